#include "cc/optimizer/optimizer_config.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

absl::Status FieldError(absl::string_view field, absl::string_view range,
                        float value) {
  return absl::InvalidArgumentError(
      absl::StrCat("optimizer ", field, ": expected ", range, ", got ", value));
}

// For coefficients of moving averages: 1 would never forget and divide by 0.
absl::Status CheckDecay(absl::string_view field, float value) {
  if (value >= 0.0f && value < 1.0f) return absl::OkStatus();
  return FieldError(field, "a number in [0, 1)", value);
}

absl::Status CheckNonNegative(absl::string_view field, float value) {
  if (value >= 0.0f && std::isfinite(value)) return absl::OkStatus();
  return FieldError(field, "a finite number >= 0", value);
}

}  // namespace

std::string OptimizerName(const OptimizerConfig& config) {
  if (std::holds_alternative<SgdConfig>(config)) return "sgd";
  if (std::holds_alternative<AdagradConfig>(config)) return "adagrad";
  if (std::holds_alternative<AdamConfig>(config)) return "adam";
  return "adamw";
}

absl::Status ValidateOptimizerConfig(const OptimizerConfig& config) {
  if (const auto* sgd = std::get_if<SgdConfig>(&config)) {
    // Keras takes 1 as well.
    if (sgd->momentum >= 0.0f && sgd->momentum <= 1.0f) return absl::OkStatus();
    return FieldError("sgd.momentum", "a number in [0, 1]", sgd->momentum);
  }
  if (const auto* adagrad = std::get_if<AdagradConfig>(&config)) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckNonNegative("adagrad.initial_accumulator_value",
                         adagrad->initial_accumulator_value));
    return CheckNonNegative("adagrad.epsilon", adagrad->epsilon);
  }
  if (const auto* adam = std::get_if<AdamConfig>(&config)) {
    TFSWITCH_RETURN_IF_ERROR(CheckDecay("adam.beta_1", adam->beta_1));
    TFSWITCH_RETURN_IF_ERROR(CheckDecay("adam.beta_2", adam->beta_2));
    return CheckNonNegative("adam.epsilon", adam->epsilon);
  }
  const auto& adamw = std::get<AdamWConfig>(config);
  TFSWITCH_RETURN_IF_ERROR(
      CheckNonNegative("adamw.weight_decay", adamw.weight_decay));
  TFSWITCH_RETURN_IF_ERROR(CheckDecay("adamw.beta_1", adamw.beta_1));
  TFSWITCH_RETURN_IF_ERROR(CheckDecay("adamw.beta_2", adamw.beta_2));
  return CheckNonNegative("adamw.epsilon", adamw.epsilon);
}

}  // namespace tfswitch
