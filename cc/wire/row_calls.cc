#include "cc/wire/row_calls.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "cc/base/key_batch.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

absl::Status CheckSize(absl::string_view table, absl::string_view what,
                       size_t num_keys, int width, size_t got) {
  if (got == num_keys * static_cast<size_t>(width)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "table '", table, "': expected ", num_keys * width, " ", what,
      " floats (", num_keys, " keys x ", width, "), got ", got));
}

absl::Status CheckFinite(absl::string_view table, absl::string_view what,
                         absl::Span<const Key> keys,
                         absl::Span<const float> values) {
  const int64_t place = FindNonFinite(values);
  if (place < 0) return absl::OkStatus();
  const size_t width = values.size() / keys.size();
  return absl::InvalidArgumentError(absl::StrCat(
      "table '", table, "': ", what, " of id ", keys[place / width], " is ",
      std::isnan(values[place]) ? "NaN" : "Inf", " (element ", place % width,
      "); nothing was applied. Check the loss and the learning rate"));
}

absl::Status CheckSettings(const PushRequest& push, int dim) {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(push.table, "gradient", push.keys.size(),
                                     dim, push.gradients.size()));
  if (!std::isfinite(push.learning_rate) || push.learning_rate < 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", push.table,
        "': learning_rate must be finite and not negative. Received: ",
        push.learning_rate));
  }
  return CheckObservations(push.table, push.keys, push.observations);
}

absl::Status CheckPush(const PushRequest& push, int dim) {
  TFSWITCH_RETURN_IF_ERROR(CheckSettings(push, dim));
  return CheckFinite(push.table, "gradient", push.keys, push.gradients);
}

}  // namespace tfswitch
