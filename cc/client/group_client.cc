// A wait is a series of polls, which go on until the deadline of the wait. The
// server may delay the answer to a poll by at most half of the client's
// timeout. So even a long wait consists of short calls, and notices when a
// server is gone. Each wait polls at least once, even if its deadline is over.
//
// Call() turns a server's DeadlineExceeded into Unavailable, because to callers
// DeadlineExceeded means that other workers have not come. All calls are
// repeated while the server is away.

#include "cc/client/group_client.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cc/base/process_identity.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/parameter_client.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {
namespace {

template <typename Request>
Request RequestOf(const GroupMember& member) {
  Request request;
  *request.mutable_member() = member;
  return request;
}

}  // namespace

template <typename Response>
absl::StatusOr<Response> GroupClient::Call(
    const google::protobuf::Message& request, absl::Duration timeout) {
  Response response;
  const absl::Status status = server_->Call(request, &response, timeout);
  if (absl::IsDeadlineExceeded(status)) {
    return absl::UnavailableError(status.message());
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  return response;
}

template <typename Request, typename Response>
absl::StatusOr<Response> GroupClient::Poll(Request request, absl::Time deadline,
                                           bool (Response::*is_over)() const) {
  for (;;) {
    request.set_wait_ms(NextPollMs(deadline));
    TFSWITCH_ASSIGN_OR_RETURN(Response response, Call<Response>(request));
    if ((response.*is_over)()) return response;
    if (SteadyNow() >= deadline) {
      return absl::DeadlineExceededError(response.waiting_for());
    }
  }
}

absl::Status GroupClient::CreateGroup(const std::string& group,
                                      const WorkerGroupOptions& options) {
  v1::CreateGroupRequest request;
  request.set_group(group);
  *request.mutable_options() = ToProto(options);
  return Call<v1::CreateGroupResponse>(request).status();
}

absl::StatusOr<WorkerGroup::Place> GroupClient::Join(
    const std::string& group, uint32_t worker, uint64_t previous,
    uint64_t newer_instance, int64_t first_step, const std::string& job) {
  v1::JoinRequest request;
  request.set_group(group);
  request.set_worker(worker);
  request.set_previous_incarnation(previous);
  request.set_newer_group_instance(newer_instance);
  request.set_first_step(first_step);
  request.set_job(job);
  request.set_process(ProcessIdentity(getpid()));
  return Call<v1::JoinResponse>(request);
}

absl::Status GroupClient::Heartbeat(const GroupMember& member,
                                    absl::Duration timeout) {
  return Call<v1::HeartbeatResponse>(RequestOf<v1::HeartbeatRequest>(member),
                                     timeout)
      .status();
}

absl::StatusOr<int64_t> GroupClient::Arrive(
    const GroupMember& member, int64_t clock, int64_t round, double weight,
    const std::vector<WorkProgress>& progress) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const v1::ArriveResponse arrival,
      GroupClient::ArriveAndWait(member, clock, round, weight, progress,
                                 /*staleness=*/0, absl::InfinitePast()));
  return arrival.open_round();
}

absl::StatusOr<v1::ArriveResponse> GroupClient::ArriveAndWait(
    const GroupMember& member, int64_t clock, int64_t round, double weight,
    const std::vector<WorkProgress>& progress, int64_t staleness,
    absl::Time deadline) {
  auto request = RequestOf<v1::ArriveRequest>(member);
  request.set_clock(clock);
  request.set_round(round);
  request.set_weight(weight);
  request.mutable_progress()->Add(progress.begin(), progress.end());
  request.set_wait_ms(NextPollMs(deadline));
  request.set_staleness(staleness);
  return Call<v1::ArriveResponse>(request);
}

absl::Status GroupClient::Leave(const GroupMember& member,
                                absl::Duration timeout) {
  return Call<v1::LeaveResponse>(RequestOf<v1::LeaveRequest>(member), timeout)
      .status();
}

absl::StatusOr<Round> GroupClient::WaitForRound(const GroupMember& member,
                                                int64_t number,
                                                absl::Time deadline) {
  auto request = RequestOf<v1::WaitForRoundRequest>(member);
  request.set_round(number);
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto response,
      Poll(request, deadline, &v1::WaitForRoundResponse::has_round));
  return response.round();
}

absl::Status GroupClient::WaitForTurn(const GroupMember& member, int64_t clock,
                                      int64_t staleness, absl::Time deadline) {
  auto request = RequestOf<v1::WaitForTurnRequest>(member);
  request.set_clock(clock);
  request.set_staleness(staleness);
  return Poll(request, deadline, &v1::WaitForTurnResponse::may_proceed)
      .status();
}

absl::StatusOr<WorkerGroup::Place> GroupClient::WaitAtBarrier(
    const GroupMember& member, const std::string& barrier,
    int64_t barrier_generation, absl::Time deadline) {
  auto request = RequestOf<v1::WaitAtBarrierRequest>(member);
  request.set_barrier(barrier);
  request.set_barrier_generation(barrier_generation);
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto response,
      Poll(request, deadline, &v1::WaitAtBarrierResponse::is_open));
  WorkerGroup::Place place;
  place.set_incarnation(member.incarnation());
  place.set_clock(response.clock());
  place.set_round(response.round());
  return place;
}

absl::StatusOr<v1::GetGroupStatsResponse> GroupClient::GroupStats(
    const std::string& group, absl::Duration timeout) {
  v1::GetGroupStatsRequest request;
  request.set_group(group);
  return Call<v1::GetGroupStatsResponse>(request, timeout);
}

absl::Status GroupClient::CreateWorkQueue(const std::string& group,
                                          const std::string& queue,
                                          const WorkQueueOptions& options) {
  v1::CreateWorkQueueRequest request;
  request.set_group(group);
  request.set_queue(queue);
  *request.mutable_options() = options;
  return Call<v1::CreateWorkQueueResponse>(request).status();
}

absl::StatusOr<std::optional<WorkItem>> GroupClient::TakeWorkItem(
    const GroupMember& member, const std::string& queue) {
  auto request = RequestOf<v1::TakeWorkItemRequest>(member);
  request.set_queue(queue);
  TFSWITCH_ASSIGN_OR_RETURN(const auto response,
                            Call<v1::TakeWorkItemResponse>(request));
  if (!response.has_item()) return std::nullopt;
  return response.item();
}

absl::Status GroupClient::FinishWorkItem(const GroupMember& member,
                                         const std::string& queue,
                                         int64_t epoch, int64_t index) {
  auto request = RequestOf<v1::FinishWorkItemRequest>(member);
  request.set_queue(queue);
  request.set_epoch(epoch);
  request.set_index(index);
  return Call<v1::FinishWorkItemResponse>(request).status();
}

absl::StatusOr<v1::GetWorkQueueStatsResponse> GroupClient::WorkQueueStats(
    const std::string& group, const std::string& queue) {
  v1::GetWorkQueueStatsRequest request;
  request.set_group(group);
  request.set_queue(queue);
  return Call<v1::GetWorkQueueStatsResponse>(request);
}

int64_t GroupClient::NextPollMs(absl::Time deadline) const {
  const absl::Duration left =
      std::min(server_->timeout() / 2, deadline - SteadyNow());
  return std::max<int64_t>(0, absl::ToInt64Milliseconds(left));
}

}  // namespace tfswitch
