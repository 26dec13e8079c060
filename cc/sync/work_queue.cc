// Each item of an epoch is in one of four states: not taken yet (order_ from
// num_taken_ on), in leases_, in returned_, or else finished. The order of an
// epoch depends only on the seed and the epoch's number. So a checkpoint needs
// only the epoch, num_taken and the unfinished items. state() counts leased
// items as unfinished, because no worker has an item after a restore.
//
// A repeated Take() returns the same item, and last_finished_ shows that a
// Finish() is repeated. Advance() never lowers an offset. Revoke() lowers it
// and ends the lease, so that the samples are trained again.

#include "cc/sync/work_queue.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/hash.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

namespace {

bool IsOf(const v1::SavedGroup::Lease& lease, uint64_t incarnation,
          int64_t epoch, int64_t index) {
  return lease.incarnation() == incarnation && lease.epoch() == epoch &&
         lease.index() == index;
}

}  // namespace

absl::Status Validate(const WorkQueueOptions& options) {
  if (options.items().empty()) {
    return absl::InvalidArgumentError("a work queue needs items. Received: 0");
  }
  if (options.num_epochs() < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("a work queue needs at least one epoch. Received: ",
                     options.num_epochs()));
  }
  return absl::OkStatus();
}

uint64_t ItemBytes(const WorkQueueOptions& options) {
  uint64_t bytes = static_cast<uint64_t>(options.items_size()) *
                   (sizeof(std::string) + sizeof(int64_t));
  for (const std::string& item : options.items()) bytes += item.size();
  return bytes;
}

std::string DescribeDifference(const WorkQueueOptions& here,
                               const WorkQueueOptions& asked) {
  const auto differ = [](absl::string_view what, auto ours, auto theirs) {
    return absl::StrCat(what, ": ", ours, " here, ", theirs, " asked");
  };
  const auto name = [](bool value) { return value ? "true" : "false"; };
  if (here.num_epochs() != asked.num_epochs()) {
    return differ("epochs", here.num_epochs(), asked.num_epochs());
  }
  if (here.shuffle() != asked.shuffle()) {
    return differ("shuffle", name(here.shuffle()), name(asked.shuffle()));
  }
  if (here.seed() != asked.seed()) {
    return differ("seed", here.seed(), asked.seed());
  }
  if (here.items_size() != asked.items_size()) {
    return differ("number of items", here.items_size(), asked.items_size());
  }
  const auto [ours, theirs] = std::mismatch(
      here.items().begin(), here.items().end(), asked.items().begin());
  if (ours == here.items().end()) return "";
  return absl::StrCat("item ", ours - here.items().begin(), ": '", *ours,
                      "' here, '", *theirs, "' asked");
}

WorkQueue::WorkQueue(std::string name, WorkQueueOptions options)
    : name_(std::move(name)),
      options_(std::move(options)),
      item_bytes_(ItemBytes(options_)) {
  BeginEpoch(0);
}

void WorkQueue::BeginEpoch(int64_t epoch) {
  epoch_ = epoch;
  num_taken_ = 0;
  order_.clear();
  if (is_over()) return;
  order_.resize(static_cast<size_t>(num_items()));
  std::iota(order_.begin(), order_.end(), 0);
  if (!options_.shuffle()) return;
  // A Fisher-Yates shuffle with its own random numbers, because those of a
  // library could change with its version.
  uint64_t draws =
      HashKey(static_cast<Key>(HashKey(static_cast<Key>(options_.seed())) +
                               static_cast<uint64_t>(epoch)));
  for (size_t i = order_.size() - 1; i > 0; --i) {
    const uint64_t draw = HashKey(static_cast<Key>(++draws));
    std::swap(order_[i], order_[draw % (i + 1)]);
  }
}

absl::Status WorkQueue::Restore(const SavedWorkQueue& state) {
  absl::Status damaged = absl::DataLossError(
      absl::StrCat("the saved state of work queue '", name_, "' is damaged"));
  const bool is_over = state.epoch() == options_.num_epochs();
  if (state.epoch() < 0 || state.epoch() > options_.num_epochs() ||
      state.num_taken() < 0 ||
      state.num_taken() > (is_over ? 0 : num_items())) {
    return damaged;
  }
  BeginEpoch(state.epoch());
  const auto num_known = std::count_if(
      order_.begin(), order_.begin() + state.num_taken(),
      [&](int64_t index) { return state.unfinished().contains(index); });
  if (static_cast<size_t>(num_known) != state.unfinished().size()) {
    return damaged;
  }
  for (const auto& [index, offset] : state.unfinished()) {
    if (offset < 0) return damaged;
  }
  num_taken_ = state.num_taken();
  leases_.clear();
  last_finished_.clear();
  returned_ = {state.unfinished().begin(), state.unfinished().end()};
  return absl::OkStatus();
}

void WorkQueue::SetState(SavedWorkQueue* state) const {
  state->set_queue(name_);
  state->set_epoch(epoch_);
  state->set_num_taken(num_taken_);
  state->mutable_unfinished()->insert(returned_.begin(), returned_.end());
}

SavedWorkQueue WorkQueue::state() const {
  SavedWorkQueue state;
  *state.mutable_options() = options_;
  SetState(&state);
  for (const auto& [worker, lease] : leases_) {
    (*state.mutable_unfinished())[lease.index()] = lease.offset();
  }
  return state;
}

v1::SavedGroup::Queue WorkQueue::Save() const {
  v1::SavedGroup::Queue saved;
  SetState(saved.mutable_state());
  saved.mutable_leases()->insert(leases_.begin(), leases_.end());
  saved.mutable_last_finished()->insert(last_finished_.begin(),
                                        last_finished_.end());
  saved.set_reissued(reissued_);
  return saved;
}

absl::Status WorkQueue::RestoreSaved(const v1::SavedGroup::Queue& saved) {
  TFSWITCH_RETURN_IF_ERROR(Restore(saved.state()));
  leases_ = {saved.leases().begin(), saved.leases().end()};
  last_finished_ = {saved.last_finished().begin(), saved.last_finished().end()};
  reissued_ = saved.reissued();
  for (const auto& [worker, lease] : leases_) {
    if (lease.index() < 0 || lease.index() >= num_items()) {
      return absl::DataLossError(absl::StrCat("the saved state of work queue '",
                                              name_, "' is damaged"));
    }
  }
  return absl::OkStatus();
}

std::optional<WorkItem> WorkQueue::Take(uint32_t worker, uint64_t incarnation) {
  const auto item_of = [this](const Lease& lease) {
    WorkItem item;
    item.set_epoch(lease.epoch());
    item.set_index(lease.index());
    item.set_value(options_.items(static_cast<int>(lease.index())));
    item.set_offset(lease.offset());
    return item;
  };
  const auto it = leases_.find(worker);
  if (it != leases_.end()) {
    if (it->second.incarnation() == incarnation) return item_of(it->second);
    returned_[it->second.index()] = it->second.offset();
    leases_.erase(it);
  }
  if (is_over()) return std::nullopt;
  Lease lease;
  lease.set_incarnation(incarnation);
  lease.set_epoch(epoch_);
  if (!returned_.empty()) {
    lease.set_index(returned_.begin()->first);
    lease.set_offset(returned_.begin()->second);
    returned_.erase(returned_.begin());
    ++reissued_;
  } else if (num_taken_ < num_items()) {
    lease.set_index(order_[static_cast<size_t>(num_taken_++)]);
  } else {
    return std::nullopt;
  }
  leases_[worker] = lease;
  return item_of(lease);
}

std::string WorkQueue::Describe(int64_t epoch, int64_t index) const {
  const bool is_known = index >= 0 && index < num_items();
  return absl::StrCat(
      "item ", index,
      is_known
          ? absl::StrCat(" ('", options_.items(static_cast<int>(index)), "')")
          : "",
      " of epoch ", epoch, " of work queue '", name_, "'");
}

std::string WorkQueue::DescribeLoss(uint32_t worker, int64_t epoch,
                                    int64_t index) const {
  return absl::StrCat(Describe(epoch, index), " is not worker ", worker,
                      "'s, or not any more; take another one");
}

absl::Status WorkQueue::CheckAdvance(uint32_t worker, uint64_t incarnation,
                                     const WorkProgress& progress) const {
  const auto it = leases_.find(worker);
  if (it == leases_.end() ||
      !IsOf(it->second, incarnation, progress.epoch(), progress.index())) {
    return absl::NotFoundError(
        DescribeLoss(worker, progress.epoch(), progress.index()));
  }
  if (progress.offset() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        Describe(progress.epoch(), progress.index()),
        ": an offset must not be negative. Received: ", progress.offset()));
  }
  return absl::OkStatus();
}

absl::Status WorkQueue::Advance(uint32_t worker, uint64_t incarnation,
                                const WorkProgress& progress) {
  absl::Status status = CheckAdvance(worker, incarnation, progress);
  if (!status.ok()) return status;
  Lease& lease = leases_[worker];
  lease.set_offset(std::max(lease.offset(), progress.offset()));
  return absl::OkStatus();
}

absl::Status WorkQueue::Finish(uint32_t worker, uint64_t incarnation,
                               int64_t epoch, int64_t index) {
  const auto last = last_finished_.find(worker);
  if (last != last_finished_.end() &&
      IsOf(last->second, incarnation, epoch, index)) {
    return absl::OkStatus();  // A repeated call.
  }
  const auto it = leases_.find(worker);
  if (it == leases_.end() || !IsOf(it->second, incarnation, epoch, index)) {
    return absl::FailedPreconditionError(DescribeLoss(worker, epoch, index));
  }
  last_finished_[worker] = it->second;
  leases_.erase(it);
  return absl::OkStatus();
}

void WorkQueue::ReturnItems(
    absl::FunctionRef<bool(uint32_t, uint64_t)> is_there) {
  for (auto it = leases_.begin(); it != leases_.end();) {
    const Lease& lease = it->second;
    if (is_there(it->first, lease.incarnation())) {
      ++it;
      continue;
    }
    returned_[lease.index()] = lease.offset();
    it = leases_.erase(it);
  }
  for (auto it = last_finished_.begin(); it != last_finished_.end();) {
    const bool stays = is_there(it->first, it->second.incarnation());
    it = stays ? std::next(it) : last_finished_.erase(it);
  }
}

void WorkQueue::Revoke(const WorkProgress& before) {
  if (before.epoch() != epoch_ || before.index() >= num_items()) return;
  for (auto it = leases_.begin(); it != leases_.end();) {
    it = it->second.index() == before.index() ? leases_.erase(it)
                                              : std::next(it);
  }
  const auto [it, is_new] = returned_.emplace(before.index(), before.offset());
  if (!is_new) it->second = std::min(it->second, before.offset());
}

void WorkQueue::EndEpochIfFinished() {
  if (is_over() || num_finished() < num_items()) return;
  BeginEpoch(epoch_ + 1);
}

std::vector<std::string> WorkQueue::Unfinished(size_t most) const {
  std::vector<std::string> items;
  const int64_t num_left = is_over() ? 0 : num_items() - num_finished();
  const auto add = [&](int64_t index) {
    if (items.size() < std::min<size_t>(most, num_left)) {
      items.push_back(options_.items(static_cast<int>(index)));
    }
  };
  for (const auto& [worker, lease] : leases_) add(lease.index());
  for (const auto& [index, offset] : returned_) add(index);
  for (int64_t i = num_taken_; items.size() < most && i < num_items(); ++i) {
    add(order_[static_cast<size_t>(i)]);
  }
  if (num_left > static_cast<int64_t>(most)) {
    items.push_back(absl::StrCat("and ", num_left - most, " more"));
  }
  return items;
}

v1::GetWorkQueueStatsResponse WorkQueue::stats() const {
  v1::GetWorkQueueStatsResponse stats;
  stats.set_epoch(epoch_);
  stats.set_num_epochs(options_.num_epochs());
  stats.set_num_items(num_items());
  stats.set_num_finished(num_finished());
  stats.set_num_leased(static_cast<int64_t>(leases_.size()));
  stats.set_num_returned(static_cast<int64_t>(returned_.size()));
  stats.set_reissued(reissued_);
  return stats;
}

}  // namespace tfswitch
