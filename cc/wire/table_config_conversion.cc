// Structs with Fields() are converted by protobuf's reflection. Their fields
// have the same names as in the message, so that a new field needs no line
// here. Only structs whose form differs from their message, such as segments
// and kinds that are enums, have functions of their own.
//
// FromProto() reports no errors: an unknown storage dtype, or segments that
// contradict each other, become a config that Validate() refuses.
// DescribeDifference() compares the texts of all fields of the message, so that
// it includes new fields, too.

#include "cc/wire/table_config_conversion.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <type_traits>
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

constexpr uint32_t kDefaultVirtualShards = 1024;

int ClampToInt(uint32_t value) {
  return static_cast<int>(std::min<uint32_t>(
      value, static_cast<uint32_t>(std::numeric_limits<int>::max())));
}

// Finds the message's field of the same name as a struct's field.
const google::protobuf::FieldDescriptor* FindField(
    const google::protobuf::Message& message, const char* name) {
  const auto* field = message.GetDescriptor()->FindFieldByName(name);
  assert(field != nullptr);
  return field;
}

void SetField(google::protobuf::Message* to, const char* name, float value) {
  to->GetReflection()->SetFloat(to, FindField(*to, name), value);
}
void SetField(google::protobuf::Message* to, const char* name, bool value) {
  to->GetReflection()->SetBool(to, FindField(*to, name), value);
}
void SetField(google::protobuf::Message* to, const char* name, uint32_t value) {
  to->GetReflection()->SetUInt32(to, FindField(*to, name), value);
}
void SetField(google::protobuf::Message* to, const char* name, uint64_t value) {
  to->GetReflection()->SetUInt64(to, FindField(*to, name), value);
}

// Reads a field. If the field has presence and is unset, the value stays as it
// is.
template <typename Value>
void GetField(const google::protobuf::Message& from, const char* name,
              Value* value) {
  const google::protobuf::Reflection* reflection = from.GetReflection();
  const google::protobuf::FieldDescriptor* field = FindField(from, name);
  if (field->has_presence() && !reflection->HasField(from, field)) return;
  if constexpr (std::is_same_v<Value, float>) {
    *value = reflection->GetFloat(from, field);
  } else if constexpr (std::is_same_v<Value, bool>) {
    *value = reflection->GetBool(from, field);
  } else if constexpr (std::is_same_v<Value, uint64_t>) {
    *value = reflection->GetUInt64(from, field);
  } else {
    *value = reflection->GetUInt32(from, field);
  }
}

template <typename Struct>
void WriteFields(const Struct& config, google::protobuf::Message* to) {
  ForEachField(config, [to](const char* name, const auto& value,
                            const FieldRange&) { SetField(to, name, value); });
}

template <typename Struct>
void ReadFields(const google::protobuf::Message& from, Struct* config) {
  ForEachField(*config,
               [&from](const char* name, auto& value, const FieldRange&) {
                 GetField(from, name, &value);
               });
}

// Writes the chosen kind to the message's field of the same name.
template <typename... Kinds>
void WriteKind(const std::variant<Kinds...>& kind,
               google::protobuf::Message* to) {
  std::visit(
      [to](const auto& config) {
        WriteFields(config, to->GetReflection()->MutableMessage(
                                to, FindField(*to, config.kName)));
      },
      kind);
}

// Reads the kind. If the message has none, or one that this version does not
// know, `*kind` stays as it is.
template <typename... Kinds>
void ReadKind(const google::protobuf::Message& from,
              std::variant<Kinds...>* kind) {
  ForEachKind<std::variant<Kinds...>>([&](auto config) {
    const auto* field = FindField(from, config.kName);
    if (!from.GetReflection()->HasField(from, field)) return;
    ReadFields(from.GetReflection()->GetMessage(from, field), &config);
    *kind = config;
  });
}

void WriteRule(const RuleConfig& rule, const StepOptions& options,
               v1::OptimizerConfig* to) {
  WriteKind(rule, to);
  // An unset option means off.
  const StepOptions off;
  std::apply(
      [&](const auto&... field) {
        ((options.*field.member == off.*field.member
              ? void()
              : SetField(to->mutable_options(), field.name,
                         options.*field.member)),
         ...);
      },
      StepOptions::Fields());
}

SegmentConfig ReadRule(const v1::OptimizerConfig& from) {
  SegmentConfig segment;
  ReadKind(from, &segment.rule);
  ReadFields(from.options(), &segment.options);
  return segment;
}

v1::OptimizerConfig ToProto(const OptimizerConfig& config) {
  v1::OptimizerConfig proto;
  if (config.is_dense) proto.set_update(v1::OptimizerConfig::DENSE);
  proto.set_is_open(config.is_open);
  if (config.IsSimple()) {
    WriteRule(config.segments[0].rule, config.segments[0].options, &proto);
    return proto;
  }
  for (const SegmentConfig& segment : config.segments) {
    v1::OptimizerConfig::Segment* to = proto.add_segments();
    to->set_dim(static_cast<uint32_t>(std::max(segment.dim, 0)));
    to->set_learning_rate_scale(segment.learning_rate_scale);
    WriteRule(segment.rule, segment.options, to->mutable_optimizer());
  }
  return proto;
}

OptimizerConfig FromProto(const v1::OptimizerConfig& proto) {
  OptimizerConfig config;
  config.segments = {ReadRule(proto)};
  config.is_dense = proto.update() == v1::OptimizerConfig::DENSE;
  config.is_open = proto.is_open();
  if (proto.segments().empty()) return config;
  config.segments.clear();
  const bool is_whole =
      proto.kind_case() != v1::OptimizerConfig::KIND_NOT_SET ||
      proto.has_options();
  for (const v1::OptimizerConfig::Segment& segment : proto.segments()) {
    // Validate() refuses a config without segments.
    if (is_whole || !segment.optimizer().segments().empty())
      return OptimizerConfig(std::vector<SegmentConfig>{});
    config.segments.push_back(ReadRule(segment.optimizer()));
    config.segments.back().dim = ClampToInt(segment.dim());
    if (segment.has_learning_rate_scale()) {
      config.segments.back().learning_rate_scale =
          segment.learning_rate_scale();
    }
  }
  return config;
}

v1::ConsistencyConfig ToProto(const ConsistencyConfig& config) {
  v1::ConsistencyConfig proto;
  switch (config.kind) {
    case ConsistencyKind::kAsp:
      proto.mutable_asp();
      break;
    case ConsistencyKind::kSsp:
      proto.mutable_ssp()->set_staleness(config.staleness);
      break;
    case ConsistencyKind::kBsp:
      proto.mutable_bsp()->set_reduction(config.reduction == Reduction::kSum
                                             ? v1::ConsistencyConfig::SUM
                                             : v1::ConsistencyConfig::MEAN);
      break;
  }
  return proto;
}

v1::StatisticsConfig ToProto(const StatisticsConfig& config) {
  v1::StatisticsConfig proto;
  switch (config.kind) {
    case StatisticsKind::kNone:
      break;
    case StatisticsKind::kUsage:
      proto.mutable_usage();
      break;
    case StatisticsKind::kShowClick:
      WriteFields(config, proto.mutable_show_click());
      break;
  }
  return proto;
}

StatisticsConfig FromProto(const v1::StatisticsConfig& proto) {
  StatisticsConfig config;
  switch (proto.kind_case()) {
    case v1::StatisticsConfig::kUsage:
      config.kind = StatisticsKind::kUsage;
      break;
    case v1::StatisticsConfig::kShowClick:
      config.kind = StatisticsKind::kShowClick;
      ReadFields(proto.show_click(), &config);
      break;
    case v1::StatisticsConfig::KIND_NOT_SET:
      break;
  }
  return config;
}

// The kinds are in the same order as the fields of their messages, whose
// numbers begin with 1.
v1::AdmissionConfig ToProto(const AdmissionConfig& config) {
  v1::AdmissionConfig proto;
  WriteKind(config.policy, &proto);
  v1::AdmissionConfig::NotAdmitted* value = proto.mutable_not_admitted();
  const int field = 1 + static_cast<int>(config.not_admitted.kind);
  value->GetReflection()->MutableMessage(
      value, value->GetDescriptor()->FindFieldByNumber(field));
  if (value->has_constant()) {
    value->mutable_constant()->set_value(config.not_admitted.constant);
  }
  return proto;
}

AdmissionConfig FromProto(const v1::AdmissionConfig& proto) {
  AdmissionConfig config;
  ReadKind(proto, &config.policy);
  const v1::AdmissionConfig::NotAdmitted& value = proto.not_admitted();
  const int field = std::max<int>(value.kind_case(), 1);
  config.not_admitted = {static_cast<NotAdmittedKind>(field - 1),
                         value.constant().value()};
  return config;
}

// The values of both enums are in the same order. An unknown value becomes one
// that Validate() refuses.
template <typename Enum>
Enum FromProtoEnum(int value) {
  constexpr int kUnknown = 255;
  return static_cast<Enum>(value < 0 || value > kUnknown ? kUnknown : value);
}

v1::StorageDtypeConfig ToProto(const StorageDtypeConfig& config) {
  using Proto = v1::StorageDtypeConfig;
  Proto proto;
  proto.set_embeddings(static_cast<Proto::FloatType>(config.embeddings));
  proto.set_slots(static_cast<Proto::FloatType>(config.slots));
  proto.set_rounding(static_cast<Proto::Rounding>(config.rounding));
  return proto;
}

StorageDtypeConfig FromProto(const v1::StorageDtypeConfig& proto) {
  StorageDtypeConfig config;
  config.embeddings = FromProtoEnum<FloatType>(proto.embeddings());
  config.slots = FromProtoEnum<FloatType>(proto.slots());
  config.rounding = FromProtoEnum<Rounding>(proto.rounding());
  return config;
}

std::string Excerpt(const std::string& text, size_t at) {
  constexpr size_t kBefore = 60;
  constexpr size_t kLength = 160;
  const size_t begin = at > kBefore ? at - kBefore : 0;
  return absl::StrCat(begin > 0 ? "..." : "", text.substr(begin, kLength),
                      text.size() > begin + kLength ? "..." : "");
}

// Returns a field as text, for example 16, "user" or adam { beta_1: 0.9 }.
// `proto` is the message of `config`.
std::string TextOf(const TableConfig& config, const v1::TableConfig& proto,
                   const google::protobuf::FieldDescriptor* field) {
  // These fields have texts for users.
  if (field->name() == "consistency") return config.consistency.ToString();
  if (field->name() == "storage_dtype") return config.storage_dtype.ToString();
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::string text;
  printer.PrintFieldValueToString(proto, field, -1, &text);
  absl::StripTrailingAsciiWhitespace(&text);
  return text.empty() ? "default" : text;
}

}  // namespace

ConsistencyConfig FromProto(const v1::ConsistencyConfig& proto) {
  ConsistencyConfig config;
  switch (proto.kind_case()) {
    case v1::ConsistencyConfig::kSsp:
      config.kind = ConsistencyKind::kSsp;
      config.staleness = proto.ssp().staleness();
      break;
    case v1::ConsistencyConfig::kBsp:
      config.kind = ConsistencyKind::kBsp;
      if (proto.bsp().reduction() == v1::ConsistencyConfig::SUM) {
        config.reduction = Reduction::kSum;
      }
      break;
    case v1::ConsistencyConfig::kAsp:
    case v1::ConsistencyConfig::KIND_NOT_SET:
      break;
  }
  return config;
}

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

v1::EvictionConfig ToProto(const EvictionConfig& config) {
  v1::EvictionConfig proto;
  for (const EvictionRule& rule : kEvictionRules) {
    if (!(config.*rule.value).has_value()) continue;
    SetField(proto.GetReflection()->MutableMessage(&proto,
                                                   FindField(proto, rule.name)),
             rule.field, *(config.*rule.value));
  }
  if (config.max_rows.has_value()) {
    proto.mutable_max_rows()->set_max_rows(*config.max_rows);
    proto.mutable_max_rows()->set_order(config.order == EvictionOrder::kLfu
                                            ? v1::EvictionConfig::MaxRows::LFU
                                            : v1::EvictionConfig::MaxRows::LRU);
  }
  proto.set_every_secs(config.every_secs);
  return proto;
}

EvictionConfig FromProto(const v1::EvictionConfig& proto) {
  EvictionConfig config;
  for (const EvictionRule& rule : kEvictionRules) {
    const auto* message = FindField(proto, rule.name);
    if (!proto.GetReflection()->HasField(proto, message)) continue;
    float value = rule.otherwise;
    GetField(proto.GetReflection()->GetMessage(proto, message), rule.field,
             &value);
    config.*rule.value = value;
  }
  if (proto.has_max_rows()) {
    config.max_rows = proto.max_rows().max_rows();
    if (proto.max_rows().order() == v1::EvictionConfig::MaxRows::LFU) {
      config.order = EvictionOrder::kLfu;
    }
  }
  config.every_secs = proto.every_secs();
  return config;
}

v1::TableConfig ToProto(const TableConfig& config) {
  v1::TableConfig proto;
  proto.set_name(config.name);
  // Converted to unsigned, a negative dim would become a huge one, so it
  // becomes 0, which Validate() refuses with a clear text.
  proto.set_dim(static_cast<uint32_t>(std::max(config.dim, 0)));
  *proto.mutable_optimizer() = ToProto(config.optimizer);
  WriteKind(config.initializer, proto.mutable_initializer());
  proto.set_seed(config.seed);
  proto.set_num_virtual_shards(config.num_virtual_shards);
  *proto.mutable_consistency() = ToProto(config.consistency);
  proto.set_layout(config.layout);
  *proto.mutable_statistics() = ToProto(config.statistics);
  *proto.mutable_admission() = ToProto(config.admission);
  *proto.mutable_eviction() = ToProto(config.eviction);
  *proto.mutable_storage_dtype() = ToProto(config.storage_dtype);
  return proto;
}

TableConfig FromProto(const v1::TableConfig& proto) {
  TableConfig config;
  config.name = proto.name();
  config.dim = ClampToInt(proto.dim());
  config.optimizer = FromProto(proto.optimizer());
  ReadKind(proto.initializer(), &config.initializer);
  config.seed = proto.seed();
  config.num_virtual_shards = proto.num_virtual_shards() == 0
                                  ? kDefaultVirtualShards
                                  : proto.num_virtual_shards();
  config.consistency = FromProto(proto.consistency());
  config.layout = proto.layout();
  config.statistics = FromProto(proto.statistics());
  config.admission = FromProto(proto.admission());
  config.eviction = FromProto(proto.eviction());
  config.storage_dtype = FromProto(proto.storage_dtype());
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
  const v1::TableConfig here = ToProto(existing);
  const v1::TableConfig wanted = ToProto(asked);
  std::vector<std::string> differences;
  for (int i = 0; i < here.GetDescriptor()->field_count(); ++i) {
    const auto* field = here.GetDescriptor()->field(i);
    const std::string before = TextOf(existing, here, field);
    const std::string after = TextOf(asked, wanted, field);
    if (before == after) continue;
    // Layouts are long texts, so only the part around the difference is shown.
    const size_t at =
        std::mismatch(before.begin(), before.end(), after.begin(), after.end())
            .first -
        before.begin();
    differences.push_back(absl::StrCat(field->name(), " (", Excerpt(before, at),
                                       " here, ", Excerpt(after, at),
                                       " asked)"));
  }
  return absl::StrJoin(differences, ", ");
}

}  // namespace tfswitch
