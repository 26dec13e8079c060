// Keeps the worker groups and work queues of one server, and blocks callers
// that have to wait.

#ifndef TFSWITCH_CC_SYNC_COORDINATOR_H_
#define TFSWITCH_CC_SYNC_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/write_gate.h"
#include "cc/sync/work_queue.h"
#include "cc/sync/worker_group.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// Limits on the state that clients may create. Groups, work queues, and each
// group's list of workers that ever joined are never removed.
struct CoordinatorLimits {
  uint64_t max_groups = 4096;
  // Limits how many workers ever join one group, and how many contributions one
  // of its rounds has.
  uint64_t max_workers = 16384;
  uint64_t max_work_queues = 4096;                    // In all groups.
  uint64_t max_work_queue_bytes = uint64_t{1} << 30;  // In all items.
};

// The name of the barrier at which workers wait if a work queue has no item for
// them.
std::string WorkQueueBarrier(const std::string& queue);

// Has one WorkerGroup for each group name, and the work queues of the groups.
// Deadlines are times of SteadyNow(). At its deadline a wait returns
// DeadlineExceeded, naming the workers that have not come. Shutdown() ends
// waits with Cancelled.
//
// Thread-safe.
class Coordinator {
 public:
  // All instances of groups are below this number. Instances begin at the
  // nanoseconds since 1970, which are far below it.
  static constexpr uint64_t kMaxInstance = uint64_t{1} << 62;

  explicit Coordinator(const CoordinatorLimits& limits = {})
      : limits_(limits) {}
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Makes the group if it does not exist. AlreadyExists if workers train in the
  // group with different options. InvalidArgument if the options are invalid.
  // ResourceExhausted if there are too many groups.
  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options);

  // These calls pass events to WorkerGroup, and return its errors. NotFound if
  // there is no such group.
  //
  // A restarted coordinator may have forgotten the group, and its clock, from
  // which it draws the group's instance, may have been set back. Then other
  // servers know a newer instance of the group. A worker that notices this
  // passes it as `newer_instance`. The group then starts again with a still
  // newer instance, and its workers must join again.
  //
  // InvalidArgument if no coordinator can have drawn `newer_instance`, or if
  // `first_step` is negative. ResourceExhausted if there are too many workers.
  // AlreadyExists while other workers train another job.
  absl::StatusOr<WorkerGroup::Place> Join(const v1::JoinRequest& request);
  absl::Status Heartbeat(const GroupMember& member);
  // Ends a step of a worker, and returns the round that is open afterwards.
  // Also counts the step's progress in work queues, only once if the arrival is
  // repeated. A contribution with progress stays in its round even if the
  // worker dies. NotFound if the worker does not have one of the items (any
  // more): then the step has not ended, and the worker must join again.
  absl::StatusOr<int64_t> Arrive(const v1::ArriveRequest& request);
  absl::Status Leave(const GroupMember& member);

  // Waits until round `number` has closed. The lease of the waiting worker does
  // not end during the wait.
  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline);

  // Waits until a worker that has ended `clock` steps may begin another one: no
  // worker is more than `staleness` steps behind it.
  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline);

  // Makes the worker wait at a barrier until all workers wait there; see
  // WorkerGroup::Enter. Returns the place from which the worker continues.
  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const v1::WaitAtBarrierRequest& request, absl::Time deadline);

  std::vector<std::string> GroupNames();
  // The group's stats, with the unfinished items of its work queues.
  absl::StatusOr<v1::GetGroupStatsResponse> GroupStats(
      const std::string& group);

  // The present workers of all groups.
  int64_t num_workers();

  // Makes a work queue of the group if it does not exist. AlreadyExists, naming
  // the difference, if the queue exists with different options.
  // ResourceExhausted if there are too many queues, or too many bytes of items.
  absl::Status CreateWorkQueue(const v1::CreateWorkQueueRequest& request);

  // These calls pass events to WorkQueue, and return its errors and those of
  // Heartbeat(). FailedPrecondition if there is no such queue. If a worker
  // leaves or dies, its items return to their queues. A worker that gets no
  // item waits at WorkQueueBarrier(queue) until an item returns or all workers
  // wait there. If all items are finished when the barrier opens, the epoch
  // ends.
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const v1::TakeWorkItemRequest& request);
  absl::Status FinishWorkItem(const v1::FinishWorkItemRequest& request);
  // The group need not exist, because a restore may have made the queue.
  absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& group, const std::string& queue);

  // All queues. Progress of steps whose round is still open is left out.
  v1::SavedWorkQueues SaveWorkQueues();

  // Chooses for each group the round up to which a save brings all `num_shards`
  // shards: the last closed one. The result has, by group and number, the
  // rounds that some shard still lacks, and always the last one.
  // request.committed() says which rounds each shard has applied; shards must
  // apply no rounds during this call. Unless `work_queues` is null, sets it to
  // the queues at the same moment.
  v1::Cut ChooseSnapshotRound(const v1::ChooseSnapshotRoundRequest& request,
                              size_t num_shards,
                              v1::SavedWorkQueues* work_queues);

  // Whether RestoreWorkQueues() can restore the queues. FailedPrecondition,
  // naming the difference, if a queue exists with different options.
  // ResourceExhausted if the queues do not all fit. DataLoss if options are
  // invalid, or a state does not fit its options.
  absl::Status CheckRestore(const v1::SavedWorkQueues& saved);
  // Replaces queues by saved ones of the same names. Workers lose their items
  // and must take new ones. If a step of an open round has trained items of
  // these queues, its contribution gets weight 0, because its samples are
  // trained again. If all tables are restored (`voids_open_steps`), first all
  // contributions to open rounds get weight 0, and their samples are handed out
  // again.
  //
  // REQUIRES: CheckRestore() is OK.
  void RestoreWorkQueues(const v1::SavedWorkQueues& saved,
                         bool voids_open_steps);

  // From now on calls `log` before each change of a group or of a work queue,
  // with a CoordinationRecord for Replay(). If `log` returns an error, the
  // change is not made. Changes wait while `gate` is closed.
  // RestoreWorkQueues() is not logged, so a save must follow it.
  //
  // REQUIRES: no other thread uses the coordinator.
  using Log = std::function<absl::Status(absl::string_view record)>;
  void StartLog(Log log, WriteGate* gate);

  // Makes a logged change again. Returns DataLoss for a damaged record. Other
  // errors are those of the call that was logged.
  absl::Status Replay(absl::string_view record);

  // Saves all groups, and the parts of their queues that SaveWorkQueues()
  // leaves out. RestoreGroups() restores them. Call it after
  // RestoreWorkQueues(), when the coordinator has no groups. DataLoss if
  // `saved` is damaged.
  v1::SavedGroups SaveGroups();
  absl::Status RestoreGroups(const v1::SavedGroups& saved);
  // Removes all groups, so their workers must join again. Contributions to open
  // rounds are lost, and items return to their queues. The change is logged.
  //
  // REQUIRES: no other thread uses the coordinator.
  absl::Status ForgetGroups();
  // Makes all leases start now. Called after RestoreGroups() and Replay().
  void RenewLeases();

  // Ends all waits, present and later ones. Idempotent.
  void Shutdown();

 private:
  using WorkQueues = std::map<std::string, WorkQueue>;

  using OpenAdvance = v1::SavedGroup::OpenAdvance;

  struct Group {
    Group(std::string group_name, const WorkerGroupOptions& group_options,
          uint64_t first_incarnation, WorkQueues* group_queues)
        : name(std::move(group_name)),
          options(group_options),
          state(group_options, first_incarnation),
          queues(group_queues) {}
    const std::string name;
    WorkerGroupOptions options;
    WorkerGroup state;
    // Points into queues_.
    WorkQueues* const queues;
    // The progress of steps whose round is open. Entries of closed rounds may
    // remain.
    std::vector<OpenAdvance> advances;
    absl::Time quiet_since;  // The last change, by AwakeNow().
    absl::Time next_line;    // When to log a wait next.
    CondVar changed;
  };

  // Draws a greater number for each later group, unless the clock was set back.
  static uint64_t DrawFirstIncarnation();
  // Logs a change. describe(&record) fills in the record.
  template <typename Describe>
  absl::Status Note(const Describe& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // These functions make the changes, both for calls and for replays. Their
  // effect depends only on the arguments and the state, not on the time. Leases
  // are not saved, so the end of a lease is logged as a change of its own;
  // Tick() does that.
  void MakeGroup(const std::string& group, const WorkerGroupOptions& options,
                 uint64_t first_incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If `first_incarnation` is not 0, the group starts again with it.
  WorkerGroup::Place Join(Group* group, const v1::JoinRequest& request,
                          uint64_t first_incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // REQUIRES: CheckProgress() is OK.
  absl::Status Arrive(Group* group, const v1::ArriveRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Leave(Group* group, const GroupMember& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Enter(Group* group, const v1::WaitAtBarrierRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Expire(Group* group, const WorkerGroup::Expiry& expiry)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeWorkQueue(Group* group, const v1::CreateWorkQueueRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::optional<WorkItem> Take(Group* group, const GroupMember& member,
                               WorkQueue* queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Finish(Group* group, const v1::FinishWorkItemRequest& request,
                      WorkQueue* queue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Whether the arrival is of the member's present step, so it is not repeated.
  static bool IsNew(const Group& group, const v1::ArriveRequest& request);
  // Whether the arrival makes progress in work queues; a repeated arrival does
  // not. NotFound if the member does not have one of the items.
  absl::StatusOr<bool> CheckProgress(Group* group,
                                     const v1::ArriveRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops members whose lease has ended. Returns false if the call could not
  // log that and must be repeated later.
  bool Tick(Group* group, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called after each change of the group: settles the consequences and wakes
  // all waits.
  void Notify(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes back the progress in work queues of steps whose round is open.
  void RevokeOpenAdvances(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  v1::SavedWorkQueues SavedQueues() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The number and the size of queues, which CoordinatorLimits limits.
  struct Room {
    uint64_t num_queues = 0;
    uint64_t bytes = 0;
  };

  // ResourceExhausted if the limits do not allow the queue in addition to
  // queues of the size `used`.
  absl::Status CheckRoom(const std::string& queue,
                         const WorkQueueOptions& options, Room used) const;
  // The number and the size of all queues.
  Room UsedRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<Group*> Find(const std::string& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // FailedPrecondition if there is no such queue. The group need not exist.
  absl::StatusOr<WorkQueue*> FindQueue(const std::string& group,
                                       const std::string& queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Renews the lease of a member and returns its group. Renews the lease before
  // the group's Tick(), so that a worker that is slightly late is not dropped.
  absl::StatusOr<Group*> HearOf(const GroupMember& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Called after each event: returns the items of workers that are gone, ends
  // epochs, and releases workers for which items are there.
  void Settle(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waits until is_over() is true, the worker is not a member any more, or the
  // deadline has come. At the deadline `describe` names the workers that have
  // not come.
  absl::Status Wait(Group* group, const GroupMember& member,
                    absl::Time deadline, const std::function<bool()>& is_over,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const CoordinatorLimits limits_;

  // Constant before the first call of a worker.
  Log log_;
  WriteGate* gate_ = nullptr;

  // One lock guards all groups: an event takes less than a microsecond.
  Mutex mutex_;
  // Groups are never removed, so that pointers to them stay valid.
  std::map<std::string, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
  // The keys are names of groups. The group itself may be missing, because a
  // checkpoint restores queues without their group.
  std::map<std::string, WorkQueues> queues_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_COORDINATOR_H_
