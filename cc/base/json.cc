#include "cc/base/json.h"

#include <algorithm>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

// Returns the depth to which objects and lists are nested. If the text is not
// JSON the number has no meaning; the parser later refuses the text.
int DepthOf(absl::string_view text) {
  int depth = 0;
  int deepest = 0;
  bool is_in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_in_string) {
      if (c == '\\') ++i;
      if (c == '"') is_in_string = false;
    } else if (c == '"') {
      is_in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

}  // namespace

absl::StatusOr<Json> ParseJson(absl::string_view text, int max_depth) {
  const int depth = DepthOf(text);
  if (depth > max_depth) {
    return absl::InvalidArgumentError(absl::StrCat(
        "it has ", depth,
        " objects and lists inside each other, expected at most ", max_depth));
  }
  Json json = Json::parse(text.begin(), text.end(), nullptr,
                          /*allow_exceptions=*/false);
  if (json.is_discarded()) {
    return absl::InvalidArgumentError("expected JSON");
  }
  return json;
}

std::string DumpJson(const Json& json) {
  // The default handler would throw.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace tfswitch
