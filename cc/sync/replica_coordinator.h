// Coordinates synchronous steps of workers whose variables are on servers that
// only store and compute. A WorkerGroup decides which gradients form a step.
// One of the workers, the applier, applies each step:
//
//   worker:   stages its gradients, EndStep() -----------------.
//   applier:  NextRound(), sums and applies, ConfirmRound() ---+--> next step
//
// The applier cannot be replaced, because no other process knows how much of a
// step it has applied. If the applier makes no call for the length of its
// lease, all other workers get an error and end.

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

// Where a worker begins in its group.
using ReplicaPlace = WorkerGroup::Place;

// Coordinates one group. Deadlines are times of SteadyNow(). At its deadline a
// wait returns DeadlineExceeded, with a description of the wait. A wait does
// not renew the lease of its worker, because the process may have died after it
// made the call.
//
// Each call of a worker may also return FailedPrecondition, with the reason:
// its applier has died or left, or its session has ended without it.
//
// Thread-safe.
class ReplicaCoordinator {
 public:
  explicit ReplicaCoordinator(std::string name) : name_(std::move(name)) {}
  ReplicaCoordinator(const ReplicaCoordinator&) = delete;
  ReplicaCoordinator& operator=(const ReplicaCoordinator&) = delete;

  // Makes a new group with the caller as its applier, and returns the applier's
  // id. Workers of the former group get an error, because they have no applier
  // any more. InvalidArgument if the options are invalid.
  absl::StatusOr<uint64_t> BeginApplying(const WorkerGroupOptions& options);

  // Waits for an applier, joins as `worker`, and waits until all rounds before
  // the worker's first round have been applied. For `previous` see
  // WorkerGroup::Join. After DeadlineExceeded, call this again with the same
  // *place to continue waiting. In the first call the incarnation of *place
  // must be 0. AlreadyExists if the group has different options.
  //
  // If `previous` is 0, the applier must make a call while this call waits. So
  // a restarted worker does not join an applier that has died and whose lease
  // has not ended yet. `applier` is the id from BeginApplying() if this worker
  // is the applier. If the applier fails before the worker has joined, this
  // call fails, too. `process` is the worker's, for stats(); see
  // ProcessIdentity().
  absl::Status Join(const WorkerGroupOptions& options, uint32_t worker,
                    uint64_t previous, uint64_t applier, absl::Time deadline,
                    ReplicaPlace* place, const std::string& process = "");

  // Ends the worker's step with a contribution of `weight`, and waits until the
  // step has been applied. After DeadlineExceeded, call this again with the
  // same *place and *has_arrived to continue waiting. In the first call
  // *has_arrived must be false.
  //
  // A worker that the group has given up joins again in this call. Its step
  // does not count, unless the group received it before.
  absl::Status EndStep(uint32_t worker, double weight, absl::Time deadline,
                       ReplicaPlace* place, bool* has_arrived);

  // Renews the lease of the worker, and that of the applier unless `applier` is
  // 0. If an EndStep() that still waits has joined the worker again, renews the
  // lease of its new incarnation.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation,
                         uint64_t applier);

  // Waits at a barrier until all workers wait there and all rounds have been
  // applied. See WorkerGroup::Enter.
  absl::StatusOr<ReplicaPlace> WaitAtBarrier(uint32_t worker,
                                             uint64_t incarnation,
                                             const std::string& barrier,
                                             int64_t barrier_generation,
                                             absl::Time deadline);

  // Waits at a last barrier until all workers wait there. Then all of them
  // leave together with the applier, so a worker that joins later waits for the
  // next applier. `applier` is 0 unless this worker is the applier.
  absl::Status LeaveTogether(uint32_t worker, uint64_t incarnation,
                             uint64_t applier, int64_t barrier_generation,
                             absl::Time deadline);

  // Says that the worker leaves before the others. If `applier` is not 0, the
  // worker also stops being the applier.
  void Leave(uint32_t worker, uint64_t incarnation, uint64_t applier);

  // Waits for the next round to apply. Cancelled when all workers have left
  // together.
  absl::StatusOr<Round> NextRound(uint64_t applier, absl::Time deadline);
  absl::Status ConfirmRound(uint64_t applier, int64_t number);
  // Called if the applier cannot continue: ends the group with the reason
  // `why`.
  void FailApplying(uint64_t applier, const std::string& why);

  v1::GetGroupStatsResponse stats();

 private:
  void Make(const WorkerGroupOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends the group. Its workers get an error with the reason `why`.
  void Fail(const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckWorker(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckApplier(uint64_t applier) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HasEnded() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether an incarnation belongs to a former group. It may even be a higher
  // number than that of the present group, if the clock of an earlier process
  // was ahead.
  bool IsOfBefore(uint64_t incarnation) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return incarnation < last_instance_ || incarnation >= next_incarnation_;
  }
  void HearApplier() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ends leases that are over, and does what follows from that or from an
  // event.
  void Settle(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void LeaveIfAllPart() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until check() does not return Unavailable, or until the deadline. At
  // the deadline `describe` describes the wait.
  absl::Status Wait(absl::Time deadline,
                    const std::function<absl::Status()>& check,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::string DescribeOpenRound() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  ReplicaPlace Admit(uint32_t worker, uint64_t previous,
                     const std::string& process = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits until the rounds before that of *place have been applied. If the
  // group gives the worker up during the wait, the worker joins again.
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
  // The incarnation of the next worker to join.
  uint64_t next_incarnation_ ABSL_GUARDED_BY(mutex_) = 0;
  // How many steps were ended by workers that the group had given up.
  int64_t num_dropped_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t applier_ ABSL_GUARDED_BY(mutex_) = 0;  // 0 if there is none.
  absl::Time applier_lease_end_ ABSL_GUARDED_BY(mutex_);
  // When the applier last made a call, or was waiting in one.
  absl::Time applier_heard_ ABSL_GUARDED_BY(mutex_);
  // How many calls of Join() are waiting for a call of the applier.
  int num_joining_ ABSL_GUARDED_BY(mutex_) = 0;
  // The number of applied rounds.
  int64_t applied_ ABSL_GUARDED_BY(mutex_) = 0;
  // Incarnations and appliers below this number get the error `failure_`.
  uint64_t failed_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string failure_ ABSL_GUARDED_BY(mutex_);
  struct Parting {
    uint32_t worker = 0;
    uint64_t applier = 0;  // 0 if it is none.
  };
  // Workers that wait to leave together, by incarnation, and the incarnations
  // that have left together.
  std::map<uint64_t, Parting> parting_ ABSL_GUARDED_BY(mutex_);
  std::set<uint64_t> parted_ ABSL_GUARDED_BY(mutex_);
  // The incarnations that have left before the others. The map has, for each
  // incarnation that the group has given up, the worker's next incarnation.
  std::set<uint64_t> left_ ABSL_GUARDED_BY(mutex_);
  std::map<uint64_t, uint64_t> successors_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_REPLICA_COORDINATOR_H_
