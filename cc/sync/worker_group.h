// The workers that train, and their progress: the state machine behind bounded
// staleness, synchronous rounds and barriers. It decides; it stores no
// gradients, knows no network and reads no clock: the time comes with each
// event, so that tests can replay any order of them.
//
// A worker joins, arrives at the end of each of its steps, and leaves. It keeps
// its place by a lease, which it renews; one that dies is dropped when its
// lease ends, as if it had left. Arriving may contribute to the open round:
//
//   round r is open -> contributions of r come in -> it closes -> r + 1 is open
//
// A round closes when no worker is missing in it any more, so the one that
// leaves or dies while others wait closes it: leaving is an event of the same
// machine, not a number that somebody polls. With `contributions_per_round` a
// round closes as soon as it has that many.
//
// A worker may wait at a barrier until all do, for example when its data of an
// epoch is used up. Nobody waits for it elsewhere meanwhile. When the barrier
// opens, all go on together, at one clock.
//
// A run ends when all its workers have left. One may be back before the last
// has left, as each comes to its end by itself. Unless it has trained together
// with the others since, or passed a barrier with them, it is of the next run,
// which waits for all that have left: so nobody trains or passes a barrier
// alone because another one was a moment later in leaving.
//
// Terms: a worker's clock is how many steps it has ended; its staleness is how
// far that is ahead of the slowest worker. All events go through one machine in
// one order, and it alone decides.

#ifndef TFSWITCH_CC_SYNC_WORKER_GROUP_H_
#define TFSWITCH_CC_SYNC_WORKER_GROUP_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

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
  // So many workers are waited for before the first round closes, or the first
  // worker runs ahead, in each run; 0: nobody is.
  uint32_t num_workers = 0;
  // But no longer than this after the first has joined.
  absl::Duration join_timeout = absl::Seconds(600);
  // A round closes when it has so many contributions, or, up to num_workers of
  // them, when each worker that is there has made one; contributions left when
  // all have gone are a last round. 0: as num_workers. Needs num_workers.
  uint32_t contributions_per_round = 0;
  // A contribution to a round that has closed: false: it is dropped, and
  // counted; true: it counts in the open round.
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

// Times have milliseconds in messages.
v1::GroupOptions ToProto(const WorkerGroupOptions& options);
WorkerGroupOptions FromProto(const v1::GroupOptions& proto);

// Identifies the worker and the step of gradients.
struct StepTag {
  std::string group;
  uint32_t worker = 0;
  uint64_t incarnation = 0;
  int64_t clock = 0;
};

// Where users give workers their numbers, for errors.
inline constexpr char kWhereNumbersAre[] =
    "`worker_id` of a Worker, `task_index` of a SyncReplicasOptimizer, or the "
    "task of TF_CONFIG";

// Thread-compatible.
class WorkerGroup {
 public:
  // The barrier behind which the next mark begins.
  static constexpr char kEndOfEpoch[] = "end of epoch";

  // The place that a worker gets when it joins.
  using Place = v1::JoinResponse;

  static constexpr int64_t kNoRound = -1;

  // How many closed rounds are kept for late requests.
  static constexpr size_t kKeptRounds = 1024;
  static constexpr size_t kStalenessBuckets = 65;

  // Incarnations count from `first_incarnation`: another one after a restart,
  // so that processes of before are not taken for those of now.
  //
  // REQUIRES: options.Validate() is OK.
  explicit WorkerGroup(const WorkerGroupOptions& options,
                       uint64_t first_incarnation = 1);

  // Begins anew with other options. Closed rounds stay, so that the next worker
  // to join brings them in; contributions to the open one are withdrawn, also
  // those that would survive their workers.
  //
  // REQUIRES: nobody is there, options.Validate() is OK.
  void Reconfigure(const WorkerGroupOptions& options);

  // A worker that is there already has been started anew: its new incarnation
  // takes its place. The contribution of the old one to the open round is
  // withdrawn, for the old one has not heard that it counts; unless a round
  // takes many contributions of each, or it survives its worker.
  //
  // A process that the group has given up and that comes back names its
  // `previous` incarnation: its contribution stands, and it does not wait once
  // more for others that have ended meanwhile.
  //
  // One that has been started again from a checkpoint of its own names the
  // `first_step` that it takes; if the group does not know of so many steps of
  // it, it takes that number over.
  //
  // A `job` is a training with a name. A new process of the present one goes on
  // where it was, or where the slowest of the others is that train, if that is
  // further; if none of them is there, where the one is that has left furthest.
  // With another name a new job begins, which knows no steps of before.
  //
  // REQUIRES: CanJoin(worker, job).
  Place Join(uint32_t worker, absl::Time now, uint64_t previous = 0,
             int64_t first_step = 0, const std::string& job = "",
             const std::string& process = "");
  // False while others are there that train another job.
  bool CanJoin(uint32_t worker, const std::string& job) const;
  const std::string& job() const { return job_; }
  // Ignored if the worker is none of the group's.
  void NoteMark(uint32_t worker, uint64_t incarnation, int64_t mark);

  // Renews the lease. NotFound if the worker is not a member (any more): it
  // has to join again. FailedPrecondition if another incarnation is.
  absl::Status Heartbeat(uint32_t worker, uint64_t incarnation, absl::Time now);

  // The worker has ended its step number `clock`. It contributes to `round`,
  // which was open when it began the step, unless that is kNoRound. Repeating
  // the last arrival is OK and changes nothing. `survives_worker`: see
  // Contribution.
  //
  // Besides the errors of Heartbeat: OutOfRange if `clock` is not the worker's
  // or `round` has not opened, InvalidArgument if `weight` is negative or not
  // finite.
  absl::Status Arrive(uint32_t worker, uint64_t incarnation, int64_t clock,
                      int64_t round, double weight, absl::Time now,
                      bool survives_worker = false);

  // The worker waits at `barrier`; `barrier_generation` is how many barriers
  // its incarnation has come to before. Repeating the last one is OK.
  //
  // Besides the errors of Heartbeat: InvalidArgument for a barrier without a
  // name, FailedPrecondition while it waits at another one, OutOfRange if
  // `barrier_generation` is not the worker's.
  absl::Status Enter(uint32_t worker, uint64_t incarnation,
                     const std::string& barrier, int64_t barrier_generation,
                     absl::Time now);

  // Where the worker goes on if it does not wait at a barrier (any more).
  // nullopt if it does. Besides the errors of Heartbeat: FailedPrecondition if
  // all wait, and those that came by the last barrier do not wait at the same.
  absl::StatusOr<std::optional<Place>> PlaceAfterBarrier(uint32_t worker,
                                                         uint64_t incarnation);

  // Workers that wait at `barrier` go on, though not all wait there: there is
  // something else to do. Each goes on as far as the slowest, so that nobody
  // has to wait for it to catch up.
  void Release(const std::string& barrier);

  // The step's contribution to the open round weighs nothing, so that it counts
  // for nothing and workers that wait for the round get it.
  void Void(uint64_t incarnation, int64_t clock);
  // The same for all steps that have contributed, and no step of before counts
  // any more.
  void VoidAll();

  // The worker has no more data, or gives up. Leaving twice is OK.
  void Leave(uint32_t worker, uint64_t incarnation);

  // What time has brought to an end; nullopt: nothing.
  using Expiry = v1::CoordinationRecord::Expiry;
  std::optional<Expiry> ExpiryAt(absl::Time now) const;
  void Expire(const Expiry& expiry);
  void Tick(absl::Time now) {
    if (const auto expiry = ExpiryAt(now)) Expire(*expiry);
  }

  // When Tick() will next have something to do; InfiniteFuture if never.
  absl::Time NextTick() const;

  int64_t open_round() const { return open_round_; }

  // The closed round `number`. NotFound if it has not closed, OutOfRange if it
  // is no longer kept.
  absl::StatusOr<Round> ClosedRound(int64_t number) const;

  // Whether a worker that has ended `clock` steps may begin the next one: no
  // worker is more than `staleness` steps behind it.
  bool MayProceed(int64_t clock, int64_t staleness) const;

  // The least clock of the workers that are there and at no barrier; INT64_MAX
  // if none is.
  int64_t SlowestClock() const;

  // For messages: the workers that keep round `round` open, that are behind
  // `clock`, or that have not come to a barrier. "worker 3 of 5 (at step 17,
  // last heard 4 s ago), 2 of 5 workers that have not joined"; with kNoTime
  // without the seconds.
  static constexpr absl::Time kNoTime = absl::InfinitePast();
  std::string DescribeMissing(int64_t round, absl::Time now = kNoTime) const;
  std::string DescribeBehind(int64_t clock, absl::Time now = kNoTime) const;
  std::string DescribeAbsent(const std::string& barrier,
                             absl::Time now = kNoTime) const;

  bool IsMember(uint32_t worker, uint64_t incarnation) const;
  uint64_t group_instance() const { return group_instance_; }
  bool HasJoined(uint32_t worker) const {  // Ever.
    return ever_joined_.count(worker) > 0;
  }
  size_t num_ever_joined() const { return ever_joined_.size(); }
  // The next that a worker is given; all others will be greater.
  uint64_t next_incarnation() const { return next_incarnation_; }
  // A step was ended by one that had been given up.
  void CountDropped() { stats_.set_dropped(stats_.dropped() + 1); }
  // How many members have gone: left, died, or been started anew.
  int64_t num_departures() const { return num_departures_; }
  // The steps that a member has ended; -1 if it is none.
  int64_t ClockOf(uint32_t worker, uint64_t incarnation) const;
  // The barriers that a member has come to; -1 if it is none.
  int64_t BarrierGenerationOf(uint32_t worker, uint64_t incarnation) const;
  bool is_anyone_waiting() const;  // At a barrier.
  // The barrier that has opened since this was called last; empty if none has.
  std::string TakeOpenedBarrier();
  // But for work queues, which its coordinator knows.
  v1::GetGroupStatsResponse stats() const;

  // All of it but its options and times, and the way back, into a new one of
  // the same options. DataLoss if it is none. RenewLeases() has to follow.
  void Save(v1::SavedGroup* saved) const;
  absl::Status Restore(const v1::SavedGroup& saved);
  // Leases, and the time to join, begin now.
  void RenewLeases(absl::Time now);

 private:
  using Position = v1::SavedGroup::Position;

  static constexpr uint32_t kOwnStep = 1;
  static constexpr uint32_t kTheirStep = 2;

  struct Worker {
    uint64_t incarnation = 0;
    int64_t clock = 0;
    int64_t last_round = kNoRound;  // The latest that does not miss it.
    absl::Time lease_end;
    std::string barrier;             // The one it waits at; empty: none.
    int64_t barrier_generation = 0;  // Barriers that it has come to.
    // The last that opened for it: as number, or 0 if none has opened yet.
    int64_t opening = 0;
    absl::Time joined;
    // That it has left the present run before, and come back, and which of
    // these have not ended a step since: it (kOwnStep), one of those that have
    // been there all the time (kTheirStep).
    uint32_t missing_steps = 0;

    bool has_come_back() const { return missing_steps != 0; }
    bool is_waiting() const { return !barrier.empty(); }
  };

  absl::StatusOr<Worker*> Find(uint32_t worker, uint64_t incarnation);
  bool IsMissing(const Worker& worker, int64_t round) const {
    return !worker.is_waiting() && worker.last_round < round;
  }
  // More than one of each worker per round.
  bool takes_many_contributions() const {
    return options_.contributions_per_round > options_.num_workers;
  }
  bool IsComplete() const;
  // Drops contributions to the open round, except those that survive their
  // workers.
  template <typename Predicate>
  void Withdraw(const Predicate& is_meant);
  // "worker 3 (at step 17), ..." for the workers of which is_named(worker) is
  // true.
  template <typename Predicate>
  std::string Describe(absl::Time now, const Predicate& is_named) const;
  void NoteLoss(uint32_t worker, bool has_joined);
  void BeginJob(uint32_t worker, const std::string& job);
  Position PositionOf(uint32_t worker) const;
  // All have gone; the next one to join is the first.
  void BeginAnew();
  // The same if there are only workers that have come back, who stay.
  void BeginAnewIfAllHaveLeft();
  // It has ended a step, which tells with whom it trains.
  void NoteStep(Worker* worker);
  // Carries out the consequences of an event; to be called after each.
  void Settle();
  void CloseIfComplete();
  void OpenIfAllWait();
  // All wait, and there is one barrier to open: null if not.
  const std::string* BarrierToOpen() const;

  WorkerGroupOptions options_;
  uint64_t group_instance_;
  std::map<uint32_t, Worker> workers_;  // The active ones, in order.
  std::set<uint32_t> ever_joined_;
  std::set<uint32_t> seen_;  // Workers that have joined in the present run.
  std::set<uint32_t> left_;  // Of these, have left, and are not back.
  uint64_t next_incarnation_;
  uint64_t first_of_present_run_;  // Incarnation; a run begins anew.
  int64_t num_openings_ = 0;       // Barriers, in the present run.
  std::string opened_barrier_;     // For TakeOpenedBarrier().
  int64_t num_departures_ = 0;
  size_t num_awaited_;  // So many join before the present run begins.
  bool waits_for_joins_;
  bool has_begun_ = false;  // The present run, or one before without a break.
  absl::Time joins_end_ = absl::InfiniteFuture();
  int64_t last_clock_ = 0;   // The greatest of any worker.
  int64_t first_clock_ = 0;  // At which the workers of a run begin together.
  std::string job_;          // The present one; empty: no name.
  std::map<uint32_t, Position> positions_;  // In it, of those with a mark.
  int64_t open_round_ = 0;
  std::vector<Contribution> open_;  // Contributions to it.
  std::deque<Round> closed_;        // The last kKeptRounds, in order.
  // Without what stats() finds elsewhere. The steps of a worker in it are those
  // that have ended and were not withdrawn.
  v1::GetGroupStatsResponse stats_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_WORKER_GROUP_H_
