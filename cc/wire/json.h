// Messages as JSON texts, in protobuf's own mapping with the names that fields
// have in the proto. In it, 64-bit integers are strings.
//
// Files are messages with the option (file_format) of
// protos/tfswitch/v1/fields.proto. What is read of them is untrusted: protobuf
// checks the types, and the rules of the fields say which must be there and
// which values they may have.
//
// Functions here are thread-safe.

#ifndef TFSWITCH_CC_WIRE_JSON_H_
#define TFSWITCH_CC_WIRE_JSON_H_

#include <cstddef>
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
// message can tell that they are unset. `with_whitespace`: a line for each.
absl::StatusOr<std::string> MessageToJson(
    const google::protobuf::Message& message, bool with_defaults,
    bool with_whitespace = false);

// InvalidArgument that names the field if a value is out of its range, or a
// message is missing. It cannot tell which numbers are missing.
absl::Status CheckRanges(const google::protobuf::Message& message);

// "checkpoint manifest '<path>' is damaged: <why>. <remedy>", as DataLoss.
absl::Status DamagedFile(const google::protobuf::Message& message,
                         const std::string& path, absl::string_view why);

// Reads a message with the option (file_format). NotFound if there is no such
// file; FailedPrecondition if it is of another version of the format, whatever
// else is in it; DataLoss that names the field if it is longer than `max_bytes`
// or breaks a rule of the fields.
absl::Status ReadMessageFile(const std::string& path, size_t max_bytes,
                             google::protobuf::Message* message);

// Sets the format and the version of such a message, and replaces the file
// whole or not at all. ResourceExhausted if ReadMessageFile() would refuse its
// length.
absl::Status WriteMessageFile(const std::string& path, size_t max_bytes,
                              google::protobuf::Message* message);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_JSON_H_
