// One worker's time in a group: joins, stays alive, counts its steps, leaves.

#ifndef TFSWITCH_CC_CLIENT_GROUP_SESSION_H_
#define TFSWITCH_CC_CLIENT_GROUP_SESSION_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"
#include "cc/client/group_client.h"

namespace tfswitch {

// A background thread renews the lease, three times while it lasts, so that a
// worker whose step takes long is not taken for dead.
//
// The methods of a step (EndStep, WaitFor..., WaitAtBarrier, Rejoin, Leave) are
// called by one thread at a time; the others by any.
class GroupSession {
 public:
  static constexpr absl::Duration kPartingTime = absl::Seconds(2);

  // Time spent waiting for other workers.
  struct Waits {
    int64_t count = 0;
    absl::Duration total;
    absl::Duration longest;
  };

  // Something that happened to the group: "waiting", which a line on stderr
  // says after kPatience and again every kRepeatedEvery, or "lost".
  struct Event {
    int64_t number = 0;  // From 1; 0: none.
    std::string kind;
    std::string text;
  };
  static constexpr LogKind kLines = {"groups", /*burst=*/200,
                                     /*per_second=*/10};
  static constexpr absl::Duration kPatience = absl::Seconds(2);
  static constexpr absl::Duration kRepeatedEvery = absl::Seconds(30);

  // Makes the group if it is not there, and joins as `worker`. A process that
  // goes on from a checkpoint of its own names the `first_step` that it takes:
  // num_steps() of that time. One of a `job` goes on where that is. While
  // others train another job, it waits for a lease and a little more, as they
  // may be dead.
  static absl::StatusOr<std::unique_ptr<GroupSession>> Join(
      std::shared_ptr<GroupClient> groups, const std::string& group,
      const WorkerGroupOptions& options, uint32_t worker,
      std::optional<int64_t> first_step = std::nullopt,
      const std::string& job = "");

  // Leaves, if Leave() was not called; an error of it is ignored, for the lease
  // ends anyway. A server that is away is not waited for longer than
  // kPartingTime and a third of the lease.
  ~GroupSession();
  GroupSession(const GroupSession&) = delete;
  GroupSession& operator=(const GroupSession&) = delete;

  // This member; it has another incarnation after Rejoin().
  GroupMember member() const {
    MutexLock lock(&mutex_);
    return member_;
  }
  // The barrier at which it waits, as far as it knows; empty: none.
  std::string barrier() const {
    MutexLock lock(&mutex_);
    return barrier_;
  }
  // Whether it has left and has not come back.
  bool has_left() const {
    MutexLock lock(&mutex_);
    return has_left_;
  }
  // How many steps have ended, and the round that the next one contributes to.
  int64_t clock() const {
    MutexLock lock(&mutex_);
    return clock_;
  }
  int64_t round() const {
    MutexLock lock(&mutex_);
    return round_;
  }

  // Where this process is among the steps of its worker: behind those that
  // count, of former processes as well, unless it takes some of them again.
  int64_t num_steps() const {
    MutexLock lock(&mutex_);
    return num_steps_;
  }
  // Whether the present step counts already.
  bool is_repeating() const {
    MutexLock lock(&mutex_);
    return num_steps_ < place_.num_steps();
  }
  // So many steps from the present one on.
  int64_t num_to_repeat() const {
    MutexLock lock(&mutex_);
    return std::clamp<int64_t>(place_.num_steps() - num_steps_, 0, clock_);
  }
  // Ends such a step, of which the group has to hear nothing.
  void EndRepeatedStep() {
    MutexLock lock(&mutex_);
    ++num_steps_;
  }

  // Where it began, as the group has said when it joined last.
  WorkerGroup::Place place() const {
    MutexLock lock(&mutex_);
    return place_;
  }
  // Said with each step that ends; see GroupMember.
  void SetMark(int64_t mark) {
    MutexLock lock(&mutex_);
    member_.set_mark(mark);
  }

  // Ends a step, with a contribution of `weight` to round() or with none.
  // NotFound if the group has given this worker up: call Rejoin(). `progress`:
  // the step's progress in work queues; see Coordinator::Arrive.
  absl::Status EndStep(bool contributes, double weight,
                       const std::vector<WorkProgress>& progress = {});

  // EndStep(), and then WaitForRound() or WaitForTurn(), in fewer calls of the
  // server. If the wait failed, calling again only waits: the step has ended.
  absl::StatusOr<Round> EndStepAndWaitForRound(
      double weight, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});
  absl::Status EndStepAndWaitForTurn(
      int64_t staleness, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});

  // Waits until round(), to which the step before has contributed, has closed.
  // For one that contributed to a round that had closed it is the last one that
  // has. `start`: when the step's end began.
  absl::StatusOr<Round> WaitForRound(absl::Duration timeout,
                                     absl::Time start = SteadyNow());

  // Waits until the next step may begin with at most `staleness`.
  absl::Status WaitForTurn(int64_t staleness, absl::Duration timeout,
                           absl::Time start = SteadyNow());

  // Waits until the round `number` of the group has closed, which need not be
  // one to which this worker has contributed.
  absl::StatusOr<Round> FetchRound(int64_t number, absl::Duration timeout);

  // Waits at a barrier until all workers of the group do; nobody waits for this
  // one elsewhere meanwhile. All go on at one clock. If it failed, calling it
  // again goes on waiting; FailedPrecondition for anything else until then.
  absl::Status WaitAtBarrier(const std::string& barrier,
                             absl::Duration timeout);

  // Comes back after the group has given this worker up, or it has left.
  // `newer_instance`: see Coordinator::Join.
  absl::Status Rejoin(uint64_t newer_instance = 0);

  // Nobody waits for this worker any more. Idempotent. `timeout`: for the
  // server, if that is less than the client's.
  absl::Status Leave(absl::Duration timeout = absl::InfiniteDuration());

  Waits waits() const {
    MutexLock lock(&mutex_);
    return waits_;
  }
  // For whom it waits, once it has said so; else empty.
  std::string waiting_for() const {
    MutexLock lock(&mutex_);
    return waiting_for_;
  }

  // Other workers that have been given up since this one has joined, in words,
  // as far as it has heard: in a wait of kPatience at its end, and else with
  // the next renewal of the lease. Empty: none.
  std::string losses() const {
    MutexLock lock(&mutex_);
    return losses_;
  }
  // The first event after `after` that is known; waits for one.
  Event NextEvent(int64_t after, absl::Duration timeout);
  // Says at the end of the training who has been lost, which of this worker's
  // steps do not count and which items of work queues are not done, if there
  // is something to say, and nobody has changed it since it was said.
  void Report(absl::Duration timeout, const std::vector<int64_t>& dropped);

 private:
  GroupSession(std::shared_ptr<GroupClient> groups, std::string group,
               const WorkerGroupOptions& options, uint32_t worker,
               std::optional<int64_t> first_step, std::string job);

  // Notes the changes that the end of a step has made.
  void Advance(bool contributes, int64_t open_round, bool must_wait);
  bool is_waiting() const {
    MutexLock lock(&mutex_);
    return is_waiting_;
  }
  // FailedPrecondition if another process of this machine is this worker.
  absl::Status CheckIsAlone() const;
  void KeepAlive();
  void CountWait(absl::Time start);
  // Calls wait(until) with parts of the time up to `deadline`, and says for
  // whom it waits.
  template <typename Wait>
  auto WaitAloud(absl::Time start, absl::Time deadline, const Wait& wait);
  // When a wait that began at `start` is to be said.
  absl::Time NextLine(absl::Time start) const;
  // GroupClient::Join(), which waits for the end of another job.
  absl::StatusOr<WorkerGroup::Place> JoinGroup(const GroupMember& before,
                                               uint64_t newer_instance,
                                               int64_t first_step);
  void HearOfLosses(absl::Duration timeout);
  void Say(const std::string& kind, const std::string& text);

  // Constant after construction.
  const std::shared_ptr<GroupClient> groups_;
  const WorkerGroupOptions options_;
  const std::string job_;

  mutable Mutex mutex_;
  CondVar changed_;
  GroupMember member_ ABSL_GUARDED_BY(mutex_);
  int64_t clock_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t round_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<int64_t> first_step_
      ABSL_GUARDED_BY(mutex_);  // Until it joins.
  int64_t num_steps_ ABSL_GUARDED_BY(mutex_) = 0;
  // When it joined.
  WorkerGroup::Place place_ ABSL_GUARDED_BY(mutex_);
  int64_t barrier_generation_ ABSL_GUARDED_BY(mutex_) = 0;  // At barriers.
  std::string barrier_ ABSL_GUARDED_BY(mutex_);
  absl::Time at_barrier_since_ ABSL_GUARDED_BY(mutex_);
  // A step has ended, and the wait after it is not over.
  bool is_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool has_left_ ABSL_GUARDED_BY(mutex_) = true;
  bool is_leaving_ ABSL_GUARDED_BY(mutex_) = false;  // Or tried to.
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  Waits waits_ ABSL_GUARDED_BY(mutex_);
  std::string waiting_for_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t num_losses_ ABSL_GUARDED_BY(mutex_) = 0;  // That it has heard of.
  int64_t losses_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string losses_ ABSL_GUARDED_BY(mutex_);
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);  // The last ones.
  int64_t num_events_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string report_ ABSL_GUARDED_BY(mutex_);

  std::thread keeper_;  // Runs KeepAlive().
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_GROUP_SESSION_H_
