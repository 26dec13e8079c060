// Conversion to and from IEEE binary16 ("float16") and bfloat16. It uses
// integer arithmetic without branches, so that compilers can vectorise loops
// over it for any instruction set, with the same results on all.
//
// A finite number that is too large becomes the largest finite one; infinities
// and NaN stay the same.

#ifndef TFSWITCH_CC_BASE_HALF_FLOATS_H_
#define TFSWITCH_CC_BASE_HALF_FLOATS_H_

#include <cstddef>
#include <cstdint>

#include "cc/base/racy_memory.h"

namespace tfswitch {

enum class FloatType : uint8_t { kFloat32, kFloat16, kBfloat16 };

TFSWITCH_ALWAYS_INLINE uint32_t BitsOfFloat(float value) {
  return __builtin_bit_cast(uint32_t, value);
}
TFSWITCH_ALWAYS_INLINE float FloatOfBits(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}

// Returns `yes` if `a` < `b`, else `no`, always without a branch. `a` and `b`
// must be below 2^31, because vector instructions compare signed numbers only.
TFSWITCH_ALWAYS_INLINE uint32_t IfLess(uint32_t a, uint32_t b, uint32_t yes,
                                       uint32_t no) {
  const uint32_t mask = 0 - static_cast<uint32_t>(static_cast<int32_t>(a) <
                                                  static_cast<int32_t>(b));
  return (yes & mask) | (no & ~mask);
}

inline constexpr uint32_t kFloatInfinity = 0x7f800000;

TFSWITCH_ALWAYS_INLINE float FloatOfBfloat16(uint16_t half) {
  return FloatOfBits(uint32_t{half} << 16);
}

TFSWITCH_ALWAYS_INLINE float FloatOfFloat16(uint16_t half) {
  const uint32_t sign = (uint32_t{half} & 0x8000) << 16;
  const uint32_t magnitude = uint32_t{half} & 0x7fff;
  // Adds 112 = 127 - 15, the difference of the two biases, to the exponent. For
  // infinity and NaN, adds it a second time.
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = normal + (112u << 23);
  const uint32_t small = BitsOfFloat(
      static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t bits = IfLess(magnitude, 0x400, small,
                               IfLess(magnitude, 0x7c00, normal, special));
  return FloatOfBits(sign | bits);
}

// Rounds to nearest, ties to even. If kIsStochastic, rounds up or down at
// random, so that the expected value of the result is the exact value; `noise`
// is 32 random bits.
template <bool kIsStochastic>
TFSWITCH_ALWAYS_INLINE uint16_t Bfloat16OfFloat(float value, uint32_t noise) {
  const uint32_t bits = BitsOfFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t up =
      kIsStochastic ? noise & 0xffff : 0x7fff + ((magnitude >> 16) & 1);
  const uint32_t rounded = (magnitude + up) >> 16;
  const uint32_t finite = IfLess(rounded, 0x7f80, rounded, 0x7f7f);
  const uint32_t special = IfLess(kFloatInfinity, magnitude, 0x7fc0, 0x7f80);
  return static_cast<uint16_t>(
      sign | IfLess(magnitude, kFloatInfinity, finite, special));
}

template <bool kIsStochastic>
TFSWITCH_ALWAYS_INLINE uint16_t Float16OfFloat(float value, uint32_t noise) {
  const uint32_t bits = BitsOfFloat(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t up =
      kIsStochastic ? noise & 0x1fff : 0xfff + ((magnitude >> 13) & 1);
  const uint32_t normal = ((magnitude + up) >> 13) - (112u << 10);
  // A float16 number below 2^-14 is a multiple of 2^-24; `steps` is the factor.
  // Adding 2^23 rounds it to an integer: floats from 2^23 on have no fraction.
  constexpr uint32_t kSmall = 0x38800000;
  const float steps =
      FloatOfBits(IfLess(magnitude, kSmall, magnitude, 0)) * 0x1p24f;
  const uint32_t small =
      kIsStochastic ? static_cast<uint32_t>(static_cast<int32_t>(
                          steps + static_cast<float>(static_cast<int32_t>(up)) *
                                      0x1p-13f))
                    : BitsOfFloat(steps + 0x1p23f) - 0x4b000000;
  const uint32_t rounded = IfLess(magnitude, kSmall, small, normal);
  const uint32_t finite = IfLess(rounded, 0x7c00, rounded, 0x7bff);
  const uint32_t special = IfLess(kFloatInfinity, magnitude, 0x7e00, 0x7c00);
  return static_cast<uint16_t>(
      sign | IfLess(magnitude, kFloatInfinity, finite, special));
}

// The hash "lowbias32" of Chris Wellons. It works on 32 bits, because vector
// instructions cannot multiply 64-bit numbers.
TFSWITCH_ALWAYS_INLINE uint32_t MixBits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352d;
  x ^= x >> 15;
  x *= 0x846ca68b;
  x ^= x >> 16;
  return x;
}

inline constexpr uint32_t kHalfSeedStep = 0x9e3779b9;

// Writes floats as `count` numbers of kType. If kIsStochastic, the noise of
// float i depends on `seed` and i; that of (seed + kHalfSeedStep, i) and of
// (seed, i + 1) are the same.
template <FloatType kType, bool kIsStochastic>
TFSWITCH_ALWAYS_INLINE void EncodeHalves(const float* __restrict floats,
                                         size_t count, uint32_t seed,
                                         char* __restrict halves) {
  static_assert(kType != FloatType::kFloat32);
  for (size_t i = 0; i < count; ++i) {
    const uint32_t noise =
        kIsStochastic ? MixBits(seed + static_cast<uint32_t>(i) * kHalfSeedStep)
                      : 0;
    const uint16_t half =
        kType == FloatType::kFloat16
            ? Float16OfFloat<kIsStochastic>(floats[i], noise)
            : Bfloat16OfFloat<kIsStochastic>(floats[i], noise);
    __builtin_memcpy(halves + 2 * i, &half, 2);
  }
}

template <FloatType kType>
TFSWITCH_ALWAYS_INLINE void DecodeHalves(const char* __restrict halves,
                                         size_t count,
                                         float* __restrict floats) {
  static_assert(kType != FloatType::kFloat32);
  for (size_t i = 0; i < count; ++i) {
    uint16_t half;
    __builtin_memcpy(&half, halves + 2 * i, 2);
    floats[i] = kType == FloatType::kFloat16 ? FloatOfFloat16(half)
                                             : FloatOfBfloat16(half);
  }
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_HALF_FLOATS_H_
