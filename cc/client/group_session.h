// One worker's membership in a group: joins the group, renews its lease, ends
// steps, leaves.

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

// A background thread renews the lease every third of its length. So a worker
// is not given up during a long step.
//
// One thread at a time may call EndStep..., WaitFor..., WaitAtBarrier, Rejoin
// and Leave. All other methods are thread-safe.
class GroupSession {
 public:
  static constexpr absl::Duration kPartingTime = absl::Seconds(2);

  // How often and how long this worker has waited for other workers.
  struct Waits {
    int64_t count = 0;
    absl::Duration total;
    absl::Duration longest;
  };

  // The state of a session at one moment.
  struct State {
    // Identifies this worker in calls. Rejoin() changes its incarnation.
    GroupMember member;
    // Where this worker began: the group's answer to the last join.
    WorkerGroup::Place place;
    // How many steps have ended, and the round to which the next step
    // contributes.
    int64_t clock = 0;
    int64_t round = 0;
    // The number of the worker's steps before the present one, including steps
    // of former processes of this worker. It is lower while this process
    // repeats steps that the group has counted already.
    int64_t num_steps = 0;
    // Whether this worker has left and has not joined again.
    bool has_left = true;
    // The barrier at which this worker waits, as far as this process knows;
    // empty if none.
    std::string barrier;
    Waits waits;
    // The workers for which this worker waits, once a line on stderr has named
    // them; empty before that.
    std::string waiting_for;
    // Names the other workers that the group has given up since this worker
    // joined, as far as this process knows; empty if none. It asks the group
    // after a wait of at least kPatience, and at each renewal of the lease.
    std::string losses;

    // Whether the group has counted the present step already, because a former
    // process of this worker took the step.
    bool is_repeating() const { return num_steps < place.num_steps(); }
    // How many steps, from the present one on, the group has counted already.
    int64_t num_to_repeat() const {
      return std::clamp<int64_t>(place.num_steps() - num_steps, 0, clock);
    }
  };

  // An event of the group. Kind "waiting": this worker has waited for others
  // longer than kPatience; a line on stderr says so, and is repeated every
  // kRepeatedEvery. Kind "lost": the group has given up workers.
  struct Event {
    int64_t number = 0;  // From 1; 0 means no event.
    std::string kind;
    std::string text;
  };
  static constexpr LogKind kLines = {"groups", /*burst=*/200,
                                     /*per_second=*/10};
  static constexpr absl::Duration kPatience = absl::Seconds(2);
  static constexpr absl::Duration kRepeatedEvery = absl::Seconds(30);

  // Makes the group if it does not exist, and joins it as `worker`. A process
  // that continues from its own checkpoint passes the num_steps() of the
  // checkpoint as `first_step`. If `job` is set and that job trains already,
  // the worker continues where the job is. If another job trains in the group,
  // its workers may be dead: Join() waits for their lease and a little more
  // before it fails.
  static absl::StatusOr<std::unique_ptr<GroupSession>> Join(
      std::shared_ptr<GroupClient> groups, const std::string& group,
      const WorkerGroupOptions& options, uint32_t worker,
      std::optional<int64_t> first_step = std::nullopt,
      const std::string& job = "");

  // Leaves the group if Leave() was not called. Errors are ignored, because the
  // lease ends anyway. If the server is away, waits at most kPartingTime and a
  // third of the lease.
  ~GroupSession();
  GroupSession(const GroupSession&) = delete;
  GroupSession& operator=(const GroupSession&) = delete;

  State state() const {
    MutexLock lock(&mutex_);
    return state_;
  }
  // Returns state().is_repeating(), but copies no state, because each push
  // calls this.
  bool is_repeating() const {
    MutexLock lock(&mutex_);
    return state_.is_repeating();
  }
  // Ends a step that the group has counted already. Does not call the group.
  void EndRepeatedStep() {
    MutexLock lock(&mutex_);
    ++state_.num_steps;
  }

  // The mark is sent at the end of each step; see GroupMember.
  void SetMark(int64_t mark) {
    MutexLock lock(&mutex_);
    state_.member.set_mark(mark);
  }

  // Ends a step. If it `contributes`, its contribution to its round has
  // `weight`. Returns NotFound if the group has given this worker up; then call
  // Rejoin(). `progress` says how far the step has trained the items of work
  // queues; see Coordinator::Arrive.
  absl::Status EndStep(bool contributes, double weight,
                       const std::vector<WorkProgress>& progress = {});

  // Calls EndStep() and then WaitForRound() or WaitForTurn(), with fewer calls
  // to the server. If only the wait failed, the step has ended: another call of
  // the method waits again and ends no second step.
  absl::StatusOr<Round> EndStepAndWaitForRound(
      double weight, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});
  absl::Status EndStepAndWaitForTurn(
      int64_t staleness, absl::Duration timeout,
      const std::vector<WorkProgress>& progress = {});

  // Waits until the round to which the last step has contributed has closed. If
  // the round closed before the contribution arrived, returns the last closed
  // round. `start` is the time at which the end of the step began.
  absl::StatusOr<Round> WaitForRound(absl::Duration timeout,
                                     absl::Time start = SteadyNow());

  // Waits until the next step may begin: no other worker is more than
  // `staleness` steps behind.
  absl::Status WaitForTurn(int64_t staleness, absl::Duration timeout,
                           absl::Time start = SteadyNow());

  // Waits until round `number` of the group has closed. This worker may have no
  // contribution in it.
  absl::StatusOr<Round> FetchRound(int64_t number, absl::Duration timeout);

  // Waits at a barrier until all workers of the group wait there. Until then no
  // other wait of the group waits for this worker. Afterwards all workers have
  // the same clock. After an error, call this again to continue waiting; until
  // it succeeds, all other calls return FailedPrecondition.
  absl::Status WaitAtBarrier(const std::string& barrier,
                             absl::Duration timeout);

  // Joins again after the group has given this worker up, or after Leave(). For
  // `newer_instance` see Coordinator::Join.
  absl::Status Rejoin(uint64_t newer_instance = 0);

  // Leaves the group, so that no worker waits for this one any more.
  // Idempotent. Waits for the server at most `timeout`, or the client's timeout
  // if that is shorter.
  absl::Status Leave(absl::Duration timeout = absl::InfiniteDuration());

  // Returns the first event whose number is above `after`. Waits for one if
  // there is none.
  Event NextEvent(int64_t after, absl::Duration timeout);
  // Reports at the end of the training which workers were lost, which of this
  // worker's steps do not count (`dropped`), and which items of work queues are
  // not done. Prints nothing if there is nothing to report, or if nothing has
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
  // FailedPrecondition if another process of this machine has joined as the
  // same worker and still runs.
  absl::Status CheckIsAlone() const;
  void KeepAlive();
  void CountWait(absl::Time start);
  // Calls wait(until) again and again, with times up to `deadline`. Between the
  // calls, reports the workers for which this worker waits.
  template <typename Wait>
  auto WaitAloud(absl::Time start, absl::Time deadline, const Wait& wait);
  // When to write the next line about a wait that began at `start`.
  absl::Time NextLine(absl::Time start) const;
  // Calls GroupClient::Join(), and repeats it while another job trains in the
  // group.
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
      ABSL_GUARDED_BY(mutex_);  // Set until it has joined.
  int64_t barrier_generation_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time at_barrier_since_ ABSL_GUARDED_BY(mutex_);
  // Whether a step has ended and the wait after the step is not over.
  bool is_waiting_ ABSL_GUARDED_BY(mutex_) = false;
  bool is_leaving_ ABSL_GUARDED_BY(mutex_) = false;  // Leave() was called.
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time last_line_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  // The losses that this process knows of.
  int64_t num_losses_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t losses_before_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Event> events_ ABSL_GUARDED_BY(mutex_);  // The newest.
  int64_t num_events_ ABSL_GUARDED_BY(mutex_) = 0;
  std::string report_ ABSL_GUARDED_BY(mutex_);

  std::thread keeper_;  // Runs KeepAlive().
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_GROUP_SESSION_H_
