// SplitByShard() sorts the keys of a batch by shard, so that the batch locks
// each shard once. ReadShard() prefetches in three rounds for several keys at a
// time, so that their cache misses overlap.
//
// Place() uses a free entry if there is one. In a full shard it moves a
// pointer, the hand of the CLOCK algorithm, over the entries. It stops at an
// entry that is too old, or was not read since the hand last passed it. It
// clears was_read of the entries that it passes. The entry still has its former
// row, and Write() replaces the row under the same lock. If there is no memory
// for the new row, its size is wrong, and so it is never read.

#include "cc/serving/row_cache.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/numeric/bits.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxShards = 64;
constexpr size_t kReadAtOnce = 32;
// Each shard has room for at least this many rows. With less room, some shards
// would be full long before others.
constexpr size_t kMinRowsPerShard = 64;
// The upper limit of a row's lifetime: times are 64-bit numbers of nanoseconds.
constexpr absl::Duration kLongestLifetime = absl::Hours(24 * 365);

size_t NumShards(size_t max_rows) {
  return std::clamp<size_t>(absl::bit_floor(max_rows / kMinRowsPerShard), 1,
                            kMaxShards);
}

}  // namespace

size_t RowCache::HashOfName::operator()(const Name& name) const {
  // Combines the key with the table, because several tables may have the same
  // keys. The map also uses the low bits of the hash. The outer HashKey() makes
  // these as random as the high bits.
  return HashKey(static_cast<Key>(hash(name.key) ^
                                  HashKey(static_cast<Key>(name.table) + 1)));
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

RowCache::Batch RowCache::SplitByShard(int table,
                                       absl::Span<const Key> keys) const {
  Batch batch;
  batch.ends.assign(shards_.size(), 0);
  std::vector<uint8_t> shards(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    const size_t shard =
        hash_for_shards_({table, keys[i]}) & (shards_.size() - 1);
    shards[i] = static_cast<uint8_t>(shard);
    ++batch.ends[shard];
  }
  size_t begin = 0;
  for (size_t& end : batch.ends) begin += std::exchange(end, begin);
  batch.places.resize(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    batch.places[batch.ends[shards[i]]++] = static_cast<uint32_t>(i);
  }
  return batch;
}

void RowCache::Read(int table, absl::Span<const Key> keys, Time now,
                    float* embeddings, std::vector<size_t>* missing) {
  const Batch batch = SplitByShard(table, keys);
  std::vector<uint8_t> was_found(keys.size(), 0);
  size_t begin = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    const size_t end = batch.ends[i];
    if (begin == end) continue;
    ReadShard(&shards_[i], table, keys,
              absl::MakeConstSpan(batch.places).subspan(begin, end - begin),
              now, embeddings, was_found.data());
    begin = end;
  }
  const size_t missing_before = missing->size();
  for (size_t i = 0; i < keys.size(); ++i) {
    if (was_found[i] == 0) missing->push_back(i);
  }
  const size_t num_missing = missing->size() - missing_before;
  num_misses_.fetch_add(static_cast<int64_t>(num_missing),
                        std::memory_order_relaxed);
  num_hits_.fetch_add(static_cast<int64_t>(keys.size() - num_missing),
                      std::memory_order_relaxed);
}

void RowCache::ReadShard(Shard* shard, int table, absl::Span<const Key> keys,
                         absl::Span<const uint32_t> places, Time now,
                         float* embeddings, uint8_t* was_found) {
  const size_t dim = static_cast<size_t>(dims_[table]);
  MutexLock lock(&shard->mutex);
  // Prefetches in three rounds: the map's slots, the entries, and their rows.
  for (size_t begin = 0; begin < places.size(); begin += kReadAtOnce) {
    const size_t count = std::min(kReadAtOnce, places.size() - begin);
    const absl::Span<const uint32_t> chunk = places.subspan(begin, count);
    Entry* entries[kReadAtOnce];
    for (const uint32_t place : chunk) {
      shard->places.prefetch(Name{table, keys[place]});
    }
    for (size_t i = 0; i < count; ++i) {
      const auto found = shard->places.find(Name{table, keys[chunk[i]]});
      entries[i] = found == shard->places.end()
                       ? nullptr
                       : &shard->entries[found->second];
      __builtin_prefetch(entries[i]);
    }
    for (size_t i = 0; i < count; ++i) {
      if (entries[i] != nullptr) __builtin_prefetch(entries[i]->row.data());
    }
    for (size_t i = 0; i < count; ++i) {
      Entry* const entry = entries[i];
      if (entry == nullptr || IsOver(*entry, now) || entry->row.size() != dim) {
        continue;
      }
      entry->was_read = true;
      was_found[chunk[i]] = 1;
      std::memcpy(embeddings + chunk[i] * dim, entry->row.data(),
                  sizeof(float) * dim);
    }
  }
}

void RowCache::Write(int table, absl::Span<const Key> keys, const float* rows,
                     Time asked_at) {
  const size_t dim = static_cast<size_t>(dims_[table]);
  const Batch batch = SplitByShard(table, keys);
  size_t next = 0;
  for (size_t i = 0; i < shards_.size(); ++i) {
    Shard& shard = shards_[i];
    if (next == batch.ends[i]) continue;
    MutexLock lock(&shard.mutex);
    for (; next < batch.ends[i]; ++next) {
      const size_t place = batch.places[next];
      const Name name{table, keys[place]};
      const auto found = shard.places.find(name);
      Entry* entry = nullptr;
      if (found == shard.places.end()) {
        entry = Place(&shard, name, asked_at);
      } else {
        entry = &shard.entries[found->second];
        if (entry->asked_at > asked_at) continue;
      }
      entry->row.assign(rows + place * dim, rows + (place + 1) * dim);
      entry->asked_at = asked_at;
    }
  }
}

RowCache::Entry* RowCache::Place(Shard* shard, const Name& name, Time now) {
  size_t place = shard->entries.size();
  if (place < shard->max_entries) {
    shard->entries.emplace_back();
  } else {
    // The loop ends within two rounds, because the first round clears was_read
    // of all entries.
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
  shard->places.emplace(name, static_cast<uint32_t>(place));
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
