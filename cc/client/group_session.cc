// mutex_ guards the worker's clock, round and place. It is never held during a
// call, so that the thread keeper_ can renew the lease while another thread
// waits. One call (ArriveAndWait) ends a step and waits. If the wait is not
// over when the call returns, is_waiting_ stays set. The next call then only
// waits, so that a step does not end twice.
//
// Leave() first makes keeper_ stop renewing the lease. So even if the server
// does not receive the call, other workers wait only until the lease ends. The
// destructor tells keeper_ to stop, then leaves the group, then joins the
// thread.

#include "cc/client/group_session.h"

#include <algorithm>
#include <atomic>
#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "cc/base/interrupt.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Adds to the error how long the wait was.
absl::Status GaveUpAfter(absl::Duration timeout, const absl::Status& status) {
  if (!absl::IsDeadlineExceeded(status)) return status;
  return absl::DeadlineExceededError(absl::StrCat(
      status.message(), "; gave up after ", absl::FormatDuration(timeout)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<GroupSession>> GroupSession::Join(
    std::shared_ptr<GroupClient> groups, const std::string& group,
    const WorkerGroupOptions& options, uint32_t worker,
    std::optional<int64_t> first_step, const std::string& job) {
  std::unique_ptr<GroupSession> session(new GroupSession(
      std::move(groups), group, options, worker, first_step, job));
  TFSWITCH_RETURN_IF_ERROR(session->CheckIsAlone());
  TFSWITCH_RETURN_IF_ERROR(session->Rejoin());
  static std::atomic<bool> has_said{false};  // At most once per process.
  if (job.empty() && !first_step.has_value() &&
      session->state().num_steps > 0 && !has_said.exchange(true)) {
    LogWriter::Get().WriteInOrder(
        kLines,
        absl::StrCat("tfswitch: group '", group, "' knows ",
                     session->state().num_steps, " steps of worker ", worker,
                     ", which begins a new run, as it has no job name. With "
                     "job= or TFSWITCH_JOB one that is started again goes on "
                     "where its job is"));
  }
  session->keeper_ = std::thread([s = session.get()] { s->KeepAlive(); });
  return session;
}

GroupSession::GroupSession(std::shared_ptr<GroupClient> groups,
                           std::string group, const WorkerGroupOptions& options,
                           uint32_t worker, std::optional<int64_t> first_step,
                           std::string job)
    : groups_(std::move(groups)),
      options_(options),
      job_(std::move(job)),
      first_step_(first_step) {
  state_.member.set_group(std::move(group));
  state_.member.set_worker(worker);
}

GroupSession::~GroupSession() {
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    changed_.NotifyAll();
  }
  // If the server does not receive this call, the lease ends by itself.
  Leave(kPartingTime).IgnoreError();
  if (keeper_.joinable()) keeper_.join();
}

absl::Status GroupSession::CheckIsAlone() const {
  const GroupMember own = state().member;
  const auto stats = groups_->GroupStats(own.group(), kPartingTime);
  // There is no group yet, or no server that answers.
  if (!stats.ok()) return absl::OkStatus();
  const auto present = stats->processes().find(own.worker());
  if (present == stats->processes().end()) return absl::OkStatus();
  return tfswitch::CheckIsAlone(own.group(), own.worker(), present->second);
}

void GroupSession::KeepAlive() {
  bool has_warned = false;
  for (;;) {
    GroupMember member;
    {
      MutexLock lock(&mutex_);
      const absl::Time next = SteadyNow() + options_.lease / 3;
      while (!is_ending_ && SteadyNow() < next) {
        changed_.WaitFor(&mutex_,
                         std::max(next - SteadyNow(), absl::Milliseconds(1)));
      }
      if (is_ending_) return;
      // After a failed Leave(), the lease must still end.
      if (state_.has_left || is_leaving_) continue;
      member = state_.member;
    }
    // Two errors need no report: a worker that was given up learns of it at the
    // end of its step, and a server that is away is asked again. Any other
    // error would repeat until the lease ends, so it is reported once.
    const absl::Status renewed = groups_->Heartbeat(member, options_.lease / 3);
    if (renewed.ok()) HearOfLosses(options_.lease / 3);
    if (renewed.ok() || absl::IsUnavailable(renewed) ||
        absl::IsNotFound(renewed) || absl::IsFailedPrecondition(renewed) ||
        std::exchange(has_warned, true)) {
      continue;
    }
    LogWriter::Get().WriteInOrder(
        kLines, absl::StrCat("tfswitch: warning: worker ", member.worker(),
                             " cannot renew its lease: ", renewed.message()));
  }
}

absl::Time GroupSession::NextLine(absl::Time start) const {
  MutexLock lock(&mutex_);
  return std::max(start + kPatience, last_line_ + kRepeatedEvery);
}

template <typename Wait>
auto GroupSession::WaitAloud(absl::Time start, absl::Time deadline,
                             const Wait& wait) {
  for (;;) {
    auto result = wait(std::min(deadline, NextLine(start)));
    const absl::Time now = SteadyNow();
    if (!absl::IsDeadlineExceeded(StatusOf(result)) || now >= deadline) {
      if (now - start >= kPatience) {
        HearOfLosses(kPartingTime);
        MutexLock lock(&mutex_);
        state_.waiting_for.clear();
      }
      return result;
    }
    // The message is "group 'g': round 3 waits for worker 4 ...".
    constexpr absl::string_view kWaitsFor = " waits for ";
    const absl::string_view text = StatusOf(result).message();
    const size_t place = text.find(kWaitsFor);
    std::string whom(place == absl::string_view::npos
                         ? text
                         : text.substr(place + kWaitsFor.size()));
    {
      MutexLock lock(&mutex_);
      last_line_ = now;
      state_.waiting_for = whom;
    }
    Say("waiting", absl::StrCat("waiting for ", whom));
  }
}

absl::Status GroupSession::EndStep(bool contributes, double weight,
                                   const std::vector<WorkProgress>& progress) {
  const State now = state();
  TFSWITCH_ASSIGN_OR_RETURN(
      const int64_t open_round,
      groups_->Arrive(now.member, now.clock,
                      contributes ? now.round : WorkerGroup::kNoRound, weight,
                      progress));
  Advance(contributes, open_round, is_waiting());
  return absl::OkStatus();
}

void GroupSession::Advance(bool contributes, int64_t open_round,
                           bool must_wait) {
  MutexLock lock(&mutex_);
  is_waiting_ = must_wait;
  ++state_.clock;
  ++state_.num_steps;
  // If Leave() was called before this step, the worker continues after all.
  is_leaving_ = false;
  // A step that contributed waits for its round next. If the contribution came
  // too late, the worker skips the rounds that closed without it.
  state_.round =
      contributes ? std::max(state_.round, open_round - 1) : open_round;
}

absl::StatusOr<Round> GroupSession::EndStepAndWaitForRound(
    double weight, absl::Duration timeout,
    const std::vector<WorkProgress>& progress) {
  if (is_waiting()) return WaitForRound(timeout);
  const absl::Time start = SteadyNow();
  const State now = state();
  TFSWITCH_ASSIGN_OR_RETURN(
      const v1::ArriveResponse arrival,
      groups_->ArriveAndWait(now.member, now.clock, now.round, weight, progress,
                             /*staleness=*/0,
                             std::min(start + timeout, NextLine(start))));
  Advance(/*contributes=*/true, arrival.open_round(),
          /*must_wait=*/!arrival.has_round());
  if (!arrival.has_round()) return WaitForRound(timeout, start);
  CountWait(start);
  MutexLock lock(&mutex_);
  ++state_.round;
  return arrival.round();
}

absl::Status GroupSession::EndStepAndWaitForTurn(
    int64_t staleness, absl::Duration timeout,
    const std::vector<WorkProgress>& progress) {
  if (is_waiting()) return WaitForTurn(staleness, timeout);
  const absl::Time start = SteadyNow();
  const State now = state();
  TFSWITCH_ASSIGN_OR_RETURN(
      const v1::ArriveResponse arrival,
      groups_->ArriveAndWait(now.member, now.clock, WorkerGroup::kNoRound,
                             /*weight=*/0.0, progress, staleness,
                             std::min(start + timeout, NextLine(start))));
  Advance(/*contributes=*/false, arrival.open_round(),
          /*must_wait=*/!arrival.may_proceed());
  if (!arrival.may_proceed()) return WaitForTurn(staleness, timeout, start);
  CountWait(start);
  return absl::OkStatus();
}

absl::StatusOr<Round> GroupSession::WaitForRound(absl::Duration timeout,
                                                 absl::Time start) {
  absl::StatusOr<Round> closed =
      WaitAloud(start, start + timeout, [&](absl::Time until) {
        const State now = state();
        return groups_->WaitForRound(now.member, now.round, until);
      });
  CountWait(start);
  TFSWITCH_RETURN_IF_ERROR(GaveUpAfter(timeout, closed.status()));
  MutexLock lock(&mutex_);
  is_waiting_ = false;
  ++state_.round;
  return closed;
}

absl::Status GroupSession::WaitForTurn(int64_t staleness,
                                       absl::Duration timeout,
                                       absl::Time start) {
  const absl::Status turn =
      WaitAloud(start, start + timeout, [&](absl::Time until) {
        const State now = state();
        return groups_->WaitForTurn(now.member, now.clock, staleness, until);
      });
  CountWait(start);
  TFSWITCH_RETURN_IF_ERROR(GaveUpAfter(timeout, turn));
  MutexLock lock(&mutex_);
  is_waiting_ = false;
  return absl::OkStatus();
}

absl::StatusOr<Round> GroupSession::FetchRound(int64_t number,
                                               absl::Duration timeout) {
  absl::StatusOr<Round> closed =
      groups_->WaitForRound(state().member, number, SteadyNow() + timeout);
  TFSWITCH_RETURN_IF_ERROR(GaveUpAfter(timeout, closed.status()));
  return closed;
}

absl::Status GroupSession::WaitAtBarrier(const std::string& barrier,
                                         absl::Duration timeout) {
  const absl::Time start = SteadyNow();
  int64_t barrier_generation;
  absl::Time since;
  {
    MutexLock lock(&mutex_);
    barrier_generation = barrier_generation_;
    if (state_.barrier.empty()) at_barrier_since_ = start;
    since = at_barrier_since_;
    state_.barrier = barrier;
  }
  const absl::StatusOr<WorkerGroup::Place> place =
      WaitAloud(since, start + timeout, [&](absl::Time until) {
        return groups_->WaitAtBarrier(state().member, barrier,
                                      barrier_generation, until);
      });
  TFSWITCH_RETURN_IF_ERROR(GaveUpAfter(timeout, place.status()));
  CountWait(since);
  MutexLock lock(&mutex_);
  ++barrier_generation_;
  state_.barrier.clear();
  state_.clock = place->clock();
  state_.round = place->round();
  return absl::OkStatus();
}

absl::Status GroupSession::Rejoin(uint64_t newer_instance) {
  GroupMember before;
  int64_t first_step;
  bool is_repeating;
  {
    MutexLock lock(&mutex_);
    before = state_.member;
    first_step = first_step_.value_or(state_.num_steps);
    // If false, the worker continues after all counted steps. The last of them
    // may be a step of this process for whose end the answer was lost.
    is_repeating = first_step_.has_value() || state_.is_repeating();
    // A worker that has left joins as a new member.
    if (state_.has_left) before.clear_incarnation();
  }
  // If the server was restarted, it has forgotten the group.
  TFSWITCH_RETURN_IF_ERROR(groups_->CreateGroup(before.group(), options_));
  TFSWITCH_ASSIGN_OR_RETURN(const WorkerGroup::Place joined,
                            JoinGroup(before, newer_instance, first_step));
  MutexLock lock(&mutex_);
  state_.member.set_incarnation(joined.incarnation());
  if (state_.place.group_instance() != joined.group_instance()) {
    num_losses_ = losses_before_ = joined.num_losses();
  }
  state_.place = joined;
  state_.clock = joined.clock();
  state_.round = joined.round();
  first_step_.reset();
  state_.num_steps = is_repeating ? first_step : joined.num_steps();
  barrier_generation_ = 0;
  state_.barrier.clear();
  is_waiting_ = false;
  state_.has_left = is_leaving_ = false;
  return absl::OkStatus();
}

absl::StatusOr<WorkerGroup::Place> GroupSession::JoinGroup(
    const GroupMember& before, uint64_t newer_instance, int64_t first_step) {
  constexpr absl::Duration kPause = absl::Milliseconds(100);
  const absl::Time end = SteadyNow() + options_.lease + kPartingTime;
  for (bool has_said = false;; absl::SleepFor(kPause)) {
    auto joined =
        groups_->Join(before.group(), before.worker(), before.incarnation(),
                      newer_instance, first_step, job_);
    if (!absl::IsAlreadyExists(joined.status()) || SteadyNow() >= end) {
      return joined;
    }
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    if (std::exchange(has_said, true)) continue;
    Say("waiting", absl::StrCat("waiting for the end of another job: ",
                                joined.status().message()));
  }
}

absl::Status GroupSession::Leave(absl::Duration timeout) {
  GroupMember leaving;
  {
    MutexLock lock(&mutex_);
    if (state_.has_left) return absl::OkStatus();
    is_leaving_ = true;
    leaving = state_.member;
  }
  // NotFound means that a restarted server does not know the group. So no
  // worker waits for this one.
  const absl::Status left = groups_->Leave(leaving, timeout);
  if (!absl::IsNotFound(left)) TFSWITCH_RETURN_IF_ERROR(left);
  MutexLock lock(&mutex_);
  state_.has_left = true;
  return absl::OkStatus();
}

void GroupSession::Say(const std::string& kind, const std::string& text) {
  constexpr size_t kKeptEvents = 100;
  std::string line;
  {
    MutexLock lock(&mutex_);
    events_.push_back({++num_events_, kind, text});
    if (events_.size() > kKeptEvents) events_.pop_front();
    changed_.NotifyAll();
    line =
        absl::StrCat("tfswitch: group '", state_.member.group(), "': ", text);
  }
  LogWriter::Get().WriteInOrder(kLines, line);
}

GroupSession::Event GroupSession::NextEvent(int64_t after,
                                            absl::Duration timeout) {
  const absl::Time end = SteadyNow() + timeout;
  MutexLock lock(&mutex_);
  while (!is_ending_ && num_events_ <= after && SteadyNow() < end) {
    changed_.WaitFor(&mutex_,
                     std::max(end - SteadyNow(), absl::Milliseconds(1)));
  }
  for (const Event& each : events_) {
    if (each.number > after) return each;
  }
  return {};
}

void GroupSession::HearOfLosses(absl::Duration timeout) {
  const GroupMember own = state().member;
  const auto stats = groups_->GroupStats(own.group(), timeout);
  if (!stats.ok()) return;  // The next renewal asks again.
  std::vector<uint32_t> given_up;
  std::vector<uint32_t> never_joined;
  std::vector<std::string> texts;
  {
    MutexLock lock(&mutex_);
    for (const auto& [worker, loss] : stats->losses()) {
      if (loss.number() <= num_losses_ || worker == own.worker()) continue;
      (loss.has_joined() ? given_up : never_joined).push_back(worker);
    }
    num_losses_ = std::max(num_losses_, stats->num_losses());
    const auto add = [&](std::vector<uint32_t> workers, absl::Duration after,
                         absl::string_view why) {
      if (workers.empty()) return;
      std::sort(workers.begin(), workers.end());
      const int64_t active = stats->num_active();
      texts.push_back(
          absl::StrCat(workers.size() == 1 ? "worker " : "workers ",
                       absl::StrJoin(workers, ", "),
                       workers.size() == 1 ? " is" : " are", " given up after ",
                       absl::ToDoubleSeconds(after), " s", why, "; ", active,
                       active <= options_.num_workers
                           ? absl::StrCat(" of ", options_.num_workers)
                           : "",
                       active == 1 ? " goes on" : " go on"));
    };
    add(given_up, options_.lease, "");
    add(never_joined, options_.join_timeout, " without having joined");
    for (const std::string& each : texts) {
      absl::StrAppend(&state_.losses, state_.losses.empty() ? "" : ", ", each);
    }
  }
  for (const std::string& each : texts) Say("lost", each);
}

void GroupSession::Report(absl::Duration timeout,
                          const std::vector<int64_t>& dropped) {
  const GroupMember own = state().member;
  const auto stats =
      groups_->GroupStats(own.group(), std::min(timeout, kPartingTime));
  std::vector<std::string> lost;
  std::vector<std::string> texts;
  if (stats.ok()) {
    MutexLock lock(&mutex_);
    // A map sorts the losses by the numbers of the workers.
    const std::map<uint32_t, v1::GetGroupStatsResponse::Loss> losses(
        stats->losses().begin(), stats->losses().end());
    for (const auto& [worker, loss] : losses) {
      if (loss.number() <= losses_before_ || loss.is_back()) continue;
      lost.push_back(absl::StrCat("worker ", worker, " after ",
                                  loss.num_steps(), " steps that count"));
    }
  }
  if (!lost.empty()) {
    texts.push_back(
        absl::StrCat("lost ", absl::StrJoin(lost, ", "),
                     "; what was left of data of its own was not trained"));
  }
  if (!dropped.empty()) {
    texts.push_back(
        absl::StrCat("steps of worker ", own.worker(),
                     " that do not count: ", absl::StrJoin(dropped, ", ")));
  }
  if (stats.ok() && stats->num_active() == 0) {
    for (const auto& [queue, items] : stats->unfinished()) {
      texts.push_back(absl::StrCat("not done of work queue '", queue,
                                   "': ", absl::StrJoin(items.values(), ", ")));
    }
  }
  std::string report = absl::StrJoin(texts, "; ");
  {
    MutexLock lock(&mutex_);
    if (report.empty() || report == report_) return;
    report_ = report;
  }
  Say("report", absl::StrCat("at the end: ", report));
}

void GroupSession::CountWait(absl::Time start) {
  const absl::Duration waited = SteadyNow() - start;
  MutexLock lock(&mutex_);
  ++state_.waits.count;
  state_.waits.total += waited;
  state_.waits.longest = std::max(state_.waits.longest, waited);
}

}  // namespace tfswitch
