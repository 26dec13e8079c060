// The state machine of a group of workers: bounded staleness, synchronous
// rounds and barriers. It only makes decisions: it stores no gradients, uses no
// network and reads no clock. Each event carries its time, so tests can replay
// events in any order.
//
// A worker joins, arrives at the end of each of its steps, and leaves. It must
// renew its lease: if the worker dies, the lease ends, and the group drops the
// worker as if it had left. An arrival may contribute to the open round:
//
//   round r is open -> contributions of r come in -> it closes -> r + 1 is open
//
// A round closes when each worker has contributed to it or waits at a barrier.
// So if all workers but one wait for the round, and this one leaves or dies,
// the round closes. With `contributions_per_round` a round closes when it has
// that many contributions.
//
// A worker may wait at a barrier until all workers wait there, for example when
// it has no data left in an epoch. Rounds do not wait for a worker at a
// barrier. When the barrier opens, all workers continue with the same clock.
//
// A run ends when all its workers have left. Workers end at different times, so
// one may leave and join again before the last worker has left. It then counts
// for the next run; but if it trains a step together with the others, or passes
// a barrier with them, it counts for the present run. The next run waits until
// all workers that have left are back. So no worker trains or passes a barrier
// alone because another one left a moment later.
//
// Terms: a worker's clock is the number of steps that it has ended. Its
// staleness is its clock minus the clock of the slowest worker.

#ifndef TFSWITCH_CC_SYNC_WORKER_GROUP_H_
#define TFSWITCH_CC_SYNC_WORKER_GROUP_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

// This room uses messages of protos/tfswitch/v1/coordination.proto as its
// types.
using v1::Contribution;
using v1::Round;
using GroupMember = v1::Member;

struct WorkerGroupOptions {
  // How long after its last call a worker counts as alive.
  absl::Duration lease = absl::Seconds(30);
  // Before this many workers have joined a run, no round closes and no worker
  // may run ahead of the others. 0 means no wait.
  uint32_t num_workers = 0;
  // How long to wait for these workers after the first one has joined.
  absl::Duration join_timeout = absl::Seconds(600);
  // A round closes when it has this many contributions. If this is at most
  // num_workers, a round also closes when each present worker has contributed
  // once. When all workers have left, the remaining contributions form a last
  // round. 0 means num_workers. Any other value needs num_workers.
  uint32_t contributions_per_round = 0;
  // Whether a contribution to a closed round counts in the open round instead.
  // If not, it is dropped, and the stats count it as dropped.
  bool carries_late_contributions = false;
  // Other settings that must be the same for all workers, as a text:
  // "bsp(mean)".
  std::string settings;

  absl::Status Validate() const;
  std::string ToString() const;

  friend bool operator==(const WorkerGroupOptions& a,
                         const WorkerGroupOptions& b) {
    return a.lease == b.lease && a.num_workers == b.num_workers &&
           a.join_timeout == b.join_timeout &&
           a.contributions_per_round == b.contributions_per_round &&
           a.carries_late_contributions == b.carries_late_contributions &&
           a.settings == b.settings;
  }
};

// AlreadyExists, naming both options, if the options of the group differ from
// those that a worker asks for.
absl::Status CheckSameOptions(const std::string& group,
                              const WorkerGroupOptions& present,
                              const WorkerGroupOptions& asked);

// Durations are rounded to milliseconds in messages.
v1::GroupOptions ToProto(const WorkerGroupOptions& options);
WorkerGroupOptions FromProto(const v1::GroupOptions& proto);

// Identifies the worker and the step to which gradients belong.
struct StepTag {
  std::string group;
  uint32_t worker = 0;
  uint64_t incarnation = 0;
  int64_t clock = 0;
};

// The worker's number as users set it, for errors: "`worker_id=3` of a Worker,
// `task_index=3` of a SyncReplicasOptimizer, or task 3 of TF_CONFIG".
std::string NumberAsSet(uint32_t worker);

// FailedPrecondition, naming the number, if `process` is another process of
// this machine that runs. `process` is the identity of the one that has joined
// as `worker`; it may be empty.
absl::Status CheckIsAlone(const std::string& group, uint32_t worker,
                          const std::string& process);

// Thread-compatible.
class WorkerGroup {
 public:
  // The barrier at the end of an epoch. When it opens, the marks of the workers
  // increase by 1.
  static constexpr char kEndOfEpoch[] = "end of epoch";

  // Where a worker begins; the answer to its join.
  using Place = v1::JoinResponse;

  static constexpr int64_t kNoRound = -1;

  // How many closed rounds are kept, for workers and shards that ask late.
  static constexpr size_t kKeptRounds = 1024;
  static constexpr size_t kStalenessBuckets = 65;

  // A worker that is in the group.
  struct Worker {
    uint64_t incarnation = 0;
    int64_t clock = 0;
    // The last round that does not wait for this worker.
    int64_t last_round = kNoRound;
    absl::Time lease_end;
    // Where it waits; may be empty.
    std::string barrier;
    // How many barriers the worker has entered.
    int64_t barrier_generation = 0;
    // The number of the last barrier that opened for this worker; 0 if none
    // has.
    int64_t opening = 0;
    absl::Time joined;
    // Not 0 if the worker has left the present run and joined again. It trains
    // with the others again when all bits are cleared. kOwnStep is cleared when
    // it has ended a step, kTheirStep when a worker that never left has ended
    // one.
    uint32_t missing_steps = 0;

    bool has_come_back() const { return missing_steps != 0; }
    bool is_waiting() const { return !barrier.empty(); }
    bool IsMissingIn(int64_t round) const {
      return !is_waiting() && last_round < round;
    }
  };

  // The incarnations of workers count up from `first_incarnation`. A restarted
  // server must pass a higher number, so that processes from before the restart
  // are recognised.
  //
  // REQUIRES: options.Validate() is OK.
  explicit WorkerGroup(const WorkerGroupOptions& options,
                       uint64_t first_incarnation = 1);

  // Starts a new run with different options. Closed rounds stay, and the next
  // worker to join applies them. All contributions to the open round are
  // withdrawn, even those that would stay after the death of their workers.
  //
  // REQUIRES: there are no workers, options.Validate() is OK.
  void Reconfigure(const WorkerGroupOptions& options);

  // Adds a worker. If the worker is a member already, its process was
  // restarted, and a new incarnation replaces the old one. The old
  // incarnation's contribution to the open round is withdrawn, because the old
  // process did not learn that it counts. There are two exceptions: rounds that
  // take several contributions of each worker, and contributions with progress
  // in work queues.
  //
  // If the group has given a process up and it joins again, it passes its
  // `previous` incarnation. Its contribution then stays, and it does not wait
  // again for workers that have ended since then.
  //
  // A process that continues from its own checkpoint passes the step that it
  // takes first as `first_step`. If the group has counted fewer steps of the
  // worker, it sets its count to this number.
  //
  // A `job` is a named training. A new process of the present job continues
  // where its worker was, or where the slowest training worker is if that is
  // further. If no worker trains, it continues at the furthest point at which a
  // worker has left. A different name begins a new job without earlier steps.
  //
  // REQUIRES: CheckJoin() is OK.
  Place Join(uint32_t worker, absl::Time now, uint64_t previous = 0,
             int64_t first_step = 0, const std::string& job = "",
             const std::string& process = "");
  // AlreadyExists while other workers train another job. ResourceExhausted if
  // `max_workers` other workers are members now or were members before.
  absl::Status CheckJoin(const v1::JoinRequest& request,
                         uint64_t max_workers) const;

  // Renews the lease. NotFound if the worker is not a member (any more); then
  // it must join again. FailedPrecondition if another incarnation of the worker
  // is a member.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation, absl::Time now);

  // Says that the worker has ended its step number request.clock(). The step
  // contributes to request.round(), the round that was open when the step
  // began; kNoRound means that it contributes to none. A contribution with
  // progress in work queues counts even if the worker dies. Repeating the last
  // arrival is OK and changes nothing.
  //
  // In addition to the errors of Heartbeat: OutOfRange if `clock` is not the
  // worker's clock or `round` has not opened, InvalidArgument if `weight` is
  // negative or not finite.
  absl::Status Arrive(const v1::ArriveRequest& request, absl::Time now);

  // Says that the worker waits at `barrier`. `barrier_generation` is the number
  // of barriers that this incarnation has entered before. Repeating the last
  // call is OK and changes nothing.
  //
  // In addition to the errors of Heartbeat: InvalidArgument if the barrier has
  // no name, FailedPrecondition while the worker waits at a different barrier,
  // OutOfRange if `barrier_generation` is not the worker's number.
  absl::Status Enter(uint32_t worker, uint64_t incarnation,
                     const std::string& barrier, int64_t barrier_generation,
                     absl::Time now);

  // The step and round from which the worker continues; nullopt while the
  // worker waits at a barrier. Has the errors of Heartbeat, and
  // FailedPrecondition for a deadlock: all workers wait, but those that passed
  // the last barrier together now wait at different barriers, so none can open.
  absl::StatusOr<std::optional<Place>> PlaceAfterBarrier(uint32_t worker,
                                                         uint64_t incarnation);

  // Releases the workers that wait at `barrier`, although other workers do not
  // wait there: there are items to train. Each continues with the clock of the
  // slowest worker, so that no worker must wait until they have caught up.
  void Release(const std::string& barrier);

  // Sets the weight of the step's contribution to the open round to 0. So the
  // step does not count, but the round can still close for the workers that
  // wait for it.
  void Void(uint64_t incarnation, int64_t clock);
  // Sets the weight of all contributions to the open round to 0, and also the
  // counts of steps.
  void VoidAll();

  // Says that the worker has no more data, or ends early. Leaving twice is OK.
  // For `mark` see GroupMember.
  void Leave(uint32_t worker, uint64_t incarnation, int64_t mark = 0);

  // Lists the leases that have ended, and whether the wait for joins has ended;
  // nullopt if nothing has ended.
  using Expiry = v1::CoordinationRecord::Expiry;
  std::optional<Expiry> ExpiryAt(absl::Time now) const;
  void Expire(const Expiry& expiry);
  // When the next lease or wait for joins ends; InfiniteFuture if none does.
  absl::Time NextExpiry() const;

  int64_t open_round() const { return open_round_; }

  // The closed round `number`. NotFound if the round has not closed. OutOfRange
  // if it is no longer kept.
  absl::StatusOr<Round> ClosedRound(int64_t number) const;

  // Whether a worker that has ended `clock` steps may begin the next one: no
  // worker is more than `staleness` steps behind it.
  bool MayProceed(int64_t clock, int64_t staleness) const;

  // Describes for messages the workers for which is_meant() is true, and those
  // that have not joined, as "worker 3 of 5 (at step 17, last heard 4 s ago), 2
  // of 5 workers that have not joined". With kNoTime the seconds are left out.
  static constexpr absl::Time kNoTime = absl::InfinitePast();
  std::string Describe(absl::FunctionRef<bool(const Worker&)> is_meant,
                       absl::Time now) const;

  // Null if the worker is not a member (any more). The next event may destroy
  // the returned object.
  const Worker* FindMember(uint32_t worker, uint64_t incarnation) const;
  uint64_t group_instance() const { return group_instance_; }

  // The effects of the events since TakeEffects() was last called.
  struct Effects {
    bool has_lost_members = false;   // Left, died or restarted.
    std::string opened_barrier;      // Empty if none has opened.
    bool is_anyone_waiting = false;  // Now, at a barrier.
  };
  Effects TakeEffects();

  // The stats of the group. The coordinator adds those of work queues.
  v1::GetGroupStatsResponse stats() const;

  // Saves the state, but not the options and the times. Restore() sets it in a
  // new group with the same options; RenewLeases() must follow. DataLoss if the
  // saved state is invalid.
  void Save(v1::SavedGroup* saved) const;
  absl::Status Restore(const v1::SavedGroup& saved);
  // Makes all leases, and the time for joining, start now.
  void RenewLeases(absl::Time now);

 private:
  using Position = v1::SavedGroup::Position;

  static constexpr uint32_t kOwnStep = 1;
  static constexpr uint32_t kTheirStep = 2;

  absl::StatusOr<Worker*> Find(uint32_t worker, uint64_t incarnation);
  // Whether rounds take more than one contribution of each worker.
  bool takes_many_contributions() const {
    return options_.contributions_per_round > options_.num_workers;
  }
  bool IsComplete() const;
  // Withdraws contributions to the open round, except those with progress in
  // work queues, which stay when their workers die.
  template <typename Predicate>
  void Withdraw(const Predicate& is_meant);
  // The lowest clock of the workers that do not wait at a barrier; INT64_MAX if
  // there is no such worker.
  int64_t SlowestClock() const;
  void NoteMark(uint32_t worker, int64_t mark);
  void NoteLoss(uint32_t worker, bool has_joined);
  void BeginJob(uint32_t worker, const std::string& job);
  Position PositionOf(uint32_t worker) const;
  // Starts the next run. Called when all workers have left and one joins.
  void BeginAnew();
  // Starts the next run if each member has left the present run and joined
  // again. The members stay.
  void BeginAnewIfAllHaveLeft();
  // Records that the worker has ended a step. A worker that has joined again
  // trains with the others after one step of its own and one step of theirs.
  void NoteStep(Worker* worker);
  // Called after each event: ends the run, closes the round and opens the
  // barrier if the event allows it.
  void Settle();
  void CloseIfComplete();
  void OpenIfAllWait();
  // The barrier that can open now; null if there is none.
  const std::string* BarrierToOpen() const;

  WorkerGroupOptions options_;
  uint64_t group_instance_;
  std::map<uint32_t, Worker> workers_;  // The keys are their numbers.
  std::set<uint32_t> ever_joined_;
  std::set<uint32_t> seen_;  // Workers that have joined in the present run.
  std::set<uint32_t>
      left_;  // Workers of seen_ that have left and not joined again.
  uint64_t next_incarnation_;
  uint64_t first_of_present_run_;  // The first incarnation of the present run.
  int64_t num_openings_ = 0;       // In the present run.
  Effects effects_;                // is_anyone_waiting is not set.
  size_t num_awaited_;             // How many must join before the run begins.
  bool waits_for_joins_;
  // Whether this run has begun, or follows another run whose workers came back.
  bool has_begun_ = false;
  absl::Time joins_end_ = absl::InfiniteFuture();
  // The highest clock of any worker.
  int64_t last_clock_ = 0;
  // The clock with which the workers of a run begin.
  int64_t first_clock_ = 0;
  // The present job; may be empty.
  std::string job_;
  // How far each worker with a mark has come in the job.
  std::map<uint32_t, Position> positions_;
  int64_t open_round_ = 0;
  // Contributions to the open round.
  std::vector<Contribution> open_;
  // The last kKeptRounds, oldest first.
  std::deque<Round> closed_;
  // stats() fills in the fields that are missing here. num_steps counts steps
  // that have ended and were not withdrawn.
  v1::GetGroupStatsResponse stats_;
};

// These describe, in the form of WorkerGroup::Describe, the workers that keep a
// round open, that are behind a clock, or that have not come to a barrier.
std::string DescribeMissing(const WorkerGroup& group, int64_t round,
                            absl::Time now = WorkerGroup::kNoTime);
std::string DescribeBehind(const WorkerGroup& group, int64_t clock,
                           absl::Time now = WorkerGroup::kNoTime);
std::string DescribeAbsent(const WorkerGroup& group, const std::string& barrier,
                           absl::Time now = WorkerGroup::kNoTime);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORKER_GROUP_H_
