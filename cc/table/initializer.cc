#include "cc/table/initializer.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "cc/base/cpu_features.h"
#include "cc/base/racy_memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tfswitch {
namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15ULL;
constexpr uint64_t kFactor1 = 0xbf58476d1ce4e5b9ULL;
constexpr uint64_t kFactor2 = 0x94d049bb133111ebULL;

// The output function of SplitMix64 (Steele, Lea, Flood 2014). Applied to start
// + i * kGoldenGamma, it gives number i of that generator without the earlier
// ones.
uint64_t Mix(uint64_t z) {
  z = (z ^ (z >> 30)) * kFactor1;
  z = (z ^ (z >> 27)) * kFactor2;
  return z ^ (z >> 31);
}

// The random numbers of one row. Key and seed are each mixed before they are
// combined, so that two keys, or two seeds, give unrelated numbers.
class RowStream {
 public:
  RowStream(uint64_t mixed_seed, Key key)
      : start_(Mix(mixed_seed ^
                   HashKey(static_cast<Key>(static_cast<uint64_t>(key) ^
                                            kGoldenGamma)))) {}

  uint64_t At(uint64_t position) const {
    return Mix(start_ + (position + 1) * kGoldenGamma);
  }
  uint64_t start() const { return start_; }

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

#if defined(__x86_64__)
[[gnu::target("avx2")]] TFSWITCH_ALWAYS_INLINE __m256i
Multiply64(__m256i x, uint64_t factor) {
  const __m256i low = _mm256_set1_epi64x(static_cast<int64_t>(factor));
  const __m256i high = _mm256_srli_epi64(low, 32);
  const __m256i cross =
      _mm256_add_epi64(_mm256_mul_epu32(_mm256_srli_epi64(x, 32), low),
                       _mm256_mul_epu32(x, high));
  return _mm256_add_epi64(_mm256_mul_epu32(x, low),
                          _mm256_slli_epi64(cross, 32));
}

// The high 24 bits of Mix() of four numbers. The last step of Mix() does not
// change them.
[[gnu::target("avx2")]] TFSWITCH_ALWAYS_INLINE __m256i HighBits(__m256i z) {
  z = Multiply64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 30)), kFactor1);
  z = Multiply64(_mm256_xor_si256(z, _mm256_srli_epi64(z, 27)), kFactor2);
  return _mm256_srli_epi64(z, 40);
}

// Returns the states of the generator at `first` and the next three positions
// of the same parity.
[[gnu::target("avx2")]] TFSWITCH_ALWAYS_INLINE __m256i
States(const RowStream& stream, uint64_t first) {
  const auto at = [&](uint64_t i) {
    return static_cast<int64_t>(stream.start() + (first + i) * kGoldenGamma);
  };
  return _mm256_setr_epi64x(at(1), at(3), at(5), at(7));
}

// Fills groups of eight floats, with the same values as FillUniform(). Returns
// how many floats it has filled.
[[gnu::target("avx2")]] int FillUniformAvx2(const RowStream& stream,
                                            float minval, float maxval, int dim,
                                            float* embedding) {
  const __m256 least = _mm256_set1_ps(minval);
  const __m256 end = _mm256_set1_ps(maxval);
  const __m256 range = _mm256_set1_ps(maxval - minval);
  const __m256i step =
      _mm256_set1_epi64x(static_cast<int64_t>(8 * kGoldenGamma));
  __m256i even = States(stream, 0);
  __m256i odd = States(stream, 1);
  int i = 0;
  for (; i + 8 <= dim; i += 8) {
    const __m256i bits =
        _mm256_or_si256(HighBits(even), _mm256_slli_epi64(HighBits(odd), 32));
    const __m256 unit =
        _mm256_mul_ps(_mm256_cvtepi32_ps(bits), _mm256_set1_ps(0x1p-24f));
    const __m256 value = _mm256_add_ps(least, _mm256_mul_ps(range, unit));
    _mm256_storeu_ps(
        embedding + i,
        _mm256_blendv_ps(least, value, _mm256_cmp_ps(value, end, _CMP_LT_OQ)));
    even = _mm256_add_epi64(even, step);
    odd = _mm256_add_epi64(odd, step);
  }
  return i;
}
#endif

void FillUniform(const RowStream& stream, float minval, float maxval, int dim,
                 bool use_avx2, float* embedding) {
  const float range = maxval - minval;
  int i = 0;
#if defined(__x86_64__)
  if (use_avx2) i = FillUniformAvx2(stream, minval, maxval, dim, embedding);
#endif
  for (; i < dim; ++i) {
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

Initializer::Initializer(const InitializerConfig& config, uint64_t seed,
                         int dim)
    : config_(config),
      mixed_seed_(Mix(seed + kGoldenGamma)),
      dim_(dim),
      use_avx2_(ActiveSimdLevel() == SimdLevel::kAvx2) {}

template <typename FillRow>
void Initializer::FillEach(const Key* keys, size_t num_keys, float* embeddings,
                           const FillRow& fill) const {
  for (size_t i = 0; i < num_keys; ++i) {
    fill(RowStream(mixed_seed_, keys[i]), embeddings + i * dim_);
  }
}

void Initializer::Fill(const Key* keys, size_t num_keys,
                       float* embeddings) const {
  const auto fill_each = [&](const auto& fill) {
    FillEach(keys, num_keys, embeddings, fill);
  };
  const auto fill_uniform = [&](float minval, float maxval) {
    fill_each([&](const RowStream& stream, float* embedding) {
      FillUniform(stream, minval, maxval, dim_, use_avx2_, embedding);
    });
  };
  if (const auto* constant = std::get_if<ConstantInitializer>(&config_)) {
    std::fill_n(embeddings, num_keys * dim_, constant->value);
  } else if (const auto* uniform = std::get_if<UniformInitializer>(&config_)) {
    fill_uniform(uniform->minval, uniform->maxval);
  } else if (const auto* normal = std::get_if<NormalInitializer>(&config_)) {
    fill_each([&](const RowStream& stream, float* embedding) {
      FillNormal(stream, normal->mean, normal->stddev, dim_, embedding);
    });
  } else if (const auto* truncated =
                 std::get_if<TruncatedNormalInitializer>(&config_)) {
    fill_each([&](const RowStream& stream, float* embedding) {
      FillTruncatedNormal(stream, truncated->mean, truncated->stddev, dim_,
                          embedding);
    });
  } else {
    const float limit = std::sqrt(6.0f / static_cast<float>(1 + dim_));
    fill_uniform(-limit, limit);
  }
}

}  // namespace tfswitch
