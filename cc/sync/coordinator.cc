#include "cc/sync/coordinator.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

namespace {

// For leases: a clock that nobody sets.
absl::Time SteadyNow() {
  return absl::UnixEpoch() +
         absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace

Coordinator::~Coordinator() { Shutdown(); }

absl::Status Coordinator::CreateGroup(const std::string& group,
                                      const WorkerGroupOptions& options) {
  if (group.empty()) {
    return absl::InvalidArgumentError("a group needs a name");
  }
  TFSWITCH_RETURN_IF_ERROR(options.Validate());
  MutexLock lock(&mutex_);
  const auto it = groups_.find(group);
  if (it == groups_.end()) {
    groups_.emplace(group, std::make_unique<Group>(options));
    return absl::OkStatus();
  }
  Group& present = *it->second;
  if (present.options == options) return absl::OkStatus();
  present.state->Tick(SteadyNow());
  if (present.state->stats().num_active == 0) {
    // What trained here has ended; nobody waits in it.
    present.options = options;
    present.state.emplace(options, DrawFirstIncarnation());
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      "group '", group, "' exists with other options: ",
      present.options.ToString(), " here, ", options.ToString(),
      " asked; give all workers the same ones, or the group another name"));
}

uint64_t Coordinator::DrawFirstIncarnation() {
  return static_cast<uint64_t>(absl::GetCurrentTimeNanos());
}

absl::StatusOr<Coordinator::Group*> Coordinator::Find(
    const std::string& group) {
  const auto it = groups_.find(group);
  if (it != groups_.end()) return it->second.get();
  return absl::NotFoundError(
      absl::StrCat("no group '", group, "'; create it first"));
}

absl::StatusOr<WorkerGroup::Place> Coordinator::Join(const std::string& group,
                                                     uint32_t worker,
                                                     uint64_t previous) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  const absl::Time now = SteadyNow();
  found->state->Tick(now);
  const WorkerGroup::Place member = found->state->Join(worker, now, previous);
  found->changed.NotifyAll();
  return member;
}

absl::Status Coordinator::Beat(const std::string& group, uint32_t worker,
                               uint64_t incarnation) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  // A worker that comes a little late is alive: its own lease first.
  const absl::Time now = SteadyNow();
  absl::Status status = found->state->Beat(worker, incarnation, now);
  found->state->Tick(now);
  found->changed.NotifyAll();
  return status;
}

absl::StatusOr<int64_t> Coordinator::Arrive(const std::string& group,
                                            uint32_t worker,
                                            uint64_t incarnation, int64_t clock,
                                            int64_t round, double weight) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  const absl::Time now = SteadyNow();
  const absl::Status status =
      found->state->Arrive(worker, incarnation, clock, round, weight, now);
  found->state->Tick(now);
  found->changed.NotifyAll();
  TFSWITCH_RETURN_IF_ERROR(status);
  return found->state->open_round();
}

absl::Status Coordinator::Leave(const std::string& group, uint32_t worker,
                                uint64_t incarnation) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  found->state->Leave(worker, incarnation);
  found->changed.NotifyAll();
  return absl::OkStatus();
}

absl::Status Coordinator::Wait(Group* group, uint32_t worker,
                               uint64_t incarnation, absl::Time deadline,
                               const std::function<bool()>& is_over,
                               const std::function<std::string()>& describe) {
  for (;;) {
    if (is_shut_down_) return absl::CancelledError("the server is stopping");
    const absl::Time now = SteadyNow();
    TFSWITCH_RETURN_IF_ERROR(group->state->Beat(worker, incarnation, now));
    const WorkerGroup::Stats before = group->state->stats();
    group->state->Tick(now);
    const WorkerGroup::Stats after = group->state->stats();
    if (after.expired != before.expired || after.rounds != before.rounds) {
      group->changed.NotifyAll();
    }
    if (is_over()) return absl::OkStatus();
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(describe());
    }
    // Its own lease is renewed well before it ends.
    group->changed.WaitFor(
        &mutex_, std::max(absl::Milliseconds(1),
                          std::min({left, group->state->NextTick() - now,
                                    group->options.lease / 3})));
  }
}

absl::StatusOr<Round> Coordinator::WaitForRound(const std::string& group,
                                                uint32_t worker,
                                                uint64_t incarnation,
                                                int64_t number,
                                                absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, worker, incarnation, deadline,
      [&] { return found->state->open_round() > number; },
      [&] {
        return absl::StrCat("group '", group, "': round ", number,
                            " waits for ",
                            found->state->DescribeMissing(number));
      }));
  return found->state->ClosedRound(number);
}

absl::Status Coordinator::WaitForTurn(const std::string& group, uint32_t worker,
                                      uint64_t incarnation, int64_t clock,
                                      int64_t staleness, absl::Time deadline) {
  if (clock < 0 || staleness < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "clock and staleness must not be negative. Received: clock=", clock,
        ", staleness=", staleness));
  }
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  return Wait(
      found, worker, incarnation, deadline,
      [&] { return found->state->MayProceed(clock, staleness); },
      [&] {
        return absl::StrCat("group '", group, "': worker ", worker,
                            " has ended ", clock, " steps, may be ", staleness,
                            " ahead, and waits for ",
                            found->state->DescribeBehind(clock - staleness));
      });
}

absl::StatusOr<WorkerGroup::Place> Coordinator::WaitAtBarrier(
    const std::string& group, uint32_t worker, uint64_t incarnation,
    const std::string& barrier, int64_t visit, absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  TFSWITCH_RETURN_IF_ERROR(
      found->state->Enter(worker, incarnation, barrier, visit, SteadyNow()));
  found->changed.NotifyAll();
  absl::StatusOr<std::optional<WorkerGroup::Place>> place;
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, worker, incarnation, deadline,
      [&] {
        place = found->state->PlaceAfterBarrier(worker, incarnation);
        return !place.ok() || place->has_value();
      },
      [&] {
        return absl::StrCat("group '", group, "': barrier '", barrier,
                            "' waits for ",
                            found->state->DescribeAbsent(barrier));
      }));
  TFSWITCH_RETURN_IF_ERROR(place.status());
  return **place;
}

absl::StatusOr<WorkerGroup::Stats> Coordinator::GroupStats(
    const std::string& group) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  return found->state->stats();
}

void Coordinator::Shutdown() {
  MutexLock lock(&mutex_);
  is_shut_down_ = true;
  for (const auto& [name, group] : groups_) group->changed.NotifyAll();
}

}  // namespace tfswitch
