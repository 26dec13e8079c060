// Each method is a function from its request message to its response message. A
// table at the end of the file lists the methods by name. Method() alone
// converts JSON and makes the checks that all methods need.

#include "cc/capi/control.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "cc/base/process_identity.h"
#include "cc/base/status_macros.h"
#include "cc/capi/client_metrics.h"
#include "cc/capi/cluster.h"
#include "cc/capi/replicas.h"
#include "cc/capi/stored_files.h"
#include "cc/client/checkpoints.h"
#include "cc/client/trace_log.h"
#include "cc/client/worker_session.h"
#include "cc/serving/exporter.h"
#include "cc/serving/served_model.h"
#include "cc/sync/worker_group.h"
#include "cc/wire/json.h"
#include "cc/wire/report_conversion.h"
#include "cc/wire/table_config_conversion.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {
namespace {

template <typename Repeated>
std::vector<std::string> ToStrings(const Repeated& repeated) {
  return {repeated.begin(), repeated.end()};
}

absl::Status Configure(Cluster& cluster, const v1::ConfigureRequest& request,
                       v1::ConfigureResponse* response) {
  if (request.has_day()) {
    // This comparison is false for NaN, too.
    cluster.set_day(request.day() >= 0.0
                        ? static_cast<float>(std::min(request.day(), 1e9))
                        : kServersDay);
  }
  if (request.has_recreate_lost_tables()) {
    cluster.client().SetOnLostTables(request.recreate_lost_tables()
                                         ? OnLostTables::kRecreate
                                         : OnLostTables::kFail);
  }
  if (request.has_max_memory()) {
    TFSWITCH_RETURN_IF_ERROR(
        cluster.client().SetMaxMemory(request.max_memory()));
  }
  if (request.has_cold_dir()) {
    TFSWITCH_RETURN_IF_ERROR(cluster.client().SetColdDir(request.cold_dir()));
  }
  response->set_day(static_cast<double>(cluster.day()));
  return absl::OkStatus();
}

absl::Status Place(const v1::PlaceServersRequest& request,
                   v1::PlaceServersResponse*) {
  return PlaceServers(request.address(), ToStrings(request.servers()),
                      request.has_tls());
}

absl::Status ListTables(Cluster& cluster, const v1::ListTablesRequest& request,
                        v1::ListTablesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            cluster.client().ListTables(request.table()));
  for (const TableInfo& info : infos) *response->add_tables() = ToProto(info);
  return absl::OkStatus();
}

absl::Status GetServers(Cluster& cluster, const v1::GetServersRequest&,
                        v1::GetServersResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto servers, cluster.client().AskServers());
  for (const v1::HandshakeResponse& server : servers) {
    *response->add_servers() = server.security();
  }
  return absl::OkStatus();
}

absl::Status FinishPushesOfProcess(const v1::FinishPushesRequest&,
                                   v1::FinishPushesResponse*) {
  // Not Cluster::FinishPushes(): a cluster without servers must not make the
  // ends of epochs fail that other clusters train, again and again.
  absl::Status first;
  for (const std::shared_ptr<Cluster>& cluster : OpenClusters()) {
    first.Update(cluster->pushes().Finish());
  }
  return first;
}

absl::Status SteerPrefetches(Cluster& cluster,
                             const v1::PrefetchesRequest& request,
                             v1::PrefetchesResponse* response) {
  if (request.drop_source() != 0) {
    cluster.prefetches().Drop(request.drop_source());
  }
  for (const auto& [name, stats] : cluster.prefetches().stats()) {
    v1::PrefetchesResponse::Table* const table = response->add_tables();
    table->set_name(name);
    table->set_hits(stats.num_hits);
    table->set_late(stats.num_late);
    table->set_misses(stats.num_misses);
    table->set_unused(stats.num_unused);
    table->set_held(stats.num_held);
    table->set_own_pushes(stats.own_pushes);
    table->set_other_pushes(stats.other_pushes);
  }
  response->set_pushes_in_flight(cluster.pushes().num_in_flight());
  return absl::OkStatus();
}

absl::Status Ask(const v1::AskServerRequest& request,
                 v1::AskServerResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::unique_ptr<ParameterClient> client,
      OpenServer(request.address(), absl::Seconds(request.timeout_secs())));
  TFSWITCH_ASSIGN_OR_RETURN(const auto servers, client->AskServers());
  *response->mutable_server() = servers.at(0);
  TFSWITCH_ASSIGN_OR_RETURN(const auto infos,
                            client->ListTables(std::string()));
  for (const TableInfo& info : infos) *response->add_tables() = ToProto(info);
  v1::GetMetricsResponse metrics;
  const absl::Status status = client->Call(v1::GetMetricsRequest(), &metrics);
  if (absl::IsPermissionDenied(status) || absl::IsUnimplemented(status)) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  for (v1::ServerView& view : *metrics.mutable_servers()) {
    *response->mutable_view() = std::move(view);
  }
  return absl::OkStatus();
}

absl::Status ReadRows(Cluster& cluster, const v1::ReadRowsRequest& request,
                      v1::ReadRowsResponse* response) {
  return cluster.client().Call(request, response);
}

absl::Status DropTable(Cluster& cluster, const v1::DropTableRequest& request,
                       v1::DropTableResponse* response) {
  TFSWITCH_RETURN_IF_ERROR(cluster.client().DropTable(request.table()));
  response->set_dropped(true);
  return absl::OkStatus();
}

absl::Status Save(Cluster& cluster, const v1::SaveRequest& request,
                  v1::CheckpointReport* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response,
                            SaveCheckpoint(cluster.client(), request));
  return absl::OkStatus();
}

absl::Status Restore(Cluster& cluster, const v1::RestoreRequest& request,
                     v1::CheckpointReport* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response,
                            RestoreCheckpoint(cluster.client(), request));
  return absl::OkStatus();
}

absl::Status GetProgress(Cluster& cluster,
                         const v1::GetProgressRequest& request,
                         v1::GetProgressResponse* response) {
  return cluster.client().Call(request, response);
}

absl::Status GetMetrics(Cluster& cluster, const v1::GetMetricsRequest& request,
                        v1::GetMetricsResponse* response) {
  return cluster.client().Call(request, response);
}

absl::Status GetProcessMetrics(const v1::GetMetricsRequest&,
                               v1::GetMetricsResponse* response) {
  MetricList list;
  AddClientMetrics(&list);
  response->add_servers()->set_metrics(list.Text());
  return absl::OkStatus();
}

absl::Status SetTracing(const v1::SetTracingRequest& request,
                        v1::SetTracingResponse*) {
  TraceLog::Get().Set(request.is_on(), request.parent());
  return absl::OkStatus();
}

absl::Status TakeTraces(const v1::TakeTracesRequest&,
                        v1::TakeTracesResponse* response) {
  *response = TraceLog::Get().Take();
  return absl::OkStatus();
}

absl::Status ResetLostTables(Cluster& cluster,
                             const v1::ResetLostTablesRequest&,
                             v1::ResetLostTablesResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ResetTable> tables,
                            cluster.client().ResetLostTables());
  for (const ResetTable& table : tables) {
    v1::ResetTable& proto = *response->add_tables();
    proto.set_table(table.name);
    proto.mutable_shards()->Add(table.shards.begin(), table.shards.end());
    if (table.num_lost_rows >= 0) proto.set_num_lost_rows(table.num_lost_rows);
  }
  return absl::OkStatus();
}

absl::Status Shrink(Cluster& cluster, const v1::ShrinkRequest& request,
                    v1::ShrinkResponse* response) {
  v1::ShrinkRequest own = request;
  if (!own.has_day() && cluster.day() >= 0.0f) own.set_day(cluster.day());
  return cluster.client().Call(own, response);
}

absl::Status Publish(Cluster& cluster, const v1::PublishExportRequest& request,
                     v1::PublishExportResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(
      *response, PublishExport(cluster.client(), request, cluster.day()));
  return absl::OkStatus();
}

absl::Status JoinGroup(Cluster& cluster, const v1::JoinGroupRequest& request,
                       v1::JoinGroupResponse*) {
  WorkerOptions options;
  options.group = request.group();
  options.worker = request.worker();
  options.group_options = FromProto(request.options());
  options.consistency = FromProto(request.consistency());
  options.wait_timeout = absl::Seconds(request.wait_timeout_secs());
  if (request.has_first_step()) options.first_step = request.first_step();
  options.fails_on_loss = request.fail_on_loss();
  options.job = request.job();
  std::string& settings = options.group_options.settings;
  settings = absl::StrCat(options.consistency.ToString(),
                          settings.empty() ? "" : ", ", settings);
  return cluster.Join(options);
}

absl::Status EnterBarrier(WorkerSession& worker,
                          const v1::EnterBarrierRequest& request,
                          v1::EnterBarrierResponse*) {
  return worker.WaitAtBarrier(request.barrier(),
                              absl::Seconds(request.timeout_secs()));
}

absl::Status LeaveGroup(WorkerSession& worker,
                        const v1::LeaveGroupRequest& request,
                        v1::LeaveGroupResponse*) {
  return worker.Leave(request.has_timeout_secs()
                          ? absl::Seconds(request.timeout_secs())
                          : absl::InfiniteDuration());
}

absl::Status GetWorker(WorkerSession& worker, const v1::GetWorkerRequest&,
                       v1::GetWorkerResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response, worker.GetReport());
  return absl::OkStatus();
}

absl::Status SetWorkerMark(WorkerSession& worker,
                           const v1::SetWorkerMarkRequest& request,
                           v1::SetWorkerMarkResponse*) {
  return worker.SetMark(request.mark(), request.join_again());
}

absl::Status GetWorkerEvent(WorkerSession& worker,
                            const v1::GetWorkerEventRequest& request,
                            v1::GetWorkerEventResponse* response) {
  const GroupSession::Event event =
      worker.NextEvent(request.after(), absl::Seconds(request.wait_secs()));
  response->set_number(event.number);
  response->set_kind(event.kind);
  response->set_text(event.text);
  return absl::OkStatus();
}

absl::Status GetGroupStats(Cluster& cluster,
                           const v1::GetGroupStatsRequest& request,
                           v1::GetGroupStatsResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response,
                            cluster.client().groups().GroupStats(
                                request.group(), absl::InfiniteDuration()));
  return absl::OkStatus();
}

absl::Status CreateWorkQueue(WorkerSession& worker,
                             const v1::CreateWorkQueueRequest& request,
                             v1::CreateWorkQueueResponse*) {
  return worker.CreateWorkQueue(request.queue(), request.options());
}

absl::Status TakeWorkItem(WorkerSession& worker,
                          const v1::TakeWorkItemRequest& request,
                          v1::TakeWorkItemResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(std::optional<WorkItem> item,
                            worker.TakeWorkItem(request.queue()));
  if (item.has_value()) *response->mutable_item() = *std::move(item);
  return absl::OkStatus();
}

absl::Status FinishWorkItem(WorkerSession& worker,
                            const v1::FinishWorkItemRequest& request,
                            v1::FinishWorkItemResponse*) {
  return worker.FinishWorkItem(request.queue(), request.epoch(),
                               request.index());
}

absl::Status GetWorkQueueStats(WorkerSession& worker,
                               const v1::GetWorkQueueStatsRequest& request,
                               v1::GetWorkQueueStatsResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response, worker.WorkQueueStats(request.queue()));
  return absl::OkStatus();
}

absl::Status SteerServedModel(const v1::ServedModelRequest& request,
                              v1::ServedModelResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::shared_ptr<ServedModel> model,
                            FindServedModel(request.path()));
  switch (request.call_case()) {
    case v1::ServedModelRequest::kRefresh:
      TFSWITCH_RETURN_IF_ERROR(model->Refresh());
      break;
    case v1::ServedModelRequest::kWatchSecs:
      if (!(request.watch_secs() >= 0.0)) {
        return absl::InvalidArgumentError(
            absl::StrCat("watch_secs: expected a number of at least 0, got ",
                         request.watch_secs()));
      }
      TFSWITCH_RETURN_IF_ERROR(
          model->Watch(absl::Seconds(request.watch_secs())));
      break;
    case v1::ServedModelRequest::kRollBackTo:
      TFSWITCH_RETURN_IF_ERROR(model->RollBack(request.roll_back_to()));
      break;
    case v1::ServedModelRequest::kResume:
      TFSWITCH_RETURN_IF_ERROR(model->Resume());
      break;
    case v1::ServedModelRequest::CALL_NOT_SET:
      break;
  }
  const ServedState state = model->state();
  response->set_number(state.rows.number);
  response->set_base_number(state.rows.base_number);
  response->set_created_ms(state.rows.created_ms);
  response->set_served_since_ms(state.rows.served_since_ms);
  response->set_held(state.rows.is_held);
  response->set_refused(state.rows.num_refused);
  if (!state.rows.error.ok()) {
    response->set_error(std::string(state.rows.error.message()));
  }
  response->set_is_remote(state.is_remote);
  if (state.is_remote) response->set_addresses(state.addresses);
  response->set_cached_rows(state.cached_rows);
  response->set_cache_hits(state.num_cache_hits);
  response->set_cache_misses(state.num_cache_misses);
  return absl::OkStatus();
}

absl::Status CheckAlone(const v1::CheckIsAloneRequest& request,
                        v1::CheckIsAloneResponse* response) {
  response->set_process(ProcessIdentity(getpid()));
  return CheckIsAlone(request.group(), request.worker(), request.process());
}

using JsonMethod = std::function<absl::StatusOr<std::string>(
    Cluster*, const std::string& request_json)>;

// Calls `run`. Some methods need no other object, some need the cluster, and
// some a part of the cluster.
template <typename Request, typename Response>
absl::Status RunIn(Cluster*, absl::Status (*run)(const Request&, Response*),
                   const Request& request, Response* response) {
  return run(request, response);
}
template <typename Owner, typename Request, typename Response>
absl::Status RunIn(Cluster* cluster,
                   absl::Status (*run)(Owner&, const Request&, Response*),
                   const Request& request, Response* response) {
  if (cluster == nullptr) {
    return absl::InvalidArgumentError("it is a call of a cluster, got none");
  }
  if constexpr (std::is_same_v<Owner, Cluster>) {
    return run(*cluster, request, response);
  } else {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster));
    return run(*worker, request, response);
  }
}

template <typename Request, typename Response, typename Run>
JsonMethod Method(const char* name, Run run) {
  return [name, run](
             Cluster* cluster,
             const std::string& request_json) -> absl::StatusOr<std::string> {
    Request request;
    TFSWITCH_RETURN_IF_ERROR(MessageFromJson(request_json, name, &request));
    Response response;
    TFSWITCH_RETURN_IF_ERROR(RunIn(cluster, run, request, &response));
    return MessageToJson(response, /*with_defaults=*/true);
  };
}
template <typename Owner, typename Request, typename Response>
std::pair<const absl::string_view, JsonMethod> Of(
    const char* name, absl::Status (*run)(Owner&, const Request&, Response*)) {
  return {name, Method<Request, Response>(name, run)};
}
template <typename Request, typename Response>
std::pair<const absl::string_view, JsonMethod> Of(
    const char* name, absl::Status (*run)(const Request&, Response*)) {
  return {name, Method<Request, Response>(name, run)};
}

const std::map<absl::string_view, JsonMethod>& Methods() {
  static const auto* const methods =
      new std::map<absl::string_view, JsonMethod>{
          Of("Configure", Configure),
          Of("PlaceServers", Place),
          Of("ListTables", ListTables),
          Of("GetServers", GetServers),
          Of("AskServer", Ask),
          Of("InspectFiles", InspectFiles),
          Of("DiffFiles", DiffFiles),
          Of("ReadRows", ReadRows),
          Of("DropTable", DropTable),
          Of("Save", Save),
          Of("Restore", Restore),
          Of("GetProgress", GetProgress),
          Of("GetMetrics", GetMetrics),
          Of("GetProcessMetrics", GetProcessMetrics),
          Of("SetTracing", SetTracing),
          Of("TakeTraces", TakeTraces),
          Of("FinishPushes", FinishPushesOfProcess),
          Of("Prefetches", SteerPrefetches),
          Of("ResetLostTables", ResetLostTables),
          Of("Shrink", Shrink),
          Of("PublishExport", Publish),
          Of("JoinGroup", JoinGroup),
          Of("EnterBarrier", EnterBarrier),
          Of("LeaveGroup", LeaveGroup),
          Of("GetWorker", GetWorker),
          Of("GetWorkerEvent", GetWorkerEvent),
          Of("SetWorkerMark", SetWorkerMark),
          Of("GetGroupStats", GetGroupStats),
          Of("CreateWorkQueue", CreateWorkQueue),
          Of("TakeWorkItem", TakeWorkItem),
          Of("FinishWorkItem", FinishWorkItem),
          Of("GetWorkQueueStats", GetWorkQueueStats),
          Of("ServedModel", SteerServedModel),
          Of("CheckIsAlone", CheckAlone),
          Of("Replicas", CallReplicas),
      };
  return *methods;
}

// Whether a method may be called while pushes are in flight. A worker can leave
// its group after a failed push, too.
bool OnlyWatches(absl::string_view method) {
  static const auto* const methods = new std::set<absl::string_view>{
      "AskServer",         "GetGroupStats", "GetMetrics", "GetProcessMetrics",
      "GetProgress",       "GetServers",    "GetWorker",  "GetWorkerEvent",
      "GetWorkQueueStats", "LeaveGroup",    "Prefetches", "SetTracing",
      "TakeTraces",
  };
  return methods->count(method) != 0;
}

bool MayChangeRows(absl::string_view method) {
  return method == "Restore" || method == "Shrink" || method == "DropTable" ||
         method == "ResetLostTables";
}

}  // namespace

absl::StatusOr<std::string> CallControl(Cluster* cluster,
                                        absl::string_view method,
                                        const std::string& request_json) {
  const auto found = Methods().find(method);
  if (found != Methods().end()) {
    if (cluster != nullptr && !OnlyWatches(method)) {
      TFSWITCH_RETURN_IF_ERROR(FinishAllPushes(*cluster));
    }
    auto response = found->second(cluster, request_json);
    if (cluster != nullptr && MayChangeRows(method)) {
      DropAllPrefetches(*cluster);
    }
    return response;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown method '", method, "'; there are: ",
      absl::StrJoin(Methods(), ", ", [](std::string* out, const auto& each) {
        absl::StrAppend(out, each.first);
      })));
}

absl::StatusOr<std::shared_ptr<WorkerSession>> FindWorker(
    const Cluster& cluster) {
  std::shared_ptr<WorkerSession> worker = cluster.worker();
  if (worker != nullptr) return worker;
  return absl::FailedPreconditionError(
      "this process is no worker of a group; make a tfswitch.train.Worker "
      "first");
}

}  // namespace tfswitch
