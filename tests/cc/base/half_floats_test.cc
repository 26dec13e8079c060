#include "cc/base/half_floats.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// One of the two formats, by what makes it up.
struct Format {
  int mantissa_bits;
  int bias;
  float (*decode)(uint16_t);
  uint16_t (*nearest)(float, uint32_t);
  uint16_t (*stochastic)(float, uint32_t);
  uint32_t num_noises;  // So many values of the noise make a difference.

  int exponent_bits() const { return 15 - mantissa_bits; }
  uint16_t infinity() const {
    return static_cast<uint16_t>(((1 << exponent_bits()) - 1) << mantissa_bits);
  }
  // By the definition of the format.
  double Value(uint16_t half) const {
    const int exponent = (half & 0x7fff) >> mantissa_bits;
    const int mantissa = half & ((1 << mantissa_bits) - 1);
    const double sign = (half & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == 0) {
      return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
    }
    return sign * std::ldexp(mantissa + (1 << mantissa_bits),
                             exponent - bias - mantissa_bits);
  }
  // The largest number that is not above the magnitude of `value`.
  uint16_t Below(float value) const {
    uint16_t low = 0;
    uint16_t high = infinity();
    while (high - low > 1) {
      const auto middle = static_cast<uint16_t>((low + high) / 2);
      (Value(middle) <= std::fabs(static_cast<double>(value)) ? low : high) =
          middle;
    }
    return low;
  }
};

class HalfFloatsTest : public ::testing::TestWithParam<Format> {
 protected:
  // Numbers of all exponents, and around the places where the format changes.
  static std::vector<float> Numbers() {
    std::mt19937 random(5);
    std::vector<float> numbers = {
        0.0f,           -0.0f,      1.0f,         65504.0f,     65519.0f,
        65520.0f,       0x1p-14f,   0x1.ff8p-15f, 0x1.ffep-15f, 0x1p-24f,
        0x1p-25f,       0x1.8p-25f, 0x1p-149f,    0x1p-126f,    0x1.fffffep127f,
        0x1.fefffep127f};
    while (numbers.size() < 20000) {
      const float number = FloatOfBits(random());
      if (std::isfinite(number)) numbers.push_back(number);
      // Most bit patterns are out of the range of float16.
      numbers.push_back(
          std::ldexp(1.0f + static_cast<float>(random()) * 0x1p-32f,
                     static_cast<int>(random() % 48) - 30));
    }
    return numbers;
  }
};

TEST_P(HalfFloatsTest, DecodesEachNumberToItsValue) {
  const Format& format = GetParam();
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto half = static_cast<uint16_t>(i);
    const float decoded = format.decode(half);
    const uint16_t magnitude = half & 0x7fff;
    if (magnitude > format.infinity()) {
      EXPECT_TRUE(std::isnan(decoded)) << i;
    } else if (magnitude == format.infinity()) {
      EXPECT_EQ(decoded, (half & 0x8000) != 0 ? -kInfinity : kInfinity) << i;
    } else {
      EXPECT_EQ(static_cast<double>(decoded), format.Value(half)) << i;
      EXPECT_EQ(std::signbit(decoded), (half & 0x8000) != 0) << i;
    }
  }
}

TEST_P(HalfFloatsTest, EncodesWhatItDecodedToTheSameBits) {
  const Format& format = GetParam();
  for (uint32_t i = 0; i < 0x10000; ++i) {
    const auto half = static_cast<uint16_t>(i);
    if ((half & 0x7fff) > format.infinity()) continue;
    const float decoded = format.decode(half);
    EXPECT_EQ(format.nearest(decoded, 0), half);
    EXPECT_EQ(format.stochastic(decoded, 0), half);
    EXPECT_EQ(format.stochastic(decoded, ~0u), half);
  }
}

TEST_P(HalfFloatsTest, RoundsToNearestWithTiesToEven) {
  const Format& format = GetParam();
  for (const float number : Numbers()) {
    const uint16_t below = format.Below(number);
    uint16_t expected = below;
    if (below + 1 < format.infinity()) {
      const double magnitude = std::fabs(static_cast<double>(number));
      const double down = magnitude - format.Value(below);
      const double up = format.Value(below + 1) - magnitude;
      if (up < down || (up == down && below % 2 == 1)) ++expected;
    }
    if (std::signbit(number)) expected |= 0x8000;
    EXPECT_EQ(format.nearest(number, 0), expected) << number;
  }
}

TEST_P(HalfFloatsTest, RoundsByChanceToTheExactValueOnAverage) {
  const Format& format = GetParam();
  std::vector<float> numbers = Numbers();
  numbers.resize(300);
  for (const float number : numbers) {
    const uint16_t below = format.Below(number);
    const bool is_largest = below + 1 == format.infinity();
    double sum = 0.0;
    for (uint32_t noise = 0; noise < format.num_noises; ++noise) {
      const uint16_t half = format.stochastic(number, noise);
      ASSERT_TRUE((half & 0x7fff) == below ||
                  (!is_largest && (half & 0x7fff) == below + 1))
          << number << " " << half;
      sum += static_cast<double>(format.decode(half));
    }
    if (is_largest) continue;
    const double ulp = format.Value(below + 1) - format.Value(below);
    EXPECT_NEAR(sum / format.num_noises / ulp,
                static_cast<double>(number) / ulp, 2.0 / format.num_noises)
        << number;
  }
}

TEST_P(HalfFloatsTest, KeepsInfinitiesAndNanAndLimitsWhatIsTooLarge) {
  const Format& format = GetParam();
  const float largest = format.decode(format.infinity() - 1);
  for (const auto& [encode, noise] :
       {std::pair(format.nearest, 0u), std::pair(format.stochastic, 0u),
        std::pair(format.stochastic, ~0u)}) {
    EXPECT_EQ(format.decode(encode(kInfinity, noise)), kInfinity);
    EXPECT_EQ(format.decode(encode(-kInfinity, noise)), -kInfinity);
    EXPECT_TRUE(std::isnan(format.decode(encode(std::nanf(""), noise))));
    EXPECT_TRUE(std::isnan(format.decode(encode(-std::nanf(""), noise))));
    const float most = std::numeric_limits<float>::max();
    EXPECT_EQ(format.decode(encode(most, noise)), largest);
    EXPECT_EQ(format.decode(encode(-most, noise)), -largest);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Formats, HalfFloatsTest,
    ::testing::Values(Format{10, 15, FloatOfFloat16, Float16OfFloat<false>,
                             Float16OfFloat<true>, 0x2000},
                      Format{7, 127, FloatOfBfloat16, Bfloat16OfFloat<false>,
                             Bfloat16OfFloat<true>, 0x10000}),
    [](const auto& info) {
      return info.param.mantissa_bits == 10 ? "Float16" : "Bfloat16";
    });

}  // namespace
}  // namespace tfswitch
