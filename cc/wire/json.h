// Messages as JSON texts, in protobuf's own mapping with the names that fields
// have in the proto. In it, 64-bit integers are strings.

#ifndef TFSWITCH_CC_WIRE_JSON_H_
#define TFSWITCH_CC_WIRE_JSON_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace tfswitch {

// InvalidArgument that names `document`, the field and the value if `json` is
// not of the message's type or has a field that the message lacks.
absl::Status MessageFromJson(const std::string& json,
                             absl::string_view document,
                             google::protobuf::Message* message);

// `with_defaults`: also the fields that have their default value, unless the
// message can tell that they are unset.
absl::StatusOr<std::string> MessageToJson(
    const google::protobuf::Message& message, bool with_defaults);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_JSON_H_
