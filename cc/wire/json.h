// Converts messages to JSON texts and back, by protobuf's own mapping, with the
// names of fields in the proto. In this mapping 64-bit integers are strings.
//
// A file is a message with the option (file_format) of
// protos/tfswitch/v1/fields.proto. Files are untrusted. Protobuf checks the
// types. The rules of the fields say which fields must be present, and which
// values they may have.
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

// Parses a message. InvalidArgument, naming `document`, the field and the
// value, if `json` does not fit the message's type or has an unknown field.
absl::Status MessageFromJson(const std::string& json,
                             absl::string_view document,
                             google::protobuf::Message* message);

// Writes a message. With `with_defaults`, fields with their default value are
// written, too, except optional fields that are not set. With
// `with_whitespace`, each field is on a line of its own.
absl::StatusOr<std::string> MessageToJson(
    const google::protobuf::Message& message, bool with_defaults,
    bool with_whitespace = false);

// InvalidArgument, naming the field, if a value is out of its range, or a
// required message is missing. A missing number reads as 0.
absl::Status CheckRanges(const google::protobuf::Message& message);

// Returns DataLoss: "checkpoint manifest '<path>' is damaged: <why>. <remedy>".
absl::Status DamagedFile(const google::protobuf::Message& message,
                         const std::string& path, absl::string_view why);

// Reads a message with the option (file_format). NotFound if there is no such
// file. FailedPrecondition if the format has another version, even if the rest
// is invalid, too. DataLoss, naming the field, if a field breaks its rule. Also
// DataLoss if the file is longer than `max_bytes`.
absl::Status ReadMessageFile(const std::string& path, size_t max_bytes,
                             google::protobuf::Message* message);

// Writes a message with the option (file_format) to a file, which it replaces
// atomically. First sets the format and version in the message.
// ResourceExhausted if the file would be longer than `max_bytes`, which
// ReadMessageFile() would refuse.
absl::Status WriteMessageFile(const std::string& path, size_t max_bytes,
                              google::protobuf::Message* message);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_JSON_H_
