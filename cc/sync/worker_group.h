// The state machine of a group of workers: bounded staleness, synchronous
// rounds and barriers. It only decides. It stores no gradients, knows no
// network and reads no clock: each event brings its time, so that tests can
// replay events in any order.
//
// A worker joins, arrives at the end of each of its steps, and leaves. It has a
// lease, which it renews. When a worker dies, its lease ends, and it is dropped
// as if it had left. An arrival may contribute to the open round:
//
//   round r is open -> contributions of r come in -> it closes -> r + 1 is open
//
// A round closes when no worker is missing in it any more. So a worker that
// leaves or dies while others wait may close it. With `contributions_per_round`
// a round closes as soon as it has that many.
//
// A worker may wait at a barrier until all workers do, for example when it has
// used up its data of an epoch. Meanwhile nobody waits for it elsewhere. When
// the barrier opens, all continue with the same clock.
//
// A run ends when all its workers have left. Workers end at different times, so
// one may leave and join again before the last one has left. It then belongs to
// the next run, unless it trains a step together with the others, or passes a
// barrier with them. The next run waits for all workers that have left. So no
// worker trains or passes a barrier alone because another one left a moment
// later.
//
// Terms: a worker's clock is the number of steps that it has ended. Its
// staleness is the distance of its clock to the slowest worker's.

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

// The messages of protos/tfswitch/v1/coordination.proto are the values here.
using v1::Contribution;
using v1::Round;
using GroupMember = v1::Member;

struct WorkerGroupOptions {
  // How long a worker is believed to live after it was last heard of.
  absl::Duration lease = absl::Seconds(30);
  // In each run, waits for this many workers before the first round closes or
  // the first worker runs ahead. 0 means no wait.
  uint32_t num_workers = 0;
  // The longest wait for them after the first worker has joined.
  absl::Duration join_timeout = absl::Seconds(600);
  // A round closes when it has this many contributions. If this is at most
  // num_workers, it also closes when each present worker has made one.
  // Contributions that are left when all have gone are a last round. 0 means
  // num_workers. Needs num_workers.
  uint32_t contributions_per_round = 0;
  // Whether a contribution to a closed round counts in the open one. If not, it
  // is dropped, and stats count it.
  bool carries_late_contributions = false;
  // Other settings on which all workers must agree, in words: "bsp(mean)".
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

// AlreadyExists, naming both, if the options of the group and those that a
// worker asks for differ.
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

// For errors: where users set the numbers of workers.
inline constexpr char kWhereNumbersAre[] =
    "`worker_id` of a Worker, `task_index` of a SyncReplicasOptimizer, or the "
    "task of TF_CONFIG";

// Thread-compatible.
class WorkerGroup {
 public:
  // The barrier after which the next mark begins.
  static constexpr char kEndOfEpoch[] = "end of epoch";

  // The place that a worker gets when it joins.
  using Place = v1::JoinResponse;

  static constexpr int64_t kNoRound = -1;

  // How many closed rounds are kept for late requests.
  static constexpr size_t kKeptRounds = 1024;
  static constexpr size_t kStalenessBuckets = 65;

  // A member.
  struct Worker {
    uint64_t incarnation = 0;
    int64_t clock = 0;
    // The last round in which this worker is not missing.
    int64_t last_round = kNoRound;
    absl::Time lease_end;
    std::string barrier;             // Where it waits; empty if nowhere.
    int64_t barrier_generation = 0;  // The number of barriers it has entered.
    // The number of the last opening that it was part of; 0 if none.
    int64_t opening = 0;
    absl::Time joined;
    // Not 0 if it has left the present run and come back. The bits say who must
    // still end a step before it counts as training with the others: itself
    // (kOwnStep), one that was there all the time (kTheirStep).
    uint32_t missing_steps = 0;

    bool has_come_back() const { return missing_steps != 0; }
    bool is_waiting() const { return !barrier.empty(); }
    bool IsMissingIn(int64_t round) const {
      return !is_waiting() && last_round < round;
    }
  };

  // Incarnations count from `first_incarnation`. It must be another number
  // after a restart, so that earlier processes are not mistaken for present
  // ones.
  //
  // REQUIRES: options.Validate() is OK.
  explicit WorkerGroup(const WorkerGroupOptions& options,
                       uint64_t first_incarnation = 1);

  // Starts a new run with other options. Closed rounds stay, and the next
  // worker to join applies them. All contributions to the open round are
  // withdrawn, also those that survive their workers.
  //
  // REQUIRES: there are no workers, options.Validate() is OK.
  void Reconfigure(const WorkerGroupOptions& options);

  // Adds a worker. If it is a member already, its process was restarted, and
  // the new incarnation replaces the old one. The old one's contribution to the
  // open round is withdrawn, because the old process did not learn that it
  // counts. It is not withdrawn if rounds take many contributions of each
  // worker, or it survives its worker.
  //
  // A process that was given up and joins again passes its `previous`
  // incarnation. Its contribution stays, and it does not wait again for workers
  // that have ended meanwhile.
  //
  // A process that continues from its own checkpoint passes as `first_step` the
  // step that it takes first. If the group knows of fewer steps of the worker,
  // it takes over this number.
  //
  // A `job` is a named training. A new process of the present job continues
  // where its worker was, or where the slowest training worker is, if that is
  // further. If no worker trains, it continues where the furthest one has left.
  // Another name begins a new job without earlier steps.
  //
  // REQUIRES: CheckJoin() is OK.
  Place Join(uint32_t worker, absl::Time now, uint64_t previous = 0,
             int64_t first_step = 0, const std::string& job = "",
             const std::string& process = "");
  // AlreadyExists while other workers train another job. ResourceExhausted if
  // `max_workers` others have joined, now or earlier.
  absl::Status CheckJoin(const v1::JoinRequest& request,
                         uint64_t max_workers) const;

  // Renews the lease. NotFound if the worker is not a member (any more): it
  // must join again. FailedPrecondition if another incarnation of it is a
  // member.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation, absl::Time now);

  // The worker has ended its step number request.clock(). It contributes to
  // request.round(), the one that was open when the step began, unless that is
  // kNoRound. A contribution with progress survives its worker. Repeating the
  // last arrival is OK and changes nothing.
  //
  // Besides the errors of Heartbeat: OutOfRange if `clock` is not the worker's
  // or `round` has not opened, InvalidArgument if `weight` is negative or not
  // finite.
  absl::Status Arrive(const v1::ArriveRequest& request, absl::Time now);

  // The worker waits at `barrier`. `barrier_generation` is the number of
  // barriers that its incarnation has entered before. Repeating the last call
  // is OK.
  //
  // Besides the errors of Heartbeat: InvalidArgument for a barrier without a
  // name, FailedPrecondition while it waits at another one, OutOfRange if
  // `barrier_generation` is not the worker's.
  absl::Status Enter(uint32_t worker, uint64_t incarnation,
                     const std::string& barrier, int64_t barrier_generation,
                     absl::Time now);

  // The place from which the worker continues, or nullopt if it still waits at
  // a barrier. Besides the errors of Heartbeat: FailedPrecondition if all wait,
  // but not all workers that have passed the last barrier wait at the same one.
  absl::StatusOr<std::optional<Place>> PlaceAfterBarrier(uint32_t worker,
                                                         uint64_t incarnation);

  // Releases the workers that wait at `barrier`, although not all wait there,
  // because there is work to do. Each continues with the clock of the slowest
  // worker, so that nobody must wait for it to catch up.
  void Release(const std::string& barrier);

  // Sets the weight of the step's contribution to the open round to 0. So it
  // does not count, but the round closes for workers that wait for it.
  void Void(uint64_t incarnation, int64_t clock);
  // Voids all contributions to the open round. Earlier steps do not count any
  // more, either.
  void VoidAll();

  // The worker has no more data, or ends early. Leaving twice is OK. For `mark`
  // see GroupMember.
  void Leave(uint32_t worker, uint64_t incarnation, int64_t mark = 0);

  // The leases and waits for joins that have ended; nullopt if none has.
  using Expiry = v1::CoordinationRecord::Expiry;
  std::optional<Expiry> ExpiryAt(absl::Time now) const;
  void Expire(const Expiry& expiry);
  // When the next one ends; InfiniteFuture if none does.
  absl::Time NextExpiry() const;

  int64_t open_round() const { return open_round_; }

  // The closed round `number`. NotFound if it has not closed, OutOfRange if it
  // is no longer kept.
  absl::StatusOr<Round> ClosedRound(int64_t number) const;

  // Whether a worker that has ended `clock` steps may begin the next one: no
  // worker is more than `staleness` steps behind it.
  bool MayProceed(int64_t clock, int64_t staleness) const;

  // For messages: describes the workers that `is_meant`, and those that have
  // not joined, as "worker 3 of 5 (at step 17, last heard 4 s ago), 2 of 5
  // workers that have not joined". With kNoTime the seconds are left out.
  static constexpr absl::Time kNoTime = absl::InfinitePast();
  std::string Describe(absl::FunctionRef<bool(const Worker&)> is_meant,
                       absl::Time now) const;

  // Null if the worker is not a member (any more). The next event may delete
  // it.
  const Worker* FindMember(uint32_t worker, uint64_t incarnation) const;
  uint64_t group_instance() const { return group_instance_; }

  // The effects of the events since the last call of TakeEffects().
  struct Effects {
    bool has_lost_members = false;   // They left, died, or were restarted.
    std::string opened_barrier;      // Empty if none has opened.
    bool is_anyone_waiting = false;  // At a barrier, now.
  };
  Effects TakeEffects();

  // The stats without work queues, which the coordinator adds.
  v1::GetGroupStatsResponse stats() const;

  // Saves the state without options and times. Restore() puts it into a new
  // group of the same options; RenewLeases() must follow. DataLoss if the saved
  // state is invalid.
  void Save(v1::SavedGroup* saved) const;
  absl::Status Restore(const v1::SavedGroup& saved);
  // Starts leases, and the time to join, now.
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
  // Drops contributions to the open round, except those that survive their
  // workers.
  template <typename Predicate>
  void Withdraw(const Predicate& is_meant);
  // The least clock of the workers that do not wait at a barrier; INT64_MAX if
  // there are none.
  int64_t SlowestClock() const;
  void NoteMark(uint32_t worker, int64_t mark);
  void NoteLoss(uint32_t worker, bool has_joined);
  void BeginJob(uint32_t worker, const std::string& job);
  Position PositionOf(uint32_t worker) const;
  // Starts the next run: all have gone, and the next worker to join is first.
  void BeginAnew();
  // Starts the next run if the only members are workers that have left this run
  // and come back. They stay members.
  void BeginAnewIfAllHaveLeft();
  // Records that the worker has ended a step. A worker that came back trains
  // with the others after a step of its own and one of theirs.
  void NoteStep(Worker* worker);
  // Does what follows from an event. Called after each event.
  void Settle();
  void CloseIfComplete();
  void OpenIfAllWait();
  // The barrier to open if all wait; null if there is none.
  const std::string* BarrierToOpen() const;

  WorkerGroupOptions options_;
  uint64_t group_instance_;
  std::map<uint32_t, Worker> workers_;  // Members by number.
  std::set<uint32_t> ever_joined_;
  std::set<uint32_t> seen_;  // Workers that have joined in the present run.
  std::set<uint32_t>
      left_;  // Workers of seen_ that have left and are not back.
  uint64_t next_incarnation_;
  uint64_t first_of_present_run_;  // The first incarnation of the present run.
  int64_t num_openings_ = 0;       // Barriers opened in the present run.
  Effects effects_;                // Without is_anyone_waiting.
  size_t num_awaited_;  // How many workers must join before the run begins.
  bool waits_for_joins_;
  bool has_begun_ = false;  // This run, or one before it without a break.
  absl::Time joins_end_ = absl::InfiniteFuture();
  int64_t last_clock_ = 0;   // The greatest clock of any worker.
  int64_t first_clock_ = 0;  // The clock of awaited workers when a run begins.
  std::string job_;          // The present job; may be empty.
  // The positions in the job, for workers with a mark.
  std::map<uint32_t, Position> positions_;
  int64_t open_round_ = 0;
  std::vector<Contribution> open_;  // Contributions to the open round.
  std::deque<Round> closed_;        // The last kKeptRounds, in order.
  // Lacks the fields that stats() fills in. num_steps counts steps that have
  // ended and were not withdrawn.
  v1::GetGroupStatsResponse stats_;
};

// See WorkerGroup::Describe: the workers that keep a round open, that are
// behind a clock, and that have not come to a barrier.
std::string DescribeMissing(const WorkerGroup& group, int64_t round,
                            absl::Time now = WorkerGroup::kNoTime);
std::string DescribeBehind(const WorkerGroup& group, int64_t clock,
                           absl::Time now = WorkerGroup::kNoTime);
std::string DescribeAbsent(const WorkerGroup& group, const std::string& barrier,
                           absl::Time now = WorkerGroup::kNoTime);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORKER_GROUP_H_
