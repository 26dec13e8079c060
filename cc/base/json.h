// JSON texts from outside: from files, messages and callers of the C API. All
// of them are read by ParseJson().

#ifndef TFSWITCH_CC_BASE_JSON_H_
#define TFSWITCH_CC_BASE_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace tfswitch {

using Json = nlohmann::json;

// Configs and manifests have a handful of levels. Recursive functions would
// walk a deeper text, and end the process when the stack ends.
inline constexpr int kMaxJsonDepth = 32;

// InvalidArgument if `text` is no JSON, or has objects and lists inside each
// other to more than `max_depth` levels. The caller adds to the message which
// text it is.
absl::StatusOr<Json> ParseJson(absl::string_view text,
                               int max_depth = kMaxJsonDepth);

// Throws Json::type_error if `json`, or anything in it, is a number that is no
// integer.
void CheckIntegers(const Json& json);

// json.get<T>() of an integer or a container of some, checked before, because
// the conversion of a float that is too large is undefined.
template <typename T>
T GetIntegers(const Json& json) {
  CheckIntegers(json);
  return json.get<T>();
}

// In one line, with U+FFFD in place of bytes that are not UTF-8.
std::string DumpJson(const Json& json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_JSON_H_
