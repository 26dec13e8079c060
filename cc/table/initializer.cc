#include "cc/table/initializer.h"

#include <algorithm>
#include <cmath>
#include <variant>

namespace tfswitch {
namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15ULL;

// The output function of SplitMix64 (Steele, Lea, Flood 2014). Applied to start
// + i * kGoldenGamma, it gives number i of that generator without the earlier
// ones.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

// The random numbers of one row. Key and seed are each mixed before they are
// combined, so that two keys, or two seeds, give unrelated numbers.
class RowStream {
 public:
  RowStream(uint64_t seed, Key key)
      : start_(Mix(Mix(seed + kGoldenGamma) ^
                   HashKey(static_cast<Key>(static_cast<uint64_t>(key) ^
                                            kGoldenGamma)))) {}

  uint64_t At(uint64_t position) const {
    return Mix(start_ + (position + 1) * kGoldenGamma);
  }

 private:
  const uint64_t start_;
};

// Returns a number in [0, 1) with all 24 bits of precision that a float has.
float ToUnit(uint64_t bits) {
  return static_cast<float>(bits >> 40) * 0x1p-24f;
}

// Makes two independent standard normal numbers by a Box-Muller transform.
// Computes in double, because in float the tails would be inexact.
struct NormalPair {
  double values[2];
};

NormalPair ToNormals(uint64_t a, uint64_t b) {
  constexpr double kTwoPi = 6.283185307179586476925;
  const double u = (static_cast<double>(a >> 11) + 1.0) * 0x1p-53;  // (0, 1]
  const double v = static_cast<double>(b >> 11) * 0x1p-53;
  const double radius = std::sqrt(-2.0 * std::log(u));
  return {{radius * std::cos(kTwoPi * v), radius * std::sin(kTwoPi * v)}};
}

void FillUniform(const RowStream& stream, float minval, float maxval, int dim,
                 float* embedding) {
  const float range = maxval - minval;
  for (int i = 0; i < dim; ++i) {
    // Rounding may give maxval, which the half-open interval does not contain.
    const float value = minval + range * ToUnit(stream.At(i));
    embedding[i] = value < maxval ? value : minval;
  }
}

void FillNormal(const RowStream& stream, float mean, float stddev, int dim,
                float* embedding) {
  for (int i = 0; i < dim; i += 2) {
    const NormalPair pair = ToNormals(stream.At(i), stream.At(i + 1));
    for (int j = 0; j < 2 && i + j < dim; ++j) {
      embedding[i + j] = static_cast<float>(mean + stddev * pair.values[j]);
    }
  }
}

void FillTruncatedNormal(const RowStream& stream, float mean, float stddev,
                         int dim, float* embedding) {
  // Element i uses the random numbers i, i + dim, i + 2 dim, ... until one is
  // within two standard deviations. For 95.4 % of the elements the first one
  // is.
  for (int i = 0; i < dim; ++i) {
    double value;
    uint64_t position = static_cast<uint64_t>(i);
    do {
      value = ToNormals(stream.At(2 * position), stream.At(2 * position + 1))
                  .values[0];
      position += static_cast<uint64_t>(dim);
    } while (std::fabs(value) > 2.0);
    embedding[i] = static_cast<float>(mean + stddev * value);
  }
}

}  // namespace

void Initializer::Fill(Key key, float* embedding) const {
  if (const auto* constant = std::get_if<ConstantInitializer>(&config_)) {
    std::fill_n(embedding, dim_, constant->value);
    return;
  }
  const RowStream stream(seed_, key);
  if (const auto* uniform = std::get_if<UniformInitializer>(&config_)) {
    FillUniform(stream, uniform->minval, uniform->maxval, dim_, embedding);
  } else if (const auto* normal = std::get_if<NormalInitializer>(&config_)) {
    FillNormal(stream, normal->mean, normal->stddev, dim_, embedding);
  } else if (const auto* truncated =
                 std::get_if<TruncatedNormalInitializer>(&config_)) {
    FillTruncatedNormal(stream, truncated->mean, truncated->stddev, dim_,
                        embedding);
  } else {
    const float limit = std::sqrt(6.0f / static_cast<float>(1 + dim_));
    FillUniform(stream, -limit, limit, dim_, embedding);
  }
}

}  // namespace tfswitch
