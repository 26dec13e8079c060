#include "tests/cc/testing/message_maker.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/stubs/logging.h"
#include "google/protobuf/text_format.h"

namespace tfswitch {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;

std::string TypeOf(const FieldDescriptor& field) {
  const google::protobuf::Descriptor* const type = field.message_type();
  return absl::StrCat("/",
                      type == nullptr ? field.type_name() : type->full_name());
}

std::string MakeValue(const FieldDescriptor& field, Choices* choices) {
  static constexpr const char* kFloats[] = {
      "0", "0.5", "1", "-1", "nan", "inf", "-inf", "1e38", "1e-40", "20000"};
  static constexpr const char* kTexts[] = {
      "", "t", "u", "g", "d", "w", "q", "s", "r", "a", "a/b", "../a", "/", "."};
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_FLOAT:
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return kFloats[choices->Below(std::size(kFloats))];
    case FieldDescriptor::CPPTYPE_STRING: {
      const size_t text = choices->Below(std::size(kTexts) + 2);
      return absl::StrCat("\"",
                          text < std::size(kTexts) ? std::string(kTexts[text])
                          : text == std::size(kTexts)
                              ? std::string(10 * size_t{choices->Byte()}, 'x')
                              : absl::CEscape(choices->Text()),
                          "\"");
    }
    case FieldDescriptor::CPPTYPE_BOOL:
      return choices->Byte() % 2 == 0 ? "true" : "false";
    case FieldDescriptor::CPPTYPE_INT64:
      return absl::StrCat(static_cast<int64_t>(choices->Number()));
    case FieldDescriptor::CPPTYPE_UINT64:
      return absl::StrCat(choices->Number());
    case FieldDescriptor::CPPTYPE_UINT32:
      return absl::StrCat(static_cast<uint32_t>(choices->Number()));
    default:  // Also enums, which may have other values.
      return absl::StrCat(static_cast<int32_t>(choices->Number()));
  }
}

}  // namespace

void MergeText(const std::string& text, Message* message) {
  const google::protobuf::LogSilencer quiet;
  TextFormat::Parser parser;
  parser.AllowPartialMessage(true);
  parser.MergeFromString(text, message);
}

void MessageMaker::Remember(const Message& answer) {
  const google::protobuf::Reflection& reflection = *answer.GetReflection();
  std::vector<const FieldDescriptor*> fields;
  reflection.ListFields(answer, &fields);
  for (const FieldDescriptor* field : fields) {
    const int size =
        field->is_repeated() ? reflection.FieldSize(answer, field) : 1;
    std::vector<std::string> values(static_cast<size_t>(std::min(size, 16)));
    for (int i = 0; i < static_cast<int>(values.size()); ++i) {
      std::string& value = values[static_cast<size_t>(i)];
      const int index = field->is_repeated() ? i : -1;
      TextFormat::PrintFieldValueToString(answer, field, index, &value);
      if (field->message_type() == nullptr) continue;
      value = absl::StrCat("{", value, "}");
      Remember(field->is_repeated()
                   ? reflection.GetRepeatedMessage(answer, field, i)
                   : reflection.GetMessage(answer, field));
    }
    remembered_[field->name() + TypeOf(*field)] = std::move(values);
  }
}

void MessageMaker::FillIn(Message* message) const {
  const google::protobuf::Reflection& reflection = *message->GetReflection();
  const google::protobuf::Descriptor& type = *message->GetDescriptor();
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor* const field = type.field(i);
    if (field->is_repeated() ? reflection.FieldSize(*message, field) > 0
                             : reflection.HasField(*message, field)) {
      if (field->message_type() != nullptr && !field->is_repeated()) {
        FillIn(reflection.MutableMessage(message, field));
      }
      continue;
    }
    const auto found = remembered_.find(field->name() + TypeOf(*field));
    if (found == remembered_.end() ||
        absl::StartsWith(field->name(), "table")) {
      continue;
    }
    for (const std::string& value : found->second) {
      MergeText(absl::StrCat(field->name(), ": ", value), message);
    }
  }
}

void MessageMaker::Change(Choices* choices, Message* message) const {
  for (;;) {
    const google::protobuf::Descriptor& type = *message->GetDescriptor();
    if (type.field_count() == 0) return;
    const google::protobuf::Reflection& reflection = *message->GetReflection();
    const uint8_t kind = choices->Byte();
    // Every other time one that is set.
    std::vector<const FieldDescriptor*> fields;
    if (kind % 16 < 8) reflection.ListFields(*message, &fields);
    if (fields.empty()) {
      for (int i = 0; i < type.field_count(); ++i) {
        fields.push_back(type.field(i));
      }
    }
    const FieldDescriptor* const field = fields[choices->Below(fields.size())];
    if (kind % 8 == 0) {
      reflection.ClearField(message, field);
      return;
    }
    const int size =
        field->is_repeated() ? reflection.FieldSize(*message, field) : 0;
    if (kind % 8 == 3 && size > 0) {
      reflection.RemoveLast(message, field);
      return;
    }
    if (kind % 8 == 1) {
      // Takes a value that an answer had in a field of this type.
      std::vector<std::string> values;
      for (const auto& [name, of_name] : remembered_) {
        if (absl::EndsWith(name, TypeOf(*field))) {
          values.insert(values.end(), of_name.begin(), of_name.end());
        }
      }
      if (!values.empty()) {
        MergeText(absl::StrCat(field->name(), ": ",
                               values[choices->Below(values.size())]),
                  message);
        return;
      }
    }
    if (field->message_type() == nullptr) {
      // Sometimes many.
      const int times = field->is_repeated() && kind % 8 == 2 ? kind : 1;
      const std::string value =
          absl::StrCat(field->name(), ": ", MakeValue(*field, choices), "\n");
      std::string text;
      for (int i = 0; i < times; ++i) text += value;
      MergeText(text, message);
      return;
    }
    if (!field->is_repeated()) {
      message = reflection.MutableMessage(message, field);
      continue;
    }
    const auto which = static_cast<int>(choices->Below(size + 1));
    message = which < size
                  ? reflection.MutableRepeatedMessage(message, field, which)
                  : reflection.AddMessage(message, field);
  }
}

}  // namespace tfswitch
