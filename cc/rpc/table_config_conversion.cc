#include "cc/rpc/table_config_conversion.h"

#include <algorithm>
#include <cassert>
#include <limits>
#include <type_traits>
#include <variant>
#include <vector>

#include "google/protobuf/descriptor.h"
#include "google/protobuf/message.h"

namespace tfswitch {
namespace {

constexpr uint32_t kDefaultVirtualShards = 1024;

int ClampToInt(uint32_t value) {
  return static_cast<int>(std::min<uint32_t>(
      value, static_cast<uint32_t>(std::numeric_limits<int>::max())));
}

// The structs of configs and their messages have fields of equal names.
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

// Leaves the value as it is if the field can be unset and is.
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

// The kind that was chosen, as the field of its name.
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

// Leaves it as it is if the message has none, or one that this version does not
// know.
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
  if (!(options == StepOptions())) WriteFields(options, to->mutable_options());
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
  if (proto.segments().empty()) return config;
  config.segments.clear();
  const bool is_whole =
      proto.kind_case() != v1::OptimizerConfig::KIND_NOT_SET ||
      proto.has_options();
  for (const v1::OptimizerConfig::Segment& segment : proto.segments()) {
    // Without segments the config is one that Validate() refuses.
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

v1::AdmissionConfig ToProto(const AdmissionConfig& config) {
  v1::AdmissionConfig proto;
  WriteKind(config.policy, &proto);
  v1::AdmissionConfig::NotAdmitted* value = proto.mutable_not_admitted();
  switch (config.not_admitted.kind) {
    case NotAdmittedKind::kZeros:
      value->mutable_zeros();
      break;
    case NotAdmittedKind::kConstant:
      value->mutable_constant()->set_value(config.not_admitted.constant);
      break;
    case NotAdmittedKind::kShared:
      value->mutable_shared();
      break;
    case NotAdmittedKind::kWeight:
      value->mutable_weight();
      break;
  }
  return proto;
}

AdmissionConfig FromProto(const v1::AdmissionConfig& proto) {
  AdmissionConfig config;
  ReadKind(proto, &config.policy);
  using Value = v1::AdmissionConfig::NotAdmitted;
  const Value& value = proto.not_admitted();
  switch (value.kind_case()) {
    case Value::kConstant:
      config.not_admitted = {NotAdmittedKind::kConstant,
                             value.constant().value()};
      break;
    case Value::kShared:
      config.not_admitted.kind = NotAdmittedKind::kShared;
      break;
    case Value::kWeight:
      config.not_admitted.kind = NotAdmittedKind::kWeight;
      break;
    case Value::kZeros:
    case Value::KIND_NOT_SET:
      break;
  }
  return config;
}

// The values of both enums are in one order. One that is not known here becomes
// one that Validate() refuses.
template <typename Enum>
Enum FromProtoEnum(int value) {
  constexpr int kUnknown = 255;
  return static_cast<Enum>(value < 0 || value > kUnknown ? kUnknown : value);
}

v1::RowTypeConfig ToProto(const RowTypeConfig& config) {
  using Proto = v1::RowTypeConfig;
  Proto proto;
  proto.set_embeddings(static_cast<Proto::FloatType>(config.embeddings));
  proto.set_slots(static_cast<Proto::FloatType>(config.slots));
  proto.set_rounding(static_cast<Proto::Rounding>(config.rounding));
  return proto;
}

RowTypeConfig FromProto(const v1::RowTypeConfig& proto) {
  RowTypeConfig config;
  config.embeddings = FromProtoEnum<FloatType>(proto.embeddings());
  config.slots = FromProtoEnum<FloatType>(proto.slots());
  config.rounding = FromProtoEnum<Rounding>(proto.rounding());
  return config;
}

}  // namespace

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
  // A negative dim would wrap to a huge one; 0 is refused with a clear text.
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
  *proto.mutable_row_type() = ToProto(config.row_type);
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
  config.row_type = FromProto(proto.row_type());
  return config;
}

v1::TableInfo ToProto(const TableInfo& info) {
  v1::TableInfo proto;
  *proto.mutable_config() = ToProto(info.config);
  proto.set_num_rows(info.stats.num_rows);
  proto.set_index_bytes(info.stats.index_bytes);
  proto.set_row_bytes(info.stats.row_bytes);
  proto.set_reserved_bytes(info.stats.reserved_bytes);
  proto.set_row_stride_bytes(info.stats.row_stride_bytes);
  proto.set_inserted_rows(info.stats.inserted_rows);
  proto.set_erased_rows(info.stats.erased_rows);
  proto.set_slot_floats(static_cast<uint32_t>(info.slot_floats));
  proto.set_num_candidates(info.stats.num_candidates);
  proto.set_admission_bytes(info.stats.admission_bytes);
  proto.set_change_bytes(info.stats.change_bytes);
  proto.set_num_steps(info.stats.num_steps);
  proto.set_incarnation(info.identity.incarnation);
  proto.mutable_shard_instances()->Add(info.identity.shard_instances.begin(),
                                       info.identity.shard_instances.end());
  return proto;
}

TableInfo FromProto(const v1::TableInfo& proto) {
  TableInfo info;
  info.config = FromProto(proto.config());
  info.stats.num_rows = proto.num_rows();
  info.stats.index_bytes = proto.index_bytes();
  info.stats.row_bytes = proto.row_bytes();
  info.stats.reserved_bytes = proto.reserved_bytes();
  info.stats.row_stride_bytes = proto.row_stride_bytes();
  info.stats.inserted_rows = proto.inserted_rows();
  info.stats.erased_rows = proto.erased_rows();
  info.slot_floats = ClampToInt(proto.slot_floats());
  info.stats.num_candidates = proto.num_candidates();
  info.stats.admission_bytes = proto.admission_bytes();
  info.stats.change_bytes = proto.change_bytes();
  info.stats.num_steps = proto.num_steps();
  info.identity = {
      proto.incarnation(),
      {proto.shard_instances().begin(), proto.shard_instances().end()}};
  return info;
}

}  // namespace tfswitch
