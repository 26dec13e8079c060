// A table's config: its name, the shape of its rows, and how rows start and
// learn. Fixed when the table is created; two configs that differ in any field
// describe different tables.

#ifndef TFSWITCH_CC_TABLE_TABLE_CONFIG_H_
#define TFSWITCH_CC_TABLE_TABLE_CONFIG_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cc/base/config_fields.h"
#include "cc/optimizer/optimizer_config.h"
#include "cc/table/row_life_config.h"

namespace tfswitch {

inline constexpr int kMinDim = 1;
inline constexpr int kMaxDim = kMaxSegmentDim;

// The first value of a row. Each depends on (seed, key) alone.
struct ConstantInitializer {  // Also "zeros" and "ones".
  static constexpr char kName[] = "constant";
  float value = 0.0f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"value", &ConstantInitializer::value, ranges::kFinite});
  }
};
struct UniformInitializer {  // Keras's default for embeddings.
  static constexpr char kName[] = "uniform";
  float minval = -0.05f;
  float maxval = 0.05f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"minval", &UniformInitializer::minval, ranges::kFinite},
        ConfigField{"maxval", &UniformInitializer::maxval, ranges::kFinite});
  }
};
struct NormalInitializer {
  static constexpr char kName[] = "normal";
  float mean = 0.0f;
  float stddev = 0.05f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"mean", &NormalInitializer::mean, ranges::kFinite},
        ConfigField{"stddev", &NormalInitializer::stddev,
                    ranges::kNonNegative});
  }
};
// Redrawn beyond two standard deviations.
struct TruncatedNormalInitializer : NormalInitializer {
  static constexpr char kName[] = "truncated_normal";
};
// Uniform in +-sqrt(6 / (1 + dim)): Glorot's rule with fan_in 1, because an id
// selects one input unit, and fan_out dim.
struct GlorotUniformInitializer {
  static constexpr char kName[] = "glorot_uniform";
  static constexpr auto Fields() { return std::make_tuple(); }
};

using InitializerConfig =
    std::variant<ConstantInitializer, UniformInitializer, NormalInitializer,
                 TruncatedNormalInitializer, GlorotUniformInitializer>;

// When the gradients of several workers are applied.
enum class ConsistencyKind {
  kAsp,  // As they arrive.
  kSsp,  // As they arrive; no worker is far ahead of the slowest.
  kBsp,  // Once per round, those of all workers together.
};
enum class Reduction {
  kMean,  // Weighted by their numbers of samples.
  kSum,
};
struct ConsistencyConfig {
  ConsistencyKind kind = ConsistencyKind::kAsp;
  uint32_t staleness = 0;                  // For kSsp, in steps.
  Reduction reduction = Reduction::kMean;  // For kBsp.

  bool operator==(const ConsistencyConfig& o) const {
    return kind == o.kind && staleness == o.staleness &&
           reduction == o.reduction;
  }

  // For example "asp", "ssp(3)", "bsp(mean)".
  std::string ToString() const;
};

// How a row is kept in memory; see row_codec.h.
enum class FloatType : uint8_t { kFloat32, kFloat16, kBfloat16 };
enum class Rounding : uint8_t {
  // Up or down by chance, so that the expected value is exact: steps that are
  // smaller than half of the last bit add up nevertheless.
  kStochastic,
  kNearest,  // Ties to even.
};
struct StorageDtypeConfig {
  FloatType embeddings = FloatType::kFloat32;
  FloatType slots = FloatType::kFloat32;  // Slots with a float per coordinate.
  // How a step rounds 16-bit values. New and assigned ones are rounded to
  // nearest.
  Rounding rounding = Rounding::kStochastic;

  // Whether all parts are float32, so that nothing is rounded.
  bool is_plain() const {
    return embeddings == FloatType::kFloat32 && slots == FloatType::kFloat32;
  }
  bool operator==(const StorageDtypeConfig& o) const {
    return embeddings == o.embeddings && slots == o.slots &&
           (is_plain() || rounding == o.rounding);
  }

  // For example "bfloat16 embeddings, float32 slots, stochastic rounding".
  std::string ToString() const;
};

// The table that a call is about.
struct TableRef {
  // NOLINTNEXTLINE(google-explicit-constructor): a name is the common case.
  TableRef(std::string name, uint64_t incarnation = 0)
      : name(std::move(name)), incarnation(incarnation) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  TableRef(const char* name) : name(name) {}

  std::string name;
  // See TableIdentity. 0: the present table of that name.
  uint64_t incarnation = 0;
};

// Tells a table from earlier and later ones of the same name.
struct TableIdentity {
  // Drawn when the table is made. Its parts on several shards share it, and a
  // restore from a checkpoint keeps it.
  uint64_t incarnation = 0;
  // The instance ids of the shards' processes for which it was made. A shard
  // with another instance id and without the table has lost its part.
  std::vector<uint64_t> shard_instances;
};

struct TableConfig {
  std::string name;  // 1 to 256 characters, no control characters.
  int dim = 0;       // Floats per embedding, kMinDim to kMaxDim.
  OptimizerConfig optimizer = SgdConfig{};
  InitializerConfig initializer = UniformInitializer{};
  uint64_t seed = 0;
  uint32_t num_virtual_shards = 1024;  // A power of two, 1 to 65536.
  ConsistencyConfig consistency;
  // For a dense table, whose rows are blocks of a model's variables: which
  // variables. Up to 65,536 characters; empty for an embedding table.
  std::string layout;
  StatisticsConfig statistics;
  AdmissionConfig admission;
  EvictionConfig eviction;
  StorageDtypeConfig storage_dtype;

  // Whether a setting depends on how often a key is in a push, or on its shows.
  bool NeedsCounts() const;

  bool operator==(const TableConfig& o) const {
    return name == o.name && dim == o.dim && optimizer == o.optimizer &&
           initializer == o.initializer && seed == o.seed &&
           num_virtual_shards == o.num_virtual_shards &&
           consistency == o.consistency && layout == o.layout &&
           statistics == o.statistics && admission == o.admission &&
           eviction == o.eviction && storage_dtype == o.storage_dtype;
  }
  bool operator!=(const TableConfig& o) const { return !(*this == o); }

  // InvalidArgument naming the table, the field, the value and the range.
  absl::Status Validate() const;
  // The same of a table that is made: no file can be named after a longer name.
  absl::Status ValidateNew() const;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_TABLE_CONFIG_H_
