// Reads JSON from files, messages and callers of the C API, always by
// ParseJson().

#ifndef TFSWITCH_CC_BASE_JSON_H_
#define TFSWITCH_CC_BASE_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace tfswitch {

using Json = nlohmann::json;

// Configs and manifests have a handful of levels. For a much deeper text
// recursive functions would use up the stack, which ends the process.
inline constexpr int kMaxJsonDepth = 32;

// InvalidArgument if `text` is no JSON, or has objects and lists inside each
// other to more than `max_depth` levels. The caller adds to the message which
// text it is.
absl::StatusOr<Json> ParseJson(absl::string_view text,
                               int max_depth = kMaxJsonDepth);

// On one line, with U+FFFD for bytes that are not UTF-8.
std::string DumpJson(const Json& json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_JSON_H_
