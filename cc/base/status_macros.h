// Short forms for passing an absl::Status up the call chain.

#ifndef TFSWITCH_CC_BASE_STATUS_MACROS_H_
#define TFSWITCH_CC_BASE_STATUS_MACROS_H_

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define TFSWITCH_CONCAT_INNER_(a, b) a##b
#define TFSWITCH_CONCAT_(a, b) TFSWITCH_CONCAT_INNER_(a, b)

namespace tfswitch {

inline const absl::Status& StatusOf(const absl::Status& status) {
  return status;
}
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

}  // namespace tfswitch

// Returns from the enclosing function if `expression` is not OK.
#define TFSWITCH_RETURN_IF_ERROR(expression)             \
  do {                                                   \
    ::absl::Status tfswitch_status_ = (expression);      \
    if (!tfswitch_status_.ok()) return tfswitch_status_; \
  } while (false)

// Assigns the value of an absl::StatusOr or returns its error. `lhs` may
// declare a variable: TFSWITCH_ASSIGN_OR_RETURN(auto table, FindTable(name));
#define TFSWITCH_ASSIGN_OR_RETURN(lhs, expression) \
  TFSWITCH_ASSIGN_OR_RETURN_IMPL_(                 \
      TFSWITCH_CONCAT_(tfswitch_status_or_, __LINE__), lhs, expression)

#define TFSWITCH_ASSIGN_OR_RETURN_IMPL_(status_or, lhs, expression) \
  auto status_or = (expression);                                    \
  if (!status_or.ok()) return std::move(status_or).status();        \
  lhs = std::move(status_or).value()

#endif  // TFSWITCH_CC_BASE_STATUS_MACROS_H_
