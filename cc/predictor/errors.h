// Short forms for errors.

#ifndef CC_PREDICTOR_ERRORS_H_
#define CC_PREDICTOR_ERRORS_H_

#include "absl/strings/str_cat.h"
#include "tfswitch/status.h"

namespace tfswitch {

template <typename... Texts>
Status Error(StatusCode code, const Texts&... texts) {
  return Status(code, absl::StrCat(texts...));
}

template <typename... Texts>
Status Invalid(const Texts&... texts) {
  return Error(StatusCode::kInvalidArgument, texts...);
}

// Returns a copy of the error, with these texts before its message.
template <typename... Texts>
Status WithContext(const Status& status, const Texts&... texts) {
  return Error(status.code(), texts..., status.message());
}

}  // namespace tfswitch

#endif  // CC_PREDICTOR_ERRORS_H_
