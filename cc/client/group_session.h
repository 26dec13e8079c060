// One worker's membership in a group: joins, renews its lease, ends steps,
// leaves.

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

// A background thread renews the lease every third of its length, so that a
// worker with a long step is not taken for dead.
//
// EndStep..., WaitFor..., WaitAtBarrier, Rejoin and Leave may be called by one
// thread at a time; all other methods are thread-safe.
class GroupSession {
 public:
  static constexpr absl::Duration kPartingTime = absl::Seconds(2);

  // Time spent waiting for other workers.
  struct Waits {
    int64_t count = 0;
    absl::Duration total;
    absl::Duration longest;
  };

  // The session at one moment.
  struct State {
    GroupMember member;  // Rejoin() gives it another incarnation.
    // Where it began, as the group said in the last join.
    WorkerGroup::Place place;
    // How many steps have ended, and the round that the next one contributes
    // to.
    int64_t clock = 0;
    int64_t round = 0;
    // The number of the worker's steps before the present one, including steps
    // of former processes. It is lower while this process repeats steps that
    // count.
    int64_t num_steps = 0;
    bool has_left = true;  // And has not come back.
    // The barrier at which it waits, as far as it knows; empty if none.
    std::string barrier;
    Waits waits;
    // The workers that it waits for, once a line on stderr has named them; else
    // empty.
    std::string waiting_for;
    // Names the other workers that were given up since this one joined, as far
    // as it knows; empty if none. It learns of them at the end of a wait of at
    // least kPatience, and with each renewal of the lease.
    std::string losses;

    // Whether the present step counts already, because a former process took
    // it.
    bool is_repeating() const { return num_steps < place.num_steps(); }
    // How many steps count already, from the present one on.
    int64_t num_to_repeat() const {
      return std::clamp<int64_t>(place.num_steps() - num_steps, 0, clock);
    }
  };

  // An event of the group. Kind "waiting": this worker waits for others; a line
  // on stderr says so after kPatience, and again every kRepeatedEvery. Kind
  // "lost": workers were given up.
  struct Event {
    int64_t number = 0;  // From 1; 0 means no event.
    std::string kind;
    std::string text;
  };
  static constexpr LogKind kLines = {"groups", /*burst=*/200,
                                     /*per_second=*/10};
  static constexpr absl::Duration kPatience = absl::Seconds(2);
  static constexpr absl::Duration kRepeatedEvery = absl::Seconds(30);

  // Makes the group if it does not exist, and joins as `worker`. A process that
  // continues from its own checkpoint passes as `first_step` the num_steps() of
  // the checkpoint. If `job` is given, the worker continues where that job is.
  // While other workers train another job, this waits for a lease and a little
  // more, because they may be dead.
  static absl::StatusOr<std::unique_ptr<GroupSession>> Join(
      std::shared_ptr<GroupClient> groups, const std::string& group,
      const WorkerGroupOptions& options, uint32_t worker,
      std::optional<int64_t> first_step = std::nullopt,
      const std::string& job = "");

  // Leaves if Leave() was not called. Errors are ignored, because the lease
  // ends anyway. Waits for a server that is away at most kPartingTime and a
  // third of the lease.
  ~GroupSession();
  GroupSession(const GroupSession&) = delete;
  GroupSession& operator=(const GroupSession&) = delete;

  State state() const {
    MutexLock lock(&mutex_);
    return state_;
  }
  // As state().is_repeating(), without the copy: each push asks.
  bool is_repeating() const {
    MutexLock lock(&mutex_);
    return state_.is_repeating();
  }
  // Ends a step that counts already. The group is not told.
  void EndRepeatedStep() {
    MutexLock lock(&mutex_);
    ++state_.num_steps;
  }

  // Sent with the end of each step; see GroupMember.
  void SetMark(int64_t mark) {
    MutexLock lock(&mutex_);
    state_.member.set_mark(mark);
  }

  // Ends a step. If it `contributes`, its contribution to its round has
  // `weight`. NotFound if the group has given this worker up: call Rejoin().
  // `progress` is the step's progress in work queues; see Coordinator::Arrive.
  absl::Status EndStep(bool contributes, double weight,
                       const std::vector<WorkProgress>& progress = {});

  // Calls EndStep() and then WaitForRound() or WaitForTurn(), with fewer calls
  // of the server. If the wait failed, the step has ended, and calling this
  // again only waits.
  absl::StatusOr<Round> EndStepAndWaitForRound(
      double weight, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});
  absl::Status EndStepAndWaitForTurn(
      int64_t staleness, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});

  // Waits until the round to which the last step has contributed has closed. If
  // that round had closed before the contribution came, returns the last closed
  // round. `start` is when the end of the step began.
  absl::StatusOr<Round> WaitForRound(absl::Duration timeout,
                                     absl::Time start = SteadyNow());

  // Waits until the next step may begin with at most `staleness`.
  absl::Status WaitForTurn(int64_t staleness, absl::Duration timeout,
                           absl::Time start = SteadyNow());

  // Waits until round `number` of the group has closed. This worker need not
  // have contributed to it.
  absl::StatusOr<Round> FetchRound(int64_t number, absl::Duration timeout);

  // Waits at a barrier until all workers of the group do. Meanwhile nobody
  // waits for this worker elsewhere. Afterwards all have the same clock. If it
  // failed, call it again to continue waiting: all other calls return
  // FailedPrecondition until it succeeds.
  absl::Status WaitAtBarrier(const std::string& barrier,
                             absl::Duration timeout);

  // Joins again after the group has given this worker up, or after it has left.
  // `newer_instance` is as in Coordinator::Join.
  absl::Status Rejoin(uint64_t newer_instance = 0);

  // Leaves the group: nobody waits for this worker any more. Idempotent. Waits
  // for the server at most `timeout`, or the client's timeout if that is
  // shorter.
  absl::Status Leave(absl::Duration timeout = absl::InfiniteDuration());

  // Returns the first known event after number `after`; waits for one.
  Event NextEvent(int64_t after, absl::Duration timeout);
  // Reports at the end of the training which workers were lost, which of this
  // worker's steps do not count (`dropped`), and which items of work queues are
  // not done. Prints nothing if there is nothing to report, or nothing has
  // changed since the last report.
  void Report(absl::Duration timeout, const std::vector<int64_t>& dropped);

 private:
  GroupSession(std::shared_ptr<GroupClient> groups, std::string group,
               const WorkerGroupOptions& options, uint32_t worker,
               std::optional<int64_t> first_step, std::string job);

  // Updates clock, round and step after a step has ended.
  void Advance(bool contributes, int64_t open_round, bool must_wait);
  bool is_waiting() const {
    MutexLock lock(&mutex_);
    return is_waiting_;
  }
  // FailedPrecondition if another process of this machine is this worker.
  absl::Status CheckIsAlone() const;
  void KeepAlive();
  void CountWait(absl::Time start);
  // Calls wait(until) repeatedly, with times up to `deadline`, and reports the
  // workers that it waits for.
  template <typename Wait>
  auto WaitAloud(absl::Time start, absl::Time deadline, const Wait& wait);
  // When to report next that a wait that began at `start` goes on.
  absl::Time NextLine(absl::Time start) const;
  // Calls GroupClient::Join() until another job has ended.
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
  State state_ ABSL_GUARDED_BY(mutex_);
  std::optional<int64_t> first_step_
      ABSL_GUARDED_BY(mutex_);  // Set until it joins.
  int64_t barrier_generation_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time at_barrier_since_ ABSL_GUARDED_BY(mutex_);
  // Whether a step has ended and the wait after it is not over.
  bool is_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_leaving_ ABSL_GUARDED_BY(mutex_) = false;  // Leave() was called.
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t num_losses_ ABSL_GUARDED_BY(mutex_) = 0;  // Known ones.
  int64_t losses_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);  // The last ones.
  int64_t num_events_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string report_ ABSL_GUARDED_BY(mutex_);

  std::thread keeper_;  // Runs KeepAlive().
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_GROUP_SESSION_H_
