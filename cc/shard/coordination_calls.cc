// A call that waits for other workers ends after at most kLongestPoll. If the
// wait is not over, the answer names the missing workers instead of
// DeadlineExceeded, and the client asks again. Arrive ends a step and may wait
// in the same call, which saves a second call. An error of its wait is not
// returned, because the step has been counted; the worker gets the error when
// it asks again. Only Cancelled is returned: a user of this process has ended
// the wait, so the client must not ask again.

#include <algorithm>
#include <optional>
#include <string>

#include "absl/time/time.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/shard/control_calls.h"

namespace tfswitch {
namespace {

// Limits how long a call still waits after its client is gone.
constexpr absl::Duration kLongestPoll = absl::Seconds(5);

absl::Time PollEnd(int64_t wait_ms) {
  return SteadyNow() + std::clamp(absl::Milliseconds(wait_ms),
                                  absl::ZeroDuration(), kLongestPoll);
}

// If the wait is not over, the answer names the workers that have not come.
template <typename Response>
absl::Status Answer(const absl::Status& waited, Response* response) {
  if (!absl::IsDeadlineExceeded(waited)) return waited;
  response->set_waiting_for(std::string(waited.message()));
  return absl::OkStatus();
}

}  // namespace

absl::Status Run(Coordinator& coordinator,
                 const v1::CreateGroupRequest& request,
                 v1::CreateGroupResponse*) {
  return coordinator.CreateGroup(request.group(), FromProto(request.options()));
}

absl::Status Run(Coordinator& coordinator, const v1::JoinRequest& request,
                 v1::JoinResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response, coordinator.Join(request));
  return absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator, const v1::HeartbeatRequest& request,
                 v1::HeartbeatResponse*) {
  return coordinator.Heartbeat(request.member());
}

absl::Status Run(Coordinator& coordinator, const v1::ArriveRequest& request,
                 v1::ArriveResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const int64_t open_round,
                            coordinator.Arrive(request));
  response->set_open_round(open_round);
  if (request.wait_ms() <= 0) return absl::OkStatus();
  // An error of the wait is not returned here: the worker gets it when it asks
  // again.
  const absl::Time end = PollEnd(request.wait_ms());
  absl::Status waited;
  if (request.round() == WorkerGroup::kNoRound) {
    waited = coordinator.WaitForTurn(request.member(), request.clock() + 1,
                                     request.staleness(), end);
    response->set_may_proceed(waited.ok());
  } else {
    absl::StatusOr<Round> round = coordinator.WaitForRound(
        request.member(), std::max(request.round(), open_round - 1), end);
    waited = round.status();
    if (round.ok()) *response->mutable_round() = *std::move(round);
  }
  return absl::IsCancelled(waited) ? waited : absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator, const v1::LeaveRequest& request,
                 v1::LeaveResponse*) {
  return coordinator.Leave(request.member());
}

absl::Status Run(Coordinator& coordinator,
                 const v1::WaitForRoundRequest& request,
                 v1::WaitForRoundResponse* response) {
  absl::StatusOr<Round> round = coordinator.WaitForRound(
      request.member(), request.round(), PollEnd(request.wait_ms()));
  if (!round.ok()) return Answer(round.status(), response);
  *response->mutable_round() = *std::move(round);
  return absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator,
                 const v1::WaitForTurnRequest& request,
                 v1::WaitForTurnResponse* response) {
  const absl::Status turn =
      coordinator.WaitForTurn(request.member(), request.clock(),
                              request.staleness(), PollEnd(request.wait_ms()));
  response->set_may_proceed(turn.ok());
  return Answer(turn, response);
}

absl::Status Run(Coordinator& coordinator,
                 const v1::WaitAtBarrierRequest& request,
                 v1::WaitAtBarrierResponse* response) {
  const absl::StatusOr<WorkerGroup::Place> place =
      coordinator.WaitAtBarrier(request, PollEnd(request.wait_ms()));
  if (!place.ok()) return Answer(place.status(), response);
  response->set_is_open(true);
  response->set_clock(place->clock());
  response->set_round(place->round());
  return absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator,
                 const v1::GetGroupStatsRequest& request,
                 v1::GetGroupStatsResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response, coordinator.GroupStats(request.group()));
  return absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator,
                 const v1::CreateWorkQueueRequest& request,
                 v1::CreateWorkQueueResponse*) {
  return coordinator.CreateWorkQueue(request);
}

absl::Status Run(Coordinator& coordinator,
                 const v1::TakeWorkItemRequest& request,
                 v1::TakeWorkItemResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(std::optional<WorkItem> taken,
                            coordinator.TakeWorkItem(request));
  if (taken.has_value()) *response->mutable_item() = *std::move(taken);
  return absl::OkStatus();
}

absl::Status Run(Coordinator& coordinator,
                 const v1::FinishWorkItemRequest& request,
                 v1::FinishWorkItemResponse*) {
  return coordinator.FinishWorkItem(request);
}

absl::Status Run(Coordinator& coordinator,
                 const v1::GetWorkQueueStatsRequest& request,
                 v1::GetWorkQueueStatsResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(
      *response, coordinator.WorkQueueStats(request.group(), request.queue()));
  return absl::OkStatus();
}

}  // namespace tfswitch
