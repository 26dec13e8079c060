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
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/table/json_reader.h"
#include "cc/table/row_life_json.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

constexpr size_t kMaxNameSize = 256;
// Files are named after their table, with up to 33 characters more, and file
// systems take 255.
constexpr size_t kMaxFileNameSize = 220;
constexpr uint32_t kMaxVirtualShards = 65536;
constexpr size_t kMaxLayoutSize = 65536;

absl::Status FieldError(const std::string& table, absl::string_view field,
                        absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("table '", absl::Utf8SafeCHexEscape(table), "': ", field,
                   ": expected ", expected, ", got ", got));
}

// The rule, with all its fields, and the options that are on.
OrderedJson RuleToJson(const RuleConfig& rule, const StepOptions& options) {
  OrderedJson json = KindToJson(rule);
  const OrderedJson on = FieldsToJson(options);
  const OrderedJson off = FieldsToJson(StepOptions());
  OrderedJson changed = OrderedJson::object();
  for (const auto& [name, value] : on.items()) {
    if (value != off[name]) changed[name] = value;
  }
  if (!changed.empty()) json["options"] = std::move(changed);
  return json;
}

OrderedJson OptimizerToJson(const OptimizerConfig& config) {
  if (config.is_dense) {
    OptimizerConfig sparse = config;
    sparse.is_dense = false;
    OrderedJson json = OptimizerToJson(sparse);
    json["update"] = "DENSE";
    return json;
  }
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

// As the enums of the proto.
const char* NameOf(FloatType type) {
  switch (type) {
    case FloatType::kFloat32:
      return "FLOAT32";
    case FloatType::kFloat16:
      return "FLOAT16";
    case FloatType::kBfloat16:
      return "BFLOAT16";
  }
  return "";
}
const char* NameOf(Rounding rounding) {
  switch (rounding) {
    case Rounding::kStochastic:
      return "STOCHASTIC";
    case Rounding::kNearest:
      return "NEAREST";
  }
  return "";
}

OrderedJson RowTypeToJson(const RowTypeConfig& config) {
  OrderedJson json;
  json["embeddings"] = NameOf(config.embeddings);
  json["slots"] = NameOf(config.slots);
  json["rounding"] = NameOf(config.rounding);
  return json;
}

absl::Status RowTypeFromJson(const Json& json, RowTypeConfig* config) {
  ObjectReader reader(json, "row_type");
  const auto read = [&reader](const char* field, const auto& values,
                              const char* expected, auto* to) {
    std::string name = NameOf(*to);
    reader.Read(field, &name);
    for (const auto value : values) {
      if (name == NameOf(value)) {
        *to = value;
        return;
      }
    }
    reader.Fail(field, expected, name);
  };
  constexpr FloatType kTypes[] = {FloatType::kFloat32, FloatType::kFloat16,
                                  FloatType::kBfloat16};
  constexpr char kTypeNames[] = R"("FLOAT32", "FLOAT16" or "BFLOAT16")";
  constexpr Rounding kRoundings[] = {Rounding::kStochastic, Rounding::kNearest};
  read("embeddings", kTypes, kTypeNames, &config->embeddings);
  read("slots", kTypes, kTypeNames, &config->slots);
  read("rounding", kRoundings, R"("STOCHASTIC" or "NEAREST")",
       &config->rounding);
  return reader.Finish();
}

// Reads a rule and its options into those of `segment`; `others` are fields of
// the same object that something else reads.
absl::Status RuleFromJson(const Json& json, const std::string& path,
                          const std::vector<const char*>& others,
                          SegmentConfig* segment) {
  ObjectReader kinds(json, path);
  for (const char* other : others) kinds.Find(other);
  TFSWITCH_RETURN_IF_ERROR(ReadKind(&kinds, path, &segment->rule));
  if (const Json* fields = kinds.Find("options")) {
    ObjectReader reader(*fields, absl::StrCat(path, ".options"));
    ReadFields(&reader, &segment->options);
    TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  }
  return kinds.Finish();
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
  TFSWITCH_RETURN_IF_ERROR(RuleFromJson(
      json, "optimizer", {"segments", "update"}, &result.segments[0]));
  std::string update = "SPARSE";
  if (const auto it = json.find("update"); it != json.end()) {
    update = it->is_string() ? it->get<std::string>() : it->dump();
  }
  if (update != "SPARSE" && update != "DENSE") {
    return absl::InvalidArgumentError(absl::StrCat(
        "table config: 'optimizer.update': expected \"SPARSE\" or \"DENSE\", "
        "got ",
        update));
  }
  if (json.contains("segments")) {
    if (json.size() > (json.contains("update") ? 2 : 1)) {
      return absl::InvalidArgumentError(
          "table config: 'optimizer.segments': expected nothing beside it; "
          "each segment has its rule and options");
    }
    result.segments.clear();
    TFSWITCH_RETURN_IF_ERROR(
        SegmentsFromJson(json["segments"], &result.segments));
  }
  result.is_dense = update == "DENSE";
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

absl::Status ValidateInitializer(const std::string& table,
                                 const InitializerConfig& config) {
  if (const auto fault = FindFault(config)) {
    return FieldError(table, absl::StrCat("initializer.", fault->name),
                      fault->expected, fault->got);
  }
  const auto* uniform = std::get_if<UniformInitializer>(&config);
  if (uniform != nullptr &&
      (uniform->minval > uniform->maxval ||
       !std::isfinite(uniform->maxval - uniform->minval))) {
    return FieldError(
        table, "initializer.uniform", "minval <= maxval, a finite range apart",
        absl::StrCat("minval ", uniform->minval, ", maxval ", uniform->maxval));
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
         consistency == o.consistency && layout == o.layout &&
         statistics == o.statistics && admission == o.admission &&
         eviction == o.eviction && row_type == o.row_type;
}

bool TableConfig::NeedsCounts() const {
  return statistics.kind != StatisticsKind::kNone || !admission.is_always() ||
         ReadsCounts(optimizer);
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

std::string RowTypeConfig::ToString() const {
  if (is_plain()) return "float32";
  return absl::AsciiStrToLower(absl::StrCat(NameOf(embeddings), " embeddings, ",
                                            NameOf(slots), " slots, ",
                                            NameOf(rounding), " rounding"));
}

absl::Status TableConfig::ValidateNew() const {
  TFSWITCH_RETURN_IF_ERROR(Validate());
  const size_t size = FileNameOf(name).size();
  if (size <= kMaxFileNameSize) return absl::OkStatus();
  return FieldError(
      name, "name",
      absl::StrCat("1 to ", kMaxFileNameSize,
                   " bytes, where each but A-Z, a-z, 0-9, '-', '_' and '.' "
                   "counts as three"),
      absl::StrCat(size));
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
  if (!layout.empty() &&
      !(admission == AdmissionConfig() && eviction == EvictionConfig() &&
        statistics == StatisticsConfig())) {
    return FieldError(name, "admission, eviction and statistics", "none",
                      "some, for a dense table, whose rows all stay");
  }
  // Of a client that knows more than this server.
  for (const char* known : {NameOf(row_type.embeddings), NameOf(row_type.slots),
                            NameOf(row_type.rounding)}) {
    if (*known == '\0') {
      return FieldError(name, "row_type", "values that this version has",
                        row_type.ToString());
    }
  }
  if (!layout.empty() && !(row_type == RowTypeConfig())) {
    return FieldError(name, "row_type", "float32, for a dense table",
                      row_type.ToString());
  }
  if (optimizer.is_dense) {
    if (!layout.empty()) {
      return FieldError(name, "optimizer.update",
                        "SPARSE for a dense table, whose rows are in each push",
                        "DENSE");
    }
    if (!admission.is_always()) {
      return FieldError(name, "admission",
                        "none with dense updates, where each id has its row "
                        "from the first step on",
                        ToJson(admission).dump());
    }
    if (!row_type.is_plain()) {
      return FieldError(name, "row_type",
                        "float32 with dense updates, as many small steps would "
                        "be lost in 16 bits",
                        row_type.ToString());
    }
  }
  if (admission.not_admitted.kind == NotAdmittedKind::kWeight &&
      (optimizer.segments.size() < 2 || optimizer.segments[0].dim != 1)) {
    return FieldError(
        name, "admission.not_admitted.weight",
        "an optimizer with a first segment of dim 1, as "
        "tfswitch.optimizers.Segments([(1, a), (None, b)])",
        absl::StrCat(optimizer.segments.size(), " segments, the first of dim ",
                     optimizer.segments[0].dim));
  }
  const absl::Status life =
      ValidateRowLife(admission, eviction, statistics, dim, num_virtual_shards);
  if (life.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", name, "': ", life.message()));
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
  compare("initializer", KindToJson(existing.initializer).dump(),
          KindToJson(asked.initializer).dump());
  compare("seed", absl::StrCat(existing.seed), absl::StrCat(asked.seed));
  compare("num_virtual_shards", absl::StrCat(existing.num_virtual_shards),
          absl::StrCat(asked.num_virtual_shards));
  compare("consistency", existing.consistency.ToString(),
          asked.consistency.ToString());
  compare("statistics", ToJson(existing.statistics).dump(),
          ToJson(asked.statistics).dump());
  compare("admission", ToJson(existing.admission).dump(),
          ToJson(asked.admission).dump());
  compare("eviction", ToJson(existing.eviction).dump(),
          ToJson(asked.eviction).dump());
  compare("row_type", existing.row_type.ToString(), asked.row_type.ToString());
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
  json["initializer"] = KindToJson(config.initializer);
  json["seed"] = config.seed;
  json["num_virtual_shards"] = config.num_virtual_shards;
  if (config.consistency.kind != ConsistencyKind::kAsp) {
    json["consistency"] = ConsistencyToJson(config.consistency);
  }
  if (!config.layout.empty()) json["layout"] = config.layout;
  if (config.statistics.kind != StatisticsKind::kNone) {
    json["statistics"] = ToJson(config.statistics);
  }
  if (!(config.admission == AdmissionConfig())) {
    json["admission"] = ToJson(config.admission);
  }
  if (!(config.eviction == EvictionConfig())) {
    json["eviction"] = ToJson(config.eviction);
  }
  if (!(config.row_type == RowTypeConfig())) {
    json["row_type"] = RowTypeToJson(config.row_type);
  }
  return json.dump(-1, ' ', false, OrderedJson::error_handler_t::replace);
}

absl::Status TableConfigFromJson(const std::string& json, TableConfig* config) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed,
                            ParseDocument(json, "table config"));
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
    ObjectReader kinds(*initializer, "initializer");
    TFSWITCH_RETURN_IF_ERROR(
        ReadKind(&kinds, "initializer", &result.initializer));
    TFSWITCH_RETURN_IF_ERROR(kinds.Finish());
  }
  if (const Json* consistency = reader.Find("consistency")) {
    TFSWITCH_RETURN_IF_ERROR(
        ConsistencyFromJson(*consistency, &result.consistency));
  }
  reader.Read("layout", &result.layout);
  if (const Json* statistics = reader.Find("statistics")) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(*statistics, &result.statistics));
  }
  if (const Json* admission = reader.Find("admission")) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(*admission, &result.admission));
  }
  if (const Json* eviction = reader.Find("eviction")) {
    TFSWITCH_RETURN_IF_ERROR(FromJson(*eviction, &result.eviction));
  }
  if (const Json* row_type = reader.Find("row_type")) {
    TFSWITCH_RETURN_IF_ERROR(RowTypeFromJson(*row_type, &result.row_type));
  }
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  result.dim = static_cast<int>(dim);
  // As in the proto, 0 and unset are the same.
  if (num_virtual_shards != 0) {
    result.num_virtual_shards = static_cast<uint32_t>(num_virtual_shards);
  }
  *config = std::move(result);
  return absl::OkStatus();
}

absl::Status EvictionFromJson(const std::string& json, EvictionConfig* config) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed, ParseDocument(json, "eviction"));
  return FromJson(parsed, config);
}

absl::Status ConsistencyFromJson(const std::string& json,
                                 ConsistencyConfig* config) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed,
                            ParseDocument(json, "consistency"));
  return ConsistencyFromJson(parsed, config);
}

}  // namespace tfswitch
