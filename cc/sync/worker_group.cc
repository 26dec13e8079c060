// Join, Arrive, Enter, Leave and Expire end with Settle(), which does what
// follows from an event: it ends the run if all its workers have left, closes
// the open round if the round is complete, and then opens a barrier if all
// workers wait. A caller repeats a call if the answer was lost. Its number
// (clock or barrier_generation) is then one below the expected number, and the
// call only renews the lease.
//
// A contribution stays in open_ when its worker leaves or dies. It is withdrawn
// only if the worker is restarted, or a new run or job begins.
// CloseIfComplete() sorts contributions, so that all shards sum them in the
// same order.

#include "cc/sync/worker_group.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/process_identity.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

absl::Status WorkerGroupOptions::Validate() const {
  if (lease <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "lease must be positive. Received: ", absl::FormatDuration(lease)));
  }
  if (join_timeout < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat("join_timeout must not be negative. Received: ",
                     absl::FormatDuration(join_timeout)));
  }
  if (contributions_per_round != 0 && num_workers == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("contributions_per_round needs num_workers. Received: "
                     "contributions_per_round=",
                     contributions_per_round, ", num_workers=0"));
  }
  return absl::OkStatus();
}

std::string WorkerGroupOptions::ToString() const {
  return absl::StrCat("lease=", absl::FormatDuration(lease),
                      " num_workers=", num_workers,
                      " join_timeout=", absl::FormatDuration(join_timeout),
                      " contributions_per_round=", contributions_per_round,
                      " carries_late_contributions=",
                      carries_late_contributions ? "true" : "false",
                      settings.empty() ? "" : " settings=", settings);
}

absl::Status CheckSameOptions(const std::string& group,
                              const WorkerGroupOptions& present,
                              const WorkerGroupOptions& asked) {
  if (present == asked) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "group '", group, "' exists with other options: ", present.ToString(),
      " here, ", asked.ToString(),
      " asked; give all workers the same ones, or the group another name"));
}

std::string NumberAsSet(uint32_t worker) {
  return absl::StrCat(
      "`worker_id=", worker, "` of a Worker, `task_index=", worker,
      "` of a SyncReplicasOptimizer, or task ", worker, " of TF_CONFIG");
}

absl::Status CheckIsAlone(const std::string& group, uint32_t worker,
                          const std::string& process) {
  const int number = RunningProcess(process);
  if (number == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "group '", group, "': process ", number, " of this machine is worker ",
      worker, " (", NumberAsSet(worker),
      "). Give each process its own number, or end that process first"));
}

v1::GroupOptions ToProto(const WorkerGroupOptions& options) {
  v1::GroupOptions proto;
  proto.set_lease_ms(absl::ToInt64Milliseconds(options.lease));
  proto.set_num_workers(options.num_workers);
  proto.set_join_timeout_ms(absl::ToInt64Milliseconds(options.join_timeout));
  proto.set_contributions_per_round(options.contributions_per_round);
  proto.set_carries_late_contributions(options.carries_late_contributions);
  proto.set_settings(options.settings);
  return proto;
}

WorkerGroupOptions FromProto(const v1::GroupOptions& proto) {
  WorkerGroupOptions options;
  options.lease = absl::Milliseconds(proto.lease_ms());
  options.num_workers = proto.num_workers();
  options.join_timeout = absl::Milliseconds(proto.join_timeout_ms());
  options.contributions_per_round = proto.contributions_per_round();
  options.carries_late_contributions = proto.carries_late_contributions();
  options.settings = proto.settings();
  return options;
}

namespace {

bool IsBefore(const v1::SavedGroup::Position& a,
              const v1::SavedGroup::Position& b) {
  return std::pair(a.mark(), a.steps()) < std::pair(b.mark(), b.steps());
}

}  // namespace

WorkerGroup::WorkerGroup(const WorkerGroupOptions& options,
                         uint64_t first_incarnation)
    : options_(options),
      group_instance_(first_incarnation),
      next_incarnation_(first_incarnation),
      first_of_present_run_(first_incarnation),
      num_awaited_(options.num_workers),
      waits_for_joins_(options.num_workers > 0) {
  stats_.mutable_staleness()->Resize(kStalenessBuckets, 0);
}

absl::StatusOr<WorkerGroup::Worker*> WorkerGroup::Find(uint32_t worker,
                                                       uint64_t incarnation) {
  const auto it = workers_.find(worker);
  if (it == workers_.end()) {
    return absl::NotFoundError(absl::StrCat(
        "worker ", worker,
        " is not in the group: it has left, or was not heard of for ",
        absl::FormatDuration(options_.lease), "; join again"));
  }
  if (it->second.incarnation != incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", worker,
        " has been started again elsewhere, or two processes have this number "
        "(",
        NumberAsSet(worker), "): give each its own"));
  }
  return &it->second;
}

template <typename Predicate>
void WorkerGroup::Withdraw(const Predicate& is_meant) {
  const auto withdrawn =
      std::remove_if(open_.begin(), open_.end(), [&](const Contribution& c) {
        const bool goes = !c.survives_worker() && is_meant(c);
        // The count of steps may be 0 here, because VoidAll() clears it.
        if (goes) {
          int64_t& steps = (*stats_.mutable_num_steps())[c.worker()];
          steps = std::max<int64_t>(0, steps - 1);
          const auto it = positions_.find(c.worker());
          if (it != positions_.end() && it->second.steps() > 0) {
            it->second.set_steps(it->second.steps() - 1);
          }
        }
        return goes;
      });
  stats_.set_dropped(stats_.dropped() + (open_.end() - withdrawn));
  open_.erase(withdrawn, open_.end());
}

void WorkerGroup::BeginAnew() {
  first_of_present_run_ = next_incarnation_;
  num_openings_ = 0;
  last_clock_ = 0;
  // The contributions that are in open_ now belong to a run that never began.
  Withdraw([](const Contribution&) { return true; });
  seen_.clear();
  left_.clear();
  first_clock_ = 0;
  num_awaited_ = options_.num_workers;
  waits_for_joins_ = num_awaited_ > 0;
  has_begun_ = false;
  joins_end_ = absl::InfiniteFuture();
}

void WorkerGroup::BeginAnewIfAllHaveLeft() {
  if (workers_.empty() ||
      !std::all_of(workers_.begin(), workers_.end(),
                   [](const auto& w) { return w.second.has_come_back(); })) {
    return;
  }
  has_begun_ = true;
  num_openings_ = 0;
  seen_.clear();
  first_clock_ = last_clock_;
  joins_end_ = absl::InfiniteFuture();
  for (auto& [id, worker] : workers_) {
    worker.missing_steps = 0;
    worker.opening = 0;
    seen_.insert(id);
    joins_end_ = std::min(joins_end_, worker.joined + options_.join_timeout);
    if (worker.is_waiting()) continue;
    // The worker may have contributed to the open round already. The other
    // workers begin at a lower clock, so that they contribute to the same
    // round.
    const auto pending = std::count_if(
        open_.begin(), open_.end(), [&w = worker](const Contribution& c) {
          return c.incarnation() == w.incarnation;
        });
    first_clock_ = std::min(first_clock_, worker.clock - pending);
  }
  num_awaited_ =
      std::min<size_t>(options_.num_workers, seen_.size() + left_.size());
  waits_for_joins_ = seen_.size() < num_awaited_;
  left_.clear();
}

void WorkerGroup::NoteStep(Worker* worker) {
  const bool is_theirs = !worker->has_come_back();
  worker->missing_steps &= ~kOwnStep;
  if (!is_theirs) return;
  for (auto& [id, other] : workers_) other.missing_steps &= ~kTheirStep;
}

void WorkerGroup::Reconfigure(const WorkerGroupOptions& options) {
  options_ = options;
  for (Contribution& each : open_) each.set_survives_worker(false);
  BeginAnew();
}

WorkerGroup::Place WorkerGroup::Join(uint32_t worker, absl::Time now,
                                     uint64_t previous, int64_t first_step,
                                     const std::string& job,
                                     const std::string& process) {
  const bool comes_back =
      previous >= first_of_present_run_ && previous < next_incarnation_;
  if (job != job_) BeginJob(worker, job);
  if (workers_.empty() && !seen_.empty() && !comes_back) {
    const int64_t clock = last_clock_;
    BeginAnew();
    // A new run of a job continues with the job's clock, so that learning rate
    // schedules continue.
    if (!job_.empty() && !positions_.empty()) {
      last_clock_ = first_clock_ = clock;
    }
  }
  // The workers for which a run waits begin with the same clock. A worker that
  // joins later begins with the clock of the slowest worker, so that no worker
  // must wait until it has caught up.
  int64_t clock = std::min(SlowestClock(), last_clock_);
  if (waits_for_joins_) clock = first_clock_;
  seen_.insert(worker);
  const auto loss = stats_.mutable_losses()->find(worker);
  if (loss != stats_.mutable_losses()->end()) loss->second.set_is_back(true);
  // A process that joins again may leave its identity out.
  if (previous == 0 || !process.empty()) {
    (*stats_.mutable_processes())[worker] = process;
  }
  if (!ever_joined_.insert(worker).second) {
    stats_.set_rejoined(stats_.rejoined() + 1);
  }
  Worker joined;
  joined.incarnation = next_incarnation_++;
  joined.clock = clock;
  joined.joined = now;
  joined.lease_end = now + options_.lease;
  if (num_openings_ > 0) joined.opening = -1;
  const auto former = workers_.find(worker);
  if (former != workers_.end()) {
    joined.missing_steps = former->second.missing_steps;
  } else if (left_.erase(worker) > 0 && !comes_back && !waits_for_joins_) {
    joined.missing_steps = kOwnStep | kTheirStep;
  }
  const auto is_own = [worker](const Contribution& c) {
    return c.worker() == worker;
  };
  if (!takes_many_contributions() && !comes_back) Withdraw(is_own);
  Position position;
  if (!job_.empty() && !comes_back) {
    position = PositionOf(worker);
    if (position.mark() > 0) positions_[worker] = position;
  }
  int64_t& num_steps = (*stats_.mutable_num_steps())[worker];
  num_steps = std::max(num_steps, first_step);
  const bool has_contributed = !takes_many_contributions() &&
                               std::any_of(open_.begin(), open_.end(), is_own);
  joined.last_round = has_contributed ? open_round_ : open_round_ - 1;
  const int64_t next_round = joined.last_round + 1;
  if (!workers_.insert_or_assign(worker, joined).second) {
    effects_.has_lost_members = true;
  }
  if (waits_for_joins_) {
    if (seen_.size() == 1) joins_end_ = now + options_.join_timeout;
    if (seen_.size() >= num_awaited_) waits_for_joins_ = false;
  }
  Settle();
  Place place;
  place.set_incarnation(joined.incarnation);
  place.set_clock(joined.clock);
  place.set_round(std::max(next_round, open_round_));
  place.set_group_instance(group_instance_);
  place.set_num_steps(num_steps);
  place.set_num_losses(stats_.num_losses());
  place.set_mark(position.mark());
  place.set_steps_since_mark(position.steps());
  return place;
}

absl::Status WorkerGroup::CheckJoin(const v1::JoinRequest& request,
                                    uint64_t max_workers) const {
  const uint32_t worker = request.worker();
  if (ever_joined_.count(worker) == 0 && ever_joined_.size() >= max_workers) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for worker ", worker, " in group '", request.group(),
        "': ", ever_joined_.size(),
        " have joined it, as many as "
        "--max_workers allows; give a worker the number of one that has gone"));
  }
  if (request.job() == job_ ||
      std::all_of(workers_.begin(), workers_.end(),
                  [worker](const auto& w) { return w.first == worker; })) {
    return absl::OkStatus();
  }
  const auto name_of = [](const std::string& each) {
    return each.empty() ? "a job without a name"
                        : absl::StrCat("job '", each, "'");
  };
  return absl::AlreadyExistsError(absl::StrCat(
      "group '", request.group(), "' trains ", name_of(job_), ", and worker ",
      worker, " is of ", name_of(request.job()),
      "; give all workers of a job its name (job=, TFSWITCH_JOB), and jobs "
      "that run at the same time groups of their own"));
}

void WorkerGroup::BeginJob(uint32_t worker, const std::string& job) {
  // If the worker's process of the former job was killed, the worker may still
  // be a member.
  if (workers_.erase(worker) > 0) effects_.has_lost_members = true;
  Withdraw([](const Contribution&) { return true; });
  if (!job.empty()) stats_.clear_num_steps();
  positions_.clear();
  job_ = job;
}

WorkerGroup::Position WorkerGroup::PositionOf(uint32_t worker) const {
  const auto known = [this](uint32_t id) {
    const auto it = positions_.find(id);
    return it == positions_.end() ? Position() : it->second;
  };
  std::optional<Position> others;
  for (const auto& [id, other] : workers_) {
    if (id == worker) continue;
    Position its = known(id);
    if (other.is_waiting()) {
      // The other worker waits at a barrier until this one has trained the
      // steps since the mark.
      its.set_steps(0);
    } else {
      // If the other worker has contributed to the open round, this worker must
      // take the same step, to contribute to the same round.
      its.set_steps(its.steps() -
                    std::count_if(open_.begin(), open_.end(),
                                  [&other = other](const Contribution& c) {
                                    return c.incarnation() == other.incarnation;
                                  }));
    }
    if (!others.has_value() || IsBefore(its, *others)) others = its;
  }
  if (!others.has_value()) {
    for (const auto& [id, its] : positions_) {
      if (!its.has_left()) continue;
      if (!others.has_value() || IsBefore(*others, its)) others = its;
    }
  }
  Position position =
      std::max(known(worker), others.value_or(Position()), IsBefore);
  position.set_has_left(false);
  return position;
}

void WorkerGroup::NoteMark(uint32_t worker, int64_t mark) {
  if (mark <= 0) return;
  Position& position = positions_[worker];
  if (mark > position.mark()) {
    position.set_mark(mark);
    position.set_steps(0);
  }
  position.set_has_left(false);
}

absl::Status WorkerGroup::Heartbeat(uint32_t worker, uint64_t incarnation,
                                    absl::Time now) {
  TFSWITCH_ASSIGN_OR_RETURN(Worker * found, Find(worker, incarnation));
  found->lease_end = now + options_.lease;
  return absl::OkStatus();
}

absl::Status WorkerGroup::Arrive(const v1::ArriveRequest& request,
                                 absl::Time now) {
  const uint32_t worker = request.member().worker();
  const uint64_t incarnation = request.member().incarnation();
  const int64_t clock = request.clock();
  const int64_t round = request.round();
  const double weight = request.weight();
  TFSWITCH_ASSIGN_OR_RETURN(Worker * found, Find(worker, incarnation));
  if (!std::isfinite(weight) || weight < 0.0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the weight of a contribution must be finite and not "
                     "negative. Received: ",
                     weight, " from worker ", worker));
  }
  found->lease_end = now + options_.lease;
  if (clock == found->clock - 1) return absl::OkStatus();  // A repeated call.
  if (found->is_waiting()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "worker ", worker, " waits at barrier '", found->barrier,
        "' and cannot end a step; go on waiting there, or leave the group"));
  }
  if (clock != found->clock) {
    return absl::OutOfRangeError(absl::StrCat(
        "worker ", worker, " ended step ", clock, ", expected ", found->clock));
  }
  if (round > open_round_ || round < kNoRound) {
    return absl::OutOfRangeError(
        absl::StrCat("worker ", worker, " contributes to round ", round,
                     ", and ", open_round_, " is open"));
  }
  const auto staleness = static_cast<size_t>(clock - SlowestClock());
  found->clock = clock + 1;
  NoteStep(found);
  ++(*stats_.mutable_num_steps())[worker];
  NoteMark(worker, request.member().mark());
  const auto position = positions_.find(worker);
  if (position != positions_.end()) {
    position->second.set_steps(position->second.steps() + 1);
  }
  last_clock_ = std::max(last_clock_, found->clock);
  ++*stats_.mutable_staleness()->Mutable(
      static_cast<int>(std::min(staleness, kStalenessBuckets - 1)));
  if (round != kNoRound) {
    const bool is_late = round < open_round_;
    if (is_late && options_.carries_late_contributions) {
      stats_.set_carried(stats_.carried() + 1);
    } else if (is_late) {
      stats_.set_dropped(stats_.dropped() + 1);
    }
    if (!is_late || options_.carries_late_contributions) {
      Contribution& added = open_.emplace_back();
      added.set_worker(worker);
      added.set_incarnation(incarnation);
      added.set_clock(clock);
      added.set_weight(weight);
      added.set_survives_worker(!request.progress().empty());
      found->last_round = open_round_;
    }
  }
  Settle();
  return absl::OkStatus();
}

absl::Status WorkerGroup::Enter(uint32_t worker, uint64_t incarnation,
                                const std::string& barrier,
                                int64_t barrier_generation, absl::Time now) {
  TFSWITCH_ASSIGN_OR_RETURN(Worker * found, Find(worker, incarnation));
  if (barrier.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a barrier needs a name. Received: '' from worker ", worker));
  }
  found->lease_end = now + options_.lease;
  if (found->is_waiting() && found->barrier != barrier) {
    return absl::FailedPreconditionError(
        absl::StrCat("worker ", worker, " comes to barrier '", barrier,
                     "' and waits at '", found->barrier, "' already"));
  }
  if (barrier_generation == found->barrier_generation - 1)
    return absl::OkStatus();  // A repeated call.
  if (barrier_generation != found->barrier_generation) {
    return absl::OutOfRangeError(absl::StrCat(
        "worker ", worker, " comes to its barrier number ", barrier_generation,
        ", expected ", found->barrier_generation));
  }
  ++found->barrier_generation;
  found->barrier = barrier;
  Settle();
  return absl::OkStatus();
}

absl::StatusOr<std::optional<WorkerGroup::Place>>
WorkerGroup::PlaceAfterBarrier(uint32_t worker, uint64_t incarnation) {
  TFSWITCH_ASSIGN_OR_RETURN(const Worker* found, Find(worker, incarnation));
  if (!found->is_waiting()) {
    Place place;
    place.set_incarnation(incarnation);
    place.set_clock(found->clock);
    place.set_round(std::max(found->last_round + 1, open_round_));
    place.set_group_instance(group_instance_);
    return place;
  }
  if (waits_for_joins_ || BarrierToOpen() != nullptr ||
      !std::all_of(workers_.begin(), workers_.end(),
                   [](const auto& w) { return w.second.is_waiting(); })) {
    return std::nullopt;
  }
  std::vector<std::string> places;
  for (const auto& [id, other] : workers_) {
    places.push_back(absl::StrCat("worker ", id, " at '", other.barrier, "'"));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("all workers wait at barriers, and not at the same: ",
                   absl::StrJoin(places, ", "),
                   "; have all come to the same barriers in the same order"));
}

void WorkerGroup::Release(const std::string& barrier) {
  const int64_t slowest = std::min(SlowestClock(), last_clock_);
  for (auto& [id, worker] : workers_) {
    if (worker.barrier != barrier) continue;
    worker.barrier.clear();
    worker.clock = std::max(worker.clock, slowest);
    worker.last_round = std::max(worker.last_round, open_round_ - 1);
  }
}

void WorkerGroup::Void(uint64_t incarnation, int64_t clock) {
  for (Contribution& each : open_) {
    if (each.incarnation() == incarnation && each.clock() == clock) {
      each.set_weight(0.0);
    }
  }
}

void WorkerGroup::VoidAll() {
  stats_.clear_num_steps();
  positions_.clear();
  for (Contribution& each : open_) each.set_weight(0.0);
}

void WorkerGroup::Leave(uint32_t worker, uint64_t incarnation, int64_t mark) {
  if (FindMember(worker, incarnation) == nullptr) return;
  NoteMark(worker, mark);
  workers_.erase(worker);
  left_.insert(worker);
  const auto position = positions_.find(worker);
  if (position != positions_.end()) position->second.set_has_left(true);
  effects_.has_lost_members = true;
  Settle();
}

std::optional<WorkerGroup::Expiry> WorkerGroup::ExpiryAt(absl::Time now) const {
  Expiry expiry;
  for (const auto& [id, worker] : workers_) {
    if (worker.lease_end <= now) expiry.add_workers(id);
  }
  expiry.set_ends_joins(waits_for_joins_ && now >= joins_end_);
  if (expiry.workers().empty() && !expiry.ends_joins()) return std::nullopt;
  return expiry;
}

void WorkerGroup::Expire(const Expiry& expiry) {
  for (const uint32_t id : expiry.workers()) {
    if (workers_.erase(id) == 0) continue;
    stats_.set_expired(stats_.expired() + 1);
    effects_.has_lost_members = true;
    NoteLoss(id, /*has_joined=*/true);
  }
  if (expiry.ends_joins()) {
    waits_for_joins_ = false;
    for (uint32_t id = 0; id < options_.num_workers; ++id) {
      if (seen_.count(id) == 0) NoteLoss(id, /*has_joined=*/false);
    }
  }
  Settle();
}

void WorkerGroup::NoteLoss(uint32_t worker, bool has_joined) {
  const auto steps = stats_.num_steps().find(worker);
  stats_.set_num_losses(stats_.num_losses() + 1);
  v1::GetGroupStatsResponse::Loss& loss = (*stats_.mutable_losses())[worker];
  loss.set_number(stats_.num_losses());
  loss.set_num_steps(steps == stats_.num_steps().end() ? 0 : steps->second);
  loss.set_has_joined(has_joined);
  loss.set_is_back(false);
}

void WorkerGroup::RenewLeases(absl::Time now) {
  for (auto& [id, worker] : workers_) {
    worker.joined = now;
    worker.lease_end = now + options_.lease;
  }
  if (waits_for_joins_ && !seen_.empty()) {
    joins_end_ = now + options_.join_timeout;
  }
}

absl::Time WorkerGroup::NextExpiry() const {
  absl::Time next = waits_for_joins_ ? joins_end_ : absl::InfiniteFuture();
  for (const auto& [id, worker] : workers_) {
    next = std::min(next, worker.lease_end);
  }
  return next;
}

bool WorkerGroup::IsComplete() const {
  if (open_.empty()) return false;
  // When all workers have left, the contributions that remain form a last
  // round.
  const bool have_all_gone = has_begun_ && workers_.empty();
  if (waits_for_joins_ && !have_all_gone) return false;
  const uint32_t wanted = options_.contributions_per_round;
  if (wanted != 0 && open_.size() >= wanted) return true;
  if (takes_many_contributions()) {  // Not one per worker.
    return std::all_of(workers_.begin(), workers_.end(),
                       [](const auto& w) { return w.second.is_waiting(); });
  }
  return std::none_of(workers_.begin(), workers_.end(), [this](const auto& w) {
    return w.second.IsMissingIn(open_round_);
  });
}

void WorkerGroup::Settle() {
  BeginAnewIfAllHaveLeft();
  CloseIfComplete();
  OpenIfAllWait();
}

const std::string* WorkerGroup::BarrierToOpen() const {
  if (waits_for_joins_) return nullptr;
  // The workers may wait at different barriers. Some of them did not take part
  // in the last opening; call them new. They joined after it, or waited
  // elsewhere. A new worker may be at another point of the program, for example
  // at the end of an epoch while the others wait for a save. If only new
  // workers wait elsewhere, the barrier of the others opens.
  const std::string* of_all = nullptr;
  const std::string* of_seniors = nullptr;
  bool is_one = true;
  bool is_one_of_seniors = true;
  for (const auto& [id, worker] : workers_) {
    if (!worker.is_waiting()) return nullptr;
    if (of_all == nullptr) of_all = &worker.barrier;
    is_one = is_one && worker.barrier == *of_all;
    if (worker.opening != num_openings_) continue;
    if (of_seniors == nullptr) of_seniors = &worker.barrier;
    is_one_of_seniors = is_one_of_seniors && worker.barrier == *of_seniors;
  }
  if (is_one) return of_all;
  return is_one_of_seniors ? of_seniors : nullptr;
}

void WorkerGroup::OpenIfAllWait() {
  const std::string* const found = BarrierToOpen();
  if (found == nullptr) return;
  const std::string barrier = *found;
  effects_.opened_barrier = barrier;
  ++num_openings_;
  int64_t clock = 0;
  bool is_of_present_run = false;
  for (const auto& [id, worker] : workers_) {
    if (worker.barrier != barrier) continue;
    clock = std::max(clock, worker.clock);
    is_of_present_run = is_of_present_run || !worker.has_come_back();
  }
  for (auto& [id, worker] : workers_) {
    if (worker.barrier != barrier) continue;
    worker.barrier.clear();
    if (is_of_present_run) worker.missing_steps = 0;
    worker.opening = num_openings_;
    worker.clock = clock;
    const auto position = positions_.find(id);
    if (barrier == kEndOfEpoch && position != positions_.end()) {
      const int64_t mark = position->second.mark() + 1;
      position->second.Clear();
      position->second.set_mark(mark);
    }
    worker.last_round = open_round_ - 1;
  }
}

void WorkerGroup::CloseIfComplete() {
  if (!IsComplete()) return;
  std::sort(open_.begin(), open_.end(),
            [](const Contribution& a, const Contribution& b) {
              return std::tuple(a.worker(), a.incarnation(), a.clock()) <
                     std::tuple(b.worker(), b.incarnation(), b.clock());
            });
  Round& round = closed_.emplace_back();
  round.set_number(open_round_);
  double total_weight = 0.0;
  for (const Contribution& each : open_) total_weight += each.weight();
  round.set_total_weight(total_weight);
  round.mutable_contributions()->Add(std::move_iterator(open_.begin()),
                                     std::move_iterator(open_.end()));
  round.set_group_instance(group_instance_);
  round.set_next_incarnation(next_incarnation_);
  for (const auto& [id, worker] : workers_) {
    round.add_active(worker.incarnation);
  }
  stats_.set_rounds(stats_.rounds() + 1);
  stats_.set_contributions(stats_.contributions() +
                           static_cast<int64_t>(open_.size()));
  stats_.set_samples(stats_.samples() + total_weight);
  open_.clear();
  if (closed_.size() > kKeptRounds) closed_.pop_front();
  ++open_round_;
}

absl::StatusOr<Round> WorkerGroup::ClosedRound(int64_t number) const {
  if (number < 0 || number >= open_round_) {
    return absl::NotFoundError(
        absl::StrCat("round ", number, " has not closed"));
  }
  const int64_t first_kept = open_round_ - static_cast<int64_t>(closed_.size());
  if (number < first_kept) {
    return absl::OutOfRangeError(absl::StrCat(
        "round ", number, " closed long ago; ", open_round_, " is open"));
  }
  Round round = closed_[static_cast<size_t>(number - first_kept)];
  round.set_first_kept(first_kept);
  return round;
}

bool WorkerGroup::MayProceed(int64_t clock, int64_t staleness) const {
  return !waits_for_joins_ && clock - staleness <= SlowestClock();
}

int64_t WorkerGroup::SlowestClock() const {
  int64_t slowest = std::numeric_limits<int64_t>::max();
  for (const auto& [id, worker] : workers_) {
    if (!worker.is_waiting()) slowest = std::min(slowest, worker.clock);
  }
  return slowest;
}

std::string WorkerGroup::Describe(
    absl::FunctionRef<bool(const Worker&)> is_meant, absl::Time now) const {
  std::vector<std::string> names;
  for (const auto& [id, worker] : workers_) {
    if (!is_meant(worker)) continue;
    names.push_back(absl::StrCat(
        "worker ", id,
        id < options_.num_workers ? absl::StrCat(" of ", options_.num_workers)
                                  : "",
        " (at step ", worker.clock,
        worker.is_waiting()
            ? absl::StrCat(", waits at barrier '", worker.barrier, "'")
            : "",
        now == kNoTime
            ? ""
            : absl::StrCat(
                  ", last heard ",
                  absl::ToInt64Seconds(now - worker.lease_end + options_.lease),
                  " s ago"),
        ")"));
  }
  if (waits_for_joins_) {
    const size_t num_absent = num_awaited_ - seen_.size();
    names.push_back(absl::StrCat(num_absent, " of ", num_awaited_,
                                 " workers that have not joined"));
  }
  return absl::StrJoin(names, ", ");
}

std::string DescribeMissing(const WorkerGroup& group, int64_t round,
                            absl::Time now) {
  return group.Describe(
      [&](const auto& worker) { return worker.IsMissingIn(round); }, now);
}

std::string DescribeBehind(const WorkerGroup& group, int64_t clock,
                           absl::Time now) {
  return group.Describe(
      [&](const auto& worker) {
        return !worker.is_waiting() && worker.clock < clock;
      },
      now);
}

std::string DescribeAbsent(const WorkerGroup& group, const std::string& barrier,
                           absl::Time now) {
  return group.Describe(
      [&](const auto& worker) { return worker.barrier != barrier; }, now);
}

const WorkerGroup::Worker* WorkerGroup::FindMember(uint32_t worker,
                                                   uint64_t incarnation) const {
  const auto it = workers_.find(worker);
  const bool is_member =
      it != workers_.end() && it->second.incarnation == incarnation;
  return is_member ? &it->second : nullptr;
}

WorkerGroup::Effects WorkerGroup::TakeEffects() {
  Effects taken = std::exchange(effects_, {});
  taken.is_anyone_waiting =
      std::any_of(workers_.begin(), workers_.end(),
                  [](const auto& w) { return w.second.is_waiting(); });
  return taken;
}

v1::GetGroupStatsResponse WorkerGroup::stats() const {
  v1::GetGroupStatsResponse stats = stats_;
  for (const auto& [worker, process] : stats_.processes()) {
    if (workers_.count(worker) == 0) stats.mutable_processes()->erase(worker);
  }
  stats.set_num_active(static_cast<int64_t>(workers_.size()));
  stats.set_num_waiting(
      std::count_if(workers_.begin(), workers_.end(),
                    [](const auto& w) { return w.second.is_waiting(); }));
  return stats;
}

void WorkerGroup::Save(v1::SavedGroup* saved) const {
  for (const auto& [id, each] : workers_) {
    v1::SavedGroup::Worker& worker = *saved->add_workers();
    worker.set_worker(id);
    worker.set_incarnation(each.incarnation);
    worker.set_clock(each.clock);
    worker.set_last_round(each.last_round);
    worker.set_barrier(each.barrier);
    worker.set_barrier_generation(each.barrier_generation);
    worker.set_opening(each.opening);
    worker.set_missing_steps(each.missing_steps);
  }
  saved->mutable_ever_joined()->Add(ever_joined_.begin(), ever_joined_.end());
  saved->mutable_seen()->Add(seen_.begin(), seen_.end());
  saved->mutable_left()->Add(left_.begin(), left_.end());
  saved->set_group_instance(group_instance_);
  saved->set_next_incarnation(next_incarnation_);
  saved->set_first_of_present_run(first_of_present_run_);
  saved->set_num_openings(num_openings_);
  saved->set_num_awaited(static_cast<uint32_t>(num_awaited_));
  saved->set_waits_for_joins(waits_for_joins_);
  saved->set_has_begun(has_begun_);
  saved->set_last_clock(last_clock_);
  saved->set_first_clock(first_clock_);
  saved->mutable_open()->set_number(open_round_);
  saved->mutable_open()->mutable_contributions()->Add(open_.begin(),
                                                      open_.end());
  saved->mutable_closed()->Add(closed_.begin(), closed_.end());
  *saved->mutable_stats() = stats_;
  saved->set_job(job_);
  saved->mutable_positions()->insert(positions_.begin(), positions_.end());
}

absl::Status WorkerGroup::Restore(const v1::SavedGroup& saved) {
  int64_t next = saved.open().number() - saved.closed_size();
  bool is_whole = next >= 0 && saved.stats().staleness_size() ==
                                   static_cast<int>(kStalenessBuckets);
  for (const Round& each : saved.closed()) {
    is_whole = is_whole && each.number() == next++;
  }
  if (!is_whole) {
    return absl::DataLossError(absl::StrCat("the saved state of group '",
                                            saved.group(), "' is damaged"));
  }
  for (const v1::SavedGroup::Worker& each : saved.workers()) {
    Worker& worker = workers_[each.worker()];
    worker.incarnation = each.incarnation();
    worker.clock = each.clock();
    worker.last_round = each.last_round();
    worker.barrier = each.barrier();
    worker.barrier_generation = each.barrier_generation();
    worker.opening = each.opening();
    worker.missing_steps = each.missing_steps();
  }
  ever_joined_ = {saved.ever_joined().begin(), saved.ever_joined().end()};
  seen_ = {saved.seen().begin(), saved.seen().end()};
  left_ = {saved.left().begin(), saved.left().end()};
  group_instance_ = saved.group_instance();
  next_incarnation_ = saved.next_incarnation();
  first_of_present_run_ = saved.first_of_present_run();
  num_openings_ = saved.num_openings();
  num_awaited_ = saved.num_awaited();
  waits_for_joins_ = saved.waits_for_joins();
  has_begun_ = saved.has_begun();
  last_clock_ = saved.last_clock();
  first_clock_ = saved.first_clock();
  open_round_ = saved.open().number();
  open_ = {saved.open().contributions().begin(),
           saved.open().contributions().end()};
  closed_ = {saved.closed().begin(), saved.closed().end()};
  stats_ = saved.stats();
  job_ = saved.job();
  positions_ = {saved.positions().begin(), saved.positions().end()};
  return absl::OkStatus();
}

}  // namespace tfswitch
