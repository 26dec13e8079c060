#include "cc/capi/json_reports.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

using Json = nlohmann::json;

std::string Dump(const Json& json) {
  // Replaces invalid UTF-8, where the default would throw.
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

std::string TableInfosToJson(const std::vector<TableInfo>& infos) {
  Json json = Json::array();
  for (const TableInfo& info : infos) {
    json.push_back({{"config", Json::parse(TableConfigToJson(info.config))},
                    {"slot_floats", info.slot_floats},
                    {"num_rows", info.stats.num_rows},
                    {"index_bytes", info.stats.index_bytes},
                    {"row_bytes", info.stats.row_bytes},
                    {"reserved_bytes", info.stats.reserved_bytes},
                    {"row_stride_bytes", info.stats.row_stride_bytes},
                    {"inserted_rows", info.stats.inserted_rows},
                    {"erased_rows", info.stats.erased_rows}});
  }
  return Dump(json);
}

std::string CheckpointReportToJson(const CheckpointReport& report) {
  return Dump({{"tables", report.tables}, {"num_rows", report.num_rows}});
}

absl::StatusOr<std::vector<std::string>> NamesFromJson(
    const std::string& json) {
  std::vector<std::string> names;
  if (json.empty()) return names;
  const Json list = Json::parse(json, nullptr, /*allow_exceptions=*/false);
  if (!list.is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected a JSON list of table names, got: ", json));
  }
  for (const Json& name : list) {
    if (!name.is_string()) {
      return absl::InvalidArgumentError(
          absl::StrCat("expected a JSON list of table names, got: ", json));
    }
    names.push_back(name.get<std::string>());
  }
  return names;
}

}  // namespace tfswitch
