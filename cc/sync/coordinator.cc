// mutex_ guards all groups and queues. An event first changes the group's state
// machine. Then Settle() updates the work queues, and then all waits in the
// group are woken. Wait() renews the lease of its worker and calls Tick(), so
// no thread is needed to end leases. It unlocks mutex_ while it calls
// CheckInterrupt().
//
// Arrive() checks all progress before it changes anything. It remembers the
// progress of an open round as OpenAdvance, for two reasons: a save must not
// count this progress yet, and if the round is lost, it must be taken back.

#include "cc/sync/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/awake_clock.h"
#include "cc/base/interrupt.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

namespace {

// The largest number of incarnations of one group.
constexpr uint64_t kIncarnationsPerGroup = uint64_t{1} << 32;
// A wait is logged after kPatience, and then every kRepeatedEvery.
constexpr absl::Duration kPatience = absl::Seconds(2);
constexpr absl::Duration kRepeatedEvery = absl::Seconds(30);
// How many unfinished items of a work queue the stats name at most.
constexpr size_t kNamedItems = 5;
// The longest name; long enough for any name that a person types.
constexpr size_t kMaxNameBytes = 1024;

absl::Status CheckName(const char* what, const std::string& name) {
  if (name.size() <= kMaxNameBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " '", name.substr(0, 32), "...' has ", name.size(),
                   " characters, over ", kMaxNameBytes));
}

}  // namespace

std::string WorkQueueBarrier(const std::string& queue) {
  return absl::StrCat("work queue '", queue, "'");
}

Coordinator::~Coordinator() { Shutdown(); }

absl::Status Coordinator::CreateGroup(const std::string& group,
                                      const WorkerGroupOptions& options) {
  if (group.empty()) {
    return absl::InvalidArgumentError("a group needs a name");
  }
  TFSWITCH_RETURN_IF_ERROR(CheckName("group", group));
  TFSWITCH_RETURN_IF_ERROR(CheckName("settings", options.settings));
  TFSWITCH_RETURN_IF_ERROR(options.Validate());
  const uint64_t most =
      std::max(options.num_workers, options.contributions_per_round);
  if (most > limits_.max_workers) {
    return absl::InvalidArgumentError(
        absl::StrCat("group '", group,
                     "': num_workers and contributions_per_round must be "
                     "at most ",
                     limits_.max_workers, " (--max_workers), got ", most));
  }
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  const auto make = [&](uint64_t first_incarnation)
                        ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
      record->mutable_create_group()->set_group(group);
      *record->mutable_create_group()->mutable_options() = ToProto(options);
      record->set_first_incarnation(first_incarnation);
    }));
    MakeGroup(group, options, first_incarnation);
    return absl::OkStatus();
  };
  const auto it = groups_.find(group);
  if (it == groups_.end()) {
    if (groups_.size() >= limits_.max_groups) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no room for group '", group, "': there are ", groups_.size(),
          ", as many as --max_groups allows; use one again in which nobody "
          "trains any more"));
    }
    return make(DrawFirstIncarnation());
  }
  Group& present = *it->second;
  absl::Status same = CheckSameOptions(group, present.options, options);
  if (same.ok()) return same;
  Tick(&present, AwakeNow());
  // No worker is left, so the former training has ended. The group starts again
  // with the new options.
  if (present.state.stats().num_active() == 0) return make(0);
  return same;
}

uint64_t Coordinator::DrawFirstIncarnation() {
  return static_cast<uint64_t>(
      std::max<int64_t>(1, absl::GetCurrentTimeNanos()));
}

template <typename Describe>
absl::Status Coordinator::Note(const Describe& describe) {
  if (log_ == nullptr) return absl::OkStatus();
  v1::CoordinationRecord record;
  describe(&record);
  return log_(record.SerializeAsString());
}

void Coordinator::MakeGroup(const std::string& group,
                            const WorkerGroupOptions& options,
                            uint64_t first_incarnation) {
  const auto it = groups_.find(group);
  if (it == groups_.end()) {
    groups_.emplace(group,
                    std::make_unique<Group>(group, options, first_incarnation,
                                            &queues_[group]));
    return;
  }
  // The contributions to the open round are lost. Closed rounds stay: the next
  // worker to join applies the last one.
  Group& present = *it->second;
  RevokeOpenAdvances(&present);
  present.options = options;
  present.state.Reconfigure(options);
  Notify(&present);
}

void Coordinator::RevokeOpenAdvances(Group* group) {
  for (const OpenAdvance& advance : group->advances) {
    if (advance.round() < group->state.open_round()) continue;
    const auto queue = group->queues->find(advance.before().queue());
    if (queue != group->queues->end()) queue->second.Revoke(advance.before());
  }
  group->advances.clear();
}

absl::StatusOr<Coordinator::Group*> Coordinator::Find(
    const std::string& group) {
  const auto it = groups_.find(group);
  if (it != groups_.end()) return it->second.get();
  return absl::NotFoundError(
      absl::StrCat("no group '", group, "'; create it first"));
}

absl::StatusOr<WorkerGroup::Place> Coordinator::Join(
    const v1::JoinRequest& request) {
  const std::string& group = request.group();
  const uint32_t worker = request.worker();
  const uint64_t newer_instance = request.newer_group_instance();
  TFSWITCH_RETURN_IF_ERROR(CheckName("job", request.job()));
  TFSWITCH_RETURN_IF_ERROR(CheckName("process", request.process()));
  if (newer_instance >= kMaxInstance) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", group, "': newer_group_instance must be below 2^62. ",
        "Received: ", newer_instance, " from worker ", worker));
  }
  if (request.first_step() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", group, "': first_step must not be negative. Received: ",
        request.first_step(), " from worker ", worker));
  }
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  Tick(found, AwakeNow());
  TFSWITCH_RETURN_IF_ERROR(
      found->state.CheckJoin(request, limits_.max_workers));
  const uint64_t first_incarnation =
      newer_instance > found->state.group_instance()
          ? std::max(DrawFirstIncarnation(),
                     newer_instance + kIncarnationsPerGroup)
          : 0;
  TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
    *record->mutable_join() = request;
    record->set_first_incarnation(first_incarnation);
  }));
  WorkerGroup::Place place = Join(found, request, first_incarnation);
  LogServerEvent(LogLevel::kInfo, "worker_joined",
                 {{"group", group},
                  {"job", request.job()},
                  {"worker", worker},
                  {"step", place.clock()},
                  {"active", found->state.stats().num_active()}});
  return place;
}

WorkerGroup::Place Coordinator::Join(Group* group,
                                     const v1::JoinRequest& request,
                                     uint64_t first_incarnation) {
  if (first_incarnation != 0) {
    for (auto& [name, queue] : *group->queues) {
      queue.ReturnItems([](uint32_t, uint64_t) { return false; });
    }
    RevokeOpenAdvances(group);
    group->state = WorkerGroup(group->options, first_incarnation);
  }
  WorkerGroup::Place member = group->state.Join(
      request.worker(), AwakeNow(), request.previous_incarnation(),
      request.first_step(), request.job(), request.process());
  Notify(group);
  return member;
}

absl::Status Coordinator::Heartbeat(const GroupMember& member) {
  MutexLock lock(&mutex_);
  return HearOf(member).status();
}

absl::StatusOr<Coordinator::Group*> Coordinator::HearOf(
    const GroupMember& member) {
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  // Renews the worker's lease before Tick(), because a worker that is slightly
  // late is alive.
  const absl::Time now = AwakeNow();
  const absl::Status status =
      found->state.Heartbeat(member.worker(), member.incarnation(), now);
  Tick(found, now);
  TFSWITCH_RETURN_IF_ERROR(status);
  return found;
}

bool Coordinator::Tick(Group* group, absl::Time now) {
  const auto expiry = group->state.ExpiryAt(now);
  if (!expiry.has_value()) return true;
  // Does not wait for the gate, because a heartbeat must not wait.
  const WriteGate::TryPass pass(gate_);
  if (!pass.is_inside()) return false;
  const absl::Status noted = Note([&](v1::CoordinationRecord* record) {
    *record->mutable_expire() = *expiry;
    record->mutable_expire()->set_group(group->name);
  });
  if (!noted.ok()) return false;
  const int64_t num_before = group->state.stats().num_losses();
  Expire(group, *expiry);
  const v1::GetGroupStatsResponse stats = group->state.stats();
  // A map sorts the losses by the numbers of the workers.
  const std::map<uint32_t, v1::GetGroupStatsResponse::Loss> losses(
      stats.losses().begin(), stats.losses().end());
  for (const auto& [worker, loss] : losses) {
    if (loss.number() <= num_before) continue;
    LogServerEvent(
        LogLevel::kWarning, "worker_lost",
        {{"group", group->name},
         {"worker", worker},
         {"reason", loss.has_joined() ? "not heard of" : "not joined"},
         {"seconds", absl::ToDoubleSeconds(loss.has_joined()
                                               ? group->options.lease
                                               : group->options.join_timeout)},
         {"steps", loss.num_steps()},
         {"active", stats.num_active()}});
  }
  return true;
}

void Coordinator::Expire(Group* group, const WorkerGroup::Expiry& expiry) {
  group->state.Expire(expiry);
  Notify(group);
}

void Coordinator::Notify(Group* group) {
  Settle(group);
  group->quiet_since = AwakeNow();
  group->changed.NotifyAll();
}

void Coordinator::Settle(Group* group) {
  WorkerGroup& state = group->state;
  // Takes back items before it looks for opened barriers, because one event may
  // cause both.
  const WorkerGroup::Effects effects = state.TakeEffects();
  if (effects.has_lost_members) {
    for (auto& [name, queue] : *group->queues) {
      queue.ReturnItems([&](uint32_t worker, uint64_t incarnation) {
        return state.FindMember(worker, incarnation) != nullptr;
      });
    }
  }
  if (effects.opened_barrier.empty() && !effects.is_anyone_waiting) return;
  for (auto& [name, queue] : *group->queues) {
    const std::string barrier = WorkQueueBarrier(name);
    if (barrier == effects.opened_barrier) queue.EndEpochIfFinished();
    // Workers that wait at the queue's barrier are released to take over the
    // items of a dead worker. A worker that comes to the barrier only after the
    // epoch has ended is released at once.
    if (!queue.is_exhausted()) state.Release(barrier);
  }
}

absl::StatusOr<int64_t> Coordinator::Arrive(const v1::ArriveRequest& request) {
  const GroupMember& member = request.member();
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  TFSWITCH_RETURN_IF_ERROR(CheckProgress(found, request).status());
  if (IsNew(*found, request)) {
    TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
      *record->mutable_arrive() = request;
    }));
  }
  const absl::Status status = Arrive(found, request);
  Tick(found, AwakeNow());
  TFSWITCH_RETURN_IF_ERROR(status);
  return found->state.open_round();
}

bool Coordinator::IsNew(const Group& group, const v1::ArriveRequest& request) {
  const WorkerGroup::Worker* const member = group.state.FindMember(
      request.member().worker(), request.member().incarnation());
  return member != nullptr && member->clock == request.clock();
}

absl::StatusOr<bool> Coordinator::CheckProgress(
    Group* group, const v1::ArriveRequest& request) {
  const uint32_t worker = request.member().worker();
  const uint64_t incarnation = request.member().incarnation();
  if (request.progress().empty() || !IsNew(*group, request)) return false;
  if (request.progress().size() > static_cast<int>(group->queues->size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("worker ", worker, " has advanced in ",
                     request.progress().size(), " work queues, and group '",
                     group->name, "' has ", group->queues->size()));
  }
  for (const WorkProgress& each : request.progress()) {
    TFSWITCH_ASSIGN_OR_RETURN(const WorkQueue* queue,
                              FindQueue(group->name, each.queue()));
    TFSWITCH_RETURN_IF_ERROR(queue->CheckAdvance(worker, incarnation, each));
  }
  return true;
}

absl::Status Coordinator::Arrive(Group* group,
                                 const v1::ArriveRequest& request) {
  const uint32_t worker = request.member().worker();
  const uint64_t incarnation = request.member().incarnation();
  WorkerGroup& state = group->state;
  TFSWITCH_ASSIGN_OR_RETURN(const bool advances, CheckProgress(group, request));
  const int64_t open_round = state.open_round();
  absl::Status status = state.Arrive(request, AwakeNow());
  if (advances && status.ok()) {
    const bool is_open = request.round() != WorkerGroup::kNoRound &&
                         open_round == state.open_round();
    std::vector<OpenAdvance>& open = group->advances;
    open.erase(std::remove_if(open.begin(), open.end(),
                              [&](const auto& a) {
                                return a.round() < state.open_round();
                              }),
               open.end());
    for (const WorkProgress& each : request.progress()) {
      WorkQueue& queue = group->queues->at(each.queue());
      if (is_open) {
        OpenAdvance& advance = open.emplace_back();
        advance.set_round(open_round);
        advance.set_incarnation(incarnation);
        advance.set_clock(request.clock());
        *advance.mutable_before() = each;
        advance.mutable_before()->set_offset(queue.offset_of(worker));
      }
      // CheckProgress() has found no error, so Advance() finds none.
      queue.Advance(worker, incarnation, each).IgnoreError();
    }
  }
  Notify(group);
  return status;
}

absl::Status Coordinator::Leave(const GroupMember& member) {
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  if (found->state.FindMember(member.worker(), member.incarnation()) ==
      nullptr) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
    *record->mutable_leave()->mutable_member() = member;
  }));
  Leave(found, member);
  LogServerEvent(LogLevel::kInfo, "worker_left",
                 {{"group", member.group()},
                  {"worker", member.worker()},
                  {"active", found->state.stats().num_active()}});
  return absl::OkStatus();
}

void Coordinator::Leave(Group* group, const GroupMember& member) {
  group->state.Leave(member.worker(), member.incarnation(), member.mark());
  Notify(group);
}

absl::Status Coordinator::Wait(Group* group, const GroupMember& member,
                               absl::Time deadline,
                               const std::function<bool()>& is_over,
                               const std::function<std::string()>& describe) {
  for (;;) {
    if (is_shut_down_) return absl::CancelledError("the server is stopping");
    const absl::Time now = AwakeNow();
    TFSWITCH_RETURN_IF_ERROR(
        group->state.Heartbeat(member.worker(), member.incarnation(), now));
    // If Tick() could not log the end of a lease, tries that again soon, but
    // not at once.
    const absl::Duration least =
        Tick(group, now) ? absl::Milliseconds(1) : absl::Milliseconds(100);
    if (is_over()) return absl::OkStatus();
    if (now >= std::max(group->quiet_since + kPatience, group->next_line)) {
      group->next_line = now + kRepeatedEvery;
      LogServerEvent(LogLevel::kInfo, "waiting",
                     {{"group", group->name},
                      {"worker", member.worker()},
                      {"what", describe()}});
    }
    const absl::Duration left = deadline - SteadyNow();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("group '", member.group(), "': ", describe()));
    }
    // Unlocks the mutex, because the interrupt check may call the coordinator.
    mutex_.Unlock();
    const absl::Status interrupted = CheckInterrupt();
    mutex_.Lock();
    TFSWITCH_RETURN_IF_ERROR(interrupted);
    if (is_over() || is_shut_down_) continue;
    // Wakes up often enough to renew the worker's lease.
    group->changed.WaitFor(
        &mutex_,
        std::max(least,
                 std::min({left, group->state.NextExpiry() - now,
                           group->options.lease / 3, kInterruptInterval})));
  }
}

absl::StatusOr<Round> Coordinator::WaitForRound(const GroupMember& member,
                                                int64_t number,
                                                absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, member, deadline,
      [&] { return found->state.open_round() > number; },
      [&] {
        return absl::StrCat("round ", number, " waits for ",
                            DescribeMissing(found->state, number, AwakeNow()));
      }));
  return found->state.ClosedRound(number);
}

absl::Status Coordinator::WaitForTurn(const GroupMember& member, int64_t clock,
                                      int64_t staleness, absl::Time deadline) {
  if (clock < 0 || staleness < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "clock and staleness must not be negative. Received: clock=", clock,
        ", staleness=", staleness));
  }
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  return Wait(
      found, member, deadline,
      [&] { return found->state.MayProceed(clock, staleness); },
      [&] {
        return absl::StrCat(
            "worker ", member.worker(), " has ended ", clock, " steps, may be ",
            staleness, " ahead, and waits for ",
            DescribeBehind(found->state, clock - staleness, AwakeNow()));
      });
}

absl::StatusOr<WorkerGroup::Place> Coordinator::WaitAtBarrier(
    const v1::WaitAtBarrierRequest& request, absl::Time deadline) {
  const GroupMember& member = request.member();
  TFSWITCH_RETURN_IF_ERROR(CheckName("barrier", request.barrier()));
  std::optional<WriteGate::Pass> pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group()));
  const WorkerGroup::Worker* const entering =
      found->state.FindMember(member.worker(), member.incarnation());
  if (entering != nullptr &&
      entering->barrier_generation == request.barrier_generation()) {
    TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
      *record->mutable_enter() = request;
    }));
  }
  TFSWITCH_RETURN_IF_ERROR(Enter(found, request));
  pass.reset();
  absl::StatusOr<std::optional<WorkerGroup::Place>> place;
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, member, deadline,
      [&] {
        place = found->state.PlaceAfterBarrier(member.worker(),
                                               member.incarnation());
        return !place.ok() || place->has_value();
      },
      [&] {
        return absl::StrCat(
            "barrier '", request.barrier(), "' waits for ",
            DescribeAbsent(found->state, request.barrier(), AwakeNow()));
      }));
  TFSWITCH_RETURN_IF_ERROR(place.status());
  return **place;
}

absl::Status Coordinator::Enter(Group* group,
                                const v1::WaitAtBarrierRequest& request) {
  absl::Status entered = group->state.Enter(
      request.member().worker(), request.member().incarnation(),
      request.barrier(), request.barrier_generation(), AwakeNow());
  Notify(group);
  return entered;
}

std::vector<std::string> Coordinator::GroupNames() {
  MutexLock lock(&mutex_);
  std::vector<std::string> names;
  for (const auto& [name, group] : groups_) names.push_back(name);
  return names;
}

absl::StatusOr<v1::GetGroupStatsResponse> Coordinator::GroupStats(
    const std::string& group) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  v1::GetGroupStatsResponse stats = found->state.stats();
  for (const auto& [name, queue] : *found->queues) {
    const std::vector<std::string> items = queue.Unfinished(kNamedItems);
    if (items.empty()) continue;
    (*stats.mutable_unfinished())[name].mutable_values()->Add(items.begin(),
                                                              items.end());
  }
  return stats;
}

int64_t Coordinator::num_workers() {
  MutexLock lock(&mutex_);
  int64_t count = 0;
  for (const auto& [name, group] : groups_) {
    count += group->state.stats().num_active();
  }
  return count;
}

absl::StatusOr<WorkQueue*> Coordinator::FindQueue(const std::string& group,
                                                  const std::string& queue) {
  const auto queues = queues_.find(group);
  if (queues != queues_.end()) {
    const auto it = queues->second.find(queue);
    if (it != queues->second.end()) return &it->second;
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "no work queue '", queue,
      "'; make it first. If it was there, the server has been started again: "
      "restore a checkpoint and begin anew"));
}

Coordinator::Room Coordinator::UsedRoom() const {
  Room used;
  for (const auto& [group, queues] : queues_) {
    used.num_queues += queues.size();
    for (const auto& [name, queue] : queues) used.bytes += queue.item_bytes();
  }
  return used;
}

absl::Status Coordinator::CheckRoom(const std::string& queue,
                                    const WorkQueueOptions& options,
                                    Room used) const {
  if (used.num_queues >= limits_.max_work_queues) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no room for work queue '", queue, "': there are ",
                     used.num_queues, ", as many as --max_work_queues allows"));
  }
  const uint64_t needed = ItemBytes(options);
  if (used.bytes + needed <= limits_.max_work_queue_bytes) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "no room for work queue '", queue, "': its ", options.items_size(),
      " items take ", needed, " bytes, beside ", used.bytes,
      " of others, and --max_work_queue_bytes is ",
      limits_.max_work_queue_bytes));
}

absl::Status Coordinator::CreateWorkQueue(
    const v1::CreateWorkQueueRequest& request) {
  const std::string& queue = request.queue();
  if (queue.empty()) {
    return absl::InvalidArgumentError("a work queue needs a name");
  }
  TFSWITCH_RETURN_IF_ERROR(CheckName("work queue", queue));
  TFSWITCH_RETURN_IF_ERROR(Validate(request.options()));
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(request.group()));
  const auto it = found->queues->find(queue);
  if (it == found->queues->end()) {
    TFSWITCH_RETURN_IF_ERROR(CheckRoom(queue, request.options(), UsedRoom()));
    TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
      *record->mutable_create_work_queue() = request;
    }));
    MakeWorkQueue(found, request);
    return absl::OkStatus();
  }
  const std::string difference =
      DescribeDifference(it->second.options(), request.options());
  if (difference.empty()) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "work queue '", queue, "' of group '", request.group(),
      "' exists with other settings, made by a worker or restored from a "
      "checkpoint: ",
      difference,
      "; give all workers the same ones, or the queue another name"));
}

void Coordinator::MakeWorkQueue(Group* group,
                                const v1::CreateWorkQueueRequest& request) {
  group->queues->try_emplace(request.queue(), request.queue(),
                             request.options());
  Notify(group);
}

absl::StatusOr<std::optional<WorkItem>> Coordinator::TakeWorkItem(
    const v1::TakeWorkItemRequest& request) {
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, HearOf(request.member()));
  TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * queue,
                            FindQueue(found->name, request.queue()));
  TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
    *record->mutable_take() = request;
  }));
  return Take(found, request.member(), queue);
}

std::optional<WorkItem> Coordinator::Take(Group* group,
                                          const GroupMember& member,
                                          WorkQueue* queue) {
  std::optional<WorkItem> taken =
      queue->Take(member.worker(), member.incarnation());
  Notify(group);
  return taken;
}

absl::Status Coordinator::FinishWorkItem(
    const v1::FinishWorkItemRequest& request) {
  const WriteGate::Pass pass(gate_);
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, HearOf(request.member()));
  TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * queue,
                            FindQueue(found->name, request.queue()));
  TFSWITCH_RETURN_IF_ERROR(Note([&](v1::CoordinationRecord* record) {
    *record->mutable_finish() = request;
  }));
  return Finish(found, request, queue);
}

absl::Status Coordinator::Finish(Group* group,
                                 const v1::FinishWorkItemRequest& request,
                                 WorkQueue* queue) {
  absl::Status finished =
      queue->Finish(request.member().worker(), request.member().incarnation(),
                    request.epoch(), request.index());
  Notify(group);
  return finished;
}

absl::StatusOr<v1::GetWorkQueueStatsResponse> Coordinator::WorkQueueStats(
    const std::string& group, const std::string& queue) {
  MutexLock lock(&mutex_);
  // A restarted server may have restored the queue from a checkpoint, without
  // the group.
  TFSWITCH_ASSIGN_OR_RETURN(const WorkQueue* asked, FindQueue(group, queue));
  return asked->stats();
}

v1::SavedWorkQueues Coordinator::SaveWorkQueues() {
  MutexLock lock(&mutex_);
  return SavedQueues();
}

v1::Cut Coordinator::ChooseSnapshotRound(
    const v1::ChooseSnapshotRoundRequest& request, size_t num_shards,
    v1::SavedWorkQueues* work_queues) {
  MutexLock lock(&mutex_);
  v1::Cut cut;
  for (const auto& [name, group] : groups_) {
    const auto add = [&cut, &group = name]() -> Round& {
      v1::CommitRoundRequest& commit = *cut.add_rounds();
      commit.set_group(group);
      return *commit.mutable_round();
    };
    const WorkerGroup& state = group->state;
    const int64_t last = state.open_round() - 1;
    absl::StatusOr<Round> closed = state.ClosedRound(last);
    if (!closed.ok()) continue;  // No round has closed.
    size_t num_known = 0;
    int64_t next = last;
    for (const v1::CommittedRound& each : request.committed()) {
      if (each.group() != name ||
          each.group_instance() != state.group_instance()) {
        continue;
      }
      ++num_known;
      next = std::min(next, each.number() + 1);
    }
    if (num_known < num_shards) {
      // A shard was restarted and does not know the group's instance. The first
      // entry tells it the instance, as workers do when they join.
      Round& none = add();
      none.set_number(WorkerGroup::kNoRound);
      none.set_group_instance(state.group_instance());
      next = 0;
    }
    for (next = std::max(next, closed->first_kept()); next < last; ++next) {
      add() = state.ClosedRound(next).value();
    }
    add() = *std::move(closed);
  }
  if (work_queues != nullptr) *work_queues = SavedQueues();
  return cut;
}

v1::SavedWorkQueues Coordinator::SavedQueues() {
  v1::SavedWorkQueues saved;
  for (const auto& [group_name, queues] : queues_) {
    const auto group = groups_.find(group_name);
    for (const auto& [name, queue] : queues) {
      SavedWorkQueue& state = *saved.add_queues();
      state = queue.state();
      state.set_group(group_name);
      if (group == groups_.end()) continue;
      for (const OpenAdvance& advance : group->second->advances) {
        const WorkProgress& before = advance.before();
        if (before.queue() != name || before.epoch() != state.epoch() ||
            advance.round() < group->second->state.open_round()) {
          continue;
        }
        const auto [it, is_new] = state.mutable_unfinished()->insert(
            {before.index(), before.offset()});
        if (!is_new) it->second = std::min(it->second, before.offset());
      }
    }
  }
  return saved;
}

absl::Status Coordinator::CheckRestore(const v1::SavedWorkQueues& saved) {
  MutexLock lock(&mutex_);
  Room used = UsedRoom();
  for (const SavedWorkQueue& each : saved.queues()) {
    absl::Status status = Validate(each.options());
    if (status.ok()) {
      status = WorkQueue(each.queue(), each.options()).Restore(each);
    }
    if (!status.ok()) {
      return absl::DataLossError(
          absl::StrCat("saved work queue '", each.queue(), "' of group '",
                       each.group(), "': ", status.message()));
    }
    const auto present = FindQueue(each.group(), each.queue());
    if (!present.ok()) {
      TFSWITCH_RETURN_IF_ERROR(CheckRoom(each.queue(), each.options(), used));
      ++used.num_queues;
      used.bytes += ItemBytes(each.options());
      continue;
    }
    const std::string difference =
        DescribeDifference((*present)->options(), each.options());
    if (difference.empty()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "work queue '", each.queue(), "' of group '", each.group(),
        "' has other settings than the saved one: ", difference,
        " by the checkpoint; make it with the saved ones or under another "
        "name, on servers where it is not there yet, or restore tables alone, "
        "with tables=[...]"));
  }
  return absl::OkStatus();
}

void Coordinator::RestoreWorkQueues(const v1::SavedWorkQueues& saved,
                                    bool voids_open_steps) {
  MutexLock lock(&mutex_);
  if (voids_open_steps) {
    for (const auto& [name, group] : groups_) {
      RevokeOpenAdvances(group.get());
      group->state.VoidAll();
      Settle(group.get());
      group->changed.NotifyAll();
    }
  }
  for (const SavedWorkQueue& each : saved.queues()) {
    WorkQueues& queues = queues_[each.group()];
    queues.erase(each.queue());
    WorkQueue& queue =
        queues.try_emplace(each.queue(), each.queue(), each.options())
            .first->second;
    queue.Restore(each).IgnoreError();  // Checked before.
    const auto group = groups_.find(each.group());
    if (group == groups_.end()) continue;
    std::vector<OpenAdvance>& open = group->second->advances;
    const auto of_others = std::stable_partition(
        open.begin(), open.end(), [&](const OpenAdvance& advance) {
          return advance.before().queue() == each.queue();
        });
    std::for_each(open.begin(), of_others, [&](const OpenAdvance& advance) {
      group->second->state.Void(advance.incarnation(), advance.clock());
    });
    open.erase(open.begin(), of_others);
    // Workers that wait for the end of the epoch may be able to take items now.
    Settle(group->second.get());
    group->second->changed.NotifyAll();
  }
}

void Coordinator::Shutdown() {
  MutexLock lock(&mutex_);
  is_shut_down_ = true;
  for (const auto& [name, group] : groups_) group->changed.NotifyAll();
}

}  // namespace tfswitch
