#include "cc/capi/serving.h"

#include <limits>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/status_macros.h"
#include "cc/serving/served_model.h"
#include "cc/table/json_reader.h"

namespace tfswitch {
namespace {

std::string StateToJson(const ServedState& state) {
  const ServedRows::State& rows = state.rows;
  Json json = {{"number", rows.number},
               {"base_number", rows.base_number},
               {"created_ms", rows.created_ms},
               {"served_since_ms", rows.served_since_ms},
               {"held", rows.is_held},
               {"refused", rows.num_refused},
               {"error", nullptr},
               {"mode", state.is_remote ? "remote" : "embedded"},
               {"addresses", nullptr},
               {"cached_rows", state.cached_rows},
               {"cache_hits", state.num_cache_hits},
               {"cache_misses", state.num_cache_misses}};
  if (!rows.error.ok()) json["error"] = std::string(rows.error.message());
  if (state.is_remote) json["addresses"] = state.addresses;
  return DumpJson(json);
}

}  // namespace

absl::StatusOr<ExportOptions> ExportOptionsFromJson(const std::string& json) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed,
                            ParseDocument(json, "export options"));
  ObjectReader reader(parsed, "", "export options");
  ExportOptions options;
  std::string format;
  uint64_t keep_bases = 0;
  reader.Read("path", &options.path);
  reader.Read("delta", &options.is_delta);
  reader.Read("base_if_broken", &options.base_if_broken);
  reader.Read("row_format", &format);
  reader.Read("keep_bases", std::numeric_limits<int32_t>::max(), &keep_bases);
  options.keep_bases = static_cast<int>(keep_bases);
  const Json* const tables = reader.Find("tables");
  if (tables != nullptr && *tables == "all") {
    options.all_tables = true;
  } else if (tables != nullptr) {
    for (const Json& table : *tables) {
      if (!table.is_string()) {
        reader.Fail("tables", "a list of names", *tables);
        break;
      }
      options.tables.push_back(table.get<std::string>());
    }
  }
  const Json* const rule = reader.Find("rule");
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  if (rule != nullptr && *rule == "all") {
    options.all_rows = true;
  } else if (rule != nullptr) {
    ObjectReader rule_reader(*rule, "rule", "export options");
    ScoreRule& read = options.rule.emplace();
    rule_reader.Read("base_threshold", &read.base_threshold);
    rule_reader.Read("delta_threshold", &read.delta_threshold);
    rule_reader.Read("delta_keep_days", &read.delta_keep_days);
    TFSWITCH_RETURN_IF_ERROR(rule_reader.Finish());
  }
  if (options.path.empty()) {
    return absl::InvalidArgumentError(
        "export options: path: expected a folder");
  }
  if (!format.empty()) {
    TFSWITCH_ASSIGN_OR_RETURN(options.format, RowFormatOf(format));
  }
  return options;
}

std::string ExportReportToJson(const ExportReport& report) {
  return DumpJson({{"kind", report.is_delta ? "delta" : "base"},
                   {"number", report.number},
                   {"published", report.is_published},
                   {"num_rows", report.num_rows},
                   {"num_removed", report.num_removed},
                   {"bytes", report.bytes},
                   {"why_base", report.why_base}});
}

absl::StatusOr<std::string> CallServedModel(const std::string& path,
                                            const std::string& request_json) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const Json parsed, ParseDocument(request_json, "call of a served model"));
  ObjectReader reader(parsed, "", "call of a served model");
  std::string call;
  uint64_t number = 0;
  float seconds = 0.0f;
  reader.Read("call", &call);
  reader.Read("number", std::numeric_limits<int64_t>::max(), &number);
  reader.Read("seconds", &seconds);
  TFSWITCH_RETURN_IF_ERROR(reader.Finish());
  TFSWITCH_ASSIGN_OR_RETURN(const std::shared_ptr<ServedModel> model,
                            FindServedModel(path));
  if (call == "refresh") {
    TFSWITCH_RETURN_IF_ERROR(model->Refresh());
  } else if (call == "roll_back") {
    TFSWITCH_RETURN_IF_ERROR(model->RollBack(static_cast<int64_t>(number)));
  } else if (call == "resume") {
    TFSWITCH_RETURN_IF_ERROR(model->Resume());
  } else if (call == "watch") {
    if (!(seconds >= 0.0f)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "seconds: expected a number of at least 0, got ", seconds));
    }
    TFSWITCH_RETURN_IF_ERROR(model->Watch(absl::Seconds(seconds)));
  } else if (call != "state") {
    return absl::InvalidArgumentError(
        absl::StrCat("call of a served model: expected state, refresh, watch, "
                     "roll_back or resume, got '",
                     call, "'"));
  }
  return StateToJson(model->state());
}

}  // namespace tfswitch
