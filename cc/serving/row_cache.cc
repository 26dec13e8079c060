#include "cc/serving/row_cache.h"

#include <algorithm>
#include <cstring>

namespace tfswitch {
namespace {

constexpr size_t kMaxShards = 64;
// Fewer would fill some shards long before others.
constexpr size_t kMinRowsPerShard = 64;
// Time is kept in 64 bits of nanoseconds; nobody waits for so long.
constexpr absl::Duration kLongestLifetime = absl::Hours(24 * 365);

size_t NumShards(size_t max_rows) {
  size_t num_shards = 1;
  while (num_shards < kMaxShards &&
         num_shards * 2 * kMinRowsPerShard <= max_rows) {
    num_shards *= 2;
  }
  return num_shards;
}

}  // namespace

size_t RowCache::HashOfName::operator()(const Name& name) const {
  // Keys of several tables may be the same numbers.
  return HashKey(name.key ^
                 static_cast<Key>(HashKey(static_cast<Key>(name.table) + 1)));
}

RowCache::RowCache(const RowCacheOptions& options)
    : lifetime_(absl::ToChronoNanoseconds(
          std::min(options.lifetime, kLongestLifetime))),
      dims_(options.dims),
      shards_(NumShards(options.max_rows)) {
  for (size_t i = 0; i < shards_.size(); ++i) {
    shards_[i].max_entries = options.max_rows / shards_.size() +
                             (i < options.max_rows % shards_.size() ? 1 : 0);
  }
}

RowCache::Shard& RowCache::ShardOf(const Name& name) {
  // The map of a shard goes by the low bits.
  return shards_[(HashOfName()(name) >> 48) & (shards_.size() - 1)];
}

void RowCache::Read(int table, absl::Span<const Key> keys, Time now,
                    float* embeddings, std::vector<size_t>* missing) {
  const size_t dim = static_cast<size_t>(dims_[table]);
  const size_t missing_before = missing->size();
  for (size_t i = 0; i < keys.size(); ++i) {
    const Name name{table, keys[i]};
    Shard& shard = ShardOf(name);
    MutexLock lock(&shard.mutex);
    const auto found = shard.places.find(name);
    if (found == shard.places.end()) {
      missing->push_back(i);
      continue;
    }
    Entry& entry = shard.entries[found->second];
    // A row has another size if there was no memory for it.
    if (IsOver(entry, now) || entry.row.size() != dim) {
      missing->push_back(i);
      continue;
    }
    entry.was_read = true;
    std::memcpy(embeddings + i * dim, entry.row.data(), sizeof(float) * dim);
  }
  const size_t num_missing = missing->size() - missing_before;
  num_misses_.fetch_add(static_cast<int64_t>(num_missing),
                        std::memory_order_relaxed);
  num_hits_.fetch_add(static_cast<int64_t>(keys.size() - num_missing),
                      std::memory_order_relaxed);
}

void RowCache::Write(int table, absl::Span<const Key> keys, const float* rows,
                     Time asked_at) {
  const size_t dim = static_cast<size_t>(dims_[table]);
  for (size_t i = 0; i < keys.size(); ++i) {
    const Name name{table, keys[i]};
    Shard& shard = ShardOf(name);
    if (shard.max_entries == 0) continue;
    MutexLock lock(&shard.mutex);
    const auto found = shard.places.find(name);
    Entry* entry = nullptr;
    if (found == shard.places.end()) {
      entry = Place(&shard, name, asked_at);
    } else {
      entry = &shard.entries[found->second];
      if (entry->asked_at > asked_at) continue;
    }
    entry->row.assign(rows + i * dim, rows + (i + 1) * dim);
    entry->asked_at = asked_at;
  }
}

RowCache::Entry* RowCache::Place(Shard* shard, const Name& name, Time now) {
  size_t place = shard->entries.size();
  if (place < shard->max_entries) {
    shard->entries.emplace_back();
  } else {
    // Ends after two rounds: the first leaves none that was read.
    for (;;) {
      place = shard->hand;
      shard->hand = (shard->hand + 1) % shard->entries.size();
      Entry& entry = shard->entries[place];
      if (!entry.was_read || IsOver(entry, now)) break;
      entry.was_read = false;
    }
    const auto former = shard->places.find(shard->entries[place].name);
    if (former != shard->places.end() && former->second == place) {
      shard->places.erase(former);
    }
  }
  Entry& entry = shard->entries[place];
  entry.name = name;
  entry.was_read = false;
  shard->places.emplace(name, place);
  return &entry;
}

size_t RowCache::size() const {
  size_t sum = 0;
  for (const Shard& shard : shards_) {
    MutexLock lock(&shard.mutex);
    sum += shard.entries.size();
  }
  return sum;
}

}  // namespace tfswitch
