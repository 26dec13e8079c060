#include "cc/wire/json.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/util/json_util.h"

namespace tfswitch {

absl::Status MessageFromJson(const std::string& json,
                             absl::string_view document,
                             google::protobuf::Message* message) {
  const auto status =
      google::protobuf::util::JsonStringToMessage(json, message);
  if (status.ok()) return absl::OkStatus();
  constexpr size_t kQuoted = 100;
  return absl::InvalidArgumentError(absl::StrCat(
      document, ": ", std::string(status.message()), ". Received: ",
      absl::CHexEscape(absl::string_view(json).substr(0, kQuoted))));
}

absl::StatusOr<std::string> MessageToJson(
    const google::protobuf::Message& message, bool with_defaults) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = with_defaults;
  std::string json;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return absl::InternalError(
      absl::StrCat(message.GetTypeName(), ": ", std::string(status.message())));
}

}  // namespace tfswitch
