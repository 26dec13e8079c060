#include "cc/table/row_life_json.h"

#include <limits>
#include <optional>
#include <string>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

absl::Status FromJson(const Json& json, NotAdmittedValue* value) {
  constexpr char kPath[] = "admission.not_admitted";
  TFSWITCH_RETURN_IF_ERROR(CheckOneKind(json, kPath));
  ObjectReader kinds(json, kPath);
  const auto read_empty = [&](const char* name, NotAdmittedKind kind) {
    const Json* fields = kinds.Find(name);
    if (fields == nullptr) return absl::OkStatus();
    value->kind = kind;
    return ObjectReader(*fields, absl::StrCat(kPath, ".", name)).Finish();
  };
  TFSWITCH_RETURN_IF_ERROR(read_empty("zeros", NotAdmittedKind::kZeros));
  TFSWITCH_RETURN_IF_ERROR(read_empty("shared", NotAdmittedKind::kShared));
  TFSWITCH_RETURN_IF_ERROR(read_empty("weight", NotAdmittedKind::kWeight));
  if (const Json* fields = kinds.Find("constant")) {
    value->kind = NotAdmittedKind::kConstant;
    ObjectReader reader(*fields, "admission.not_admitted.constant");
    reader.Read("value", &value->constant);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  return kinds.Finish();
}

OrderedJson ToJson(const NotAdmittedValue& value) {
  OrderedJson json;
  switch (value.kind) {
    case NotAdmittedKind::kZeros:
      json["zeros"] = OrderedJson::object();
      break;
    case NotAdmittedKind::kConstant:
      json["constant"]["value"] = ShortestDouble(value.constant);
      break;
    case NotAdmittedKind::kShared:
      json["shared"] = OrderedJson::object();
      break;
    case NotAdmittedKind::kWeight:
      json["weight"] = OrderedJson::object();
      break;
  }
  return json;
}

}  // namespace

OrderedJson ToJson(const StatisticsConfig& config) {
  OrderedJson json = OrderedJson::object();
  switch (config.kind) {
    case StatisticsKind::kNone:
      break;
    case StatisticsKind::kUsage:
      json["usage"] = OrderedJson::object();
      break;
    case StatisticsKind::kShowClick:
      json["show_click"] = FieldsToJson(config);
      break;
  }
  return json;
}

absl::Status FromJson(const Json& json, StatisticsConfig* config) {
  TFSWITCH_RETURN_IF_ERROR(CheckOneKind(json, "statistics"));
  ObjectReader kinds(json, "statistics");
  if (const Json* fields = kinds.Find("usage")) {
    config->kind = StatisticsKind::kUsage;
    TFSWITCH_RETURN_IF_ERROR(
        ObjectReader(*fields, "statistics.usage").Finish());
  }
  if (const Json* fields = kinds.Find("show_click")) {
    config->kind = StatisticsKind::kShowClick;
    ObjectReader reader(*fields, "statistics.show_click");
    ReadFields(&reader, config);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  return kinds.Finish();
}

OrderedJson ToJson(const AdmissionConfig& config) {
  OrderedJson json = KindToJson(config.policy);
  json["not_admitted"] = ToJson(config.not_admitted);
  return json;
}

absl::Status FromJson(const Json& json, AdmissionConfig* config) {
  ObjectReader reader(json, "admission");
  TFSWITCH_RETURN_IF_ERROR(ReadKind(&reader, "admission", &config->policy));
  if (const Json* value = reader.Find("not_admitted")) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(*value, &config->not_admitted));
  }
  return reader.Finish();
}

OrderedJson ToJson(const EvictionConfig& config) {
  OrderedJson json = OrderedJson::object();
  for (const EvictionRule& rule : kEvictionRules) {
    if (const std::optional<float>& value = config.*rule.value) {
      json[rule.name][rule.field] = ShortestDouble(*value);
    }
  }
  if (config.max_rows.has_value()) {
    json["max_rows"] = {
        {"max_rows", *config.max_rows},
        {"order", config.order == EvictionOrder::kLfu ? "LFU" : "LRU"}};
  }
  if (config.every_secs != 0.0f) {
    json["every_secs"] = ShortestDouble(config.every_secs);
  }
  return json;
}

absl::Status FromJson(const Json& json, EvictionConfig* config) {
  // They also come by themselves, without a table config.
  constexpr absl::string_view kDocument = "eviction rules";
  ObjectReader reader(json, "eviction", kDocument);
  for (const EvictionRule& rule : kEvictionRules) {
    const Json* fields = reader.Find(rule.name);
    if (fields == nullptr) continue;
    ObjectReader rule_reader(*fields, absl::StrCat("eviction.", rule.name),
                             kDocument);
    float value = rule.otherwise;
    rule_reader.Read(rule.field, &value);
    TFSWITCH_RETURN_IF_ERROR(rule_reader.Finish());
    config->*rule.value = value;
  }
  if (const Json* fields = reader.Find("max_rows")) {
    ObjectReader field_reader(*fields, "eviction.max_rows", kDocument);
    uint64_t max_rows = 0;
    std::string order = "LRU";
    field_reader.Read("max_rows", std::numeric_limits<int64_t>::max(),
                      &max_rows);
    field_reader.Read("order", &order);
    if (order != "LRU" && order != "LFU") {
      field_reader.Fail("order", "LRU or LFU", (*fields)["order"]);
    }
    TFSWITCH_RETURN_IF_ERROR(field_reader.Finish());
    config->max_rows = max_rows;
    config->order = order == "LFU" ? EvictionOrder::kLfu : EvictionOrder::kLru;
  }
  reader.Read("every_secs", &config->every_secs);
  return reader.Finish();
}

}  // namespace tfswitch
