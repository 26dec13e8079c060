// A struct and its message have fields of the same names, and their enums the
// same values, so that all are written and read by reflection. A new field
// needs no line here.
//
// FromProto() reports no errors: an unknown storage dtype, or segments that
// contradict each other, become values that Validate() refuses.
// DescribeDifference() compares the texts of all fields of the message, so that
// it includes new fields, too.

#include "cc/wire/table_config_conversion.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/status_macros.h"
#include "cc/wire/json.h"
#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"
#include "google/protobuf/text_format.h"

namespace tfswitch {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

template <typename T>
inline constexpr bool kIsVariant = false;
template <typename... Kinds>
inline constexpr bool kIsVariant<std::variant<Kinds...>> = true;

// The functions of messages and of fields call each other.
template <typename... Kinds>
void WriteMessage(const std::variant<Kinds...>& kind, Message* to);
template <typename Struct>
void WriteMessage(const Struct& config, Message* to);
template <typename... Kinds>
void ReadMessage(const Message& from, std::variant<Kinds...>* kind);
template <typename Struct>
void ReadMessage(const Message& from, Struct* config);

template <typename Value>
void WriteField(const Value& value, const FieldDescriptor* field, Message* to) {
  const google::protobuf::Reflection* reflection = to->GetReflection();
  if constexpr (std::is_same_v<Value, float>) {
    reflection->SetFloat(to, field, value);
  } else if constexpr (std::is_same_v<Value, bool>) {
    reflection->SetBool(to, field, value);
  } else if constexpr (std::is_same_v<Value, uint64_t>) {
    reflection->SetUInt64(to, field, value);
  } else if constexpr (std::is_same_v<Value, RowCapacity>) {
    reflection->SetUInt64(to, field, value.num_rows);
  } else if constexpr (std::is_same_v<Value, WireDtype>) {
    WriteField(value.type, field, to);
  } else if constexpr (std::is_same_v<Value, uint32_t>) {
    reflection->SetUInt32(to, field, value);
  } else if constexpr (std::is_same_v<Value, int>) {
    // A negative dim would become a huge one. Validate() refuses 0 with a clear
    // text.
    reflection->SetUInt32(to, field, static_cast<uint32_t>(std::max(value, 0)));
  } else if constexpr (std::is_same_v<Value, std::string>) {
    reflection->SetString(to, field, value);
  } else if constexpr (std::is_enum_v<Value>) {
    reflection->SetEnumValue(to, field, static_cast<int>(value));
  } else if constexpr (std::is_same_v<Value, StepOptions>) {
    if (!(value == StepOptions())) {
      WriteMessage(value, reflection->MutableMessage(to, field));
    }
  } else {
    WriteMessage(value, reflection->MutableMessage(to, field));
  }
}
template <typename T, const FieldRange& kRange>
void WriteField(const Ranged<T, kRange>& value, const FieldDescriptor* field,
                Message* to) {
  WriteField(value.value, field, to);
}
template <typename T>
void WriteField(const std::optional<T>& value, const FieldDescriptor* field,
                Message* to) {
  if (value.has_value()) WriteField(*value, field, to);
}
template <typename T>
void WriteField(const std::vector<T>& values, const FieldDescriptor* field,
                Message* to) {
  for (const T& value : values) {
    WriteMessage(value, to->GetReflection()->AddMessage(to, field));
  }
}

// Reads a field. If the field has presence and is unset, the value stays as it
// is.
template <typename Value>
void ReadField(const Message& from, const FieldDescriptor* field,
               Value* value) {
  const google::protobuf::Reflection* reflection = from.GetReflection();
  if (field->has_presence() && !reflection->HasField(from, field)) return;
  if constexpr (std::is_same_v<Value, float>) {
    *value = reflection->GetFloat(from, field);
  } else if constexpr (std::is_same_v<Value, bool>) {
    *value = reflection->GetBool(from, field);
  } else if constexpr (std::is_same_v<Value, uint64_t>) {
    *value = reflection->GetUInt64(from, field);
  } else if constexpr (std::is_same_v<Value, RowCapacity>) {
    value->num_rows = reflection->GetUInt64(from, field);
  } else if constexpr (std::is_same_v<Value, WireDtype>) {
    ReadField(from, field, &value->type);
  } else if constexpr (std::is_same_v<Value, uint32_t>) {
    *value = reflection->GetUInt32(from, field);
  } else if constexpr (std::is_same_v<Value, int>) {
    constexpr uint32_t kMax = std::numeric_limits<int>::max();
    *value =
        static_cast<int>(std::min(reflection->GetUInt32(from, field), kMax));
  } else if constexpr (std::is_same_v<Value, std::string>) {
    *value = reflection->GetString(from, field);
  } else if constexpr (std::is_enum_v<Value>) {
    constexpr int kUnknown = 255;
    const int number = reflection->GetEnumValue(from, field);
    const bool fits = number >= 0 && number <= kUnknown;
    *value = static_cast<Value>(fits ? number : kUnknown);
  } else {
    ReadMessage(reflection->GetMessage(from, field), value);
  }
}
template <typename T, const FieldRange& kRange>
void ReadField(const Message& from, const FieldDescriptor* field,
               Ranged<T, kRange>* value) {
  ReadField(from, field, &value->value);
}
template <typename T>
void ReadField(const Message& from, const FieldDescriptor* field,
               std::optional<T>* value) {
  if (!from.GetReflection()->HasField(from, field)) return;
  ReadField(from, field, &value->emplace());
}
template <typename T>
void ReadField(const Message& from, const FieldDescriptor* field,
               std::vector<T>* values) {
  const int size = from.GetReflection()->FieldSize(from, field);
  if (size > 0) values->assign(size, T());
  for (int i = 0; i < size; ++i) {
    ReadMessage(from.GetReflection()->GetRepeatedMessage(from, field, i),
                &(*values)[i]);
  }
}

// Calls visit(member, field) with the message's field of each member of a
// struct. A variant that is a oneof of the message has no such field.
template <typename Struct, typename Visit>
void ForEachFieldOf(const Message& message, Struct& config,
                    const Visit& visit) {
  ForEachField(config, [&](const std::string& name, auto& member) {
    const auto* field = message.GetDescriptor()->FindFieldByName(name);
    assert(field != nullptr || kIsVariant<std::decay_t<decltype(member)>>);
    visit(member, field);
  });
}

template <typename Struct>
void WriteMessage(const Struct& config, Message* to) {
  ForEachFieldOf(*to, config,
                 [to](const auto& member, const FieldDescriptor* field) {
                   if constexpr (kIsVariant<std::decay_t<decltype(member)>>) {
                     if (field == nullptr) return WriteMessage(member, to);
                   }
                   WriteField(member, field, to);
                 });
  if constexpr (std::is_same_v<Struct, StepOptions>) {
    const StepOptions options_off;  // An unset option means off.
    ForEachFieldOf(*to, options_off, [to](float off, const auto* field) {
      const auto* reflection = to->GetReflection();
      if (reflection->GetFloat(*to, field) == off) {
        reflection->ClearField(to, field);
      }
    });
  }
}
template <typename Struct>
void ReadMessage(const Message& from, Struct* config) {
  ForEachFieldOf(from, *config,
                 [&from](auto& member, const FieldDescriptor* field) {
                   if constexpr (kIsVariant<std::decay_t<decltype(member)>>) {
                     if (field == nullptr) return ReadMessage(from, &member);
                   }
                   ReadField(from, field, &member);
                 });
}

// Writes the chosen kind to the message's field of the same name.
template <typename... Kinds>
void WriteMessage(const std::variant<Kinds...>& kind, Message* to) {
  std::visit(
      [to](const auto& config) {
        WriteField(config, to->GetDescriptor()->FindFieldByName(config.kName),
                   to);
      },
      kind);
}
// Reads the kind. If the message has none, or one that this version does not
// know, `*kind` stays as it is.
template <typename... Kinds>
void ReadMessage(const Message& from, std::variant<Kinds...>* kind) {
  ForEachKind<std::variant<Kinds...>>([&](auto config) {
    const auto* field = from.GetDescriptor()->FindFieldByName(config.kName);
    if (!from.GetReflection()->HasField(from, field)) return;
    ReadField(from, field, &config);
    *kind = config;
  });
}

template <typename Proto, typename Struct>
Proto Written(const Struct& config) {
  Proto proto;
  WriteMessage(config, &proto);
  return proto;
}
template <typename Struct>
Struct ReadFrom(const Message& proto) {
  Struct config;
  ReadMessage(proto, &config);
  return config;
}

std::string Excerpt(const std::string& text, size_t at) {
  constexpr size_t kBefore = 60;
  constexpr size_t kLength = 160;
  const size_t begin = at > kBefore ? at - kBefore : 0;
  return absl::StrCat(begin > 0 ? "..." : "", text.substr(begin, kLength),
                      text.size() > begin + kLength ? "..." : "");
}

template <typename T, typename = void>
inline constexpr bool kHasText = false;
template <typename T>
inline constexpr bool
    kHasText<T, std::void_t<decltype(std::declval<T>().ToString())>> = true;

// Returns the fields' names and texts for users, as 16, "user", bsp(mean),
// segments { adam { beta_1: 0.9 } }.
std::vector<std::pair<std::string, std::string>> TextsOf(
    const TableConfig& config) {
  const v1::TableConfig proto = ToProto(config);
  std::vector<std::pair<std::string, std::string>> texts;
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  ForEachFieldOf(
      proto, config, [&](const auto& member, const FieldDescriptor* field) {
        std::string text;
        if constexpr (kHasText<decltype(member)>) {
          text = member.ToString();
        } else {
          printer.PrintFieldValueToString(proto, field, -1, &text);
          absl::StripTrailingAsciiWhitespace(&text);
        }
        texts.emplace_back(field->name(), text.empty() ? "default" : text);
      });
  return texts;
}

}  // namespace

absl::Status CheckKnown(const google::protobuf::Message& config) {
  const google::protobuf::Reflection* reflection = config.GetReflection();
  const auto unknown = [&](absl::string_view what) {
    return absl::InvalidArgumentError(
        absl::StrCat("the config of the table has ", what, " in ",
                     config.GetDescriptor()->name(),
                     ", which this server does not know; install the same "
                     "version of tfswitch on both sides"));
  };
  const auto& others = reflection->GetUnknownFields(config);
  if (!others.empty()) {
    return unknown(absl::StrCat("field ", others.field(0).number()));
  }
  std::vector<const google::protobuf::FieldDescriptor*> fields;
  reflection->ListFields(config, &fields);
  for (const auto* field : fields) {
    if (field->enum_type() != nullptr) {
      const int value = reflection->GetEnumValue(config, field);
      if (field->enum_type()->FindValueByNumber(value) == nullptr) {
        return unknown(absl::StrCat(field->name(), " ", value));
      }
    } else if (field->is_repeated()) {
      const int size = reflection->FieldSize(config, field);
      for (int i = 0; i < size && field->message_type() != nullptr; ++i) {
        TFSWITCH_RETURN_IF_ERROR(
            CheckKnown(reflection->GetRepeatedMessage(config, field, i)));
      }
    } else if (field->message_type() != nullptr) {
      TFSWITCH_RETURN_IF_ERROR(
          CheckKnown(reflection->GetMessage(config, field)));
    }
  }
  return absl::OkStatus();
}

v1::TableConfig ToProto(const TableConfig& config) {
  return Written<v1::TableConfig>(config);
}
v1::EvictionConfig ToProto(const EvictionConfig& config) {
  return Written<v1::EvictionConfig>(config);
}
// Fields that have no effect beside the others get their defaults, so that
// configs with the same effect are equal.
TableConfig FromProto(const v1::TableConfig& proto) {
  auto config = ReadFrom<TableConfig>(proto);
  config.consistency = FromProto(proto.consistency());
  config.eviction = FromProto(proto.eviction());
  if (config.statistics.kind < StatisticsKind::kShowClick) {
    const StatisticsKind kind = config.statistics.kind;
    config.statistics = StatisticsConfig();
    config.statistics.kind = kind;
  }
  NotAdmittedValue& value = config.admission.not_admitted;
  if (value.kind != NotAdmittedKind::kConstant) value.constant = 0.0f;
  return config;
}
EvictionConfig FromProto(const v1::EvictionConfig& proto) {
  auto config = ReadFrom<EvictionConfig>(proto);
  if (!config.max_rows.has_value() && config.order <= EvictionOrder::kLfu) {
    config.order = EvictionOrder::kLru;
  }
  return config;
}
ConsistencyConfig FromProto(const v1::ConsistencyConfig& proto) {
  auto config = ReadFrom<ConsistencyConfig>(proto);
  if (config.kind < ConsistencyKind::kBsp) config.reduction = Reduction::kMean;
  if (config.kind != ConsistencyKind::kSsp) config.staleness = 0;
  return config;
}

std::string TableConfigToJson(const TableConfig& config) {
  return MessageToJson(ToProto(config), /*with_defaults=*/false).value();
}

absl::Status TableConfigFromJson(const std::string& json, TableConfig* config) {
  v1::TableConfig proto;
  TFSWITCH_RETURN_IF_ERROR(MessageFromJson(json, "table config", &proto));
  *config = FromProto(proto);
  return absl::OkStatus();
}

std::string DescribeDifference(const TableConfig& existing,
                               const TableConfig& asked) {
  const auto here = TextsOf(existing);
  TableConfig comparable = asked;
  comparable.capacity = existing.capacity;
  comparable.wire_dtype = existing.wire_dtype;
  const auto wanted = TextsOf(comparable);
  std::vector<std::string> differences;
  for (size_t i = 0; i < here.size(); ++i) {
    const auto& [name, before] = here[i];
    const std::string& after = wanted[i].second;
    if (before == after) continue;
    // Layouts are long texts, so only the part around the difference is shown.
    const size_t at =
        std::mismatch(before.begin(), before.end(), after.begin(), after.end())
            .first -
        before.begin();
    differences.push_back(absl::StrCat(name, " (", Excerpt(before, at),
                                       " here, ", Excerpt(after, at),
                                       " asked)"));
  }
  return absl::StrJoin(differences, ", ");
}

}  // namespace tfswitch
