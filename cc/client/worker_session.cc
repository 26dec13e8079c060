// The end of a step may fail at several points, and the session remembers at
// which one. unconfirmed_weight_ is set while it is not known whether the group
// has received the end of the step. is_unfinished_ is set while the wait after
// the step is not over, and must_catch_up_ while a closed round must still be
// applied. Prepare() finishes a failed call before the next call begins, so a
// failed call can be repeated.
//
// NotFound means that the group has given the worker up; ComeBack() joins
// again. Commit() sends a round to all shards at the same time. Then it sends
// each shard the rounds that the shard lacks, one by one. Leave() sets
// is_leaving_ before it locks mutex_, because a call that waits for other
// workers holds mutex_.

#include "cc/client/worker_session.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/shard/gradient_accumulator.h"

namespace tfswitch {

absl::StatusOr<std::unique_ptr<WorkerSession>> WorkerSession::Join(
    std::shared_ptr<ParameterClient> client, const WorkerOptions& options,
    std::function<void()> on_round) {
  if (options.wait_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("wait_timeout must be positive. Received: ",
                     absl::FormatDuration(options.wait_timeout)));
  }
  // Points into the client, and keeps the client alive.
  const std::shared_ptr<GroupClient> groups(client, &client->groups());
  TFSWITCH_ASSIGN_OR_RETURN(
      std::unique_ptr<GroupSession> session,
      GroupSession::Join(groups, options.group, options.group_options,
                         options.worker, options.first_step, options.job));
  std::unique_ptr<WorkerSession> worker(new WorkerSession(
      std::move(client), options, std::move(session), std::move(on_round)));
  {
    MutexLock lock(&worker->mutex_);
    TFSWITCH_RETURN_IF_ERROR(worker->BeginOnServers());
    TFSWITCH_RETURN_IF_ERROR(worker->CatchUp());
  }
  return worker;
}

WorkerSession::WorkerSession(std::shared_ptr<ParameterClient> client,
                             WorkerOptions options,
                             std::unique_ptr<GroupSession> session,
                             std::function<void()> on_round)
    : client_(std::move(client)),
      options_(std::move(options)),
      session_(std::move(session)),
      on_round_(std::move(on_round)) {}

absl::Status WorkerSession::CheckTable(const TableConfig& table) const {
  const ConsistencyConfig& ours = options_.consistency;
  const ConsistencyConfig& theirs = table.consistency;
  switch (theirs.kind) {
    case ConsistencyKind::kAsp:
      return absl::OkStatus();
    case ConsistencyKind::kSsp:
      if (is_bsp()) return absl::OkStatus();
      if (ours.kind == ConsistencyKind::kSsp &&
          ours.staleness <= theirs.staleness) {
        return absl::OkStatus();
      }
      break;
    case ConsistencyKind::kBsp:
      if (is_bsp()) return absl::OkStatus();
      break;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "table '", table.name, "' has consistency ", theirs.ToString(),
      ", and worker ", options_.worker, " of group '", options_.group,
      "' trains with ", ours.ToString(),
      "; give the worker the consistency of the strictest table"));
}

absl::StatusOr<StepTag> WorkerSession::CurrentStep(const std::string& table) {
  {
    // Prepare() may take long. Other threads that push at the same time wait
    // here until it has returned.
    MutexLock lock(&mutex_);
    TFSWITCH_RETURN_IF_ERROR(Prepare(""));
  }
  has_pushed_ = true;
  if (!table.empty()) {
    MutexLock lock(&staged_mutex_);
    staged_tables_.insert(table);
  }
  const GroupSession::State now = session_->state();
  return StepTag{now.member.group(), now.member.worker(),
                 now.member.incarnation(), now.clock};
}

absl::Status WorkerSession::Prepare(const std::string& barrier) {
  TFSWITCH_RETURN_IF_ERROR(CheckLosses());
  if (has_left_) {
    TFSWITCH_RETURN_IF_ERROR(JoinAgain());
    has_left_ = false;
    is_unfinished_ = false;
  }
  if (unconfirmed_weight_.has_value()) TFSWITCH_RETURN_IF_ERROR(Arrive());
  if (is_unfinished_) TFSWITCH_RETURN_IF_ERROR(FinishStep());
  if (must_catch_up_) TFSWITCH_RETURN_IF_ERROR(CatchUp());
  const std::string present = session_->state().barrier;
  if (present.empty() || present == barrier) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "worker ", options_.worker, " waits at barrier '", present,
      "', where a wait has failed; go on waiting there, or leave the group"));
}

void WorkerSession::ForgetStagedTables() {
  MutexLock lock(&staged_mutex_);
  staged_tables_.clear();
}

absl::Status WorkerSession::JoinAgain() {
  ForgetStagedTables();
  has_pushed_ = false;
  has_applied_ = false;
  unconfirmed_weight_.reset();
  opened_barrier_.clear();
  has_ended_step_ = false;
  must_rejoin_ = true;
  return CatchUp();
}

absl::Status WorkerSession::Rejoin() {
  own_items_.clear();  // The group may have given them away.
  absl::Status joined = session_->Rejoin();
  if (joined.ok()) joined = BeginOnServers();
  must_rejoin_ = !joined.ok();
  if (joined.ok() && is_leaving_) return HasLeft();
  return joined;
}

absl::Status WorkerSession::BeginOnServers() {
  // One attempt is enough, unless other workers restart at the same time and
  // choose an even higher instance.
  constexpr int kMaxDraws = 8;
  absl::Status begun;
  for (int i = 0; is_bsp() && i < kMaxDraws; ++i) {
    Round none;
    none.set_number(WorkerGroup::kNoRound);
    none.set_group_instance(session_->state().place.group_instance());
    begun = Commit(none);
    const uint64_t newer = NewerInstanceOf(begun);
    if (newer == 0) break;
    TFSWITCH_RETURN_IF_ERROR(session_->Rejoin(newer));
  }
  return begun;
}

absl::Status WorkerSession::HasLeft() const {
  return absl::CancelledError(absl::StrCat("worker ", options_.worker,
                                           " of group '", options_.group,
                                           "' has left meanwhile"));
}

absl::Status WorkerSession::CatchUp() {
  must_catch_up_ = true;
  if (must_rejoin_) TFSWITCH_RETURN_IF_ERROR(Rejoin());
  absl::StatusOr<std::optional<Round>> last = LastClosedRound();
  if (absl::IsNotFound(last.status()) && !is_leaving_) {
    // The group has given this worker up during the wait.
    TFSWITCH_RETURN_IF_ERROR(Rejoin());
    last = LastClosedRound();
  }
  TFSWITCH_RETURN_IF_ERROR(last.status());
  if (last->has_value()) {
    const absl::Status applied = Commit(**last);
    // An error of the round itself was reported to the workers that took part
    // in it.
    if (!IsErrorOfAppliedRound(applied)) TFSWITCH_RETURN_IF_ERROR(applied);
  }
  must_catch_up_ = false;
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Round>> WorkerSession::LastClosedRound() {
  const int64_t number = session_->state().round - 1;
  if (!is_bsp() || number < 0) return std::nullopt;
  return session_->FetchRound(number, options_.wait_timeout);
}

absl::Status WorkerSession::EndStep(double weight) {
  MutexLock lock(&mutex_);
  if (is_unfinished_) return EndedStep(FinishStep());
  if (must_catch_up_ && has_ended_step_) return EndedStep(CatchUp());
  if (!unconfirmed_weight_.has_value()) {
    TFSWITCH_RETURN_IF_ERROR(Prepare(""));
    if (is_repeating()) {
      session_->EndRepeatedStep();
      return absl::OkStatus();
    }
    unconfirmed_weight_ = weight;
    unconfirmed_progress_ = Progress();
  }
  return Arrive();
}

absl::Status WorkerSession::Arrive() {
  const double weight = *unconfirmed_weight_;
  const int64_t clock = session_->state().clock;
  absl::Status ended;
  bool has_closed = false;
  switch (options_.consistency.kind) {
    case ConsistencyKind::kAsp:
      ended = session_->EndStep(/*contributes=*/false, weight,
                                unconfirmed_progress_);
      break;
    case ConsistencyKind::kSsp:
      ended = session_->EndStepAndWaitForTurn(options_.consistency.staleness,
                                              options_.wait_timeout,
                                              unconfirmed_progress_);
      break;
    case ConsistencyKind::kBsp: {
      absl::StatusOr<Round> round = session_->EndStepAndWaitForRound(
          weight, options_.wait_timeout, unconfirmed_progress_);
      ended = round.status();
      has_closed = round.ok();
      if (has_closed) uncommitted_ = *std::move(round);
      break;
    }
  }
  const bool has_arrived = has_closed || session_->state().clock != clock;
  if (has_arrived) {
    CountProgress(unconfirmed_progress_);
    has_pushed_ = false;
    has_applied_ = false;
  }
  // If a server did not answer, or the user has interrupted the call, it is not
  // known whether the group has received the end of the step.
  const bool is_unconfirmed =
      !has_arrived &&
      (absl::IsUnavailable(ended) || absl::IsDeadlineExceeded(ended) ||
       absl::IsCancelled(ended));
  if (!is_unconfirmed) unconfirmed_weight_.reset();
  if (absl::IsNotFound(ended)) return EndedStep(ComeBack(ended, has_arrived));
  is_unfinished_ = has_closed || (has_arrived && !ended.ok());
  if (has_closed) ended = EndedStep(FinishStep());
  return ended.ok() ? CheckLosses() : ended;
}

absl::Status WorkerSession::EndedStep(absl::Status status) {
  has_ended_step_ = !status.ok() && must_catch_up_;
  return status;
}

absl::Status WorkerSession::WaitAtBarrier(const std::string& barrier,
                                          absl::Duration timeout) {
  const absl::Time deadline = SteadyNow() + timeout;
  MutexLock lock(&mutex_);
  const bool has_opened = must_catch_up_ && opened_barrier_ == barrier;
  TFSWITCH_RETURN_IF_ERROR(Prepare(barrier));
  opened_barrier_.clear();
  has_ended_step_ = false;
  // A former process of this worker has passed the barrier already.
  if (is_repeating()) return absl::OkStatus();
  if (has_opened) return absl::OkStatus();
  if (is_bsp() && has_pushed_) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", options_.worker, " comes to barrier '", barrier,
        "' in the midst of a step: end the step first, or what it has pushed "
        "would be lost"));
  }
  absl::Status opened = session_->WaitAtBarrier(barrier, timeout);
  if (absl::IsNotFound(opened)) {
    TFSWITCH_RETURN_IF_ERROR(ComeBack(opened, /*has_arrived=*/true));
    opened = session_->WaitAtBarrier(barrier, deadline - SteadyNow());
  }
  TFSWITCH_RETURN_IF_ERROR(opened);
  opened_barrier_ = barrier;
  TFSWITCH_RETURN_IF_ERROR(CatchUp());
  opened_barrier_.clear();
  return CheckLosses();
}

absl::Status WorkerSession::FinishStep() {
  if (is_bsp()) {
    if (!uncommitted_.has_value()) {
      absl::StatusOr<Round> round =
          session_->WaitForRound(options_.wait_timeout);
      if (absl::IsNotFound(round.status())) {
        return ComeBack(round.status(), /*has_arrived=*/true);
      }
      TFSWITCH_RETURN_IF_ERROR(round.status());
      uncommitted_ = *std::move(round);
    }
    const absl::Status applied = Commit(*uncommitted_);
    if (absl::IsAborted(applied)) {
      // The server that closed the round was restarted without its tables.
      uncommitted_.reset();
      return ComeBack(applied, /*has_arrived=*/true);
    }
    // A round is over even if it could not be applied.
    if (IsErrorOfAppliedRound(applied)) is_unfinished_ = false;
    if (is_unfinished_) TFSWITCH_RETURN_IF_ERROR(applied);
    if (!Counts(*uncommitted_)) NoteDropped(session_->state().num_steps - 1);
    uncommitted_.reset();
    ForgetStagedTables();
    TFSWITCH_RETURN_IF_ERROR(applied);
  } else {
    const absl::Status turn = session_->WaitForTurn(
        options_.consistency.staleness, options_.wait_timeout);
    if (absl::IsNotFound(turn)) return ComeBack(turn, /*has_arrived=*/true);
    TFSWITCH_RETURN_IF_ERROR(turn);
  }
  is_unfinished_ = false;
  return absl::OkStatus();
}

void WorkerSession::NoteDropped(int64_t step) {
  constexpr size_t kKeptSteps = 20;
  ++num_dropped_;
  MutexLock lock(&staged_mutex_);
  if (dropped_.size() < kKeptSteps) dropped_.push_back(step);
}

absl::Status WorkerSession::CheckLosses() const {
  if (!options_.fails_on_loss) return absl::OkStatus();
  const std::string losses = session_->state().losses;
  if (losses.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "group '", options_.group, "': ", losses, ", and worker ",
      options_.worker,
      " ends, as on_lost_worker is 'fail'; start the job again from its last "
      "checkpoint"));
}

bool WorkerSession::Counts(const Round& round) const {
  if (options_.group_options.carries_late_contributions) return true;
  const GroupSession::State now = session_->state();
  return std::any_of(round.contributions().begin(), round.contributions().end(),
                     [&](const Contribution& each) {
                       return each.incarnation() == now.member.incarnation() &&
                              each.clock() == now.clock - 1;
                     });
}

absl::Status WorkerSession::ComeBack(const absl::Status& why,
                                     bool has_arrived) {
  if (is_leaving_) return HasLeft();
  const bool is_lost = is_bsp() && !has_arrived;
  LogWriter::Get().WriteInOrder(
      GroupSession::kLines,
      absl::StrCat(
          "tfswitch: group '", options_.group, "': ", why.message(),
          "; joining again",
          is_lost ? ". The step that has just ended does not count" : ""));
  if (is_lost) NoteDropped(session_->state().num_steps);
  is_unfinished_ = false;
  return JoinAgain();
}

absl::Status WorkerSession::Commit(const Round& round) {
  const auto tell = absl::MakeCleanup([this] { on_round_(); });
  const std::string& group = options_.group;
  const int num_shards = client_->num_shards();
  std::vector<TableRef> staged;
  {
    MutexLock lock(&staged_mutex_);
    staged.assign(staged_tables_.begin(), staged_tables_.end());
  }
  std::vector<int64_t> committed(static_cast<size_t>(num_shards));
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(static_cast<size_t>(num_shards));
  for (int shard = 0; shard < num_shards; ++shard) {
    calls.push_back(client_->StartCommitRound(shard, group, round,
                                              &committed[shard], staged));
  }
  absl::Status first;
  absl::Status applied;
  const auto note = [&](const absl::Status& status, int64_t number,
                        int64_t* last) {
    if (!IsErrorOfAppliedRound(status)) return first.Update(status);
    *last = number;
    applied.Update(status);
  };
  for (int shard = 0; shard < num_shards; ++shard) {
    note(calls[shard]->Wait(), round.number(), &committed[shard]);
  }
  TFSWITCH_RETURN_IF_ERROR(first);
  for (int shard = 0; shard < num_shards; ++shard) {
    // The shard may lack earlier rounds, because the workers that should have
    // committed them may have died.
    int64_t& last = committed[shard];
    while (last < round.number()) {
      const int64_t missing = last + 1;
      Round next = round;
      if (missing < round.number()) {
        absl::StatusOr<Round> fetched =
            session_->FetchRound(missing, options_.wait_timeout);
        if (absl::IsOutOfRange(fetched.status())) {
          // The group keeps only the last rounds, and has dropped the missing
          // one since `round` was fetched. A new copy of `round` says so to the
          // shard.
          fetched = session_->FetchRound(round.number(), options_.wait_timeout);
        }
        if (absl::IsNotFound(fetched.status())) {
          return absl::AbortedError(fetched.status().message());
        }
        TFSWITCH_ASSIGN_OR_RETURN(next, std::move(fetched));
      }
      note(client_->StartCommitRound(shard, group, next, &last, staged)->Wait(),
           next.number(), &last);
      TFSWITCH_RETURN_IF_ERROR(first);
      if (last < missing) {
        return absl::InternalError(absl::StrCat("group '", group, "': shard ",
                                                shard, " asks for round ",
                                                missing, " again and again"));
      }
    }
  }
  return applied;
}

std::vector<WorkProgress> WorkerSession::Progress() const {
  std::vector<WorkProgress> progress;
  for (const auto& [queue, own] : own_items_) {
    if (own.item.offset() == own.counted) continue;
    WorkProgress& each = progress.emplace_back();
    each.set_queue(queue);
    each.set_epoch(own.item.epoch());
    each.set_index(own.item.index());
    each.set_offset(own.item.offset());
  }
  return progress;
}

void WorkerSession::CountProgress(const std::vector<WorkProgress>& progress) {
  for (const WorkProgress& each : progress) {
    const auto own = FindWorkItem(each.queue(), each.epoch(), each.index());
    if (own.ok()) (*own)->counted = each.offset();
  }
}

absl::StatusOr<WorkerSession::OwnItem*> WorkerSession::FindWorkItem(
    const std::string& queue, int64_t epoch, int64_t index) {
  const auto it = own_items_.find(queue);
  if (it != own_items_.end() && it->second.item.epoch() == epoch &&
      it->second.item.index() == index) {
    return &it->second;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "item ", index, " of epoch ", epoch, " of work queue '", queue,
      "' is not worker ", options_.worker,
      "'s, or not any more: the group has given the worker up meanwhile, it "
      "has left, or the item is finished; take another one"));
}

template <typename Call>
auto WorkerSession::CallAsMember(const Call& call) {
  auto result = call();
  if (!absl::IsNotFound(StatusOf(result))) return result;
  const absl::Status back =
      ComeBack(StatusOf(result), /*has_arrived=*/!has_pushed_);
  if (!back.ok()) return decltype(call())(back);
  return call();
}

absl::Status WorkerSession::CreateWorkQueue(const std::string& queue,
                                            const WorkQueueOptions& options) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(Prepare(""));
  // An earlier training loop may have ended in the middle of a step that pushed
  // nothing. Its progress is dropped.
  const auto own = own_items_.find(queue);
  if (own != own_items_.end() && !has_pushed_ && !has_applied_) {
    own->second.item.set_offset(own->second.counted);
  }
  return CallAsMember([&] {
    return client_->groups().CreateWorkQueue(options_.group, queue, options);
  });
}

absl::StatusOr<std::optional<WorkItem>> WorkerSession::TakeWorkItem(
    const std::string& queue) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(Prepare(""));
  TFSWITCH_ASSIGN_OR_RETURN(std::optional<WorkItem> taken, CallAsMember([&] {
                              return client_->groups().TakeWorkItem(
                                  session_->state().member, queue);
                            }));
  if (!taken.has_value()) {
    own_items_.erase(queue);
    return taken;
  }
  const auto own = FindWorkItem(queue, taken->epoch(), taken->index());
  // The worker has this item already, and the present step has trained a part
  // of it.
  if (own.ok() && (*own)->counted == taken->offset()) return (*own)->item;
  own_items_[queue] = {*taken, taken->offset()};
  return taken;
}

absl::Status WorkerSession::AdvanceWorkItem(const std::string& queue,
                                            int64_t epoch, int64_t index,
                                            int64_t offset) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(OwnItem * own, FindWorkItem(queue, epoch, index));
  if (is_repeating()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", options_.worker, " takes step ", session_->state().num_steps,
        " again, which counts already, and work queue '", queue,
        "' has given it an item behind that; join without first_step"));
  }
  const bool takes_back = offset == own->counted && !has_pushed_ &&
                          !has_applied_ && !unconfirmed_weight_.has_value();
  if (offset < own->item.offset() && !takes_back) {
    return absl::FailedPreconditionError(absl::StrCat(
        "item ", index, " of epoch ", epoch, " of work queue '", queue,
        "' has come to ", own->item.offset(), " already. Received: ", offset));
  }
  own->item.set_offset(offset);
  return absl::OkStatus();
}

absl::Status WorkerSession::FinishWorkItem(const std::string& queue,
                                           int64_t epoch, int64_t index) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(Prepare(""));
  TFSWITCH_ASSIGN_OR_RETURN(const OwnItem* own,
                            FindWorkItem(queue, epoch, index));
  if (own->item.offset() != own->counted) {
    return absl::FailedPreconditionError(absl::StrCat(
        "item ", index, " ('", own->item.value(), "') of epoch ", epoch,
        " of work queue '", queue, "' is finished in the midst of a step that ",
        "has advanced it from ", own->counted, " to ", own->item.offset(),
        ": end the step first"));
  }
  absl::Status finished = client_->groups().FinishWorkItem(
      session_->state().member, queue, epoch, index);
  if (absl::IsNotFound(finished)) {
    TFSWITCH_RETURN_IF_ERROR(ComeBack(finished, /*has_arrived=*/!has_pushed_));
    return FindWorkItem(queue, epoch, index).status();  // The item is lost.
  }
  // If a server did not answer, it is not known whether the queue has received
  // the call. Then the worker keeps the item.
  if (finished.ok() || absl::IsFailedPrecondition(finished)) {
    own_items_.erase(queue);
  }
  return finished;
}

WorkerSession::ItemState WorkerSession::GetItemState(const std::string& queue,
                                                     int64_t epoch,
                                                     int64_t index) {
  MutexLock lock(&mutex_);
  const auto own = FindWorkItem(queue, epoch, index);
  if (!own.ok()) return ItemState::kLost;
  return (*own)->item.offset() == (*own)->counted ? ItemState::kOwn
                                                  : ItemState::kInStep;
}

absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkerSession::WorkQueueStats(
    const std::string& queue) {
  return client_->groups().WorkQueueStats(options_.group, queue);
}

absl::Status WorkerSession::Leave(absl::Duration timeout) {
  // A call that waits in another thread learns that the worker is no longer a
  // member. The flag keeps that call from joining again.
  is_leaving_ = true;
  const bool is_member = !session_->state().has_left;
  absl::Status left = session_->Leave(timeout);
  if (left.ok()) {
    MutexLock lock(&mutex_);
    // The other thread may have joined again before it saw is_leaving_.
    left = session_->Leave(timeout);
    is_unfinished_ = false;
    own_items_.clear();
    must_rejoin_ = must_catch_up_ = false;
    uncommitted_.reset();
    unconfirmed_weight_.reset();
    has_left_ = true;
  }
  is_leaving_ = false;
  std::vector<int64_t> dropped;
  {
    MutexLock lock(&staged_mutex_);
    dropped = dropped_;
  }
  if (left.ok() && is_member) session_->Report(timeout, dropped);
  return left;
}

absl::Status WorkerSession::SetMark(int64_t mark, bool joins_again) {
  session_->SetMark(mark);
  if (!joins_again) return absl::OkStatus();
  MutexLock lock(&mutex_);
  return Prepare("");
}

absl::StatusOr<WorkerSession::Report> WorkerSession::GetReport() {
  Report report;
  TFSWITCH_ASSIGN_OR_RETURN(
      *report.mutable_workers(),
      client_->groups().GroupStats(options_.group, absl::InfiniteDuration()));
  const GroupSession::State now = session_->state();
  const GroupSession::Waits& waits = now.waits;
  report.set_group(options_.group);
  report.set_worker(options_.worker);
  report.set_clock(now.clock - now.num_to_repeat());
  report.set_round(now.round);
  report.set_num_steps(now.num_steps);
  report.set_dropped_steps(num_dropped_);
  report.set_left(now.has_left);
  report.set_in_step(has_pushed_ || has_applied_);
  report.set_num_waits(waits.count);
  report.set_waited_secs(absl::ToDoubleSeconds(waits.total));
  report.set_longest_wait_secs(absl::ToDoubleSeconds(waits.longest));
  report.set_waiting_for(now.waiting_for);
  report.set_mark(now.place.mark());
  report.set_steps_since_mark(now.place.steps_since_mark());
  return report;
}

}  // namespace tfswitch
