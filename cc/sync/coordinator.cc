// All groups and queues are under mutex_. An event goes to the group's state
// machine, then Settle() tells the work queues its consequences, and then all
// that wait in the group are woken. Wait() renews the lease of its worker and
// moves the group's time on, so that leases end without a thread of their own.
// It releases mutex_ while it asks for an interrupt.
//
// Arrive() checks all progress before it changes anything. It keeps the
// progress of an open round as OpenAdvance, because a save must not count it
// yet and a round that is lost has to give it back.

#include "cc/sync/coordinator.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "cc/base/interrupt.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

namespace {

// A group gives out so many incarnations at most.
constexpr uint64_t kIncarnationsPerGroup = uint64_t{1} << 32;
// Far above nanoseconds since 1970 and the groups that begin anew above them.
constexpr uint64_t kMaxInstance = uint64_t{1} << 62;
// Long enough for any name that somebody types.
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
  MutexLock lock(&mutex_);
  const auto it = groups_.find(group);
  if (it == groups_.end()) {
    if (groups_.size() >= limits_.max_groups) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "no room for group '", group, "': there are ", groups_.size(),
          ", as many as --max_groups allows; use one again in which nobody "
          "trains any more"));
    }
    groups_.emplace(group, std::make_unique<Group>(options, &queues_[group]));
    return absl::OkStatus();
  }
  Group& present = *it->second;
  if (present.options == options) return absl::OkStatus();
  present.state.Tick(SteadyNow());
  Settle(&present);
  if (present.state.stats().num_active == 0) {
    // The training here has ended; nobody waits in it, and its open round is
    // lost. A closed round is not: the next worker to join has it applied.
    RevokeOpenAdvances(&present);
    present.options = options;
    present.state.Reconfigure(options);
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      "group '", group, "' exists with other options: ",
      present.options.ToString(), " here, ", options.ToString(),
      " asked; give all workers the same ones, or the group another name"));
}

uint64_t Coordinator::DrawFirstIncarnation() {
  return static_cast<uint64_t>(
      std::max<int64_t>(1, absl::GetCurrentTimeNanos()));
}

void Coordinator::BeginAbove(Group* group, uint64_t instance) {
  for (auto& [name, queue] : *group->queues) {
    queue.ReturnItems([](uint32_t, uint64_t) { return false; });
  }
  RevokeOpenAdvances(group);
  group->state = WorkerGroup(
      group->options,
      std::max(DrawFirstIncarnation(), instance + kIncarnationsPerGroup));
  group->num_departures = 0;
}

void Coordinator::RevokeOpenAdvances(Group* group) {
  for (const OpenAdvance& advance : group->advances) {
    if (advance.round < group->state.open_round()) continue;
    const auto queue = group->queues->find(advance.before.queue);
    if (queue != group->queues->end()) queue->second.Revoke(advance.before);
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

absl::StatusOr<WorkerGroup::Place> Coordinator::Join(const std::string& group,
                                                     uint32_t worker,
                                                     uint64_t previous,
                                                     uint64_t newer_instance) {
  if (newer_instance >= kMaxInstance) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group '", group, "': newer_group_instance must be below 2^62. ",
        "Received: ", newer_instance, " from worker ", worker));
  }
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  if (!found->state.HasJoined(worker) &&
      found->state.num_ever_joined() >= limits_.max_workers) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for worker ", worker, " in group '", group,
        "': ", found->state.num_ever_joined(),
        " have joined it, as many as "
        "--max_workers allows; give a worker the number of one that has gone"));
  }
  if (newer_instance > found->state.group_instance()) {
    BeginAbove(found, newer_instance);
  }
  const absl::Time now = SteadyNow();
  found->state.Tick(now);
  const WorkerGroup::Place member = found->state.Join(worker, now, previous);
  Settle(found);
  found->changed.NotifyAll();
  return member;
}

absl::Status Coordinator::Heartbeat(const GroupMember& member) {
  MutexLock lock(&mutex_);
  return HearOf(member).status();
}

absl::StatusOr<Coordinator::Group*> Coordinator::HearOf(
    const GroupMember& member) {
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group));
  // A worker that comes a little late is alive: its own lease first.
  const absl::Time now = SteadyNow();
  const absl::Status status =
      found->state.Heartbeat(member.worker, member.incarnation, now);
  found->state.Tick(now);
  Settle(found);
  found->changed.NotifyAll();
  TFSWITCH_RETURN_IF_ERROR(status);
  return found;
}

void Coordinator::Settle(Group* group) {
  WorkerGroup& state = group->state;
  // Before a barrier's opening: the same event may have led to both.
  if (group->num_departures != state.num_departures()) {
    group->num_departures = state.num_departures();
    for (auto& [name, queue] : *group->queues) {
      queue.ReturnItems([&](uint32_t worker, uint64_t incarnation) {
        return state.IsMember(worker, incarnation);
      });
    }
  }
  const std::string opened = state.TakeOpenedBarrier();
  if (opened.empty() && !state.is_anyone_waiting()) return;
  for (auto& [name, queue] : *group->queues) {
    const std::string barrier = WorkQueueBarrier(name);
    if (barrier == opened) queue.EndEpochIfFinished();
    // A worker that waits there while others work takes over the item of one
    // that died, and one that comes late, from an epoch that is over, does not
    // wait.
    if (!queue.is_exhausted()) state.Release(barrier);
  }
}

absl::StatusOr<int64_t> Coordinator::Arrive(
    const GroupMember& member, int64_t clock, int64_t round, double weight,
    const std::vector<WorkProgress>& progress) {
  const auto& [group, worker, incarnation] = member;
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  WorkerGroup& state = found->state;
  const bool advances =
      !progress.empty() && state.ClockOf(worker, incarnation) == clock;
  if (advances) {
    if (progress.size() > found->queues->size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "worker ", worker, " has advanced in ", progress.size(),
          " work queues, and group '", group, "' has ", found->queues->size()));
    }
    for (const WorkProgress& each : progress) {
      TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * queue,
                                FindQueue(group, each.queue));
      TFSWITCH_RETURN_IF_ERROR(queue->CheckAdvance(worker, incarnation, each));
    }
  }
  const absl::Time now = SteadyNow();
  const int64_t open_round = state.open_round();
  const absl::Status status = state.Arrive(worker, incarnation, clock, round,
                                           weight, now, !progress.empty());
  if (advances && status.ok()) {
    const bool is_open =
        round != WorkerGroup::kNoRound && open_round == state.open_round();
    std::vector<OpenAdvance>& open = found->advances;
    open.erase(std::remove_if(
                   open.begin(), open.end(),
                   [&](const auto& a) { return a.round < state.open_round(); }),
               open.end());
    for (const WorkProgress& each : progress) {
      WorkQueue& queue = found->queues->at(each.queue);
      WorkProgress before = each;
      before.offset = queue.offset_of(worker);
      if (is_open) {
        open.push_back({open_round, incarnation, clock, std::move(before)});
      }
      queue.Advance(worker, incarnation, each).IgnoreError();  // Was checked.
    }
  }
  state.Tick(now);
  Settle(found);
  found->changed.NotifyAll();
  TFSWITCH_RETURN_IF_ERROR(status);
  return state.open_round();
}

absl::Status Coordinator::Leave(const GroupMember& member) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group));
  found->state.Leave(member.worker, member.incarnation);
  Settle(found);
  found->changed.NotifyAll();
  return absl::OkStatus();
}

absl::Status Coordinator::Wait(Group* group, const GroupMember& member,
                               absl::Time deadline,
                               const std::function<bool()>& is_over,
                               const std::function<std::string()>& describe) {
  for (;;) {
    if (is_shut_down_) return absl::CancelledError("the server is stopping");
    const absl::Time now = SteadyNow();
    TFSWITCH_RETURN_IF_ERROR(
        group->state.Heartbeat(member.worker, member.incarnation, now));
    const WorkerGroup::Stats before = group->state.stats();
    group->state.Tick(now);
    Settle(group);
    const WorkerGroup::Stats after = group->state.stats();
    if (after.expired != before.expired || after.rounds != before.rounds) {
      group->changed.NotifyAll();
    }
    if (is_over()) return absl::OkStatus();
    const absl::Duration left = deadline - now;
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(
          absl::StrCat("group '", member.group, "': ", describe()));
    }
    // The interrupt check may call the coordinator.
    mutex_.Unlock();
    const absl::Status interrupted = CheckInterrupt();
    mutex_.Lock();
    TFSWITCH_RETURN_IF_ERROR(interrupted);
    if (is_over() || is_shut_down_) continue;
    // Its own lease is renewed well before it ends.
    group->changed.WaitFor(
        &mutex_,
        std::max(absl::Milliseconds(1),
                 std::min({left, group->state.NextTick() - now,
                           group->options.lease / 3, kInterruptInterval})));
  }
}

absl::StatusOr<Round> Coordinator::WaitForRound(const GroupMember& member,
                                                int64_t number,
                                                absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group));
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, member, deadline,
      [&] { return found->state.open_round() > number; },
      [&] {
        return absl::StrCat("round ", number, " waits for ",
                            found->state.DescribeMissing(number));
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
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group));
  return Wait(
      found, member, deadline,
      [&] { return found->state.MayProceed(clock, staleness); },
      [&] {
        return absl::StrCat("worker ", member.worker, " has ended ", clock,
                            " steps, may be ", staleness,
                            " ahead, and waits for ",
                            found->state.DescribeBehind(clock - staleness));
      });
}

absl::StatusOr<WorkerGroup::Place> Coordinator::WaitAtBarrier(
    const GroupMember& member, const std::string& barrier, int64_t visit,
    absl::Time deadline) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckName("barrier", barrier));
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(member.group));
  TFSWITCH_RETURN_IF_ERROR(found->state.Enter(member.worker, member.incarnation,
                                              barrier, visit, SteadyNow()));
  Settle(found);
  found->changed.NotifyAll();
  absl::StatusOr<std::optional<WorkerGroup::Place>> place;
  TFSWITCH_RETURN_IF_ERROR(Wait(
      found, member, deadline,
      [&] {
        place =
            found->state.PlaceAfterBarrier(member.worker, member.incarnation);
        return !place.ok() || place->has_value();
      },
      [&] {
        return absl::StrCat("barrier '", barrier, "' waits for ",
                            found->state.DescribeAbsent(barrier));
      }));
  TFSWITCH_RETURN_IF_ERROR(place.status());
  return **place;
}

absl::StatusOr<WorkerGroup::Stats> Coordinator::GroupStats(
    const std::string& group) {
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  return found->state.stats();
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
  const uint64_t needed = options.ItemBytes();
  if (used.bytes + needed <= limits_.max_work_queue_bytes) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "no room for work queue '", queue, "': its ", options.items.size(),
      " items take ", needed, " bytes, beside ", used.bytes,
      " of others, and --max_work_queue_bytes is ",
      limits_.max_work_queue_bytes));
}

absl::Status Coordinator::CreateWorkQueue(const std::string& group,
                                          const std::string& queue,
                                          const WorkQueueOptions& options) {
  if (queue.empty()) {
    return absl::InvalidArgumentError("a work queue needs a name");
  }
  TFSWITCH_RETURN_IF_ERROR(CheckName("work queue", queue));
  TFSWITCH_RETURN_IF_ERROR(options.Validate());
  MutexLock lock(&mutex_);
  TFSWITCH_ASSIGN_OR_RETURN(Group * found, Find(group));
  const auto it = found->queues->find(queue);
  if (it == found->queues->end()) {
    TFSWITCH_RETURN_IF_ERROR(CheckRoom(queue, options, UsedRoom()));
    found->queues->try_emplace(queue, queue, options);
    return absl::OkStatus();
  }
  const std::string difference =
      DescribeDifference(it->second.options(), options);
  if (difference.empty()) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(
      "work queue '", queue, "' of group '", group,
      "' exists with other settings, made by a worker or restored from a "
      "checkpoint: ",
      difference,
      "; give all workers the same ones, or the queue another name"));
}

absl::StatusOr<std::optional<WorkItem>> Coordinator::TakeWorkItem(
    const GroupMember& member, const std::string& queue) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(HearOf(member).status());
  TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * taken_from,
                            FindQueue(member.group, queue));
  return taken_from->Take(member.worker, member.incarnation);
}

absl::Status Coordinator::FinishWorkItem(const GroupMember& member,
                                         const std::string& queue,
                                         int64_t epoch, int64_t index) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(HearOf(member).status());
  TFSWITCH_ASSIGN_OR_RETURN(WorkQueue * finished_of,
                            FindQueue(member.group, queue));
  return finished_of->Finish(member.worker, member.incarnation, epoch, index);
}

absl::StatusOr<WorkQueue::Stats> Coordinator::WorkQueueStats(
    const std::string& group, const std::string& queue) {
  MutexLock lock(&mutex_);
  // A server that was started again may have the queue, of a checkpoint, and
  // not the group.
  TFSWITCH_ASSIGN_OR_RETURN(const WorkQueue* asked, FindQueue(group, queue));
  return asked->stats();
}

std::vector<SavedWorkQueue> Coordinator::SaveWorkQueues() {
  MutexLock lock(&mutex_);
  std::vector<SavedWorkQueue> saved;
  for (const auto& [group_name, queues] : queues_) {
    const auto group = groups_.find(group_name);
    for (const auto& [name, queue] : queues) {
      saved.push_back({group_name, name, queue.options(), queue.state()});
      if (group == groups_.end()) continue;
      WorkQueue::State& state = saved.back().state;
      for (const OpenAdvance& advance : group->second->advances) {
        const WorkProgress& before = advance.before;
        if (before.queue != name || before.epoch != state.epoch ||
            advance.round < group->second->state.open_round()) {
          continue;
        }
        const auto [it, is_new] =
            state.unfinished.emplace(before.index, before.offset);
        if (!is_new) it->second = std::min(it->second, before.offset);
      }
    }
  }
  return saved;
}

absl::Status Coordinator::CheckRestore(
    const std::vector<SavedWorkQueue>& saved) {
  MutexLock lock(&mutex_);
  Room used = UsedRoom();
  for (const SavedWorkQueue& each : saved) {
    absl::Status status = each.options.Validate();
    if (status.ok()) {
      status = WorkQueue(each.queue, each.options).Restore(each.state);
    }
    if (!status.ok()) {
      return absl::DataLossError(absl::StrCat("saved work queue '", each.queue,
                                              "' of group '", each.group,
                                              "': ", status.message()));
    }
    const auto present = FindQueue(each.group, each.queue);
    if (!present.ok()) {
      TFSWITCH_RETURN_IF_ERROR(CheckRoom(each.queue, each.options, used));
      ++used.num_queues;
      used.bytes += each.options.ItemBytes();
      continue;
    }
    const std::string difference =
        DescribeDifference((*present)->options(), each.options);
    if (difference.empty()) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        "work queue '", each.queue, "' of group '", each.group,
        "' has other settings than the saved one: ", difference,
        " by the checkpoint; make it with the saved ones or under another "
        "name, on servers where it is not there yet, or restore tables alone, "
        "with tables=[...]"));
  }
  return absl::OkStatus();
}

void Coordinator::VoidOpenSteps() {
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_) {
    RevokeOpenAdvances(group.get());
    group->state.VoidAll();
    Settle(group.get());
    group->changed.NotifyAll();
  }
}

void Coordinator::RestoreWorkQueues(const std::vector<SavedWorkQueue>& saved) {
  MutexLock lock(&mutex_);
  for (const SavedWorkQueue& each : saved) {
    WorkQueues& queues = queues_[each.group];
    queues.erase(each.queue);
    WorkQueue& queue =
        queues.try_emplace(each.queue, each.queue, each.options).first->second;
    queue.Restore(each.state).IgnoreError();  // Was checked.
    const auto group = groups_.find(each.group);
    if (group == groups_.end()) continue;
    std::vector<OpenAdvance>& open = group->second->advances;
    const auto of_others = std::stable_partition(
        open.begin(), open.end(), [&](const OpenAdvance& advance) {
          return advance.before.queue == each.queue;
        });
    std::for_each(open.begin(), of_others, [&](const OpenAdvance& advance) {
      group->second->state.Void(advance.incarnation, advance.clock);
    });
    open.erase(open.begin(), of_others);
    // Workers that wait for the end of its epoch may have items to take.
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
