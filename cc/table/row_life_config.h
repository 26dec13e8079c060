// The parts of a table's config that say when an id gets a row (admission),
// what is counted of it (statistics), and when it loses the row (eviction).

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
  // The part of shows and clicks that is left after a day.
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

// Says when an id gets a row. Pushes count the numbers that decide, each push
// once, even if it is repeated because its answer was lost.
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
// The same with a counting Bloom filter in place of a record for each waiting
// id. Its size is fixed, and it admits about one id in 1 / false_positive_rate
// early.
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
// Each occurrence of an id gets it a row with this probability.
struct ProbabilityAdmission {
  static constexpr char kName[] = "probability";
  float probability = 1.0f;

  static constexpr auto Fields() {
    return std::make_tuple(ConfigField{
        "probability", &ProbabilityAdmission::probability, ranges::kRate});
  }
};
// An id gets a row once its score of shows and clicks is at least
// embedx_threshold.
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
  kShared,  // One row for all, drawn from the initializer; it does not learn.
  kWeight,  // Its own first element, which learns from the first push on; zeros
            // behind it.
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
  kLru,  // The rows that were pushed to longest ago go first.
  kLfu,  // The rows with the fewest occurrences.
};

// Says which rows a shrink evicts: those to which any of the set rules applies.
struct EvictionConfig {
  // Rows without a push for more than this many days.
  std::optional<float> delete_after_unseen_days;
  // Rows with a score of shows and clicks below this.
  std::optional<float> delete_threshold;
  // Rows whose embedding has a Euclidean norm below this.
  std::optional<float> min_l2_norm;
  // Rows beyond this many in the whole table.
  std::optional<uint64_t> max_rows;
  EvictionOrder order = EvictionOrder::kLru;
  // The server shrinks the table at this interval; 0: never by itself.
  float every_secs = 0.0f;

  bool has_rules() const {
    return delete_after_unseen_days || delete_threshold || min_l2_norm ||
           max_rows;
  }
  bool operator==(const EvictionConfig& o) const;
};

// A rule that is one number. This has the rule's name, the name of its field in
// protos and JSON, the member, and the field's value if it is unset.
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
// checks that the statistics have what the policies need.
absl::Status ValidateRowLife(const AdmissionConfig& admission,
                             const EvictionConfig& eviction,
                             const StatisticsConfig& statistics, int dim,
                             uint32_t num_virtual_shards);

// Checks only the rules.
absl::Status ValidateEviction(const EvictionConfig& eviction);

// Returns FailedPrecondition if `statistics` lack a number that the rules use.
absl::Status CheckCounted(const EvictionConfig& eviction,
                          const StatisticsConfig& statistics);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_
