// One worker's training in a group: tags the worker's pushes with their step,
// and ends its steps.

#ifndef TFSWITCH_CC_CLIENT_WORKER_SESSION_H_
#define TFSWITCH_CC_CLIENT_WORKER_SESSION_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/client/group_session.h"
#include "cc/client/parameter_client.h"
#include "cc/table/table_config.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

struct WorkerOptions {
  std::string group;
  uint32_t worker = 0;
  WorkerGroupOptions group_options;
  // When EndStep() returns. Asp: at once. Ssp: when no worker is too far
  // behind. Bsp: when all servers have applied the step's round.
  ConsistencyConfig consistency;
  // How long EndStep() may wait for other workers.
  absl::Duration wait_timeout = absl::Seconds(600);
  // The step at which this process continues from its own checkpoint. If not
  // set, the process continues after all steps of this worker that the group
  // has counted.
  std::optional<int64_t> first_step = std::nullopt;
  // Whether steps fail once the group has given up another worker.
  bool fails_on_loss = false;
  std::string job;  // See WorkerGroup::Join; may be empty.
};

// Many threads may push in a step. One thread at a time may call EndStep() and
// Leave(), and only when no push of the step is running. Any thread may call
// the methods of work queues. While EndStep() or WaitAtBarrier() waits for
// other workers, all methods but Leave(), GetReport() and WorkQueueStats()
// block. So no thread can take or advance an item during such a wait.
class WorkerSession {
 public:
  using Report = v1::GetWorkerResponse;

  // `client` must be the client of the cluster that has the worker's tables.
  // With bsp, on_round() is called whenever this worker has let the servers
  // apply rounds, or has failed to.
  static absl::StatusOr<std::unique_ptr<WorkerSession>> Join(
      std::shared_ptr<ParameterClient> client, const WorkerOptions& options,
      std::function<void()> on_round = [] {});

  const WorkerOptions& options() const { return options_; }
  GroupMember member() const { return session_->state().member; }

  // FailedPrecondition if pushes to `table` are not allowed, because the
  // consistency of the table does not fit that of the session.
  absl::Status CheckTable(const TableConfig& table) const;

  // Returns the tag for gradients that are pushed now. First joins again if the
  // worker has left, and finishes a step whose end has failed. `table` is the
  // bsp table that is pushed to, or "".
  absl::StatusOr<StepTag> CurrentStep(const std::string& table = "");

  // Says that the present step has pushed to a table that applies pushes at
  // once.
  void NoteAppliedPush() { has_applied_ = true; }

  // Whether the group has counted the present step already, because a former
  // process of this worker took it. The pushes of a repeated step must not be
  // sent.
  bool is_repeating() const { return session_->is_repeating(); }

  // Ends a step of `weight` samples, and waits as options().consistency says.
  // After wait_timeout returns DeadlineExceeded, naming the workers that have
  // not come; call this again to continue waiting.
  //
  // The group gives up a worker that has not called for the length of its
  // lease. If that has happened to this worker, it joins again, and with bsp
  // this step does not count.
  //
  // Returns at once if is_repeating().
  absl::Status EndStep(double weight);

  // The round to which the next step contributes. With bsp, this is the number
  // of applied rounds.
  int64_t round() const { return session_->state().round; }

  // Waits at a barrier until all workers of the group wait there. Until then no
  // other wait of the group waits for this worker. Afterwards all rounds are
  // applied on all servers. After `timeout` returns DeadlineExceeded, naming
  // the workers that have not come; call this again to continue waiting.
  // FailedPrecondition if a step has pushed something and has not ended. Does
  // nothing while steps are repeated.
  absl::Status WaitAtBarrier(const std::string& barrier,
                             absl::Duration timeout);

  // Work queues of the group; see WorkQueue and Coordinator. A worker has at
  // most one item of each queue. It loses the item when it leaves or the group
  // gives it up. Another worker then continues the item after the last counted
  // step.
  //
  // If this worker has an item of the queue already, and the present step has
  // pushed nothing, the item's offset returns to that of the last counted step.
  absl::Status CreateWorkQueue(const std::string& queue,
                               const WorkQueueOptions& options);
  // Returns the item that the worker has, or takes a new one; see
  // WorkQueue::Take.
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const std::string& queue);
  // Says that the present step has trained the item up to `offset`. The group
  // counts this when the step ends. FailedPrecondition if the item is lost, or
  // if `offset` is lower than before; but a step that has pushed nothing may go
  // back to the offset at its start. FailedPrecondition also while steps are
  // repeated, because the queue continues after all counted steps.
  absl::Status AdvanceWorkItem(const std::string& queue, int64_t epoch,
                               int64_t index, int64_t offset);
  // FailedPrecondition if the item is lost, or if the present step has advanced
  // the item.
  absl::Status FinishWorkItem(const std::string& queue, int64_t epoch,
                              int64_t index);
  // The state of an item as this worker knows it. A worker must not train an
  // item that it has lost, because another worker trains the item again.
  enum class ItemState { kLost = 0, kOwn = 1, kInStep = 2 };
  ItemState GetItemState(const std::string& queue, int64_t epoch,
                         int64_t index);
  absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& queue);

  // Leaves the group, so that no worker waits for this one any more. The next
  // step joins again. Idempotent. For `timeout` see GroupSession::Leave().
  absl::Status Leave(absl::Duration timeout = absl::InfiniteDuration());

  // Sets the mark, a number that records the program's progress; see
  // GroupMember. If the worker has left and `joins_again`, it joins first.
  absl::Status SetMark(int64_t mark, bool joins_again);

  absl::StatusOr<Report> GetReport();
  GroupSession::Event NextEvent(int64_t after, absl::Duration timeout) {
    return session_->NextEvent(after, timeout);
  }

 private:
  WorkerSession(std::shared_ptr<ParameterClient> client, WorkerOptions options,
                std::unique_ptr<GroupSession> session,
                std::function<void()> on_round);

  bool is_bsp() const {
    return options_.consistency.kind == ConsistencyKind::kBsp;
  }
  // Called before a step (with "") or a barrier. Joins again if the worker has
  // left, and finishes an earlier call that has failed.
  absl::Status Prepare(const std::string& barrier)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status JoinAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HasLeft() const;
  // FailedPrecondition if options().fails_on_loss and the group has given up
  // another worker.
  absl::Status CheckLosses() const;
  void NoteDropped(int64_t step);
  // Tells the group that the present step has ended.
  absl::Status Arrive() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Remembers how EndStep() ended, so that another call of it does not end
  // another step. Returns the result of EndStep().
  absl::Status EndedStep(absl::Status status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Joins again after the group has given this worker up. `why` is the error
  // that said so.
  absl::Status ComeBack(const absl::Status& why, bool has_arrived)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Finishes the waits that an earlier EndStep() has not finished.
  absl::Status FinishStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the round includes the step that ended last.
  bool Counts(const Round& round) const;
  // Makes every server apply the round, and first the earlier rounds that the
  // server lacks. DataLoss if a server has lost a table together with the
  // gradients that this worker has staged there.
  absl::Status Commit(const Round& round);
  void ForgetStagedTables();
  // Makes all servers apply the last closed round, so that the worker begins
  // with its result.
  absl::Status CatchUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Waits for the round before that of the next step. Nullopt with asp and ssp,
  // or if there is no such round.
  absl::StatusOr<std::optional<Round>> LastClosedRound();
  struct OwnItem {
    WorkItem item;        // Offset includes this step.
    int64_t counted = 0;  // Offset after counted steps.
  };

  // How far the present step has trained its items.
  std::vector<WorkProgress> Progress() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notes that the group has counted the progress.
  void CountProgress(const std::vector<WorkProgress>& progress)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<OwnItem*> FindWorkItem(const std::string& queue, int64_t epoch,
                                        int64_t index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls `call`. If the group has given this worker up, joins again and
  // repeats the call once.
  template <typename Call>
  auto CallAsMember(const Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Called after joining: makes all servers accept only rounds of this instance
  // of the group. A server may know a newer instance, if the coordinator was
  // restarted with its clock set back. Then joins again with a higher instance.
  absl::Status BeginOnServers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls GroupSession::Rejoin(). Cancelled if another thread is in Leave().
  absl::Status Rejoin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const std::shared_ptr<ParameterClient> client_;
  const WorkerOptions options_;
  const std::unique_ptr<GroupSession> session_;
  const std::function<void()> on_round_;

  mutable Mutex staged_mutex_;
  // The bsp tables to which the present step has pushed. Cleared when the
  // step's round is applied.
  std::set<std::string> staged_tables_ ABSL_GUARDED_BY(staged_mutex_);

  std::atomic<int64_t> num_dropped_{0};
  // The numbers of the first steps that do not count.
  std::vector<int64_t> dropped_ ABSL_GUARDED_BY(staged_mutex_);
  // Whether CurrentStep() was called in the present step.
  std::atomic<bool> has_pushed_{false};
  // Whether NoteAppliedPush() was called in the present step.
  std::atomic<bool> has_applied_{false};
  std::atomic<bool> is_leaving_{false};

  // Held while a step ends.
  Mutex mutex_;
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
  // The weight of a step, set while it is not known whether the group has
  // received the end of the step.
  std::optional<double> unconfirmed_weight_ ABSL_GUARDED_BY(mutex_);
  std::vector<WorkProgress> unconfirmed_progress_ ABSL_GUARDED_BY(mutex_);
  // The keys are names of queues.
  std::map<std::string, OwnItem> own_items_ ABSL_GUARDED_BY(mutex_);
  // Whether a step has ended and the wait after the step is not over.
  bool is_unfinished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Round> uncommitted_ ABSL_GUARDED_BY(mutex_);
  // Whether Rejoin() and then CatchUp() must still be called. They finish the
  // end of a step, or the barrier opened_barrier_.
  bool must_rejoin_ ABSL_GUARDED_BY(mutex_) = false;
  bool must_catch_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_step_ ABSL_GUARDED_BY(mutex_) = false;
  std::string opened_barrier_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_WORKER_SESSION_H_
