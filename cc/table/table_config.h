// A table's config: its name, the shape of its rows, and how rows are
// initialised and learn. It is fixed when the table is created; two configs
// that differ in any field describe different tables.

#ifndef TFSWITCH_CC_TABLE_TABLE_CONFIG_H_
#define TFSWITCH_CC_TABLE_TABLE_CONFIG_H_

#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "cc/base/config_fields.h"
#include "cc/base/half_floats.h"
#include "cc/optimizer/optimizer_config.h"
#include "cc/table/row_life_config.h"

namespace tfswitch {

inline constexpr int kMinDim = 1;
inline constexpr int kMaxDim = kMaxSegmentDim;

// How a row is initialised. Each value depends only on seed, key and position.
struct ConstantInitializer {  // Also "zeros" and "ones".
  static constexpr char kName[] = "constant";
  Finite value = 0.0f;

  TFSWITCH_FIELDS(value)
};
struct UniformInitializer {  // Keras's default for embeddings.
  static constexpr char kName[] = "uniform";
  Finite minval = -0.05f;
  Finite maxval = 0.05f;

  TFSWITCH_FIELDS(minval, maxval)
};
struct NormalInitializer {
  static constexpr char kName[] = "normal";
  Finite mean = 0.0f;
  NonNegative stddev = 0.05f;

  TFSWITCH_FIELDS(mean, stddev)
};
// Redrawn beyond two standard deviations.
struct TruncatedNormalInitializer : NormalInitializer {
  static constexpr char kName[] = "truncated_normal";
};
// Uniform in +-sqrt(6 / (1 + dim)): Glorot's rule with fan_in 1, because an id
// selects one input unit, and fan_out dim.
struct GlorotUniformInitializer {
  static constexpr char kName[] = "glorot_uniform";

  TFSWITCH_FIELDS()
};

using InitializerConfig =
    std::variant<ConstantInitializer, UniformInitializer, NormalInitializer,
                 TruncatedNormalInitializer, GlorotUniformInitializer>;

// When the gradients of several workers are applied. The names are those of the
// literature: asynchronous, stale synchronous and bulk synchronous parallel.
enum class ConsistencyKind {
  kAsp,  // As they arrive.
  kSsp,  // As they arrive; no worker may be far ahead of the slowest.
  kBsp,  // Once per round, the gradients of all workers together.
};
enum class Reduction {
  kMean,  // Weighted by their numbers of samples.
  kSum,
};
struct ConsistencyConfig {
  ConsistencyKind kind = ConsistencyKind::kAsp;
  uint32_t staleness = 0;                  // For kSsp, in steps.
  Reduction reduction = Reduction::kMean;  // For kBsp.

  TFSWITCH_FIELDS(kind, staleness, reduction)
  // For example "asp", "ssp(3)", "bsp(mean)".
  std::string ToString() const;
};

// How a row is stored in memory; see row_codec.h.
enum class Rounding : uint8_t {
  // Rounds up or down at random, so that the expected value is exact. So even
  // steps that are smaller than half of the last bit have an effect on average.
  kStochastic,
  kNearest,  // Ties to even.
};
struct StorageDtypeConfig {
  FloatType embeddings = FloatType::kFloat32;
  // Slots with a float per coordinate.
  FloatType slots = FloatType::kFloat32;
  // How an optimizer step rounds 16-bit values. Values of new rows and assigned
  // values are always rounded to nearest.
  Rounding rounding = Rounding::kStochastic;

  TFSWITCH_FIELDS(embeddings, slots, rounding)
  // Whether all parts are float32, so that nothing is rounded.
  bool is_plain() const {
    return embeddings == FloatType::kFloat32 && slots == FloatType::kFloat32;
  }
  bool operator==(const StorageDtypeConfig& o) const {
    return embeddings == o.embeddings && slots == o.slots &&
           (is_plain() || rounding == o.rounding);
  }

  // Describes the types, for example "bfloat16 embeddings, float32 slots,
  // stochastic rounding".
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
  // The incarnation of the table that the caller means; see TableIdentity. 0:
  // the present table of that name.
  uint64_t incarnation = 0;
};

// Distinguishes a table from earlier and later ones of the same name.
struct TableIdentity {
  // A random number, drawn when the table is made. All parts of the table on
  // several shards have the same one. A restore from a checkpoint keeps it.
  uint64_t incarnation = 0;
  // The instance ids of the shard processes for which the table was made. If a
  // shard has another instance id and does not have the table, it has lost its
  // part.
  std::vector<uint64_t> shard_instances;
};

// The expected number of rows. It does not change what a table contains, so all
// capacities are equal.
struct RowCapacity {
  uint64_t num_rows = 0;

  bool operator==(const RowCapacity&) const { return true; }
};

// How the process that opened the table exchanges rows and gradients with
// servers. It is no part of the table, so all types are equal.
struct WireDtype {
  FloatType type = FloatType::kFloat32;

  // NOLINTNEXTLINE(google-explicit-constructor)
  operator FloatType() const { return type; }
  bool operator==(const WireDtype&) const { return true; }
};

// The treatment of a new id when the table is full: it has max_rows rows, or
// the memory of all tables has reached its ceiling.
enum class WhenFull : uint8_t {
  kDefault,  // kEvict for a table with max_rows, else kRefuse.
  kRefuse,   // The id gets no row.
  kEvict,    // The least used rows of the table are evicted.
  kDisk,     // They move to disk. Not with max_rows.
};

struct TableConfig {
  std::string name;  // 1 to 256 characters, no control characters.
  int dim = 0;       // Floats per embedding, kMinDim to kMaxDim.
  OptimizerConfig optimizer = SgdConfig{};
  InitializerConfig initializer = UniformInitializer{};
  uint64_t seed = 0;
  uint32_t num_virtual_shards = 1024;  // A power of two, 1 to 65536.
  ConsistencyConfig consistency;
  // Only for a dense table, whose rows are blocks of a model's variables:
  // describes the variables, in up to 65,536 characters. Empty for an embedding
  // table.
  std::string layout;
  StatisticsConfig statistics;
  AdmissionConfig admission;
  EvictionConfig eviction;
  WhenFull when_full = WhenFull::kDefault;
  StorageDtypeConfig storage_dtype;
  RowCapacity capacity;
  WireDtype wire_dtype;

  TFSWITCH_FIELDS(name, dim, optimizer, initializer, seed, num_virtual_shards,
                  consistency, layout, statistics, admission, eviction,
                  when_full, storage_dtype, capacity, wire_dtype)
  bool evicts_when_full() const {
    return when_full == WhenFull::kEvict ||
           (when_full == WhenFull::kDefault && eviction.max_rows.has_value());
  }
  bool demotes_when_full() const { return when_full == WhenFull::kDisk; }
  // Whether a setting depends on how often a key is in a push, or on its shows.
  bool NeedsCounts() const;

  bool operator!=(const TableConfig& o) const { return !(*this == o); }

  // InvalidArgument naming the table, the field, the value and the range.
  absl::Status Validate() const;
  // Like Validate(), for a table that is to be made: also limits the length of
  // its name, which becomes a part of file names.
  absl::Status ValidateNew() const;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_TABLE_CONFIG_H_
