#include "cc/table/table_config.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

using Json = nlohmann::json;
// Keeps the order of the proto fields, so that manifests read well.
using OrderedJson = nlohmann::ordered_json;

constexpr size_t kMaxNameSize = 256;
constexpr uint32_t kMaxVirtualShards = 65536;
constexpr size_t kMaxLayoutSize = 65536;

// Shortest text that gives the same float back: 0.1, not 0.10000000149.
double ShortestDouble(float value) {
  for (int digits = 6; digits < 9; ++digits) {
    char text[32];
    snprintf(text, sizeof(text), "%.*g", digits, static_cast<double>(value));
    const double parsed = strtod(text, nullptr);
    if (static_cast<float>(parsed) == value) return parsed;
  }
  return static_cast<double>(value);
}

absl::Status FieldError(const std::string& table, absl::string_view field,
                        absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("table '", absl::CHexEscape(table), "': ", field,
                   ": expected ", expected, ", got ", got));
}

OrderedJson FieldToJson(float value) { return ShortestDouble(value); }
OrderedJson FieldToJson(bool value) { return value; }
OrderedJson FieldToJson(uint32_t value) { return value; }

// The rule, with all its fields, and the options that are on.
OrderedJson RuleToJson(const RuleConfig& rule, const StepOptions& options) {
  OrderedJson json;
  std::visit(
      [&json](const auto& config) {
        OrderedJson fields = OrderedJson::object();
        ForEachField(config, [&](const char* name, const auto& value,
                                 const FieldRange&) {
          fields[name] = FieldToJson(value);
        });
        json[config.kName] = std::move(fields);
      },
      rule);
  OrderedJson changed = OrderedJson::object();
  std::apply(
      [&](const auto&... field) {
        const auto add = [&](const auto& f) {
          if (options.*f.member != StepOptions().*f.member) {
            changed[f.name] = FieldToJson(options.*f.member);
          }
        };
        (add(field), ...);
      },
      StepOptions::Fields());
  if (!changed.empty()) json["options"] = std::move(changed);
  return json;
}

OrderedJson OptimizerToJson(const OptimizerConfig& config) {
  if (config.IsSimple()) {
    return RuleToJson(config.segments[0].rule, config.segments[0].options);
  }
  OrderedJson segments = OrderedJson::array();
  for (const SegmentConfig& segment : config.segments) {
    OrderedJson json;
    json["dim"] = segment.dim;
    json["learning_rate_scale"] = ShortestDouble(segment.learning_rate_scale);
    json["optimizer"] = RuleToJson(segment.rule, segment.options);
    segments.push_back(std::move(json));
  }
  OrderedJson json;
  json["segments"] = std::move(segments);
  return json;
}

OrderedJson InitializerToJson(const InitializerConfig& config) {
  OrderedJson json;
  if (const auto* constant = std::get_if<ConstantInitializer>(&config)) {
    json["constant"]["value"] = ShortestDouble(constant->value);
  } else if (const auto* uniform = std::get_if<UniformInitializer>(&config)) {
    json["uniform"]["minval"] = ShortestDouble(uniform->minval);
    json["uniform"]["maxval"] = ShortestDouble(uniform->maxval);
  } else if (const auto* normal = std::get_if<NormalInitializer>(&config)) {
    json["normal"]["mean"] = ShortestDouble(normal->mean);
    json["normal"]["stddev"] = ShortestDouble(normal->stddev);
  } else if (const auto* truncated =
                 std::get_if<TruncatedNormalInitializer>(&config)) {
    json["truncated_normal"]["mean"] = ShortestDouble(truncated->mean);
    json["truncated_normal"]["stddev"] = ShortestDouble(truncated->stddev);
  } else {
    json["glorot_uniform"] = OrderedJson::object();
  }
  return json;
}

OrderedJson ConsistencyToJson(const ConsistencyConfig& config) {
  OrderedJson json;
  switch (config.kind) {
    case ConsistencyKind::kAsp:
      json["asp"] = OrderedJson::object();
      break;
    case ConsistencyKind::kSsp:
      json["ssp"]["staleness"] = config.staleness;
      break;
    case ConsistencyKind::kBsp:
      json["bsp"]["reduction"] =
          config.reduction == Reduction::kMean ? "MEAN" : "SUM";
      break;
  }
  return json;
}

// Reads the fields of one JSON object. Each Read leaves its target as it is if
// the field is absent; Finish() objects to fields that nothing read. The first
// error stays.
class ObjectReader {
 public:
  // `path` names the object in messages: "" for the root, "optimizer.adam".
  ObjectReader(const Json& json, std::string path)
      : json_(json), path_(std::move(path)) {
    if (!json.is_object()) {
      Fail("", "an object", json);
    }
  }

  const Json* Find(const char* field) {
    known_.insert(field);
    if (!status_.ok()) return nullptr;
    const auto it = json_.find(field);
    return it == json_.end() ? nullptr : &*it;
  }

  void Read(const char* field, std::string* value) {
    const Json* json = Find(field);
    if (json == nullptr) return;
    if (!json->is_string()) return Fail(field, "a string", *json);
    *value = json->get<std::string>();
  }

  void Read(const char* field, bool* value) {
    const Json* json = Find(field);
    if (json == nullptr) return;
    if (!json->is_boolean()) return Fail(field, "true or false", *json);
    *value = json->get<bool>();
  }

  void Read(const char* field, float* value) {
    const Json* json = Find(field);
    if (json == nullptr) return;
    if (!json->is_number()) return Fail(field, "a number", *json);
    const double number = json->get<double>();
    if (std::fabs(number) >
        static_cast<double>(std::numeric_limits<float>::max())) {
      return Fail(field, "a number in the range of float32", *json);
    }
    *value = static_cast<float>(number);
  }

  // An integer in [0, max]. The canonical mapping of protobuf writes 64-bit
  // integers as strings, so these are read too.
  void Read(const char* field, uint64_t max, uint64_t* value) {
    const Json* json = Find(field);
    if (json == nullptr) return;
    uint64_t number = 0;
    if (json->is_number_unsigned()) {
      number = json->get<uint64_t>();
    } else if (!json->is_string() ||
               !ParseDigits(json->get_ref<const std::string&>(), &number)) {
      return Fail(field, IntegerRange(max), *json);
    }
    if (number > max) return Fail(field, IntegerRange(max), *json);
    *value = number;
  }

  void Read(const char* field, uint32_t* value) {
    uint64_t number = *value;
    Read(field, std::numeric_limits<uint32_t>::max(), &number);
    *value = static_cast<uint32_t>(number);
  }

  // All fields of a struct of optimizer_config.h.
  template <typename Struct>
  void ReadFields(Struct* config) {
    ForEachField(*config, [this](const char* name, auto& value,
                                 const FieldRange&) { Read(name, &value); });
  }

  void Fail(absl::string_view field, absl::string_view expected,
            const Json& got) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(
        absl::StrCat("table config: ", Name(field), ": expected ", expected,
                     ", got ", Dump(got)));
  }

  absl::Status Finish() {
    if (!status_.ok()) return status_;
    for (const auto& item : json_.items()) {
      if (known_.count(item.key()) == 0) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table config: unknown field ", Name(absl::CHexEscape(item.key())),
            "; expected one of: ", absl::StrJoin(known_, ", ")));
      }
    }
    return absl::OkStatus();
  }

 private:
  static std::string Dump(const Json& json) {
    return json.dump(-1, ' ', true, Json::error_handler_t::replace);
  }

  static std::string IntegerRange(uint64_t max) {
    return absl::StrCat("an integer from 0 to ", max);
  }

  static bool ParseDigits(const std::string& text, uint64_t* number) {
    if (text.empty()) return false;
    for (const char c : text) {
      if (c < '0' || c > '9') return false;
    }
    return absl::SimpleAtoi(text, number);
  }

  std::string Name(absl::string_view field) const {
    if (path_.empty()) {
      return field.empty() ? "the whole" : absl::StrCat("'", field, "'");
    }
    return absl::StrCat("'", path_, field.empty() ? "" : ".", field, "'");
  }

  const Json& json_;
  const std::string path_;
  std::set<std::string> known_;
  absl::Status status_;
};

// A oneof in JSON: an object with at most one of the known fields.
absl::Status CheckOneKind(const Json& json, absl::string_view path) {
  if (!json.is_object() || json.size() <= 1) return absl::OkStatus();
  std::vector<std::string> kinds;
  for (const auto& item : json.items()) {
    kinds.push_back(absl::CHexEscape(item.key()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat("table config: '", path, "': expected one kind, got ",
                   kinds.size(), ": ", absl::StrJoin(kinds, ", ")));
}

// Reads a rule and its options into those of `segment`; `others` are fields of
// the same object that something else reads.
absl::Status RuleFromJson(const Json& json, const std::string& path,
                          const std::vector<const char*>& others,
                          SegmentConfig* segment) {
  ObjectReader kinds(json, path);
  for (const char* other : others) kinds.Find(other);
  std::vector<std::string> found;
  absl::Status status;
  ForEachRule([&](auto rule) {
    const Json* fields = kinds.Find(rule.kName);
    if (fields == nullptr || !status.ok()) return;
    found.push_back(rule.kName);
    ObjectReader reader(*fields, absl::StrCat(path, ".", rule.kName));
    reader.ReadFields(&rule);
    status = reader.Finish();
    segment->rule = rule;
  });
  TFSWITCH_RETURN_IF_ERROR(status);
  if (const Json* fields = kinds.Find("options")) {
    ObjectReader reader(*fields, absl::StrCat(path, ".options"));
    reader.ReadFields(&segment->options);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  TFSWITCH_RETURN_IF_ERROR(kinds.Finish());
  if (found.size() <= 1) return absl::OkStatus();
  std::sort(found.begin(), found.end());
  return absl::InvalidArgumentError(
      absl::StrCat("table config: '", path, "': expected one kind, got ",
                   found.size(), ": ", absl::StrJoin(found, ", ")));
}

absl::Status SegmentsFromJson(const Json& json,
                              std::vector<SegmentConfig>* segments) {
  if (!json.is_array() || json.empty()) {
    return absl::InvalidArgumentError(
        "table config: 'optimizer.segments': expected an array of at least one "
        "object");
  }
  for (size_t i = 0; i < json.size(); ++i) {
    const std::string path = absl::StrCat("optimizer.segments[", i, "]");
    SegmentConfig segment;
    uint64_t dim = 0;
    ObjectReader reader(json[i], path);
    reader.Read("dim", std::numeric_limits<int32_t>::max(), &dim);
    reader.Read("learning_rate_scale", &segment.learning_rate_scale);
    if (const Json* rule = reader.Find("optimizer")) {
      TFSWITCH_RETURN_IF_ERROR(
          RuleFromJson(*rule, path + ".optimizer", {}, &segment));
    }
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    segment.dim = static_cast<int>(dim);
    segments->push_back(segment);
  }
  return absl::OkStatus();
}

absl::Status OptimizerFromJson(const Json& json, OptimizerConfig* config) {
  OptimizerConfig result;
  TFSWITCH_RETURN_IF_ERROR(
      RuleFromJson(json, "optimizer", {"segments"}, &result.segments[0]));
  if (json.contains("segments")) {
    if (json.size() > 1) {
      return absl::InvalidArgumentError(
          "table config: 'optimizer.segments': expected nothing beside it; "
          "each segment has its rule and options");
    }
    result.segments.clear();
    TFSWITCH_RETURN_IF_ERROR(
        SegmentsFromJson(json["segments"], &result.segments));
  }
  *config = std::move(result);
  return absl::OkStatus();
}

absl::Status ConsistencyFromJson(const Json& json, ConsistencyConfig* config) {
  TFSWITCH_RETURN_IF_ERROR(CheckOneKind(json, "consistency"));
  ObjectReader kinds(json, "consistency");
  ConsistencyConfig result;
  if (const Json* fields = kinds.Find("asp")) {
    ObjectReader reader(*fields, "consistency.asp");
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  if (const Json* fields = kinds.Find("ssp")) {
    ObjectReader reader(*fields, "consistency.ssp");
    uint64_t staleness = 0;
    reader.Read("staleness", std::numeric_limits<uint32_t>::max(), &staleness);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    result.kind = ConsistencyKind::kSsp;
    result.staleness = static_cast<uint32_t>(staleness);
  }
  if (const Json* fields = kinds.Find("bsp")) {
    ObjectReader reader(*fields, "consistency.bsp");
    std::string reduction = "MEAN";
    reader.Read("reduction", &reduction);
    if (reduction != "MEAN" && reduction != "SUM") {
      reader.Fail("reduction", "\"MEAN\" or \"SUM\"", reduction);
    }
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    result.kind = ConsistencyKind::kBsp;
    result.reduction = reduction == "SUM" ? Reduction::kSum : Reduction::kMean;
  }
  TFSWITCH_RETURN_IF_ERROR(kinds.Finish());
  *config = result;
  return absl::OkStatus();
}

absl::StatusOr<Json> ParseJson(const std::string& json, const char* what) {
  Json parsed = Json::parse(json, /*cb=*/nullptr, /*allow_exceptions=*/false);
  if (!parsed.is_discarded()) return parsed;
  return absl::InvalidArgumentError(absl::StrCat(
      what, ": expected JSON, got ", absl::CHexEscape(json.substr(0, 100))));
}

template <typename Normal>
absl::Status NormalFromJson(const Json& json, const char* path,
                            InitializerConfig* config) {
  ObjectReader reader(json, path);
  Normal normal;
  reader.Read("mean", &normal.mean);
  reader.Read("stddev", &normal.stddev);
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  *config = normal;
  return absl::OkStatus();
}

absl::Status InitializerFromJson(const Json& json, InitializerConfig* config) {
  TFSWITCH_RETURN_IF_ERROR(CheckOneKind(json, "initializer"));
  ObjectReader kinds(json, "initializer");
  if (const Json* fields = kinds.Find("constant")) {
    ObjectReader reader(*fields, "initializer.constant");
    ConstantInitializer constant;
    reader.Read("value", &constant.value);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    *config = constant;
  }
  if (const Json* fields = kinds.Find("uniform")) {
    ObjectReader reader(*fields, "initializer.uniform");
    UniformInitializer uniform;
    reader.Read("minval", &uniform.minval);
    reader.Read("maxval", &uniform.maxval);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    *config = uniform;
  }
  if (const Json* fields = kinds.Find("normal")) {
    TFSWITCH_RETURN_IF_ERROR(NormalFromJson<NormalInitializer>(
        *fields, "initializer.normal", config));
  }
  if (const Json* fields = kinds.Find("truncated_normal")) {
    TFSWITCH_RETURN_IF_ERROR(NormalFromJson<TruncatedNormalInitializer>(
        *fields, "initializer.truncated_normal", config));
  }
  if (const Json* fields = kinds.Find("glorot_uniform")) {
    ObjectReader reader(*fields, "initializer.glorot_uniform");
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
    *config = GlorotUniformInitializer{};
  }
  return kinds.Finish();
}

absl::Status ValidateInitializer(const std::string& table,
                                 const InitializerConfig& config) {
  const auto check = [&table](absl::string_view field, float value) {
    if (std::isfinite(value)) return absl::OkStatus();
    return FieldError(table, field, "a finite number", absl::StrCat(value));
  };
  const auto check_stddev = [&](absl::string_view field, float value) {
    if (value >= 0.0f && std::isfinite(value)) return absl::OkStatus();
    return FieldError(table, field, "a finite number >= 0",
                      absl::StrCat(value));
  };
  if (const auto* constant = std::get_if<ConstantInitializer>(&config)) {
    return check("initializer.constant.value", constant->value);
  }
  if (const auto* uniform = std::get_if<UniformInitializer>(&config)) {
    TFSWITCH_RETURN_IF_ERROR(
        check("initializer.uniform.minval", uniform->minval));
    TFSWITCH_RETURN_IF_ERROR(
        check("initializer.uniform.maxval", uniform->maxval));
    if (uniform->minval > uniform->maxval ||
        !std::isfinite(uniform->maxval - uniform->minval)) {
      return FieldError(table, "initializer.uniform",
                        "minval <= maxval, a finite range apart",
                        absl::StrCat("minval ", uniform->minval, ", maxval ",
                                     uniform->maxval));
    }
    return absl::OkStatus();
  }
  if (const auto* normal = std::get_if<NormalInitializer>(&config)) {
    TFSWITCH_RETURN_IF_ERROR(check("initializer.normal.mean", normal->mean));
    return check_stddev("initializer.normal.stddev", normal->stddev);
  }
  if (const auto* normal = std::get_if<TruncatedNormalInitializer>(&config)) {
    TFSWITCH_RETURN_IF_ERROR(
        check("initializer.truncated_normal.mean", normal->mean));
    return check_stddev("initializer.truncated_normal.stddev", normal->stddev);
  }
  return absl::OkStatus();
}

// Layouts are long; what differs should not be lost in what is the same.
size_t FirstDifference(const std::string& a, const std::string& b) {
  size_t at = 0;
  while (at < a.size() && at < b.size() && a[at] == b[at]) ++at;
  return at;
}

std::string Excerpt(const std::string& text, size_t at) {
  constexpr size_t kBefore = 60;
  constexpr size_t kLength = 160;
  const size_t begin = at > kBefore ? at - kBefore : 0;
  return absl::StrCat("'", begin > 0 ? "..." : "",
                      absl::CHexEscape(text.substr(begin, kLength)),
                      text.size() > begin + kLength ? "..." : "", "'");
}

}  // namespace

bool TableConfig::operator==(const TableConfig& o) const {
  return name == o.name && dim == o.dim && optimizer == o.optimizer &&
         initializer == o.initializer && seed == o.seed &&
         num_virtual_shards == o.num_virtual_shards &&
         consistency == o.consistency && layout == o.layout;
}

std::string ConsistencyConfig::ToString() const {
  switch (kind) {
    case ConsistencyKind::kAsp:
      return "asp";
    case ConsistencyKind::kSsp:
      return absl::StrCat("ssp(", staleness, ")");
    case ConsistencyKind::kBsp:
      return reduction == Reduction::kMean ? "bsp(mean)" : "bsp(sum)";
  }
  return "";
}

absl::Status TableConfig::Validate() const {
  if (name.empty() || name.size() > kMaxNameSize) {
    return FieldError(name, "name",
                      absl::StrCat("1 to ", kMaxNameSize, " characters"),
                      absl::StrCat(name.size()));
  }
  for (const char c : name) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      return FieldError(name, "name", "no control characters",
                        absl::CHexEscape(std::string(1, c)));
    }
  }
  if (dim < kMinDim || dim > kMaxDim) {
    return FieldError(
        name, "dim", absl::StrCat("an integer from ", kMinDim, " to ", kMaxDim),
        absl::StrCat(dim));
  }
  const absl::Status optimizer_status = ValidateOptimizerConfig(optimizer, dim);
  if (!optimizer_status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", name, "': ", optimizer_status.message()));
  }
  TFSWITCH_RETURN_IF_ERROR(ValidateInitializer(name, initializer));
  if (num_virtual_shards == 0 || num_virtual_shards > kMaxVirtualShards ||
      (num_virtual_shards & (num_virtual_shards - 1)) != 0) {
    return FieldError(
        name, "num_virtual_shards",
        absl::StrCat("a power of two from 1 to ", kMaxVirtualShards),
        absl::StrCat(num_virtual_shards));
  }
  if (layout.size() > kMaxLayoutSize) {
    return FieldError(name, "layout",
                      absl::StrCat("at most ", kMaxLayoutSize, " characters"),
                      absl::StrCat(layout.size()));
  }
  return absl::OkStatus();
}

std::string DescribeDifference(const TableConfig& existing,
                               const TableConfig& asked) {
  std::vector<std::string> differences;
  const auto compare = [&differences](absl::string_view field,
                                      const std::string& here,
                                      const std::string& wanted) {
    if (here == wanted) return;
    differences.push_back(
        absl::StrCat(field, " (", here, " here, ", wanted, " asked)"));
  };
  compare("name", absl::StrCat("'", existing.name, "'"),
          absl::StrCat("'", asked.name, "'"));
  compare("dim", absl::StrCat(existing.dim), absl::StrCat(asked.dim));
  compare("optimizer", OptimizerToJson(existing.optimizer).dump(),
          OptimizerToJson(asked.optimizer).dump());
  compare("initializer", InitializerToJson(existing.initializer).dump(),
          InitializerToJson(asked.initializer).dump());
  compare("seed", absl::StrCat(existing.seed), absl::StrCat(asked.seed));
  compare("num_virtual_shards", absl::StrCat(existing.num_virtual_shards),
          absl::StrCat(asked.num_virtual_shards));
  compare("consistency", existing.consistency.ToString(),
          asked.consistency.ToString());
  const size_t from = FirstDifference(existing.layout, asked.layout);
  compare("layout", Excerpt(existing.layout, from),
          Excerpt(asked.layout, from));
  return absl::StrJoin(differences, ", ");
}

std::string TableConfigToJson(const TableConfig& config) {
  OrderedJson json;
  json["name"] = config.name;
  json["dim"] = config.dim;
  json["optimizer"] = OptimizerToJson(config.optimizer);
  json["initializer"] = InitializerToJson(config.initializer);
  json["seed"] = config.seed;
  json["num_virtual_shards"] = config.num_virtual_shards;
  if (config.consistency.kind != ConsistencyKind::kAsp) {
    json["consistency"] = ConsistencyToJson(config.consistency);
  }
  if (!config.layout.empty()) json["layout"] = config.layout;
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

absl::Status TableConfigFromJson(const std::string& json, TableConfig* config) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed, ParseJson(json, "table config"));
  TableConfig result;
  uint64_t dim = 0;
  uint64_t num_virtual_shards = 0;
  ObjectReader reader(parsed, "");
  reader.Read("name", &result.name);
  reader.Read("dim", std::numeric_limits<int32_t>::max(), &dim);
  reader.Read("seed", std::numeric_limits<uint64_t>::max(), &result.seed);
  reader.Read("num_virtual_shards", std::numeric_limits<uint32_t>::max(),
              &num_virtual_shards);
  if (const Json* optimizer = reader.Find("optimizer")) {
    TFSWITCH_RETURN_IF_ERROR(OptimizerFromJson(*optimizer, &result.optimizer));
  }
  if (const Json* initializer = reader.Find("initializer")) {
    TFSWITCH_RETURN_IF_ERROR(
        InitializerFromJson(*initializer, &result.initializer));
  }
  if (const Json* consistency = reader.Find("consistency")) {
    TFSWITCH_RETURN_IF_ERROR(
        ConsistencyFromJson(*consistency, &result.consistency));
  }
  reader.Read("layout", &result.layout);
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  result.dim = static_cast<int>(dim);
  // As in the proto, 0 and unset are the same.
  if (num_virtual_shards != 0) {
    result.num_virtual_shards = static_cast<uint32_t>(num_virtual_shards);
  }
  *config = std::move(result);
  return absl::OkStatus();
}

absl::Status ConsistencyFromJson(const std::string& json,
                                 ConsistencyConfig* config) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed, ParseJson(json, "consistency"));
  return ConsistencyFromJson(parsed, config);
}

}  // namespace tfswitch
