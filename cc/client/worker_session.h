// One worker's training in a group: its pushes, and when it may go on.

#ifndef TFSWITCH_CC_CLIENT_WORKER_SESSION_H_
#define TFSWITCH_CC_CLIENT_WORKER_SESSION_H_

#include <atomic>
#include <cstdint>
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
  // Asp: a step ends at once. Ssp: when nobody is too far behind. Bsp: when the
  // round that it contributes to has been applied on all servers.
  ConsistencyConfig consistency;
  // How long the end of a step may wait for other workers.
  absl::Duration wait_timeout = absl::Seconds(600);
  // The step at which this process goes on, after a checkpoint of its own; not
  // set: behind all steps of this worker that count.
  std::optional<int64_t> first_step = std::nullopt;
  // Steps fail once another worker has been given up.
  bool fails_on_loss = false;
  std::string job;  // See WorkerGroup::Join; empty: without a name.
};

// Pushes of a step may come from many threads; EndStep() and Leave() from one
// at a time, and not while a push of the step is under way. The methods of work
// queues may come from any thread. All but Leave(), GetReport() and
// WorkQueueStats() wait for a call that waits for other workers: one that is in
// EndStep() or at a barrier lets no thread take or advance an item meanwhile.
class WorkerSession {
 public:
  using Report = v1::GetWorkerResponse;

  // `client` must be of the cluster that the worker trains with.
  static absl::StatusOr<std::unique_ptr<WorkerSession>> Join(
      std::shared_ptr<ParameterClient> client, const WorkerOptions& options);

  const WorkerOptions& options() const { return options_; }
  GroupMember member() const { return session_->member(); }

  // FailedPrecondition if a table of this consistency must not be pushed to
  // under that of the session.
  absl::Status CheckTable(const TableConfig& table) const;

  // The tag of gradients that are pushed now. A worker that has left joins
  // again; a step whose end has failed is finished first. `table` is a bsp
  // table.
  absl::StatusOr<StepTag> CurrentStep(const std::string& table = "");

  // A push of the present step to a table that applies it at once.
  void NoteAppliedPush() { has_applied_ = true; }

  // Whether the present step counts already, as a former process of this worker
  // has taken it: its pushes must not go out.
  bool is_repeating() const { return session_->is_repeating(); }

  // Ends a step of `weight` samples, and waits as options().consistency says.
  // DeadlineExceeded, saying for whom, after wait_timeout; calling it again
  // goes on waiting.
  //
  // If the group has given this worker up because it was not heard of for a
  // lease, the worker joins again, and with bsp this step does not count.
  //
  // A step that counts already ends at once.
  absl::Status EndStep(double weight);

  // To which the next step contributes. With bsp, how many have been applied.
  int64_t round() const { return session_->round(); }

  // Waits at a barrier until all workers of the group do, and nobody waits for
  // this one elsewhere meanwhile. Afterwards all rounds have been applied on
  // all servers. DeadlineExceeded, saying for whom, after `timeout`; calling it
  // again goes on waiting. FailedPrecondition if something has been pushed
  // under a step that has not ended. Nothing, while steps are repeated.
  absl::Status WaitAtBarrier(const std::string& barrier,
                             absl::Duration timeout);

  // Work queues of the group; see WorkQueue and Coordinator. A worker has one
  // item of each queue at most, and loses it when the group gives the worker
  // up, or when it leaves: others go on where the last step that counts has
  // left it.
  //
  // Making it once more begins the step anew, if nothing has been pushed in it.
  absl::Status CreateWorkQueue(const std::string& queue,
                               const WorkQueueOptions& options);
  // The item that the worker has, or a new one; see WorkQueue::Take.
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const std::string& queue);
  // The present step has come to `offset`; counts with the end of the step.
  // FailedPrecondition if the item is lost, or `offset` is further back; unless
  // it is where the step began, and nothing has been pushed in it. The same
  // while steps are repeated: the queue goes on behind all that count.
  absl::Status AdvanceWorkItem(const std::string& queue, int64_t epoch,
                               int64_t index, int64_t offset);
  // FailedPrecondition if the item is lost, or was advanced in a step that has
  // not ended.
  absl::Status FinishWorkItem(const std::string& queue, int64_t epoch,
                              int64_t index);
  // The state of an item as this worker knows it. The work of a step on a lost
  // one would be done twice.
  enum class ItemState { kLost = 0, kOwn = 1, kInStep = 2 };
  ItemState GetItemState(const std::string& queue, int64_t epoch,
                         int64_t index);
  absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& queue);

  // Nobody waits for this worker any more; the next step joins again.
  // Idempotent. `timeout` as in GroupSession.
  absl::Status Leave(absl::Duration timeout = absl::InfiniteDuration());

  // Says where the program is; see GroupMember. `joins_again`: first, if it has
  // left.
  absl::Status SetMark(int64_t mark, bool joins_again);

  absl::StatusOr<Report> GetReport();
  GroupSession::Event NextEvent(int64_t after, absl::Duration timeout) {
    return session_->NextEvent(after, timeout);
  }

 private:
  WorkerSession(std::shared_ptr<ParameterClient> client, WorkerOptions options,
                std::unique_ptr<GroupSession> session);

  bool is_bsp() const {
    return options_.consistency.kind == ConsistencyKind::kBsp;
  }
  // Before a step (""), or a barrier: joins again if it has left, and finishes
  // a call that has failed before.
  absl::Status Prepare(const std::string& barrier)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status JoinAgain() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HasLeft() const;
  // FailedPrecondition if options().fails_on_loss, and one has been given up.
  absl::Status CheckLosses() const;
  void NoteDropped(int64_t step);
  // Tells the group that the present step has ended.
  absl::Status Arrive() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The result of EndStep(); repeating it must not end another step.
  absl::Status EndedStep(absl::Status status)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // After the group has given this worker up, as `why` says.
  absl::Status ComeBack(const absl::Status& why, bool has_arrived)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Finishes the waits that the end of the last step has left.
  absl::Status FinishStep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether the step that ended last is in the round.
  bool Counts(const Round& round) const;
  // Has every server apply the round, and those before it that it has missed.
  // DataLoss if one has lost a table, with this worker's staged gradients.
  absl::Status Commit(const Round& round);
  void ForgetStagedTables();
  // A worker begins with the result of the last closed round.
  absl::Status CatchUp() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The one before that of the next step, when it has closed; none with asp and
  // ssp, or if there is none.
  absl::StatusOr<std::optional<Round>> LastClosedRound();
  struct OwnItem {
    WorkItem item;        // With the offset that the present step has come to.
    int64_t counted = 0;  // The offset that counts.
  };

  // The progress of the present step.
  std::vector<WorkProgress> Progress() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // It counts.
  void CountProgress(const std::vector<WorkProgress>& progress)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<OwnItem*> FindWorkItem(const std::string& queue, int64_t epoch,
                                        int64_t index)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Calls `call`, once more after coming back if the group has given this
  // worker up.
  template <typename Call>
  auto CallAsMember(const Call& call) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // After joining: has all servers take rounds of the group that it has joined,
  // and of no other. If one knows a newer group, since the coordinator was
  // started again with its clock set back, this one begins anew above it.
  absl::Status BeginOnServers() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // GroupSession::Rejoin(); Cancelled if another thread is leaving.
  absl::Status Rejoin() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Constant after construction.
  const std::shared_ptr<ParameterClient> client_;
  const WorkerOptions options_;
  const std::unique_ptr<GroupSession> session_;

  mutable Mutex staged_mutex_;
  // The bsp tables to which the present step has pushed, until its round is
  // applied.
  std::set<std::string> staged_tables_ ABSL_GUARDED_BY(staged_mutex_);

  std::atomic<int64_t> num_dropped_{0};
  std::vector<int64_t> dropped_ ABSL_GUARDED_BY(staged_mutex_);  // The first.
  std::atomic<bool> has_pushed_{false};  // In the present step.
  // The same of tables that apply at once.
  std::atomic<bool> has_applied_{false};
  std::atomic<bool> is_leaving_{false};

  // Held while a step ends.
  Mutex mutex_;
  bool has_left_ ABSL_GUARDED_BY(mutex_) = false;
  // The step whose end the group may not have heard of.
  std::optional<double> unconfirmed_weight_ ABSL_GUARDED_BY(mutex_);
  std::vector<WorkProgress> unconfirmed_progress_ ABSL_GUARDED_BY(mutex_);
  // By queue.
  std::map<std::string, OwnItem> own_items_ ABSL_GUARDED_BY(mutex_);
  // A step has ended, and not all that it waits for has come.
  bool is_unfinished_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Round> uncommitted_ ABSL_GUARDED_BY(mutex_);
  // CatchUp() is still to be done, and Rejoin() before it; to finish the end of
  // a step or, with a name, a barrier that has opened.
  bool must_rejoin_ ABSL_GUARDED_BY(mutex_) = false;
  bool must_catch_up_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_ended_step_ ABSL_GUARDED_BY(mutex_) = false;
  std::string opened_barrier_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_WORKER_SESSION_H_
