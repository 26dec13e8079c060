#include "cc/optimizer/optimizer_config.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Names a field in errors: `prefix` is "" or "segments[1].", `field` is for
// example "adam.beta_1".
absl::Status FieldError(absl::string_view prefix, absl::string_view field,
                        absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(absl::StrCat(
      "optimizer ", prefix, field, ": expected ", expected, ", got ", got));
}

absl::Status ValidateSegment(absl::string_view prefix,
                             const SegmentConfig& segment) {
  if (const auto fault = FindFault(segment.rule)) {
    return FieldError(prefix, fault->name, fault->expected, fault->got);
  }
  const StepOptions& options = segment.options;
  if (const auto fault = FindFault(options)) {
    return FieldError(prefix, absl::StrCat("options.", fault->name),
                      fault->expected, fault->got);
  }
  if (options.min_weight > options.max_weight) {
    return FieldError(
        prefix, "options.min_weight",
        absl::StrCat("at most max_weight, ", options.max_weight.value),
        absl::StrCat(options.min_weight.value));
  }
  if (options.min_norm > options.max_norm) {
    return FieldError(
        prefix, "options.min_norm",
        absl::StrCat("at most max_norm, ", options.max_norm.value),
        absl::StrCat(options.min_norm.value));
  }
  if (options.weight_decay != 0.0f &&
      std::holds_alternative<AdamWConfig>(segment.rule)) {
    return FieldError(prefix, "options.weight_decay",
                      "0 beside adamw, which has its own weight_decay",
                      absl::StrCat(options.weight_decay.value));
  }
  if (const auto fault = FindFault(segment)) {
    return FieldError(prefix, fault->name, fault->expected, fault->got);
  }
  return absl::OkStatus();
}

// For tables with dense updates, refuses rules that cannot catch up with missed
// steps.
absl::Status ValidateDense(absl::string_view prefix, const RuleConfig& rule) {
  // If the sum were 0, a step would divide a gradient of zero by zero.
  const auto check_sum = [&](absl::string_view field, float sum) {
    if (sum > 0.0f) return absl::OkStatus();
    return FieldError(prefix, field, "a number > 0 with dense updates",
                      absl::StrCat(sum));
  };
  if (std::holds_alternative<SgdConfig>(rule)) return absl::OkStatus();
  if (const auto* adagrad = std::get_if<AdagradConfig>(&rule)) {
    return check_sum("adagrad.epsilon",
                     adagrad->epsilon + adagrad->initial_accumulator_value);
  }
  if (const auto* adam = std::get_if<AdamConfig>(&rule)) {
    return check_sum("adam.epsilon", adam->epsilon);
  }
  if (const auto* adamw = std::get_if<AdamWConfig>(&rule)) {
    return check_sum("adamw.epsilon", adamw->epsilon);
  }
  if (const auto* amsgrad = std::get_if<AmsGradConfig>(&rule)) {
    return check_sum("amsgrad.epsilon", amsgrad->epsilon);
  }
  if (const auto* rmsprop = std::get_if<RmspropConfig>(&rule)) {
    if (rmsprop->momentum == 0.0f) return absl::OkStatus();
    return FieldError(prefix, "rmsprop.momentum", "0 with dense updates",
                      absl::StrCat(rmsprop->momentum.value));
  }
  if (std::holds_alternative<AdadeltaConfig>(rule)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "optimizer ", prefix, KindName(rule),
      ": has no dense updates; sgd, adagrad, adam, adamw, amsgrad, rmsprop and "
      "adadelta have. Use one of these, or update=\"sparse\""));
}

}  // namespace

std::string OptimizerName(const OptimizerConfig& config) {
  if (config.is_dense) {
    OptimizerConfig sparse = config;
    sparse.is_dense = false;
    return absl::StrCat(OptimizerName(sparse), " with dense updates");
  }
  if (config.IsSimple()) return KindName(config.segments[0].rule);
  return absl::StrCat(
      "segments(",
      absl::StrJoin(config.segments, ", ",
                    [](std::string* out, const SegmentConfig& segment) {
                      absl::StrAppend(out, KindName(segment.rule));
                    }),
      ")");
}

absl::Status ValidateOptimizerConfig(const OptimizerConfig& config, int dim) {
  if (config.segments.empty()) {
    return absl::InvalidArgumentError(
        "optimizer: expected segments with one rule each, got none");
  }
  int left = dim;
  for (size_t i = 0; i < config.segments.size(); ++i) {
    const SegmentConfig& segment = config.segments[i];
    const std::string prefix =
        config.IsSimple() ? "" : absl::StrCat("segments[", i, "].");
    TFSWITCH_RETURN_IF_ERROR(ValidateSegment(prefix, segment));
    if (config.is_dense) {
      TFSWITCH_RETURN_IF_ERROR(ValidateDense(prefix, segment.rule));
    }
    const bool is_last = i + 1 == config.segments.size();
    const bool fits = segment.dim == 0 ? is_last && left > 0
                                       : segment.dim > 0 && segment.dim <= left;
    if (!fits) {
      return FieldError(prefix, "dim",
                        absl::StrCat("an integer from ", is_last ? 0 : 1,
                                     " to what is left of the row, ", left),
                        absl::StrCat(segment.dim));
    }
    left -= segment.dim == 0 ? left : segment.dim;
  }
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("optimizer segments: expected dims that sum to ", dim,
                   ", got ", dim - left));
}

bool ReadsCounts(const OptimizerConfig& config) {
  return std::any_of(config.segments.begin(), config.segments.end(),
                     [](const SegmentConfig& segment) {
                       return segment.options.cowclip_r != 0.0f ||
                              PlanOf(segment.rule).params.show_scale;
                     });
}

std::vector<int> SegmentDims(const OptimizerConfig& config, int dim) {
  std::vector<int> dims;
  int left = dim;
  for (const SegmentConfig& segment : config.segments) {
    dims.push_back(segment.dim == 0 ? left : segment.dim);
    left -= dims.back();
  }
  return dims;
}

}  // namespace tfswitch
