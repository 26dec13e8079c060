// The parts of a table's config that determine when an id gets a row
// (admission), what is counted about the row (statistics), and when it is
// removed (eviction).

#ifndef TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_
#define TFSWITCH_CC_TABLE_ROW_LIFE_CONFIG_H_

#include <cstdint>
#include <optional>
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
  NonNegative nonclk_coeff = 0.1f;
  NonNegative click_coeff = 1.0f;
  // The part of shows and clicks that is left after a day.
  Rate show_click_decay_rate = 0.98f;

  TFSWITCH_FIELDS(kind, nonclk_coeff, click_coeff, show_click_decay_rate)
};

// --- Admission --------------------------------------------------------------

// Determines when an id gets a row. Pushes add to the numbers by which the
// policies decide. A push that is repeated because its answer was lost counts
// only once.
struct AlwaysAdmission {
  static constexpr char kName[] = "always";

  TFSWITCH_FIELDS()
};
// An id gets a row at its min_count-th occurrence. The count is exact.
struct MinCountAdmission {
  static constexpr char kName[] = "min_count";
  static constexpr FieldRange kRange{"an integer from 1 to 16777216", 1.0,
                                     16777216.0};
  Ranged<uint32_t, kRange> min_count = 1;

  TFSWITCH_FIELDS(min_count)
};
// Like MinCountAdmission, but with a counting Bloom filter instead of a record
// for each waiting id. The filter has a fixed size, and admits about one id in
// 1 / false_positive_rate too early.
struct BloomMinCountAdmission {
  static constexpr char kName[] = "bloom_min_count";
  static constexpr FieldRange kRange{"an integer from 1 to 65535", 1.0,
                                     65535.0};
  Ranged<uint32_t, kRange> min_count = 1;
  // How many ids are expected.
  Ranged<uint64_t, ranges::kCount> capacity = 100'000'000;
  Fraction false_positive_rate = 0.01f;

  TFSWITCH_FIELDS(min_count, capacity, false_positive_rate)
};
// Each occurrence of an id gives it a row with this probability.
struct ProbabilityAdmission {
  static constexpr char kName[] = "probability";
  Rate probability = 1.0f;

  TFSWITCH_FIELDS(probability)
};
// An id gets a row when its score of shows and clicks reaches embedx_threshold.
struct ShowClickAdmission {
  static constexpr char kName[] = "show_click";
  NonNegative embedx_threshold = 10.0f;

  TFSWITCH_FIELDS(embedx_threshold)
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
  Finite constant = 0.0f;

  TFSWITCH_FIELDS(kind, constant)
};

struct AdmissionConfig {
  AdmissionPolicy policy = AlwaysAdmission{};
  NotAdmittedValue not_admitted;

  TFSWITCH_FIELDS(policy, not_admitted)
  bool is_always() const {
    return std::holds_alternative<AlwaysAdmission>(policy);
  }
  // Whether each waiting id has a record.
  bool has_candidates() const {
    return std::holds_alternative<MinCountAdmission>(policy) ||
           std::holds_alternative<ShowClickAdmission>(policy);
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
  // Rows without a push for more than this many days.
  std::optional<NonNegative> delete_after_unseen_days;
  // Rows with a score of shows and clicks below this.
  std::optional<NonNegative> delete_threshold;
  // Rows whose embedding has a Euclidean norm below this.
  std::optional<NonNegative> min_l2_norm;
  // Rows beyond this many in the whole table.
  std::optional<uint64_t> max_rows;
  EvictionOrder order = EvictionOrder::kLru;
  // How often the server shrinks the table. 0: only when a caller asks for it.
  NonNegative every_secs = 0.0f;

  TFSWITCH_FIELDS(delete_after_unseen_days, delete_threshold, min_l2_norm,
                  max_rows, order, every_secs)
  bool has_rules() const {
    return delete_after_unseen_days || delete_threshold || min_l2_norm ||
           max_rows;
  }
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
