// All waits use Wait(). It calls Settle() and a check, and sleeps until the
// state changes, a lease ends or the deadline comes. A check returns NotYet()
// while the wait must continue. applied_ counts the rounds that the applier has
// confirmed. It never exceeds the number of the open round of state_.
//
// Make() draws a first incarnation above all earlier ones. So an incarnation
// alone tells whether a worker belongs to a former group. A worker that the
// group gives up during a wait gets a new incarnation. Heartbeat() and Leave()
// find it in successors_, because their caller may not know it yet.

#include "cc/sync/replica_coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/awake_clock.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

constexpr char kStartAgain[] =
    "; start all workers again, and the last checkpoint counts";

// No process can be restarted in a shorter time.
constexpr absl::Duration kRecently = absl::Seconds(2);

// The barrier at which workers wait to leave together.
constexpr char kEndOfSession[] = "end of session";

// A check returns this while the wait must continue.
absl::Status NotYet() { return absl::UnavailableError("not yet"); }

}  // namespace

void ReplicaCoordinator::Make(const WorkerGroupOptions& options) {
  options_ = options;
  // The time makes the instance higher than those that earlier processes drew.
  last_instance_ = std::max(next_incarnation_ + 1,
                            static_cast<uint64_t>(absl::GetCurrentTimeNanos()));
  next_incarnation_ = last_instance_;
  state_.emplace(options, last_instance_);
  num_dropped_ = 0;
  applier_ = 0;
  applied_ = 0;
  parting_.clear();
  left_.clear();
  successors_.clear();
}

void ReplicaCoordinator::HearApplier() {
  applier_heard_ = AwakeNow();
  if (num_joining_ > 0) changed_.NotifyAll();
}

void ReplicaCoordinator::Fail(const std::string& why) {
  Make(options_);
  failed_before_ = last_instance_;
  failure_ = absl::StrCat("group '", name_, "': ", why, kStartAgain);
  changed_.NotifyAll();
}

absl::StatusOr<uint64_t> ReplicaCoordinator::BeginApplying(
    const WorkerGroupOptions& options) {
  TFSWITCH_RETURN_IF_ERROR(options.Validate());
  MutexLock lock(&mutex_);
  if (applier_ != 0) {
    Fail(
        "the worker that takes the steps was started again, or two processes "
        "are chief: give each its own `task_index=`, and only that with "
        "task_index=0 `is_chief=True`");
  }
  Make(options);
  applier_ = last_instance_;
  applier_lease_end_ = AwakeNow() + options_.lease;
  HearApplier();
  changed_.NotifyAll();
  return applier_;
}

absl::Status ReplicaCoordinator::CheckWorker(uint64_t incarnation) const {
  if (incarnation >= failed_before_) return absl::OkStatus();
  return absl::FailedPreconditionError(failure_);
}

absl::Status ReplicaCoordinator::CheckApplier(uint64_t applier) const {
  if (applier == applier_ && applier != 0) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(CheckWorker(applier));
  return absl::CancelledError(
      absl::StrCat("group '", name_, "': all workers have left"));
}

absl::Status ReplicaCoordinator::HasEnded() const {
  return absl::FailedPreconditionError(
      absl::StrCat("group '", name_,
                   "': the other workers have ended their session; this "
                   "one had been given up, as it was not heard of for ",
                   absl::FormatDuration(options_.lease)));
}

void ReplicaCoordinator::Settle(absl::Time now) {
  if (!state_.has_value()) return;
  if (const auto expiry = state_->ExpiryAt(now)) {
    state_->Expire(*expiry);
    changed_.NotifyAll();
  }
  if (applier_ != 0 && now >= applier_lease_end_) {
    Fail(absl::StrCat("the worker that takes the steps was not heard of for ",
                      absl::FormatDuration(options_.lease)));
    return;
  }
  LeaveIfAllPart();
}

void ReplicaCoordinator::LeaveIfAllPart() {
  if (parting_.empty() || applied_ < state_->open_round()) return;
  bool has_opened = false;
  bool has_applier_left = false;
  for (const auto& [incarnation, parting] : parting_) {
    const auto place = state_->PlaceAfterBarrier(parting.worker, incarnation);
    if (!place.ok() || !place->has_value()) continue;
    if (!has_opened) parted_.clear();
    has_opened = true;
    state_->Leave(parting.worker, incarnation);
    parted_.insert(incarnation);
    if (parting.applier == applier_) has_applier_left = true;
  }
  if (!has_opened) return;
  parting_.clear();
  // A worker that has joined again cannot continue without the applier.
  if (has_applier_left || state_->stats().num_active() == 0) applier_ = 0;
  changed_.NotifyAll();
}

absl::Status ReplicaCoordinator::Wait(
    absl::Time deadline, const std::function<absl::Status()>& check,
    const std::function<std::string()>& describe) {
  for (;;) {
    const absl::Time now = AwakeNow();
    Settle(now);
    absl::Status status = check();
    if (!absl::IsUnavailable(status)) return status;
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("group '", name_, "': ", describe()));
    }
    absl::Time next =
        applier_ == 0 ? absl::InfiniteFuture() : applier_lease_end_;
    if (state_.has_value()) next = std::min(next, state_->NextExpiry());
    changed_.WaitFor(
        &mutex_, std::max(absl::Milliseconds(1), std::min(left, next - now)));
  }
}

std::string ReplicaCoordinator::DescribeOpenRound() const {
  if (!state_.has_value() || applied_ < state_->open_round()) {
    return "waiting for the worker that takes the steps";
  }
  return absl::StrCat("round ", applied_, " waits for ",
                      DescribeMissing(*state_, applied_));
}

ReplicaPlace ReplicaCoordinator::Admit(uint32_t worker, uint64_t previous,
                                       const std::string& process) {
  ReplicaPlace joined = state_->Join(worker, AwakeNow(), previous,
                                     /*first_step=*/0, /*job=*/"", process);
  next_incarnation_ = joined.incarnation() + 1;
  if (previous != 0) successors_[previous] = joined.incarnation();
  changed_.NotifyAll();
  return joined;
}

absl::Status ReplicaCoordinator::Join(const WorkerGroupOptions& options,
                                      uint32_t worker, uint64_t previous,
                                      uint64_t applier, absl::Time deadline,
                                      ReplicaPlace* place,
                                      const std::string& process) {
  TFSWITCH_RETURN_IF_ERROR(options.Validate());
  MutexLock lock(&mutex_);
  if (place->incarnation() != 0)
    return WaitUntilApplied(worker, deadline, place);
  const absl::Time since = AwakeNow() - kRecently;
  ++num_joining_;
  const absl::Status begun = Wait(
      deadline,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        if (previous != 0) {
          TFSWITCH_RETURN_IF_ERROR(CheckWorker(previous));
          // A different applier has a group of its own.
          if (applier_ == 0 || IsOfBefore(previous)) return HasEnded();
        } else if (applier != 0) {
          TFSWITCH_RETURN_IF_ERROR(CheckApplier(applier));
        }
        const bool is_there =
            applier_ != 0 && (previous != 0 || applier_heard_ >= since);
        return is_there ? absl::OkStatus() : NotYet();
      },
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return applier_ != 0
                   ? "the worker that takes the steps is not heard of"
                   : "no worker has begun to take its steps, as the chief does";
      });
  --num_joining_;
  TFSWITCH_RETURN_IF_ERROR(begun);
  TFSWITCH_RETURN_IF_ERROR(CheckSameOptions(name_, options_, options));
  *place = Admit(worker, previous, process);
  return WaitUntilApplied(worker, deadline, place);
}

absl::Status ReplicaCoordinator::WaitUntilApplied(uint32_t worker,
                                                  absl::Time deadline,
                                                  ReplicaPlace* place) {
  return Wait(
      deadline,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        TFSWITCH_RETURN_IF_ERROR(CheckWorker(place->incarnation()));
        if (IsOfBefore(place->incarnation())) return HasEnded();
        if (applied_ >= place->round()) return absl::OkStatus();
        if (applier_ == 0) return HasEnded();
        if (left_.count(place->incarnation()) != 0) {
          return absl::CancelledError(absl::StrCat(
              "group '", name_, "': worker ", worker, " has left"));
        }
        if (state_->FindMember(worker, place->incarnation()) == nullptr) {
          const auto other = state_->PlaceAfterBarrier(worker, 0);
          if (!absl::IsNotFound(other.status())) return other.status();
          *place = Admit(worker, place->incarnation());
        }
        return NotYet();
      },
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return DescribeOpenRound();
      });
}

absl::Status ReplicaCoordinator::EndStep(uint32_t worker, double weight,
                                         absl::Time deadline,
                                         ReplicaPlace* place,
                                         bool* has_arrived) {
  MutexLock lock(&mutex_);
  if (place->incarnation() == 0) {
    return absl::FailedPreconditionError(absl::StrCat(
        "group '", name_, "': worker ", worker,
        " has not joined: give its session the hook of make_session_run_hook"));
  }
  TFSWITCH_RETURN_IF_ERROR(CheckWorker(place->incarnation()));
  if (!*has_arrived) {
    if (applier_ == 0 || IsOfBefore(place->incarnation())) return HasEnded();
    v1::ArriveRequest step;
    step.mutable_member()->set_worker(worker);
    step.mutable_member()->set_incarnation(place->incarnation());
    step.set_clock(place->clock());
    step.set_round(place->round());
    step.set_weight(weight);
    const absl::Status arrived = state_->Arrive(step, AwakeNow());
    if (absl::IsNotFound(arrived)) {
      ++num_dropped_;
      *place = Admit(worker, place->incarnation());
    } else {
      TFSWITCH_RETURN_IF_ERROR(arrived);
      place->set_clock(place->clock() + 1);
      // If the worker is late, it skips the rounds that closed without it. If
      // its own round has just closed, the open round is the next one.
      place->set_round(std::max(place->round() + 1, state_->open_round()));
    }
    *has_arrived = true;
    changed_.NotifyAll();
  }
  return WaitUntilApplied(worker, deadline, place);
}

absl::Status ReplicaCoordinator::Heartbeat(uint32_t worker,
                                           uint64_t incarnation,
                                           uint64_t applier) {
  MutexLock lock(&mutex_);
  const absl::Time now = AwakeNow();
  // Renews the applier's lease even if it has not joined as a worker yet.
  if (applier != 0 && applier == applier_) {
    applier_lease_end_ = now + options_.lease;
    HearApplier();
  }
  TFSWITCH_RETURN_IF_ERROR(CheckWorker(incarnation));
  if (!state_.has_value()) return HasEnded();
  for (auto it = successors_.find(incarnation); it != successors_.end();
       it = successors_.find(incarnation)) {
    incarnation = it->second;
  }
  absl::Status status = state_->Heartbeat(worker, incarnation, now);
  Settle(now);
  return status;
}

absl::StatusOr<ReplicaPlace> ReplicaCoordinator::WaitAtBarrier(
    uint32_t worker, uint64_t incarnation, const std::string& barrier,
    int64_t barrier_generation, absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckWorker(incarnation));
  if (applier_ == 0) return HasEnded();
  TFSWITCH_RETURN_IF_ERROR(state_->Enter(worker, incarnation, barrier,
                                         barrier_generation, AwakeNow()));
  changed_.NotifyAll();
  ReplicaPlace after;
  TFSWITCH_RETURN_IF_ERROR(Wait(
      deadline,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
        TFSWITCH_RETURN_IF_ERROR(CheckWorker(incarnation));
        TFSWITCH_ASSIGN_OR_RETURN(
            const std::optional<ReplicaPlace> place,
            state_->PlaceAfterBarrier(worker, incarnation));
        if (!place.has_value() && applier_ == 0) return HasEnded();
        if (!place.has_value() || applied_ < place->round()) return NotYet();
        after = *place;
        return absl::OkStatus();
      },
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        if (applied_ < state_->open_round()) return DescribeOpenRound();
        return absl::StrCat("barrier '", barrier, "' waits for ",
                            DescribeAbsent(*state_, barrier));
      }));
  return after;
}

absl::Status ReplicaCoordinator::LeaveTogether(uint32_t worker,
                                               uint64_t incarnation,
                                               uint64_t applier,
                                               int64_t barrier_generation,
                                               absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckWorker(incarnation));
  if (parted_.count(incarnation) != 0) return absl::OkStatus();
  if (applier_ == 0) return HasEnded();
  // Set before Enter() is called, because Enter() may open the barrier.
  parting_[incarnation] = {worker, applier};
  absl::Status entered = state_->Enter(worker, incarnation, kEndOfSession,
                                       barrier_generation, AwakeNow());
  if (!entered.ok()) {
    parting_.erase(incarnation);
    return entered;
  }
  changed_.NotifyAll();
  return Wait(
      deadline,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
        if (parted_.count(incarnation) != 0) return absl::OkStatus();
        TFSWITCH_RETURN_IF_ERROR(CheckWorker(incarnation));
        TFSWITCH_RETURN_IF_ERROR(
            state_->PlaceAfterBarrier(worker, incarnation).status());
        return NotYet();
      },
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        if (applied_ < state_->open_round()) return DescribeOpenRound();
        return absl::StrCat("the end of the session waits for ",
                            DescribeAbsent(*state_, kEndOfSession));
      });
}

void ReplicaCoordinator::Leave(uint32_t worker, uint64_t incarnation,
                               uint64_t applier) {
  MutexLock lock(&mutex_);
  if (!state_.has_value()) return;
  absl::Status known;
  // Removes the newer incarnations as well, because the worker may not know
  // them.
  for (;;) {
    parting_.erase(incarnation);
    left_.insert(incarnation);
    known = state_->PlaceAfterBarrier(worker, incarnation).status();
    state_->Leave(worker, incarnation);
    const auto successor = successors_.find(incarnation);
    if (successor == successors_.end()) break;
    incarnation = successor->second;
  }
  changed_.NotifyAll();
  if (applier == 0 || applier != applier_) return;
  if (state_->stats().num_active() > 0) {
    // The former is the case if another process has the worker's number.
    Fail(absl::IsFailedPrecondition(known)
             ? std::string(known.message())
             : "the worker that takes the steps has left before the others");
  } else {
    applier_ = 0;
  }
}

absl::StatusOr<Round> ReplicaCoordinator::NextRound(uint64_t applier,
                                                    absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckApplier(applier));
  HearApplier();
  TFSWITCH_RETURN_IF_ERROR(Wait(
      deadline,
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        TFSWITCH_RETURN_IF_ERROR(CheckApplier(applier));
        return applied_ < state_->open_round() ? absl::OkStatus() : NotYet();
      },
      [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
        return DescribeOpenRound();
      }));
  return state_->ClosedRound(applied_);
}

absl::Status ReplicaCoordinator::ConfirmRound(uint64_t applier,
                                              int64_t number) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckApplier(applier));
  HearApplier();
  if (number == applied_ - 1) return absl::OkStatus();  // A repeated call.
  if (number != applied_ || number >= state_->open_round()) {
    return absl::OutOfRangeError(absl::StrCat("group '", name_, "': round ",
                                              number, " is confirmed, and ",
                                              applied_, " is to be applied"));
  }
  ++applied_;
  changed_.NotifyAll();
  return absl::OkStatus();
}

void ReplicaCoordinator::FailApplying(uint64_t applier,
                                      const std::string& why) {
  MutexLock lock(&mutex_);
  if (applier != 0 && applier == applier_) {
    Fail(absl::StrCat("a step could not be taken: ", why));
  }
}

v1::GetGroupStatsResponse ReplicaCoordinator::stats() {
  MutexLock lock(&mutex_);
  if (!state_.has_value()) return {};
  v1::GetGroupStatsResponse stats = state_->stats();
  stats.set_dropped(stats.dropped() + num_dropped_);
  return stats;
}

}  // namespace tfswitch
