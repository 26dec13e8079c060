// The parts of a table's config that determine when an id gets a row
// (admission), what is counted about the row (statistics), and when it is
// removed (eviction).

#ifndef TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_
#define TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_

#include <cstdint>
#include <optional>
#include <tuple>
#include <variant>

#include "absl/status/status.h"
#include "cc/base/config_fields.h"

namespace tfswitch {

// --- Statistics -------------------------------------------------------------

// The statistics of each row; see table/row_statistics.h.
enum class StatisticsKind { kNone, kUsage, kShowClick };

// Names and defaults are those of Paddle's CTR accessor.
struct StatisticsConfig {
  StatisticsKind kind = StatisticsKind::kNone;
  // kShowClick: score = (show - click) * nonclk_coeff + click * click_coeff.
  float nonclk_coeff = 0.1f;
  float click_coeff = 1.0f;
  // Shows and clicks are multiplied by this each day.
  float show_click_decay_rate = 0.98f;

  // The fields of kShowClick.
  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"nonclk_coeff", &StatisticsConfig::nonclk_coeff,
                    ranges::kNonNegative},
        ConfigField{"click_coeff", &StatisticsConfig::click_coeff,
                    ranges::kNonNegative},
        ConfigField{"show_click_decay_rate",
                    &StatisticsConfig::show_click_decay_rate, ranges::kRate});
  }
  bool operator==(const StatisticsConfig& o) const {
    return kind == o.kind && HaveEqualFields(*this, o);
  }
};

// --- Admission --------------------------------------------------------------

// Determines when an id gets a row. Pushes add to the numbers by which the
// policies decide. A push that is repeated because its answer was lost counts
// only once.
struct AlwaysAdmission {
  static constexpr char kName[] = "always";
  static constexpr auto Fields() { return std::make_tuple(); }
};
// An id gets a row at its min_count-th occurrence. The count is exact.
struct MinCountAdmission {
  static constexpr char kName[] = "min_count";
  static constexpr FieldRange kRange{"an integer from 1 to 16777216", 1.0,
                                     16777216.0};
  uint32_t min_count = 1;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"min_count", &MinCountAdmission::min_count, kRange});
  }
};
// Like MinCountAdmission, but with a counting Bloom filter instead of a record
// for each waiting id. The filter has a fixed size, and admits about one id in
// 1 / false_positive_rate too early.
struct BloomMinCountAdmission {
  static constexpr char kName[] = "bloom_min_count";
  static constexpr FieldRange kRange{"an integer from 1 to 65535", 1.0,
                                     65535.0};
  uint32_t min_count = 1;
  uint64_t capacity = 100'000'000;  // How many ids are expected.
  float false_positive_rate = 0.01f;

  static constexpr auto Fields() {
    return std::make_tuple(
        ConfigField{"min_count", &BloomMinCountAdmission::min_count, kRange},
        ConfigField{"capacity", &BloomMinCountAdmission::capacity,
                    ranges::kCount},
        ConfigField{"false_positive_rate",
                    &BloomMinCountAdmission::false_positive_rate,
                    ranges::kFraction});
  }
};
// Each occurrence of an id gives it a row with this probability.
struct ProbabilityAdmission {
  static constexpr char kName[] = "probability";
  float probability = 1.0f;

  static constexpr auto Fields() {
    return std::make_tuple(ConfigField{
        "probability", &ProbabilityAdmission::probability, ranges::kRate});
  }
};
// An id gets a row when its score of shows and clicks reaches embedx_threshold.
struct ShowClickAdmission {
  static constexpr char kName[] = "show_click";
  float embedx_threshold = 10.0f;

  static constexpr auto Fields() {
    return std::make_tuple(ConfigField{"embedx_threshold",
                                       &ShowClickAdmission::embedx_threshold,
                                       ranges::kNonNegative});
  }
};

using AdmissionPolicy =
    std::variant<AlwaysAdmission, MinCountAdmission, BloomMinCountAdmission,
                 ProbabilityAdmission, ShowClickAdmission>;

// The value that a lookup gives for an id without a row.
enum class NotAdmittedKind {
  kZeros,
  kConstant,
  kShared,  // One row for all ids, drawn by the initializer; it never learns.
  kWeight,  // A weight of its own, which is the row's first element and learns
            // from the first push on; all other elements are zeros.
};
struct NotAdmittedValue {
  NotAdmittedKind kind = NotAdmittedKind::kZeros;
  float constant = 0.0f;

  bool operator==(const NotAdmittedValue& o) const {
    return kind == o.kind && constant == o.constant;
  }
};

struct AdmissionConfig {
  AdmissionPolicy policy = AlwaysAdmission{};
  NotAdmittedValue not_admitted;

  bool is_always() const {
    return std::holds_alternative<AlwaysAdmission>(policy);
  }
  // Whether each waiting id has a record.
  bool has_candidates() const {
    return std::holds_alternative<MinCountAdmission>(policy) ||
           std::holds_alternative<ShowClickAdmission>(policy);
  }
  bool operator==(const AdmissionConfig& o) const {
    return policy == o.policy && not_admitted == o.not_admitted;
  }
};

// --- Eviction ---------------------------------------------------------------

enum class EvictionOrder {
  kLru,  // First removes the rows whose last push was longest ago.
  kLfu,  // First removes the rows with the fewest occurrences.
};

// Determines which rows a shrink removes: those to which any of the rules that
// are set applies.
struct EvictionConfig {
  // Removes rows without a push for more than this many days.
  std::optional<float> delete_after_unseen_days;
  // Removes rows whose score of shows and clicks is below this.
  std::optional<float> delete_threshold;
  // Removes rows whose embedding has a Euclidean norm below this.
  std::optional<float> min_l2_norm;
  // Keeps at most this many rows in the whole table.
  std::optional<uint64_t> max_rows;
  EvictionOrder order = EvictionOrder::kLru;
  // The interval at which the server shrinks the table; 0: only when asked.
  float every_secs = 0.0f;

  bool has_rules() const {
    return delete_after_unseen_days || delete_threshold || min_l2_norm ||
           max_rows;
  }
  bool operator==(const EvictionConfig& o) const;
};

// A rule that consists of one number: the rule's name, the name of its field in
// protos and JSON, the member, and the value that means "not set".
struct EvictionRule {
  const char* name;
  const char* field;
  std::optional<float> EvictionConfig::*value;
  float otherwise;
};
inline constexpr EvictionRule kEvictionRules[] = {
    {"ttl", "delete_after_unseen_days",
     &EvictionConfig::delete_after_unseen_days, 30.0f},
    {"show_click_score", "delete_threshold", &EvictionConfig::delete_threshold,
     0.8f},
    {"l2_norm", "min_l2_norm", &EvictionConfig::min_l2_norm, 0.0f},
};

// --- All three --------------------------------------------------------------

// Returns InvalidArgument, naming the field, its value and its range. Also
// checks that the statistics include what the policies need.
absl::Status ValidateRowLife(const AdmissionConfig& admission,
                             const EvictionConfig& eviction,
                             const StatisticsConfig& statistics, int dim,
                             uint32_t num_virtual_shards);

// Checks only the rules.
absl::Status ValidateEviction(const EvictionConfig& eviction);

// Returns FailedPrecondition if `statistics` do not count a number that the
// rules need.
absl::Status CheckCounted(const EvictionConfig& eviction,
                          const StatisticsConfig& statistics);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_
