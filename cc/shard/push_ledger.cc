#include "cc/shard/push_ledger.h"

#include <algorithm>

namespace tfswitch {

PushLedger::Client& PushLedger::Touch(uint64_t client_id) {
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

PushLedger::Verdict PushLedger::Begin(uint64_t client_id, uint64_t sequence) {
  MutexLock lock(&mutex_);
  while (true) {
    Client& client = Touch(client_id);
    if (client.in_progress.count(sequence) != 0) {
      ended_.Wait(&mutex_);
      continue;
    }
    const bool before_window =
        client.highest >= kWindow && sequence <= client.highest - kWindow;
    if (before_window || client.applied.count(sequence) != 0) {
      return Verdict::kDuplicate;
    }
    client.in_progress.insert(sequence);
    return Verdict::kApply;
  }
}

void PushLedger::End(uint64_t client_id, uint64_t sequence, bool applied) {
  MutexLock lock(&mutex_);
  Client& client = clients_.at(client_id);
  client.in_progress.erase(sequence);
  if (applied) {
    client.applied.insert(sequence);
    const uint64_t before = client.highest;
    client.highest = std::max(client.highest, sequence);
    const auto floor_of = [](uint64_t highest) {
      return highest >= kWindow ? highest - kWindow : 0;
    };
    const uint64_t from = floor_of(before);
    const uint64_t to = floor_of(client.highest);
    if (to - from > client.applied.size()) {
      for (auto it = client.applied.begin(); it != client.applied.end();) {
        it = *it <= to ? client.applied.erase(it) : std::next(it);
      }
    } else {
      for (uint64_t s = from + 1; s <= to; ++s) client.applied.erase(s);
    }
  }
  ended_.NotifyAll();
}

}  // namespace tfswitch
