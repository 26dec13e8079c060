#include "cc/shard/write_ledger.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

// The highest sequence number that is too old for the window.
uint64_t FloorOf(uint64_t highest) {
  return highest >= WriteLedger::kWindow ? highest - WriteLedger::kWindow : 0;
}

}  // namespace

WriteLedger::Client& WriteLedger::Touch(const PushId& id) {
  const auto [it, is_new] = clients_.try_emplace(id.client_id);
  Client& client = it->second;
  if (is_new) {
    client.caller = id.caller;
    client.recency =
        recent_[id.caller].insert(recent_[id.caller].begin(), id.client_id);
  } else {
    Recent& from = recent_[client.caller];
    if (client.caller == 0) client.caller = id.caller;
    Recent& to = recent_[client.caller];
    to.splice(to.begin(), from, client.recency);
  }
  Recent& of_caller = recent_[client.caller];
  if (client.caller != 0 && of_caller.size() > kMaxClients) {
    ForgetOneOf(&of_caller, id.client_id);
  } else if (clients_.size() > kMaxOfAll) {
    const auto most = std::max_element(
        recent_.begin(), recent_.end(), [](const auto& a, const auto& b) {
          return a.second.size() < b.second.size();
        });
    ForgetOneOf(&most->second, id.client_id);
    if (most->second.empty()) recent_.erase(most);
  }
  return client;
}

void WriteLedger::ForgetOneOf(Recent* recent, uint64_t kept) {
  for (auto last = recent->end(); last != recent->begin();) {
    --last;
    const auto candidate = clients_.find(*last);
    if (*last == kept || !candidate->second.in_progress.empty()) continue;
    clients_.erase(candidate);
    recent->erase(last);
    return;
  }
}

absl::StatusOr<WriteLedger::Verdict> WriteLedger::Begin(const PushId& id,
                                                        int64_t* count) {
  const auto [client_id, sequence, caller] = id;
  MutexLock lock(&mutex_);
  while (true) {
    Client& client = Touch(id);
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

void WriteLedger::End(const PushId& id, bool applied, int64_t count) {
  const uint64_t sequence = id.sequence;
  MutexLock lock(&mutex_);
  Client& client = clients_.at(id.client_id);
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
  for (const auto& [caller, recent] : recent_) {
    for (auto id = recent.rbegin(); id != recent.rend(); ++id) {
      for (const auto& [sequence, count] : clients_.at(*id).applied) {
        marks.push_back({*id, sequence, count});
      }
    }
  }
  return marks;
}

void WriteLedger::Restore(absl::Span<const checkpoint::WriteMark> marks) {
  for (const checkpoint::WriteMark& mark : marks) {
    const PushId id = {mark.client_id, mark.sequence};
    {
      MutexLock lock(&mutex_);
      Touch(id);
    }
    End(id, /*applied=*/true, mark.count);
  }
}

}  // namespace tfswitch
