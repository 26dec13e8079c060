// When protobuf parses JSON, a missing field looks like one with its default.
// So a file is parsed twice: by protobuf, and into a tree that shows which
// fields are present. If a name appears twice, the tree has only the last
// value. So ranges are checked in another tree, which is made from the parsed
// message.

#include "cc/wire/json.h"

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/util/json_util.h"
#include "tfswitch/v1/fields.pb.h"

namespace tfswitch {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

absl::Status Wrong(const std::string& field, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("field '", absl::CHexEscape(field), "' ", why));
}

// Returns the value at `key` of an object; null if there is none.
const Json* Find(const Json& json, const std::string& key) {
  if (!json.is_object()) return nullptr;
  const auto it = json.find(key);
  return it == json.end() || it->is_null() ? nullptr : &*it;
}

// Returns the value of a number, or the length of a string.
double SizeOf(const FieldDescriptor& field, const Json& json) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING) {
    return json.is_string() ? json.get_ref<const std::string&>().size() : 0.0;
  }
  double number = 0.0;
  if (json.is_number()) number = json.get<double>();
  // In JSON, 64-bit numbers are strings, and so are infinities and NaN.
  if (json.is_string() &&
      !absl::SimpleAtod(json.get_ref<const std::string&>(), &number)) {
    number = std::numeric_limits<double>::quiet_NaN();
  }
  return number;
}

absl::Status CheckFields(const google::protobuf::Descriptor& type,
                         const Json& json, const std::string& prefix);

// Checks the value of a field, an element of a list, or a value of a map.
// `rule` is the rule of the field, list or map.
absl::Status CheckValue(const FieldDescriptor& field, const v1::FieldRule& rule,
                        const Json& json, const std::string& name) {
  // Refuses a list inside a list, because protobuf would ignore an empty one.
  if (json.is_array()) return Wrong(name, "is a list, expected a value");
  if (rule.has_defaults()) return absl::OkStatus();
  if (field.message_type() != nullptr) {
    // Only objects are checked further. Some of protobuf's own types, such as
    // Duration, are strings in JSON.
    return json.is_object()
               ? CheckFields(*field.message_type(), json, name + ".")
               : absl::OkStatus();
  }
  if (field.enum_type() != nullptr) {
    const bool is_known =
        !json.is_number_integer() ||
        field.enum_type()->FindValueByNumber(json.get<int>()) != nullptr;
    return is_known ? absl::OkStatus()
                    : Wrong(name, absl::StrCat("is none of ",
                                               field.enum_type()->name()));
  }
  const double size = SizeOf(field, json);
  if (!std::isfinite(size) || (rule.has_min() && size < rule.min()) ||
      (rule.has_max() && size > rule.max())) {
    const bool is_text = field.cpp_type() == FieldDescriptor::CPPTYPE_STRING;
    return Wrong(
        name,
        absl::StrCat(
            is_text ? "has length " : "is ", size, ", expected ",
            rule.has_min() ? absl::StrCat("at least ", rule.min(), " ") : "",
            rule.has_max() ? absl::StrCat("at most ", rule.max())
                           : "a finite number"));
  }
  return absl::OkStatus();
}

absl::Status CheckFields(const google::protobuf::Descriptor& type,
                         const Json& json, const std::string& prefix) {
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    const v1::FieldRule& rule = field.options().GetExtension(v1::field_rule);
    const std::string name = prefix + field.name();
    const Json* const found = Find(json, field.name());
    if (found == nullptr) {
      if (field.has_optional_keyword() ||
          field.real_containing_oneof() != nullptr) {
        continue;
      }
      return Wrong(name, "is missing");
    }
    if (!field.is_repeated()) {
      TFSWITCH_RETURN_IF_ERROR(CheckValue(field, rule, *found, name));
      continue;
    }
    const FieldDescriptor& value =
        field.is_map() ? *field.message_type()->map_value() : field;
    for (const auto& [key, each] : found->items()) {
      TFSWITCH_RETURN_IF_ERROR(
          CheckValue(value, rule, each, absl::StrCat(name, ".", key)));
    }
  }
  for (int i = 0; i < type.real_oneof_decl_count(); ++i) {
    const google::protobuf::OneofDescriptor& oneof = *type.oneof_decl(i);
    bool is_there = false;
    for (int k = 0; k < oneof.field_count(); ++k) {
      is_there = is_there || Find(json, oneof.field(k)->name()) != nullptr;
    }
    if (!is_there) return Wrong(prefix + oneof.name(), "is missing");
  }
  return absl::OkStatus();
}

// Removes the inner messages that are not checked here, because the code that
// uses them checks them. They may be long.
void DropUnchecked(Message* message) {
  const google::protobuf::Reflection* const reflection =
      message->GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection->ListFields(*message, &fields);
  for (const FieldDescriptor* field : fields) {
    if (field->message_type() == nullptr || field->is_repeated()) continue;
    Message* const part = reflection->MutableMessage(message, field);
    if (field->options().GetExtension(v1::field_rule).has_defaults()) {
      part->Clear();
    } else {
      DropUnchecked(part);
    }
  }
}

const v1::FileFormat& FormatOf(const Message& message) {
  return message.GetDescriptor()->options().GetExtension(v1::file_format);
}

std::string Describe(const Message& message, const std::string& path) {
  return absl::StrCat(FormatOf(message).title(), " '", path, "'");
}

// Parses `text`, the contents of `path`.
absl::Status ParseFile(const std::string& text, const std::string& path,
                       Message* message) {
  const v1::FileFormat& format = FormatOf(*message);
  TFSWITCH_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  const Json* const name = Find(json, "format");
  const Json* const version = Find(json, "version");
  if (name == nullptr || *name != format.format() || version == nullptr ||
      !version->is_number_unsigned()) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is not JSON of a ", format.format()));
  }
  if (*version != format.version()) {
    return absl::FailedPreconditionError(
        absl::StrCat(Describe(*message, path), " has format version ",
                     DumpJson(*version), ", and this tfswitch reads version ",
                     format.version(), ". Use the tfswitch that wrote it"));
  }
  TFSWITCH_RETURN_IF_ERROR(MessageFromJson(text, "its JSON", message));
  TFSWITCH_RETURN_IF_ERROR(CheckFields(*message->GetDescriptor(), json, ""));
  return CheckRanges(*message);
}

}  // namespace

absl::Status MessageFromJson(const std::string& json,
                             absl::string_view document, Message* message) {
  const auto status =
      google::protobuf::util::JsonStringToMessage(json, message);
  if (status.ok()) return absl::OkStatus();
  constexpr size_t kQuoted = 100;
  return absl::InvalidArgumentError(absl::StrCat(
      document, ": ", std::string(status.message()), ". Received: ",
      absl::CHexEscape(absl::string_view(json).substr(0, kQuoted))));
}

absl::StatusOr<std::string> MessageToJson(const Message& message,
                                          bool with_defaults,
                                          bool with_whitespace) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = with_defaults;
  options.add_whitespace = with_whitespace;
  std::string json;
  const auto status =
      google::protobuf::util::MessageToJsonString(message, &json, options);
  if (status.ok()) return json;
  return absl::InternalError(
      absl::StrCat(message.GetTypeName(), ": ", std::string(status.message())));
}

absl::Status CheckRanges(const Message& given) {
  const std::unique_ptr<Message> message(given.New());
  message->CopyFrom(given);
  DropUnchecked(message.get());
  TFSWITCH_ASSIGN_OR_RETURN(const std::string text,
                            MessageToJson(*message, /*with_defaults=*/true));
  TFSWITCH_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  return CheckFields(*message->GetDescriptor(), json, "");
}

absl::Status DamagedFile(const Message& message, const std::string& path,
                         absl::string_view why) {
  const std::string& remedy = FormatOf(message).remedy();
  return absl::DataLossError(absl::StrCat(Describe(message, path),
                                          " is damaged: ", why,
                                          remedy.empty() ? "" : ". ", remedy));
}

absl::Status ReadMessageFile(const std::string& path, size_t max_bytes,
                             Message* message) {
  const absl::StatusOr<std::string> text = ReadWholeFile(path, max_bytes);
  if (absl::IsResourceExhausted(text.status())) {
    return DamagedFile(*message, path, text.status().message());
  }
  TFSWITCH_RETURN_IF_ERROR(text.status());
  absl::Status status = ParseFile(*text, path, message);
  if (!absl::IsInvalidArgument(status)) return status;
  return DamagedFile(*message, path, status.message());
}

absl::Status WriteMessageFile(const std::string& path, size_t max_bytes,
                              Message* message) {
  const v1::FileFormat& format = FormatOf(*message);
  const auto field = [message](const char* name) {
    return message->GetDescriptor()->FindFieldByName(name);
  };
  const google::protobuf::Reflection* reflection = message->GetReflection();
  reflection->SetString(message, field("format"), format.format());
  reflection->SetUInt32(message, field("version"), format.version());
  TFSWITCH_ASSIGN_OR_RETURN(const std::string text,
                            MessageToJson(*message, /*with_defaults=*/true,
                                          /*with_whitespace=*/true));
  if (text.size() > max_bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat(Describe(*message, path), " would have ", text.size(),
                     " bytes, and at most ", max_bytes, " are read again"));
  }
  return WriteFileAtomically(path, text);
}

}  // namespace tfswitch
