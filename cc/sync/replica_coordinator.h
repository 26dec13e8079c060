// Coordinates synchronous steps of workers whose variables are on servers that
// only store and compute. A WorkerGroup decides which gradients make a step,
// and one of the workers, the applier, applies it:
//
//   worker:   stages its gradients, EndStep() -----------------.
//   applier:  NextRound(), sums and applies, ConfirmRound() ---+--> next step
//
// The applier cannot be replaced, because nobody else knows how much of a step
// it has applied. If it is not heard of any more, all other workers get an
// error and end.

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

// The place of a worker in its group.
using ReplicaPlace = WorkerGroup::Place;

// One group. At its deadline, a time of SteadyNow(), every wait returns
// DeadlineExceeded, which describes the wait. A wait does not renew the lease:
// it may be the last call of a process that has died.
//
// Besides their own errors, all calls of a worker return FailedPrecondition,
// with the reason, if its applier has gone or its session has ended without it.
//
// Thread-safe.
class ReplicaCoordinator {
 public:
  explicit ReplicaCoordinator(std::string name) : name_(std::move(name)) {}
  ReplicaCoordinator(const ReplicaCoordinator&) = delete;
  ReplicaCoordinator& operator=(const ReplicaCoordinator&) = delete;

  // Makes a new group with the caller as its applier, and returns the applier's
  // id. Present workers have lost their applier. InvalidArgument if the options
  // are invalid.
  absl::StatusOr<uint64_t> BeginApplying(const WorkerGroupOptions& options);

  // Waits for an applier, joins as `worker`, and waits until all rounds before
  // its first one have been applied. `previous` is as in WorkerGroup::Join.
  // After DeadlineExceeded, call it again with the same *place to continue
  // waiting; at first its incarnation must be 0. AlreadyExists if the group has
  // other options.
  //
  // Without a `previous`, the applier must be heard of during the call: a
  // restarted worker must not join an applier that has died and still has its
  // lease. `applier` is the worker's own applier, if it has begun one: if that
  // fails before the worker has joined, this call fails, too.
  absl::Status Join(const WorkerGroupOptions& options, uint32_t worker,
                    uint64_t previous, uint64_t applier, absl::Time deadline,
                    ReplicaPlace* place);

  // Ends the worker's step with a contribution of `weight`, and waits until it
  // has been applied. After DeadlineExceeded, call it again with the same
  // *place and *has_arrived to continue waiting; at first *has_arrived must be
  // false.
  //
  // A given-up worker joins again. Its step does not count if the group did not
  // receive it before.
  absl::Status EndStep(uint32_t worker, double weight, absl::Time deadline,
                       ReplicaPlace* place, bool* has_arrived);

  // Renews the lease of a worker, and of the applier unless that is 0. If an
  // EndStep() that still waits has joined again, renews the new member's lease.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation,
                         uint64_t applier);

  // Waits at a barrier until all workers do, and all rounds have been applied.
  // See WorkerGroup::Enter.
  absl::StatusOr<ReplicaPlace> WaitAtBarrier(uint32_t worker,
                                             uint64_t incarnation,
                                             const std::string& barrier,
                                             int64_t barrier_generation,
                                             absl::Time deadline);

  // Waits at a last barrier: all workers leave together, with the applier, so
  // that later workers wait for the next applier. `applier` is 0 unless this
  // worker is the applier.
  absl::Status LeaveTogether(uint32_t worker, uint64_t incarnation,
                             uint64_t applier, int64_t barrier_generation,
                             absl::Time deadline);

  // The worker leaves early. Unless `applier` is 0, it also stops applying.
  void Leave(uint32_t worker, uint64_t incarnation, uint64_t applier);

  // Waits for the next round to apply. Cancelled when all have left together.
  absl::StatusOr<Round> NextRound(uint64_t applier, absl::Time deadline);
  absl::Status ConfirmRound(uint64_t applier, int64_t number);
  // Called if the applier cannot continue.
  void FailApplying(uint64_t applier, const std::string& why);

  v1::GetGroupStatsResponse stats();

 private:
  void Make(const WorkerGroupOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the group. Its workers get an error that says why.
  void Fail(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWorker(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckApplier(uint64_t applier) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether an incarnation belongs to a group before the present one. That may
  // be of an earlier process whose clock was ahead.
  bool IsOfBefore(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return incarnation < last_instance_ || incarnation >= next_incarnation_;
  }
  void HearApplier() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does what follows from an event and from the time.
  void Settle(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveIfAllPart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until check() returns something else than Unavailable, or the
  // deadline comes. At the deadline `describe` describes the wait.
  absl::Status Wait(absl::Time deadline,
                    const std::function<absl::Status()>& check,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string DescribeOpenRound() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ReplicaPlace Admit(uint32_t worker, uint64_t previous)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until the rounds before *place have been applied. A given-up worker
  // joins again.
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
  // That of the next worker to join.
  uint64_t next_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  // The steps that given-up workers have ended.
  int64_t num_dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t applier_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 if there is none.
  absl::Time applier_lease_end_ ABSL_GUARDED_BY(mutex_);
  // When the applier last made a call, or waited in one.
  absl::Time applier_heard_ ABSL_GUARDED_BY(mutex_);
  // The calls of Join() that wait for a call of the applier.
  int num_joining_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t applied_ ABSL_GUARDED_BY(mutex_) = 0;  // The number of rounds.
  // Incarnations and appliers below this number have failed with `failure_`.
  uint64_t failed_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  struct Parting {
    uint32_t worker = 0;
    uint64_t applier = 0;  // 0 if it is not the applier.
  };
  // By incarnation, workers that wait to leave together, and those that have
  // left together.
  std::map<uint64_t, Parting> parting_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> parted_ ABSL_GUARDED_BY(mutex_);
  // Incarnations that have left alone, and the new incarnations of given-up
  // ones.
  std::set<uint64_t> left_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> successors_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_REPLICA_COORDINATOR_H_
