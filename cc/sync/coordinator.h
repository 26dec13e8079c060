// Runs the worker groups and work queues of one server.

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
// group's list of workers that ever joined are kept as long as the coordinator.
struct CoordinatorLimits {
  uint64_t max_groups = 4096;
  // Limits the workers that ever joined one group, and the contributions to one
  // of its rounds.
  uint64_t max_workers = 16384;
  uint64_t max_work_queues = 4096;                    // In all groups.
  uint64_t max_work_queue_bytes = uint64_t{1} << 30;  // In all items.
};

// The barrier at which workers wait if a work queue has no item for them.
std::string WorkQueueBarrier(const std::string& queue);

// Runs one WorkerGroup per name, and its work queues. At its deadline, a time
// of SteadyNow(), every wait returns DeadlineExceeded, naming the missing
// workers. Shutdown() ends waits with Cancelled.
//
// Thread-safe.
class Coordinator {
 public:
  // All instances of groups are lower. It is far above nanoseconds since 1970,
  // from which instances are drawn, and above instances that follow those.
  static constexpr uint64_t kMaxInstance = uint64_t{1} << 62;

  explicit Coordinator(const CoordinatorLimits& limits = {})
      : limits_(limits) {}
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Makes the group if it does not exist. AlreadyExists if workers train in it
  // with other options, InvalidArgument if the options are invalid,
  // ResourceExhausted if there are too many groups.
  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options);

  // The calls for the events of WorkerGroup, with its errors. NotFound if there
  // is no such group.
  //
  // A restarted coordinator may know no group, and the clock from which it
  // draws instances may have been set back. So a worker reports if a server
  // knows a `newer_instance` of its group. The group then starts again with a
  // still newer instance, and its workers must join again.
  //
  // InvalidArgument if `newer_instance` cannot have been drawn, or `first_step`
  // is negative. ResourceExhausted if there are too many workers. AlreadyExists
  // while other workers train another job.
  absl::StatusOr<WorkerGroup::Place> Join(const v1::JoinRequest& request);
  absl::Status Heartbeat(const GroupMember& member);
  // Ends a step of a worker, and returns the open round afterwards. The arrival
  // also counts the step's progress in work queues, once, even if it is
  // repeated. A contribution with progress survives its worker. NotFound if the
  // worker does not have one of the items (any more): then it has not arrived,
  // and must join again.
  absl::StatusOr<int64_t> Arrive(const v1::ArriveRequest& request);
  absl::Status Leave(const GroupMember& member);

  // Waits until round `number` has closed. A waiting worker is alive: its lease
  // does not end meanwhile.
  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline);

  // Waits until a worker that has ended `clock` steps may begin another one
  // with at most `staleness`.
  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline);

  // Makes the worker wait at a barrier until all workers do; see
  // WorkerGroup::Enter. Returns the place from which it continues.
  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const v1::WaitAtBarrierRequest& request, absl::Time deadline);

  // The group's stats, with the unfinished items of its work queues.
  absl::StatusOr<v1::GetGroupStatsResponse> GroupStats(
      const std::string& group);

  // Makes a work queue of the group if it does not exist. AlreadyExists, naming
  // the difference, if it exists with other options. ResourceExhausted if there
  // are too many queues, or too many bytes of items.
  absl::Status CreateWorkQueue(const v1::CreateWorkQueueRequest& request);

  // The calls for the events of WorkQueue, with its errors and those of
  // Heartbeat(). FailedPrecondition if there is no such queue. The items of a
  // worker that leaves or dies are returned. Workers that get no item wait at
  // WorkQueueBarrier(queue) until there is one to take, or all wait there. If
  // all items are finished then, the epoch is over.
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const v1::TakeWorkItemRequest& request);
  absl::Status FinishWorkItem(const v1::FinishWorkItemRequest& request);
  // The group need not exist: the queue may have been restored.
  absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& group, const std::string& queue);

  // All queues, without progress that counts only with open rounds.
  v1::SavedWorkQueues SaveWorkQueues();

  // Chooses one moment to which a save brings `num_shards` shards. The cut has,
  // by group and number, the rounds up to the last closed one that some shard
  // has not committed, and always the last one. request.committed() says what
  // each shard has committed; shards apply no rounds meanwhile. Unless null,
  // `*work_queues` is set to the queues of that moment.
  v1::Cut ChooseSnapshotRound(const v1::ChooseSnapshotRoundRequest& request,
                              size_t num_shards,
                              v1::SavedWorkQueues* work_queues);

  // FailedPrecondition, naming the difference, if a queue exists with other
  // options. ResourceExhausted if there is no room for all. DataLoss if options
  // are invalid, or a state does not fit them.
  absl::Status CheckRestore(const v1::SavedWorkQueues& saved);
  // Replaces queues by saved ones of the same names. Workers lose their items
  // and must take new ones. Steps of an open round that have advanced in these
  // queues get weight 0, because their samples are trained again.
  // If all tables are restored (`voids_open_steps`), first all contributions to
  // open rounds get weight 0, and their samples are handed out again.
  //
  // REQUIRES: CheckRestore() is OK.
  void RestoreWorkQueues(const v1::SavedWorkQueues& saved,
                         bool voids_open_steps);

  // From now on passes each change of a group or of a work queue to `log`
  // before it takes effect, as a CoordinationRecord for Replay(). A change that
  // `log` refuses does not happen. Changes wait while `gate` is closed.
  // RestoreWorkQueues() is not logged, so a save must follow it.
  //
  // REQUIRES: no other thread uses the coordinator.
  using Log = std::function<absl::Status(absl::string_view record)>;
  void StartLog(Log log, WriteGate* gate);

  // Makes a logged change again. DataLoss for a damaged record; other errors
  // are those of the original call.
  absl::Status Replay(absl::string_view record);

  // Saves all groups, with what SaveWorkQueues() does not have of their queues.
  // RestoreGroups() restores them, into a coordinator without groups and after
  // RestoreWorkQueues(). DataLoss if they are damaged.
  v1::SavedGroups SaveGroups();
  absl::Status RestoreGroups(const v1::SavedGroups& saved);
  // Removes all groups: their workers must join again. Contributions to open
  // rounds are lost, and items return to their queues. This is logged.
  //
  // REQUIRES: no other thread uses the coordinator.
  absl::Status ForgetGroups();
  // Starts all leases now. Called after RestoreGroups() and Replay().
  void RenewLeases();

  // Ends all present and later waits. Idempotent.
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
    WorkQueues* const queues;  // Points into queues_.
    // Progress in open rounds; may also have entries of closed ones.
    std::vector<OpenAdvance> advances;
    absl::Time quiet_since;  // When it last changed, by AwakeNow().
    absl::Time next_line;    // The earliest time to report a wait.
    CondVar changed;
  };

  // Draws a greater number for each later group, unless the clock is set back.
  static uint64_t DrawFirstIncarnation();
  // Logs the change that describe(&record) writes to the record.
  template <typename Describe>
  absl::Status Note(const Describe& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // These make the changes, for calls and for replays. Their effect depends
  // only on the arguments and the state. Leases are not saved, so the end of a
  // lease is a change of its own, which Tick() makes.
  void MakeGroup(const std::string& group, const WorkerGroupOptions& options,
                 uint64_t first_incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Unless 0, the group starts again with `first_incarnation`.
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

  // Whether the arrival is of the member's present step, and no repeated one.
  static bool IsNew(const Group& group, const v1::ArriveRequest& request);
  // Whether the arrival would advance in work queues; a repeated one would not.
  // NotFound if the member does not have one of the items.
  absl::StatusOr<bool> CheckProgress(Group* group,
                                     const v1::ArriveRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops members whose lease has ended. False if this must be tried later.
  bool Tick(Group* group, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called when the group has changed.
  void Notify(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Undoes the progress in work queues of steps whose round is open.
  void RevokeOpenAdvances(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  v1::SavedWorkQueues SavedQueues() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The room that queues take.
  struct Room {
    uint64_t num_queues = 0;
    uint64_t bytes = 0;
  };

  // ResourceExhausted if the queue does not fit beside queues that take `used`.
  absl::Status CheckRoom(const std::string& queue,
                         const WorkQueueOptions& options, Room used) const;
  // The room that all queues take.
  Room UsedRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<Group*> Find(const std::string& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // FailedPrecondition if there is no such queue. The group need not exist.
  absl::StatusOr<WorkQueue*> FindQueue(const std::string& group,
                                       const std::string& queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Renews the lease of a member and returns its group. The lease comes before
  // the group's Tick(), so that a slightly late worker is not dropped.
  absl::StatusOr<Group*> HearOf(const GroupMember& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Tells the group's work queues the consequences of an event. Called after
  // each event.
  void Settle(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waits until is_over() is true, the worker is no member any more, or the
  // deadline comes. At the deadline `describe` names the missing workers.
  absl::Status Wait(Group* group, const GroupMember& member,
                    absl::Time deadline, const std::function<bool()>& is_over,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const CoordinatorLimits limits_;

  // Constant before the first call of a worker.
  Log log_;
  WriteGate* gate_ = nullptr;

  // One lock for all groups: an event takes less than a microsecond.
  Mutex mutex_;
  // Groups are kept, so that pointers to them stay valid.
  std::map<std::string, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
  // The keys are groups. A group need not exist: its queues may have been
  // restored from a checkpoint.
  std::map<std::string, WorkQueues> queues_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_COORDINATOR_H_
