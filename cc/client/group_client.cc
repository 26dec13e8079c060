// Waiting is polling: the server may hold a poll for at most half of the
// client's timeout, and the client polls again until the deadline of the wait.
// So a wait of any length is made of short calls, and a server that has gone is
// noticed. Each wait polls at least once, also after its deadline.
//
// Call() turns DeadlineExceeded of a server into Unavailable, because to
// callers DeadlineExceeded says that other workers have not come. All calls are
// repeated while the server is away.

#include "cc/client/group_client.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/parameter_client.h"
#include "cc/wire/coordination_conversion.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {
namespace {

v1::Member ToProto(const GroupMember& member) {
  v1::Member proto;
  proto.set_group(member.group);
  proto.set_worker(member.worker);
  proto.set_incarnation(member.incarnation);
  return proto;
}

v1::ArriveRequest ToArriveRequest(const GroupMember& member, int64_t clock,
                                  int64_t round, double weight,
                                  const std::vector<WorkProgress>& progress) {
  v1::ArriveRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_clock(clock);
  request.set_round(round);
  request.set_weight(weight);
  for (const WorkProgress& each : progress) {
    v1::WorkProgress& proto = *request.add_progress();
    proto.set_queue(each.queue);
    proto.set_epoch(each.epoch);
    proto.set_index(each.index);
    proto.set_offset(each.offset);
  }
  return request;
}

}  // namespace

absl::Status GroupClient::CreateGroup(const std::string& group,
                                      const WorkerGroupOptions& options) {
  v1::CreateGroupRequest request;
  request.set_group(group);
  *request.mutable_options() = ToProto(options);
  v1::CreateGroupResponse response;
  return Call(request, &response);
}

absl::StatusOr<WorkerGroup::Place> GroupClient::Join(const std::string& group,
                                                     uint32_t worker,
                                                     uint64_t previous,
                                                     uint64_t newer_instance) {
  v1::JoinRequest request;
  request.set_group(group);
  request.set_worker(worker);
  request.set_previous_incarnation(previous);
  request.set_newer_group_instance(newer_instance);
  v1::JoinResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return WorkerGroup::Place{response.incarnation(), response.clock(),
                            response.round(), response.group_instance()};
}

absl::Status GroupClient::Heartbeat(const GroupMember& member,
                                    absl::Duration timeout) {
  v1::HeartbeatRequest request;
  *request.mutable_member() = ToProto(member);
  v1::HeartbeatResponse response;
  return Call(request, &response, timeout);
}

absl::StatusOr<int64_t> GroupClient::Arrive(
    const GroupMember& member, int64_t clock, int64_t round, double weight,
    const std::vector<WorkProgress>& progress) {
  const v1::ArriveRequest request =
      ToArriveRequest(member, clock, round, weight, progress);
  v1::ArriveResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response.open_round();
}

absl::StatusOr<Arrival> GroupClient::ArriveAndWait(
    const GroupMember& member, int64_t clock, int64_t round, double weight,
    const std::vector<WorkProgress>& progress, int64_t staleness,
    absl::Time deadline) {
  v1::ArriveRequest request =
      ToArriveRequest(member, clock, round, weight, progress);
  request.set_wait_ms(NextPollMs(deadline));
  request.set_staleness(staleness);
  v1::ArriveResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  Arrival arrival;
  arrival.open_round = response.open_round();
  if (response.has_round()) arrival.round = FromProto(response.round());
  arrival.may_proceed = response.may_proceed();
  return arrival;
}

absl::Status GroupClient::Leave(const GroupMember& member,
                                absl::Duration timeout) {
  v1::LeaveRequest request;
  *request.mutable_member() = ToProto(member);
  v1::LeaveResponse response;
  return Call(request, &response, timeout);
}

absl::StatusOr<Round> GroupClient::WaitForRound(const GroupMember& member,
                                                int64_t number,
                                                absl::Time deadline) {
  v1::WaitForRoundRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_round(number);
  v1::WaitForRoundResponse response;
  do {
    request.set_wait_ms(NextPollMs(deadline));
    TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  } while (!response.has_round() && SteadyNow() < deadline);
  if (response.has_round()) return FromProto(response.round());
  return absl::DeadlineExceededError(response.waiting_for());
}

absl::Status GroupClient::WaitForTurn(const GroupMember& member, int64_t clock,
                                      int64_t staleness, absl::Time deadline) {
  v1::WaitForTurnRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_clock(clock);
  request.set_staleness(staleness);
  v1::WaitForTurnResponse response;
  do {
    request.set_wait_ms(NextPollMs(deadline));
    TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  } while (!response.may_proceed() && SteadyNow() < deadline);
  if (response.may_proceed()) return absl::OkStatus();
  return absl::DeadlineExceededError(response.waiting_for());
}

absl::StatusOr<WorkerGroup::Place> GroupClient::WaitAtBarrier(
    const GroupMember& member, const std::string& barrier, int64_t visit,
    absl::Time deadline) {
  v1::WaitAtBarrierRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_barrier(barrier);
  request.set_visit(visit);
  v1::WaitAtBarrierResponse response;
  do {
    request.set_wait_ms(NextPollMs(deadline));
    TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  } while (!response.is_open() && SteadyNow() < deadline);
  if (!response.is_open()) {
    return absl::DeadlineExceededError(response.waiting_for());
  }
  return WorkerGroup::Place{member.incarnation, response.clock(),
                            response.round()};
}

absl::StatusOr<v1::GetGroupStatsResponse> GroupClient::GroupStats(
    const std::string& group) {
  v1::GetGroupStatsRequest request;
  request.set_group(group);
  v1::GetGroupStatsResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response;
}

absl::Status GroupClient::CreateWorkQueue(const std::string& group,
                                          const std::string& queue,
                                          const WorkQueueOptions& options) {
  v1::CreateWorkQueueRequest request;
  request.set_group(group);
  request.set_queue(queue);
  *request.mutable_options() = ToProto(options);
  v1::CreateWorkQueueResponse response;
  return Call(request, &response);
}

absl::StatusOr<std::optional<WorkItem>> GroupClient::TakeWorkItem(
    const GroupMember& member, const std::string& queue) {
  v1::TakeWorkItemRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_queue(queue);
  v1::TakeWorkItemResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  if (!response.has_item()) return std::nullopt;
  return FromProto(response.item());
}

absl::Status GroupClient::FinishWorkItem(const GroupMember& member,
                                         const std::string& queue,
                                         int64_t epoch, int64_t index) {
  v1::FinishWorkItemRequest request;
  *request.mutable_member() = ToProto(member);
  request.set_queue(queue);
  request.set_epoch(epoch);
  request.set_index(index);
  v1::FinishWorkItemResponse response;
  return Call(request, &response);
}

absl::StatusOr<v1::GetWorkQueueStatsResponse> GroupClient::WorkQueueStats(
    const std::string& group, const std::string& queue) {
  v1::GetWorkQueueStatsRequest request;
  request.set_group(group);
  request.set_queue(queue);
  v1::GetWorkQueueStatsResponse response;
  TFSWITCH_RETURN_IF_ERROR(Call(request, &response));
  return response;
}

absl::Status GroupClient::Call(const google::protobuf::Message& request,
                               google::protobuf::Message* response,
                               absl::Duration timeout) {
  absl::Status status = server_->Call(request, response, timeout);
  // A call that takes too long waits for others, not for the server.
  if (!absl::IsDeadlineExceeded(status)) return status;
  return absl::UnavailableError(status.message());
}

int64_t GroupClient::NextPollMs(absl::Time deadline) const {
  const absl::Duration left =
      std::min(server_->timeout() / 2, deadline - SteadyNow());
  return std::max<int64_t>(0, absl::ToInt64Milliseconds(left));
}

}  // namespace tfswitch
