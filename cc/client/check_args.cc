#include "cc/client/check_args.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "cc/base/key_batch.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

absl::Status CheckSize(const std::string& table, size_t num_keys, int dim,
                       size_t got) {
  if (got == num_keys * static_cast<size_t>(dim)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table, "': expected ", num_keys * dim,
                   " floats (", num_keys, " keys x dim ", dim, "), got ", got));
}

absl::Status CheckFinite(const std::string& table, absl::string_view what,
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

absl::Status CheckPush(const PushArgs& args) {
  TFSWITCH_RETURN_IF_ERROR(
      CheckSize(args.table, args.keys.size(), args.dim, args.gradients.size()));
  if (!std::isfinite(args.learning_rate) || args.learning_rate < 0.0f) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", args.table,
        "': learning_rate must be finite and not negative. Received: ",
        args.learning_rate));
  }
  TFSWITCH_RETURN_IF_ERROR(
      CheckObservations(args.table, args.keys, args.observations));
  return CheckFinite(args.table, "gradient", args.keys, args.gradients);
}

absl::Status CheckPushes(absl::Span<const PushPart> parts) {
  for (const PushPart& part : parts) {
    if (part.args.is_checked) continue;
    TFSWITCH_RETURN_IF_ERROR(CheckPush(part.args));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
