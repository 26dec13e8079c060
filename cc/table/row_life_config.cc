#include "cc/table/row_life_config.h"

#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"
#include "cc/table/counting_bloom.h"

namespace tfswitch {
namespace {

template <typename T>
absl::Status FieldError(absl::string_view field, absl::string_view expected,
                        const T& got) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": expected ", expected, ", got ", got));
}

// `path` is the config's field, such as "admission".
template <typename Config>
absl::Status CheckFields(absl::string_view path, const Config& config) {
  const std::optional<FieldFault> fault = FindFault(config);
  if (!fault.has_value()) return absl::OkStatus();
  return FieldError(absl::StrCat(path, ".", fault->name), fault->expected,
                    fault->got);
}

absl::Status CheckBloomSize(const BloomMinCountAdmission& config,
                            uint32_t num_virtual_shards) {
  // The most cells of a filter, because a hash of 32 bits selects a cell.
  const double cells =
      CountingBloom::CellsPerVirtualShard(config, num_virtual_shards);
  if (cells <= 0x1p32) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "admission.bloom_min_count.capacity: ", config.capacity.value,
      " ids with a false_positive_rate of ", config.false_positive_rate.value,
      " take ", cells, " cells in each of ", num_virtual_shards,
      " virtual shards, about ",
      CountingBloom::SizeBytes(config, num_virtual_shards) / 1e9,
      " GB in all, and at most 2^32 are possible; lower the capacity or raise "
      "the rate"));
}

absl::Status ValidateAdmission(const AdmissionConfig& config,
                               const StatisticsConfig& statistics, int dim,
                               uint32_t num_virtual_shards) {
  TFSWITCH_RETURN_IF_ERROR(CheckFields("admission", config.policy));
  if (const auto* rule = std::get_if<BloomMinCountAdmission>(&config.policy)) {
    TFSWITCH_RETURN_IF_ERROR(CheckBloomSize(*rule, num_virtual_shards));
  }
  if (std::holds_alternative<ShowClickAdmission>(config.policy) &&
      statistics.kind != StatisticsKind::kShowClick) {
    return absl::InvalidArgumentError(
        "admission.show_click: needs statistics of kind SHOW_CLICK, where "
        "shows "
        "and clicks are counted");
  }
  TFSWITCH_RETURN_IF_ERROR(
      CheckFields("admission.not_admitted", config.not_admitted));
  if (config.not_admitted.kind != NotAdmittedKind::kWeight) {
    return absl::OkStatus();
  }
  if (!config.has_candidates()) {
    return absl::InvalidArgumentError(
        "admission.not_admitted.weight: needs admission.min_count or "
        "admission.show_click, which keep a record of each id that waits");
  }
  if (dim < 2) {
    return FieldError("admission.not_admitted.weight",
                      "a dim of at least 2: a weight, and what comes later",
                      dim);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateEviction(const EvictionConfig& config) {
  TFSWITCH_RETURN_IF_ERROR(CheckFields("eviction", config));
  constexpr uint64_t kMaxRows = std::numeric_limits<int64_t>::max();
  if (config.max_rows.value_or(0) > kMaxRows) {
    return FieldError("eviction.max_rows",
                      absl::StrCat("an integer from 0 to ", kMaxRows),
                      *config.max_rows);
  }
  if (config.every_secs != 0.0f && !config.has_rules()) {
    return FieldError("eviction.every_secs", "a rule beside it, or 0",
                      config.every_secs.value);
  }
  return absl::OkStatus();
}

absl::Status CheckCounted(const EvictionConfig& config,
                          const StatisticsConfig& statistics) {
  const bool has_usage = statistics.kind != StatisticsKind::kNone;
  if (config.delete_after_unseen_days.has_value() && !has_usage) {
    return absl::FailedPreconditionError(
        "eviction.delete_after_unseen_days: needs statistics of kind USAGE, "
        "where it is noted when a row was last seen");
  }
  if (config.delete_threshold.has_value() &&
      statistics.kind != StatisticsKind::kShowClick) {
    return absl::FailedPreconditionError(
        "eviction.delete_threshold: needs statistics of kind SHOW_CLICK, where "
        "shows and clicks are counted");
  }
  if (config.max_rows.has_value() && !has_usage) {
    return absl::FailedPreconditionError(
        "eviction.max_rows: needs statistics of kind USAGE, where it is "
        "counted how often and when a row was seen");
  }
  return absl::OkStatus();
}

absl::Status ValidateRowLife(const AdmissionConfig& admission,
                             const EvictionConfig& eviction,
                             const StatisticsConfig& statistics, int dim,
                             uint32_t num_virtual_shards) {
  const char* const unknown =
      statistics.kind > StatisticsKind::kShowClick ? "statistics.kind"
      : admission.not_admitted.kind > NotAdmittedKind::kWeight
          ? "admission.not_admitted.kind"
      : eviction.order > EvictionOrder::kLfu ? "eviction.order"
                                             : nullptr;
  if (unknown != nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(
        unknown, ": expected a value that this version has, got another one"));
  }
  TFSWITCH_RETURN_IF_ERROR(CheckFields("statistics", statistics));
  TFSWITCH_RETURN_IF_ERROR(
      ValidateAdmission(admission, statistics, dim, num_virtual_shards));
  TFSWITCH_RETURN_IF_ERROR(ValidateEviction(eviction));
  const absl::Status counted = CheckCounted(eviction, statistics);
  if (counted.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(counted.message());
}

}  // namespace tfswitch
