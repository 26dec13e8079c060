#include "cc/shard/write_ledger.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

// The last sequence before the window.
uint64_t FloorOf(uint64_t highest) {
  return highest >= WriteLedger::kWindow ? highest - WriteLedger::kWindow : 0;
}

}  // namespace

WriteLedger::Client& WriteLedger::Touch(uint64_t client_id) {
  auto [it, is_new] = clients_.try_emplace(client_id);
  if (is_new) {
    recent_.push_front(client_id);
    it->second.recency = recent_.begin();
  } else {
    recent_.splice(recent_.begin(), recent_, it->second.recency);
  }
  // Forget the client heard of longest ago, but none with a push under way:
  // its End() must find it.
  for (auto last = recent_.end();
       clients_.size() > kMaxClients && last != recent_.begin();) {
    --last;
    const auto candidate = clients_.find(*last);
    if (*last == client_id || !candidate->second.in_progress.empty()) continue;
    clients_.erase(candidate);
    last = recent_.erase(last);
  }
  return clients_.at(client_id);
}

absl::StatusOr<WriteLedger::Verdict> WriteLedger::Begin(uint64_t client_id,
                                                        uint64_t sequence,
                                                        int64_t* count) {
  MutexLock lock(&mutex_);
  while (true) {
    Client& client = Touch(client_id);
    if (client.in_progress.count(sequence) != 0) {
      ended_.Wait(&mutex_);
      continue;
    }
    const auto applied = client.applied.find(sequence);
    if (applied != client.applied.end()) {
      if (count != nullptr) *count = applied->second;
      return Verdict::kDuplicate;
    }
    const uint64_t floor = FloorOf(client.highest);
    if (client.highest >= kWindow && sequence <= floor) {
      return absl::FailedPreconditionError(absl::StrCat(
          "write ", sequence, " of client ", client_id,
          " has come too late: the server remembers the last ", kWindow,
          " sequences of a client, for this one ", floor + 1, " to ",
          client.highest,
          ". It was not applied now, and may have been before. Repeat it under "
          "a new sequence only if applying it twice does no harm, and have "
          "fewer than ",
          kWindow / 8, " writes of one client under way at once"));
    }
    client.in_progress.insert(sequence);
    return Verdict::kApply;
  }
}

void WriteLedger::End(uint64_t client_id, uint64_t sequence, bool applied,
                      int64_t count) {
  MutexLock lock(&mutex_);
  Client& client = clients_.at(client_id);
  client.in_progress.erase(sequence);
  if (applied) {
    client.applied.emplace(sequence, count);
    const uint64_t from = FloorOf(client.highest);
    client.highest = std::max(client.highest, sequence);
    const uint64_t to = FloorOf(client.highest);
    if (to - from > client.applied.size()) {
      for (auto it = client.applied.begin(); it != client.applied.end();) {
        it = it->first <= to ? client.applied.erase(it) : std::next(it);
      }
    } else {
      for (uint64_t s = from + 1; s <= to; ++s) client.applied.erase(s);
    }
  }
  ended_.NotifyAll();
}

std::vector<checkpoint::WriteMark> WriteLedger::Marks() const {
  MutexLock lock(&mutex_);
  std::vector<checkpoint::WriteMark> marks;
  for (auto id = recent_.rbegin(); id != recent_.rend(); ++id) {
    for (const auto& [sequence, count] : clients_.at(*id).applied) {
      marks.push_back({*id, sequence, count});
    }
  }
  return marks;
}

void WriteLedger::Restore(absl::Span<const checkpoint::WriteMark> marks) {
  for (const checkpoint::WriteMark& mark : marks) {
    {
      MutexLock lock(&mutex_);
      Touch(mark.client_id);
    }
    End(mark.client_id, mark.sequence, /*applied=*/true, mark.count);
  }
}

}  // namespace tfswitch
