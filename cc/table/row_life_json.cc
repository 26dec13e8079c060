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
      json["show_click"] = {
          {"nonclk_coeff", ShortestDouble(config.nonclk_coeff)},
          {"click_coeff", ShortestDouble(config.click_coeff)},
          {"show_click_decay_rate",
           ShortestDouble(config.show_click_decay_rate)}};
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
    reader.Read("nonclk_coeff", &config->nonclk_coeff);
    reader.Read("click_coeff", &config->click_coeff);
    reader.Read("show_click_decay_rate", &config->show_click_decay_rate);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  return kinds.Finish();
}

OrderedJson ToJson(const AdmissionConfig& config) {
  OrderedJson json;
  if (const auto* rule = std::get_if<MinCountAdmission>(&config.policy)) {
    json["min_count"]["min_count"] = rule->min_count;
  } else if (const auto* rule =
                 std::get_if<BloomMinCountAdmission>(&config.policy)) {
    json["bloom_min_count"] = {
        {"min_count", rule->min_count},
        {"capacity", rule->capacity},
        {"false_positive_rate", ShortestDouble(rule->false_positive_rate)}};
  } else if (const auto* rule =
                 std::get_if<ProbabilityAdmission>(&config.policy)) {
    json["probability"]["probability"] = ShortestDouble(rule->probability);
  } else if (const auto* rule =
                 std::get_if<ShowClickAdmission>(&config.policy)) {
    json["show_click"]["embedx_threshold"] =
        ShortestDouble(rule->embedx_threshold);
  } else {
    json["always"] = OrderedJson::object();
  }
  json["not_admitted"] = ToJson(config.not_admitted);
  return json;
}

absl::Status FromJson(const Json& json, AdmissionConfig* config) {
  ObjectReader reader(json, "admission");
  int num_policies = 0;
  const auto read = [&](const char* name, auto policy,
                        auto read_fields) -> absl::Status {
    const Json* fields = reader.Find(name);
    if (fields == nullptr) return absl::OkStatus();
    ++num_policies;
    ObjectReader field_reader(*fields, absl::StrCat("admission.", name));
    read_fields(&field_reader, &policy);
    config->policy = policy;
    return field_reader.Finish();
  };
  TFSWITCH_RETURN_IF_ERROR(read("always", AlwaysAdmission{},
                                [](ObjectReader*, AlwaysAdmission*) {}));
  TFSWITCH_RETURN_IF_ERROR(read("min_count", MinCountAdmission{},
                                [](ObjectReader* r, MinCountAdmission* p) {
                                  r->Read("min_count", &p->min_count);
                                }));
  TFSWITCH_RETURN_IF_ERROR(read(
      "bloom_min_count", BloomMinCountAdmission{},
      [](ObjectReader* r, BloomMinCountAdmission* p) {
        r->Read("min_count", &p->min_count);
        r->Read("capacity", std::numeric_limits<uint64_t>::max(), &p->capacity);
        r->Read("false_positive_rate", &p->false_positive_rate);
      }));
  TFSWITCH_RETURN_IF_ERROR(read("probability", ProbabilityAdmission{},
                                [](ObjectReader* r, ProbabilityAdmission* p) {
                                  r->Read("probability", &p->probability);
                                }));
  TFSWITCH_RETURN_IF_ERROR(read("show_click", ShowClickAdmission{},
                                [](ObjectReader* r, ShowClickAdmission* p) {
                                  r->Read("embedx_threshold",
                                          &p->embedx_threshold);
                                }));
  if (num_policies > 1) {
    reader.Fail("", "one policy", json);
  }
  if (const Json* value = reader.Find("not_admitted")) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(*value, &config->not_admitted));
  }
  return reader.Finish();
}

OrderedJson ToJson(const EvictionConfig& config) {
  OrderedJson json = OrderedJson::object();
  if (config.delete_after_unseen_days.has_value()) {
    json["ttl"]["delete_after_unseen_days"] =
        ShortestDouble(*config.delete_after_unseen_days);
  }
  if (config.delete_threshold.has_value()) {
    json["show_click_score"]["delete_threshold"] =
        ShortestDouble(*config.delete_threshold);
  }
  if (config.min_l2_norm.has_value()) {
    json["l2_norm"]["min_l2_norm"] = ShortestDouble(*config.min_l2_norm);
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
  const auto read_float = [&](const char* name, const char* field,
                              float otherwise,
                              std::optional<float>* value) -> absl::Status {
    const Json* fields = reader.Find(name);
    if (fields == nullptr) return absl::OkStatus();
    ObjectReader field_reader(*fields, absl::StrCat("eviction.", name),
                              kDocument);
    float number = otherwise;
    field_reader.Read(field, &number);
    *value = number;
    return field_reader.Finish();
  };
  TFSWITCH_RETURN_IF_ERROR(read_float("ttl", "delete_after_unseen_days", 30.0f,
                                      &config->delete_after_unseen_days));
  TFSWITCH_RETURN_IF_ERROR(read_float("show_click_score", "delete_threshold",
                                      0.8f, &config->delete_threshold));
  TFSWITCH_RETURN_IF_ERROR(
      read_float("l2_norm", "min_l2_norm", 0.0f, &config->min_l2_norm));
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
