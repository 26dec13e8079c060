#include "cc/table/key_heat.h"

#include <algorithm>
#include <numeric>

#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

// Returns a random distance to the next sample, from 1 to 511. A constant one
// could miss keys that a program looks up at regular places.
uint32_t DrawDistance() {
  thread_local uint64_t state = 0;
  state = state * 6364136223846793005u + 1442695040888963407u;
  return 1 +
         static_cast<uint32_t>(state >> 40) % (2 * KeyHeat::kSampleEvery - 1);
}

}  // namespace

void KeyHeat::Note(absl::Span<const Key> keys) {
  // The number of keys to skip before the next sample.
  thread_local uint64_t skip = 0;
  if (skip >= keys.size()) {
    skip -= keys.size();
    return;
  }
  const bool is_locked = mutex_.TryLock();
  size_t i = skip;
  if (is_locked) {
    Decay();
    for (; i < keys.size(); i += DrawDistance()) Count(keys[i]);
    mutex_.Unlock();
  } else {
    i = keys.size() + DrawDistance() - 1;
  }
  skip = i - keys.size();
}

void KeyHeat::Decay() {
  const absl::Time now = SteadyNow();
  if (total_ <= 0) {
    shards_.assign(num_virtual_shards_, 0);
    entries_ = {};
    total_ = 0;
    next_halving_ = now + kHalfLife;
  }
  for (; now >= next_halving_ && total_ > 0; next_halving_ += kHalfLife) {
    for (float& count : shards_) count /= 2;
    for (Entry& entry : entries_) {
      entry.count /= 2;
      entry.error /= 2;
    }
    total_ /= 2;
    if (total_ < 1) total_ = 0;
  }
}

void KeyHeat::Count(Key key) {
  ++total_;
  ++shards_[VirtualShardOf(key, num_virtual_shards_)];
  Entry* const set = &entries_[HashKey(key) % kSets * kEntriesOfSet];
  Entry* least = set;
  for (Entry* entry = set; entry != set + kEntriesOfSet; ++entry) {
    if (entry->key == key) {
      ++entry->count;
      return;
    }
    if (entry->count < least->count) least = entry;
  }
  *least = {key, least->count + 1, least->count};
}

KeyHeat::Report KeyHeat::Read(uint32_t first, uint32_t end) {
  Report report;
  MutexLock lock(&mutex_);
  if (total_ > 0) Decay();
  report.sampled_keys = total_;
  if (total_ <= 0 || first >= end) return report;
  report.virtual_shards.assign(shards_.begin() + first, shards_.begin() + end);
  const double sum = std::accumulate(report.virtual_shards.begin(),
                                     report.virtual_shards.end(), 0.0);
  for (float& count : report.virtual_shards) {
    count = sum > 0 ? static_cast<float>(count * (end - first) / sum) : 0;
  }
  for (const Entry& entry : entries_) {
    if (entry.count > 0) {
      report.hot_keys.push_back(
          {entry.key, (entry.count - entry.error) / total_});
    }
  }
  std::sort(report.hot_keys.begin(), report.hot_keys.end(),
            [](const HotKey& a, const HotKey& b) { return a.share > b.share; });
  return report;
}

}  // namespace tfswitch
