// Reads JSON from files, messages and callers of the C API. All of them use
// ParseJson().

#ifndef TFSWITCH_CC_BASE_JSON_H_
#define TFSWITCH_CC_BASE_JSON_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json.hpp"

namespace tfswitch {

using Json = nlohmann::json;

// The deepest nesting that is accepted. Configs and manifests have a handful of
// levels. With very many levels, recursive functions would overflow the stack,
// which ends the process.
inline constexpr int kMaxJsonDepth = 32;

// InvalidArgument if `text` is not JSON, or objects and lists are nested to
// more than `max_depth` levels. The caller adds where the text comes from.
absl::StatusOr<Json> ParseJson(absl::string_view text,
                               int max_depth = kMaxJsonDepth);

// The JSON text on one line. Bytes that are not UTF-8 become U+FFFD.
std::string DumpJson(const Json& json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_JSON_H_
