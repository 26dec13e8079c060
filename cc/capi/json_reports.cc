#include "cc/capi/json_reports.h"

#include <cstdint>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/status_macros.h"
#include "cc/table/json_reader.h"

namespace tfswitch {
namespace {

Json ToJson(const WorkerGroup::Stats& workers) {
  std::vector<int64_t> staleness = workers.staleness;
  while (!staleness.empty() && staleness.back() == 0) staleness.pop_back();
  return {
      {"active", workers.num_active}, {"waiting", workers.num_waiting},
      {"rounds", workers.rounds},     {"contributions", workers.contributions},
      {"samples", workers.samples},   {"dropped", workers.dropped},
      {"carried", workers.carried},   {"expired", workers.expired},
      {"rejoined", workers.rejoined}, {"staleness", staleness}};
}

}  // namespace

std::string TableInfosToJson(const std::vector<TableInfo>& infos) {
  Json json = Json::array();
  for (const TableInfo& info : infos) {
    json.push_back({{"config", Json::parse(TableConfigToJson(info.config))},
                    {"lost", std::string(info.lost.message())},
                    {"slot_floats", info.slot_floats},
                    {"num_rows", info.stats.num_rows},
                    {"index_bytes", info.stats.index_bytes},
                    {"row_bytes", info.stats.row_bytes},
                    {"reserved_bytes", info.stats.reserved_bytes},
                    {"row_stride_bytes", info.stats.row_stride_bytes},
                    {"inserted_rows", info.stats.inserted_rows},
                    {"erased_rows", info.stats.erased_rows},
                    {"num_candidates", info.stats.num_candidates},
                    {"admission_bytes", info.stats.admission_bytes},
                    {"change_bytes", info.stats.change_bytes},
                    {"num_steps", info.stats.num_steps}});
  }
  return DumpJson(json);
}

std::string ResetTablesToJson(const std::vector<ResetTable>& tables) {
  Json json = Json::array();
  for (const ResetTable& table : tables) {
    json.push_back({{"table", table.name},
                    {"shards", table.shards},
                    {"num_lost_rows", table.num_lost_rows < 0
                                          ? Json(nullptr)
                                          : Json(table.num_lost_rows)}});
  }
  return DumpJson(json);
}

std::string ShrinkReportToJson(const ShrinkReport& report) {
  return DumpJson({{"evicted_rows", report.evicted_rows},
                   {"evicted_bytes", report.evicted_bytes},
                   {"by",
                    {{"ttl", report.by_ttl},
                     {"show_click_score", report.by_show_click_score},
                     {"l2_norm", report.by_l2_norm},
                     {"max_rows", report.by_max_rows}}},
                   {"evicted_candidates", report.evicted_candidates},
                   {"remaining_rows", report.remaining_rows},
                   {"remaining_usage",
                    {{"count", report.remaining_count},
                     {"show", report.remaining_show},
                     {"click", report.remaining_click}}}});
}

std::string CheckpointReportToJson(const CheckpointReport& report) {
  Json json = {{"tables", report.tables},
               {"num_rows", report.num_rows},
               {"save", report.save}};
  if (!report.skipped.empty()) json["skipped"] = report.skipped;
  return DumpJson(json);
}

namespace {

// What a request to save or restore has in common. Python has checked it.
template <typename Options>
absl::Status ReadCheckpointRequest(const Json& request, Options* options) {
  const auto names = [&request](const char* field,
                                std::vector<std::string>* to) {
    const auto it = request.find(field);
    if (it == request.end()) return true;
    if (!it->is_array()) return false;
    for (const Json& name : *it) {
      if (!name.is_string()) return false;
      to->push_back(name.get<std::string>());
    }
    return true;
  };
  bool is_good = request.is_object() && request.contains("path") &&
                 request["path"].is_string() &&
                 names("tables", &options->tables);
  if constexpr (std::is_same_v<Options, SaveOptions>) {
    is_good = is_good && names("drop", &options->dropped_tables);
  }
  if (!is_good) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected a path and lists of table names, got: ", DumpJson(request)));
  }
  options->path = request["path"].template get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadNumber(const Json& request, const char* field, int64_t least,
                        int64_t most, int64_t* number) {
  const auto it = request.find(field);
  if (it == request.end()) return absl::OkStatus();
  if (!it->is_number_integer() || it->get<int64_t>() < least ||
      it->get<int64_t>() > most) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", field, "' must be an integer from ", least, " to ",
                     most, ". Received: ", DumpJson(*it)));
  }
  *number = it->get<int64_t>();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<SaveOptions> SaveOptionsFromJson(const std::string& json) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json request, ParseJson(json));
  SaveOptions options;
  TFSWITCH_RETURN_IF_ERROR(ReadCheckpointRequest(request, &options));
  int64_t keep = options.keep;
  TFSWITCH_RETURN_IF_ERROR(ReadNumber(request, "keep", 1, INT32_MAX, &keep));
  options.keep = static_cast<int>(keep);
  return options;
}

absl::StatusOr<RestoreOptions> RestoreOptionsFromJson(const std::string& json) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json request, ParseJson(json));
  RestoreOptions options;
  TFSWITCH_RETURN_IF_ERROR(ReadCheckpointRequest(request, &options));
  TFSWITCH_RETURN_IF_ERROR(
      ReadNumber(request, "save", 0, INT64_MAX, &options.save));
  return options;
}

absl::StatusOr<WorkerOptions> WorkerOptionsFromJson(const std::string& json) {
  TFSWITCH_ASSIGN_OR_RETURN(const Json parsed,
                            ParseDocument(json, "worker options"));
  const auto bad = [&json](absl::string_view why) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker options: ", why, ". Received: ", json));
  };
  if (!parsed.is_object()) return bad("expected a JSON object");
  WorkerOptions options;
  absl::Status status;
  // `field` as a number in [0, max]; `value` stays if it is absent.
  const auto read = [&](const char* field, double max, auto set) {
    const auto it = parsed.find(field);
    if (it == parsed.end()) return;
    if (!it->is_number() || !(it->get<double>() >= 0.0) ||
        it->get<double>() > max) {
      status.Update(
          bad(absl::StrCat("'", field, "' must be a number from 0 to ", max)));
      return;
    }
    set(it->get<double>());
  };
  constexpr double kMaxWorkers = 1e6;
  constexpr double kMaxSeconds = 1e9;
  read("worker", kMaxWorkers,
       [&](double v) { options.worker = static_cast<uint32_t>(v); });
  WorkerGroupOptions& group = options.group_options;
  read("num_workers", kMaxWorkers,
       [&](double v) { group.num_workers = static_cast<uint32_t>(v); });
  read("contributions_per_round", kMaxWorkers, [&](double v) {
    group.contributions_per_round = static_cast<uint32_t>(v);
  });
  read("lease_s", kMaxSeconds,
       [&](double v) { group.lease = absl::Seconds(v); });
  read("join_timeout_s", kMaxSeconds,
       [&](double v) { group.join_timeout = absl::Seconds(v); });
  read("wait_timeout_s", kMaxSeconds,
       [&](double v) { options.wait_timeout = absl::Seconds(v); });
  TFSWITCH_RETURN_IF_ERROR(status);
  const auto name = parsed.find("group");
  if (name == parsed.end() || !name->is_string()) {
    return bad("'group' must be a string");
  }
  options.group = name->get<std::string>();
  if (const auto it = parsed.find("consistency"); it != parsed.end()) {
    TFSWITCH_RETURN_IF_ERROR(
        ConsistencyFromJson(it->dump(), &options.consistency));
  }
  if (const auto it = parsed.find("carries_late_contributions");
      it != parsed.end()) {
    if (!it->is_boolean()) {
      return bad("'carries_late_contributions' must be true or false");
    }
    group.carries_late_contributions = it->get<bool>();
  }
  group.settings = options.consistency.ToString();
  if (const auto it = parsed.find("settings"); it != parsed.end()) {
    if (!it->is_string()) return bad("'settings' must be a string");
    absl::StrAppend(&group.settings, ", ", it->get<std::string>());
  }
  return options;
}

std::string WorkerReportToJson(const WorkerSession::Report& report) {
  return DumpJson(
      {{"group", report.member.group},
       {"worker", report.member.worker},
       {"clock", report.clock},
       {"round", report.round},
       {"dropped_steps", report.dropped},
       {"left", report.has_left},
       {"in_step", report.is_in_step},
       {"waits",
        {{"count", report.waits.count},
         {"total_s", absl::ToDoubleSeconds(report.waits.total)},
         {"longest_s", absl::ToDoubleSeconds(report.waits.longest)}}},
       {"workers", ToJson(report.group)}});
}

std::string GroupStatsToJson(const WorkerGroup::Stats& stats) {
  return DumpJson(ToJson(stats));
}

std::string WorkItemToJson(const WorkItem& item) {
  return DumpJson({{"epoch", item.epoch},
                   {"index", item.index},
                   {"value", item.value},
                   {"offset", item.offset}});
}

std::string WorkQueueStatsToJson(const WorkQueue::Stats& stats) {
  return DumpJson({{"epoch", stats.epoch},
                   {"epochs", stats.num_epochs},
                   {"items", stats.num_items},
                   {"finished", stats.num_finished},
                   {"leased", stats.num_leased},
                   {"returned", stats.num_returned},
                   {"reissued", stats.reissued}});
}

}  // namespace tfswitch
