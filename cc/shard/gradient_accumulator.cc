// mutex_ guards the map of groups. The map only grows, so pointers to groups
// stay valid. While a round is applied, the group's own mutex is locked. A
// second worker that commits the same round waits for it, and then finds the
// round committed. Pushes are sorted by contribution, then by content, so that
// every run sums them in the same order.
//
// A round counts as committed even if the step of one table fails, because
// other tables have changed already. The error is remembered and marked. A
// repetition gets the same error, and the mark tells the worker that the round
// is over.

#include "cc/shard/gradient_accumulator.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <tuple>

#include "absl/strings/cord.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Compares pushes by content. Two layers that share a table push in an order
// that differs from run to run, so their order of arrival cannot be used.
bool ContentLess(const StagedPush& a, const StagedPush& b) {
  if (a.keys != b.keys) return a.keys < b.keys;
  if (a.gradients.size() != b.gradients.size()) {
    return a.gradients.size() < b.gradients.size();
  }
  const int order = std::memcmp(a.gradients.data(), b.gradients.data(),
                                a.gradients.size() * sizeof(float));
  if (order != 0) return order < 0;
  const KeyObservations& of_a = a.observations;
  const KeyObservations& of_b = b.observations;
  const StepSettings& step_of_a = a;
  const StepSettings& step_of_b = b;
  return std::tie(step_of_a, a.insert_missing, of_a.counts, of_a.shows,
                  of_a.clicks, a.day) < std::tie(step_of_b, b.insert_missing,
                                                 of_b.counts, of_b.shows,
                                                 of_b.clicks, b.day);
}

constexpr char kAppliedRound[] = "tfswitch/applied_round";
constexpr char kNewerInstance[] = "tfswitch/newer_group_instance";

}  // namespace

absl::Status ErrorOfAppliedRound(absl::Status error) {
  error.SetPayload(kAppliedRound, absl::Cord());  // Has no effect on OK.
  return error;
}

bool IsErrorOfAppliedRound(const absl::Status& status) {
  return status.GetPayload(kAppliedRound).has_value();
}

absl::Status ErrorOfOlderGroup(absl::Status error, uint64_t newer_instance) {
  error.SetPayload(kNewerInstance, absl::Cord(absl::StrCat(newer_instance)));
  return error;
}

uint64_t NewerInstanceOf(const absl::Status& status) {
  const auto mark = status.GetPayload(kNewerInstance);
  uint64_t instance = 0;
  if (!mark.has_value() || !absl::SimpleAtoi(std::string(*mark), &instance)) {
    return 0;
  }
  return instance;
}

absl::StatusOr<GradientAccumulator::Group*> GradientAccumulator::FindGroup(
    const std::string& name) {
  MutexLock lock(&mutex_);
  const auto it = groups_.find(name);
  if (it != groups_.end()) return it->second.get();
  if (groups_.size() >= max_groups_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no room for steps of group '", name, "': there are those of ",
        groups_.size(), " groups, as many as --max_groups allows"));
  }
  return groups_.emplace(name, std::make_unique<Group>()).first->second.get();
}

absl::Status GradientAccumulator::Add(const StepTag& tag,
                                      const std::string& table,
                                      StagedPush push) {
  TFSWITCH_ASSIGN_OR_RETURN(Group* const group, FindGroup(tag.group));
  MutexLock lock(&group->mutex);
  if (const auto closed = group->closed_clocks.find(tag.incarnation);
      closed != group->closed_clocks.end() && tag.clock <= closed->second) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", table, "': worker ", tag.worker, " pushes at clock ",
        tag.clock, ", which is closed: the round of clock ", closed->second,
        " has been applied. Push before the step ends"));
  }
  if (group->HasGone(tag.incarnation)) return absl::OkStatus();
  std::vector<StagedPush>& pushes =
      group->steps[{tag.incarnation, tag.clock}][table];
  if (pushes.size() >= kMaxPushesPerStep) {
    return absl::ResourceExhaustedError(
        absl::StrCat("table '", table, "': worker ", tag.worker, " has pushed ",
                     kMaxPushesPerStep, " times in step ", tag.clock,
                     "; end the step after each batch, with "
                     "tfswitch.train.Worker.end_step"));
  }
  pushes.push_back(std::move(push));
  return absl::OkStatus();
}

absl::StatusOr<int64_t> GradientAccumulator::Commit(const std::string& name,
                                                    const Round& round,
                                                    Apply apply) {
  TFSWITCH_ASSIGN_OR_RETURN(Group* const group, FindGroup(name));
  MutexLock lock(&group->mutex);
  const bool is_new = round.group_instance() > group->instance;
  const bool may_begin =
      group->instance == 0 || round.number() == WorkerGroup::kNoRound;
  if (round.group_instance() < group->instance || (is_new && !may_begin)) {
    absl::Status refused = absl::AbortedError(absl::StrCat(
        "round ", round.number(), " of group '", name, "' is of instance ",
        round.group_instance(), " of the group, and rounds of instance ",
        group->instance,
        " are taken now, as the coordinator was started again; join again"));
    return is_new ? refused
                  : ErrorOfOlderGroup(std::move(refused), group->instance);
  }
  if (is_new) {
    group->instance = round.group_instance();
    group->committed = WorkerGroup::kNoRound;
    group->status = absl::OkStatus();
    group->closed_clocks.clear();
    // All workers of the former instance are gone.
    group->active.clear();
    group->next_incarnation = round.group_instance();
  }
  // This server was started after rounds before first_kept() were applied. They
  // cannot be committed here any more, so they count as committed. The
  // comparison comes before the subtraction, which could overflow.
  if (round.first_kept() > group->committed) {
    group->committed = round.first_kept() - 1;
  }
  if (round.number() == group->committed && !group->status.ok()) {
    return group->status;
  }
  if (round.number() <= group->committed ||
      round.number() - 1 != group->committed) {
    return group->committed;
  }

  std::map<std::string, std::vector<WeightedPush>> by_table;
  for (const Contribution& each : round.contributions()) {
    const auto step = group->steps.find({each.incarnation(), each.clock()});
    // A step of weight 0 does not count, even if gradients are summed without
    // weights.
    if (step == group->steps.end() || each.weight() == 0.0) continue;
    for (auto& [table, pushes] : step->second) {
      std::sort(pushes.begin(), pushes.end(), ContentLess);
      for (const StagedPush& push : pushes) {
        by_table[table].push_back({&push, each.weight()});
      }
    }
  }
  group->status = absl::OkStatus();
  for (const auto& [table, pushes] : by_table) {
    // The round counts as committed even after an exception, because rows that
    // have changed must not change again.
    try {
      group->status.Update(apply(table, pushes, round.total_weight()));
    } catch (const std::bad_alloc&) {
      group->status.Update(absl::ResourceExhaustedError(absl::StrCat(
          "table '", table, "': no memory to apply round ", round.number())));
    }
  }
  group->status = ErrorOfAppliedRound(group->status);
  group->committed = round.number();
  group->GiveUp(round);
  if (!group->status.ok()) return group->status;
  return round.number();
}

bool GradientAccumulator::HasCommitted(const std::string& name,
                                       const Round& round) {
  Group* group = nullptr;
  {
    MutexLock lock(&mutex_);
    const auto it = groups_.find(name);
    if (it == groups_.end()) return false;
    group = it->second.get();
  }
  MutexLock lock(&group->mutex);
  return round.group_instance() == group->instance &&
         round.number() <= group->committed;
}

std::vector<v1::CommittedRound> GradientAccumulator::LastRounds() {
  std::vector<std::pair<std::string, Group*>> groups;
  {
    MutexLock lock(&mutex_);
    for (const auto& [name, group] : groups_) {
      groups.emplace_back(name, group.get());
    }
  }
  std::vector<v1::CommittedRound> rounds;
  for (const auto& [name, group] : groups) {
    MutexLock lock(&group->mutex);
    v1::CommittedRound& round = rounds.emplace_back();
    round.set_group(name);
    round.set_group_instance(group->instance);
    round.set_number(group->committed);
  }
  return rounds;
}

void GradientAccumulator::Group::GiveUp(const Round& round) {
  for (const Contribution& each : round.contributions()) {
    int64_t& closed = closed_clocks[each.incarnation()];
    closed = std::max(closed, each.clock());
  }
  active = std::set<uint64_t>(round.active().begin(), round.active().end());
  next_incarnation = round.next_incarnation();
  for (auto it = steps.begin(); it != steps.end();) {
    const auto [incarnation, clock] = it->first;
    const auto closed = closed_clocks.find(incarnation);
    const bool is_over =
        HasGone(incarnation) ||
        (closed != closed_clocks.end() && clock <= closed->second);
    it = is_over ? steps.erase(it) : std::next(it);
  }
  for (auto it = closed_clocks.begin(); it != closed_clocks.end();) {
    it = HasGone(it->first) ? closed_clocks.erase(it) : std::next(it);
  }
}

void GradientAccumulator::DropTable(const std::string& table) {
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_) {
    MutexLock group_lock(&group->mutex);
    for (auto& [step, tables] : group->steps) tables.erase(table);
  }
}

void GradientAccumulator::SaveGroups(SavedGroups* saved) {
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_) {
    MutexLock group_lock(&group->mutex);
    v1::CommittedRounds& rounds = (*saved)[name];
    rounds.set_committed(group->committed);
    rounds.set_instance(group->instance);
    rounds.set_next_incarnation(group->next_incarnation);
    rounds.mutable_active()->Assign(group->active.begin(), group->active.end());
    rounds.mutable_closed_clocks()->insert(group->closed_clocks.begin(),
                                           group->closed_clocks.end());
  }
}

absl::Status GradientAccumulator::RestoreGroups(const SavedGroups& saved) {
  for (const auto& [name, rounds] : saved) {
    TFSWITCH_ASSIGN_OR_RETURN(Group* const group, FindGroup(name));
    MutexLock lock(&group->mutex);
    group->committed = rounds.committed();
    group->instance = rounds.instance();
    group->next_incarnation = rounds.next_incarnation();
    group->active = {rounds.active().begin(), rounds.active().end()};
    group->closed_clocks = {rounds.closed_clocks().begin(),
                            rounds.closed_clocks().end()};
  }
  return absl::OkStatus();
}

void GradientAccumulator::ForEachStaged(
    absl::FunctionRef<void(const StepTag&, const std::string&,
                           const StagedPush&)>
        visit) {
  MutexLock lock(&mutex_);
  for (const auto& [name, group] : groups_) {
    MutexLock group_lock(&group->mutex);
    for (const auto& [step, tables] : group->steps) {
      // The worker's number is 0 here, because it is not stored with a step.
      // Only texts of errors would show it.
      const StepTag tag = {name, 0, step.first, step.second};
      for (const auto& [table, pushes] : tables) {
        for (const StagedPush& push : pushes) visit(tag, table, push);
      }
    }
  }
}

int64_t GradientAccumulator::num_staged_steps() {
  MutexLock lock(&mutex_);
  int64_t count = 0;
  for (const auto& [name, group] : groups_) {
    MutexLock group_lock(&group->mutex);
    count += static_cast<int64_t>(group->steps.size());
  }
  return count;
}

}  // namespace tfswitch
