// The groups of one server, and waiting in them.

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

// Limits on the state that clients may make a coordinator keep. Groups and work
// queues stay until the end, and so does a group's memory of all that have
// joined it.
struct CoordinatorLimits {
  uint64_t max_groups = 4096;
  // Workers that have ever joined one group. Also: contributions to one of its
  // rounds.
  uint64_t max_workers = 16384;
  uint64_t max_work_queues = 4096;                    // In all groups.
  uint64_t max_work_queue_bytes = uint64_t{1} << 30;  // Their items.
};

// The barrier at which workers wait that have found nothing in a work queue.
std::string WorkQueueBarrier(const std::string& queue);

// Runs one WorkerGroup per name, and its work queues. Every wait ends by its
// deadline, a time of SteadyNow(), with DeadlineExceeded that names the missing
// workers, and by Shutdown() with Cancelled.
//
// Thread-safe.
class Coordinator {
 public:
  // Instances of groups are below it. Far above nanoseconds since 1970 and the
  // groups that begin anew above them.
  static constexpr uint64_t kMaxInstance = uint64_t{1} << 62;

  explicit Coordinator(const CoordinatorLimits& limits = {})
      : limits_(limits) {}
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Makes the group unless it is there. AlreadyExists if others train in it
  // with other options, InvalidArgument if they make no sense,
  // ResourceExhausted if that is one too many.
  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options);

  // The events of WorkerGroup, with its errors; NotFound if there is no such
  // group.
  //
  // A coordinator that was started again remembers no group, and the clock from
  // which it draws instances may have been set back. So a worker says if it has
  // met a `newer_instance` of its group on a server: the group then begins anew
  // with one that is newer still, and its workers have to join again.
  // InvalidArgument if that is no instance that was ever drawn, or `first_step`
  // is negative.
  // ResourceExhausted for a worker too many, AlreadyExists while others train
  // another job.
  absl::StatusOr<WorkerGroup::Place> Join(const v1::JoinRequest& request);
  absl::Status Heartbeat(const GroupMember& member);
  // Returns the open round afterwards. With the arrival, and once however often
  // it is repeated, the worker has advanced in work queues; its contribution
  // with that survives it. NotFound if it does not have such an item (any
  // more): then it has not arrived, and has to join again.
  absl::StatusOr<int64_t> Arrive(const v1::ArriveRequest& request);
  absl::Status Leave(const GroupMember& member);

  // Waits until round `number` has closed. A worker that waits is alive: its
  // lease does not end meanwhile.
  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline);

  // Waits until a worker that has ended `clock` steps may begin another one
  // with at most `staleness`.
  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline);

  // Has the worker wait at a barrier until all workers do; see
  // WorkerGroup::Enter. Returns where it goes on.
  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const v1::WaitAtBarrierRequest& request, absl::Time deadline);

  // With the unfinished items of its work queues.
  absl::StatusOr<v1::GetGroupStatsResponse> GroupStats(
      const std::string& group);

  // Makes a work queue of the group unless it is there. AlreadyExists, naming
  // the difference, if it is there with other options. ResourceExhausted if
  // that is one too many, or its items are.
  absl::Status CreateWorkQueue(const v1::CreateWorkQueueRequest& request);

  // The events of WorkQueue, with its errors and those of Heartbeat();
  // FailedPrecondition if there is no such queue. A worker that goes returns
  // its items. Workers that get none wait at WorkQueueBarrier(queue) until
  // there is one to take again, or all wait there: then the epoch is over, if
  // all items are finished.
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const v1::TakeWorkItemRequest& request);
  absl::Status FinishWorkItem(const v1::FinishWorkItemRequest& request);
  // Also of a queue that was restored, and whose group is not there yet.
  absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& group, const std::string& queue);

  // All queues, without the progress contributed to open rounds.
  v1::SavedWorkQueues SaveWorkQueues();

  // The state of one moment that `num_shards` shards are to be brought to. By
  // group and number: up to the last round that has closed, which is always
  // there, those that are not in request.committed() of each shard, which
  // applies no others meanwhile. `work_queues`: those of that moment, unless
  // null.
  v1::Cut ChooseSnapshotRound(const v1::ChooseSnapshotRoundRequest& request,
                              size_t num_shards,
                              v1::SavedWorkQueues* work_queues);

  // FailedPrecondition, naming the difference, if a queue is there with other
  // options; ResourceExhausted if there is no room for all; DataLoss if options
  // make no sense or a state does not fit them.
  absl::Status CheckRestore(const v1::SavedWorkQueues& saved);
  // Puts saved queues in the place of those of their names, whose workers have
  // to take their items anew. Steps that have advanced these in an open round
  // count for nothing, as they are trained again.
  //
  // REQUIRES: CheckRestore() is OK.
  void RestoreWorkQueues(const v1::SavedWorkQueues& saved);

  // All tables go back in time: steps that have arrived and whose round is open
  // weigh nothing, and their part of a queue is handed out again.
  void VoidOpenSteps();

  // From now on each change of a group or of a work queue goes to `log` before
  // it takes effect, as a CoordinationRecord for Replay(); what `log` refuses
  // has not happened. Changes pass `gate`: closed, it holds them up. Restores
  // of work queues and VoidOpenSteps() are not logged: a save has to follow
  // them.
  //
  // REQUIRES: nobody else uses the coordinator.
  using Log = std::function<absl::Status(absl::string_view record)>;
  void StartLog(Log log, WriteGate* gate);

  // Takes a change again. DataLoss for bytes that are none; other errors are
  // those that the call had.
  absl::Status Replay(absl::string_view record);

  // All groups, with their work queues but for what SaveWorkQueues() has of
  // them; and the way back, after RestoreWorkQueues(), into a coordinator
  // without groups. DataLoss if they are damaged.
  v1::SavedGroups SaveGroups();
  absl::Status RestoreGroups(const v1::SavedGroups& saved);
  // There are none from now on: their workers have to join again. Steps that
  // have arrived and whose round is open count for nothing, and items are
  // returned to their queues. It is logged.
  //
  // REQUIRES: nobody else uses the coordinator.
  absl::Status ForgetGroups();
  // To be called after RestoreGroups() and Replay(): leases begin now.
  void RenewLeases();

  // Ends all waits, now and later. Idempotent.
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
    WorkQueues* const queues;           // In queues_.
    int64_t num_departures = 0;         // Workers whose items were returned.
    std::vector<OpenAdvance> advances;  // In open rounds, maybe older ones.
    absl::Time quiet_since;             // The last change; of AwakeNow().
    absl::Time next_line;               // That says who waits; not before.
    CondVar changed;
  };

  // Later groups have greater ones, if nobody sets the clock back.
  static uint64_t DrawFirstIncarnation();
  // Logs the change that describe(&record) describes.
  template <typename Describe>
  absl::Status Note(const Describe& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The changes, for calls and for their replay. Nothing but their arguments
  // and the state decides what they do, except for the leases, which are no
  // part of a saved state: Tick() says by a change of its own which have ended.
  void MakeGroup(const std::string& group, const WorkerGroupOptions& options,
                 uint64_t first_incarnation)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `first_incarnation`: the group begins again with it; 0: it does not.
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

  // Whether the step that ends would advance work queues, which it would not
  // again; NotFound if the member does not have such an item.
  absl::StatusOr<bool> CheckProgress(Group* group,
                                     const v1::ArriveRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Drops members whose lease has ended. False if that has to be done later.
  bool Tick(Group* group, absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The group has changed.
  void Notify(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Steps that have arrived and whose round is open count for nothing: takes
  // back how far they have brought work queues.
  void RevokeOpenAdvances(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  v1::SavedWorkQueues SavedQueues() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The room that queues take.
  struct Room {
    uint64_t num_queues = 0;
    uint64_t bytes = 0;
  };

  // ResourceExhausted if there is no room for such a queue beside those that
  // have taken `used`.
  absl::Status CheckRoom(const std::string& queue,
                         const WorkQueueOptions& options, Room used) const;
  // The room that all queues take.
  Room UsedRoom() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::StatusOr<Group*> Find(const std::string& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // FailedPrecondition if it is not there; the group need not be.
  absl::StatusOr<WorkQueue*> FindQueue(const std::string& group,
                                       const std::string& queue)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The group of a member that has been heard of. A worker's own event comes
  // first, then the group's Tick().
  absl::StatusOr<Group*> HearOf(const GroupMember& member)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Brings the events of a group to its work queues; to be called after each.
  void Settle(Group* group) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waits until is_over() is true, the worker is no member any more, or the
  // deadline has come: then `describe` names the missing workers.
  absl::Status Wait(Group* group, const GroupMember& member,
                    absl::Time deadline, const std::function<bool()>& is_over,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const CoordinatorLimits limits_;

  // Constant once calls come in.
  Log log_;
  WriteGate* gate_ = nullptr;

  // One lock for all groups: an event takes less than a microsecond.
  Mutex mutex_;
  // Groups stay until the end, so that pointers to them do.
  std::map<std::string, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
  // By group, which need not be there: a checkpoint may have been restored.
  std::map<std::string, WorkQueues> queues_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_COORDINATOR_H_
