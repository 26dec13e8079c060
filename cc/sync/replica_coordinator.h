// Synchronous steps of workers whose variables are kept elsewhere: by servers
// that store and compute, but decide nothing. A WorkerGroup decides which
// gradients make a step, and one of the workers, the applier, takes it:
//
//   worker:   stages its gradients, EndStep() -----------------.
//   applier:  NextRound(), sums and applies, ConfirmRound() ---+--> next step
//
// The applier cannot be replaced, for nobody knows how far it has come with a
// step. If it is not heard of any more, all others are told, and end.

#ifndef TFSWITCH_CC_SYNC_REPLICA_COORDINATOR_H_
#define TFSWITCH_CC_SYNC_REPLICA_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/sync/worker_group.h"

namespace tfswitch {

// Where a worker is.
using ReplicaPlace = WorkerGroup::Place;

// One group. Every wait ends by its deadline, a time of SteadyNow(), with
// DeadlineExceeded that describes the wait. Waiting renews no lease: it may be
// the last call of a process that has died.
//
// Besides their own errors all calls of a worker give FailedPrecondition, with
// the reason, if the applier of its time has gone, as nothing goes on then, or
// if its session has ended without it.
//
// Thread-safe.
class ReplicaCoordinator {
 public:
  explicit ReplicaCoordinator(std::string name) : name_(std::move(name)) {}
  ReplicaCoordinator(const ReplicaCoordinator&) = delete;
  ReplicaCoordinator& operator=(const ReplicaCoordinator&) = delete;

  // Makes the group anew, with the caller as its applier. Workers that are
  // there have lost theirs. InvalidArgument if the options make no sense.
  absl::StatusOr<uint64_t> BeginApplying(const WorkerGroupOptions& options);

  // Waits for an applier, joins as `worker`, and waits until all rounds before
  // its first have been applied. `previous` as in WorkerGroup::Join. After
  // DeadlineExceeded the same call goes on waiting: *place, with incarnation 0
  // at first, has the state between. AlreadyExists if the group has other
  // options.
  //
  // Without a `previous` it needs an applier that is heard of now: a worker
  // that is started again shall not join one that died before and still has its
  // lease. `applier` is the worker's own, if it has begun one: if that fails
  // before the worker has joined, so does this.
  absl::Status Join(const WorkerGroupOptions& options, uint32_t worker,
                    uint64_t previous, uint64_t applier, absl::Time deadline,
                    ReplicaPlace* place);

  // Ends the worker's step with a contribution of `weight`, and waits until it
  // has been applied. After DeadlineExceeded the same call goes on waiting:
  // *place and *has_arrived, false at first, have the state between.
  //
  // A worker that was given up joins again; a step of which the group has not
  // heard before that does not count.
  absl::Status EndStep(uint32_t worker, double weight, absl::Time deadline,
                       ReplicaPlace* place, bool* has_arrived);

  // Renews the lease of a worker, or of its successor from an EndStep() that
  // still waits, and of the applier unless that is 0.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation,
                         uint64_t applier);

  // Waits at a barrier until all workers do, and all rounds have been applied.
  // See WorkerGroup::Enter.
  absl::StatusOr<ReplicaPlace> WaitAtBarrier(uint32_t worker,
                                             uint64_t incarnation,
                                             const std::string& barrier,
                                             int64_t barrier_generation,
                                             absl::Time deadline);

  // The same, as the last that the workers do: all leave together, and the
  // applier with them, so that the next to come wait for the next applier.
  // `applier` unless 0: this worker is the applier.
  absl::Status LeaveTogether(uint32_t worker, uint64_t incarnation,
                             uint64_t applier, int64_t barrier_generation,
                             absl::Time deadline);

  // The worker gives up. `applier` unless 0: and takes no more steps.
  void Leave(uint32_t worker, uint64_t incarnation, uint64_t applier);

  // The next round to apply. Cancelled when all have left together.
  absl::StatusOr<Round> NextRound(uint64_t applier, absl::Time deadline);
  absl::Status ConfirmRound(uint64_t applier, int64_t number);
  // The applier cannot go on.
  void FailApplying(uint64_t applier, const std::string& why);

  v1::GetGroupStatsResponse stats();

 private:
  void Make(const WorkerGroupOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the group; its workers hear why.
  void Fail(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWorker(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckApplier(uint64_t applier) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether an incarnation is of a group before the present one: it may be of a
  // process before this one, when the clock was ahead.
  bool IsOfBefore(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return incarnation < last_instance_ || !state_.has_value() ||
           incarnation >= state_->next_incarnation();
  }
  void HearApplier() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Carries out the effects of time and of an event.
  void Settle(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveIfAllPart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until check() gives something else than Unavailable, or the deadline
  // comes: then `describe` describes the wait.
  absl::Status Wait(absl::Time deadline,
                    const std::function<absl::Status()>& check,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string DescribeOpenRound() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ReplicaPlace Admit(uint32_t worker, uint64_t previous)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until the rounds before *place have been applied. A worker that was
  // given up joins again.
  absl::Status WaitUntilApplied(uint32_t worker, absl::Time deadline,
                                ReplicaPlace* place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const std::string name_;

  Mutex mutex_;
  CondVar changed_;
  WorkerGroupOptions options_ ABSL_GUARDED_BY(mutex_);
  std::optional<WorkerGroup> state_ ABSL_GUARDED_BY(mutex_);
  // The first incarnation of the present group.
  uint64_t last_instance_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t applier_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none.
  absl::Time applier_lease_end_ ABSL_GUARDED_BY(mutex_);
  // When it last did something, be it only to wait.
  absl::Time applier_heard_ ABSL_GUARDED_BY(mutex_);
  int num_joining_ ABSL_GUARDED_BY(mutex_) = 0;  // Calls that wait to hear it.
  int64_t applied_ ABSL_GUARDED_BY(mutex_) = 0;  // Rounds.
  // The failure of incarnations and appliers below a number.
  uint64_t failed_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  struct Parting {
    uint32_t worker = 0;
    uint64_t applier = 0;  // 0: it is not.
  };
  // Workers that leave together, by incarnation, and those that have.
  std::map<uint64_t, Parting> parting_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> parted_ ABSL_GUARDED_BY(mutex_);
  // Incarnations that have left alone, and the successors of those that were
  // given up.
  std::set<uint64_t> left_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> successors_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_REPLICA_COORDINATOR_H_
