#include "cc/table/change_log.h"

#include <algorithm>

#include "cc/base/spin_wait.h"

namespace tfswitch {

uint32_t ChangeClock::Enter() {
  SpinWait wait;
  for (;;) {
    const uint32_t epoch = epoch_.load();
    if ((epoch & kHeld) != 0) {
      wait.Pause();
      continue;
    }
    at_work_[epoch % 2].fetch_add(1);
    // This load and the end of an epoch are sequentially consistent. So either
    // this thread notices that the epoch has ended, or the thread that ends it
    // notices this one and waits.
    if (epoch_.load() == epoch) return epoch;
    Leave(epoch);
  }
}

uint32_t ChangeClock::EndEpoch() {
  MutexLock lock(&mutex_);
  const uint32_t epoch = epoch_.load();
  SpinWait wait;
  while (at_work_[(epoch + 1) % 2].load() != 0) wait.Pause();
  epoch_.store(epoch + 1);
  while (at_work_[epoch % 2].load() != 0) wait.Pause();
  return epoch;
}

void ChangeClock::TryEndEpoch() {
  MutexLock lock(&mutex_);
  const uint32_t epoch = epoch_.load();
  if (at_work_[(epoch + 1) % 2].load() == 0) epoch_.store(epoch + 1);
}

void ChangeClock::Hold() {
  mutex_.Lock();
  epoch_.fetch_or(kHeld);
  SpinWait wait;
  while (at_work_[0].load() != 0 || at_work_[1].load() != 0) wait.Pause();
}

void ChangeClock::Release() {
  epoch_.fetch_and(~kHeld);
  mutex_.Unlock();
}

uint32_t ChangeClock::BeginSnapshot() {
  const uint32_t epoch = epoch_.load() & ~kHeld;
  keeps_below_.store(epoch + 1);
  epoch_.store((epoch + 1) | kHeld);
  return epoch;
}

void KeyChanges::Add(Key key, uint32_t stamp) {
  if (entries_.size() >= max_keys_) Compact();
  entries_.push_back({key, stamp});
}

std::vector<Key> KeyChanges::Since(uint32_t epoch) const {
  std::vector<Key> keys;
  for (const Entry& entry : entries_) {
    if (entry.stamp > epoch) keys.push_back(entry.key);
  }
  return keys;
}

void KeyChanges::Compact() {
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) {
              return a.key != b.key ? a.key < b.key : a.stamp > b.stamp;
            });
  entries_.erase(std::unique(entries_.begin(), entries_.end(),
                             [](const Entry& a, const Entry& b) {
                               return a.key == b.key;
                             }),
                 entries_.end());
  if (entries_.size() <= max_keys_ / 2) return;
  const auto first_kept =
      entries_.begin() +
      static_cast<std::ptrdiff_t>(entries_.size() - max_keys_ / 2);
  std::nth_element(
      entries_.begin(), first_kept, entries_.end(),
      [](const Entry& a, const Entry& b) { return a.stamp < b.stamp; });
  for (auto entry = entries_.begin(); entry != first_kept; ++entry) {
    forgotten_ = std::max(forgotten_, entry->stamp);
  }
  entries_.erase(entries_.begin(), first_kept);
}

}  // namespace tfswitch
