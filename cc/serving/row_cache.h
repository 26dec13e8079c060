// Caches rows for models that look up on servers.

#ifndef TFSWITCH_CC_SERVING_ROW_CACHE_H_
#define TFSWITCH_CC_SERVING_ROW_CACHE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/keyed_hash.h"
#include "cc/base/mutex.h"

namespace tfswitch {

struct RowCacheOptions {
  // The most rows of all tables together.
  size_t max_rows = 0;
  // How long a cached row may be used, from the request to the servers on.
  absl::Duration lifetime = absl::Seconds(10);
  std::vector<int> dims;  // The dim of each table.
};

// Keeps the servers' answer for a key for some time: a row, or the table's
// default row for a key without one. When the cache is full, it drops a row
// that was not read again recently (CLOCK algorithm). So keys that are looked
// up once do not displace frequent ones.
//
// Rows are distributed over shards by their keys. Each shard has its own lock
// and entries, so threads wait for each other only if they use the same shard.
// A batch is processed shard by shard, with prefetching.
//
// Thread-safe.
class RowCache {
 public:
  // A steady clock, because changes of the system time do not affect it.
  using Time = std::chrono::steady_clock::time_point;

  // REQUIRES: options.lifetime > 0, options.max_rows <= 2^32.
  explicit RowCache(const RowCacheOptions& options);

  // Writes cached rows to embeddings[i * dim, (i + 1) * dim), and appends the
  // indices i of all other keys to *missing, in ascending order.
  //
  // REQUIRES: fewer than 2^31 keys, here and in Write().
  void Read(int table, absl::Span<const Key> keys, Time now, float* embeddings,
            std::vector<size_t>* missing);

  // Stores rows (keys.size() x dim) that were requested at `asked_at`. Does not
  // replace cached rows that were requested later.
  void Write(int table, absl::Span<const Key> keys, const float* rows,
             Time asked_at);

  // The number of cached rows. Rows that are too old to be used count, too.
  size_t size() const;
  int64_t num_hits() const { return num_hits_.load(std::memory_order_relaxed); }
  int64_t num_misses() const {
    return num_misses_.load(std::memory_order_relaxed);
  }

 private:
  struct Name {
    int table = 0;
    Key key = 0;
    friend bool operator==(const Name& a, const Name& b) {
      return a.key == b.key && a.table == b.table;
    }
  };
  // Each of these objects draws its own secret number, so that a caller cannot
  // choose keys that collide.
  struct HashOfName {
    KeyedHash hash = KeyedHash::Draw();
    size_t operator()(const Name& name) const;
  };
  // A batch, sorted by shard. The elements ends[i - 1] to ends[i] of `places`
  // are the indices in the batch of the keys of shard i.
  struct Batch {
    std::vector<uint32_t> places;
    std::vector<size_t> ends;
  };
  struct Entry {
    Name name;
    Time asked_at;
    // Whether the row was read since the CLOCK algorithm last passed it.
    bool was_read = false;
    std::vector<float> row;
  };
  // Aligned, so that shards do not share cache lines.
  struct alignas(64) Shard {
    mutable Mutex mutex;
    size_t max_entries = 0;  // Constant after construction.
    absl::flat_hash_map<Name, uint32_t, HashOfName> places
        ABSL_GUARDED_BY(mutex);
    std::vector<Entry> entries ABSL_GUARDED_BY(mutex);
    size_t hand ABSL_GUARDED_BY(mutex) = 0;
  };

  Batch SplitByShard(int table, absl::Span<const Key> keys) const;
  // Copies the cached rows of one shard's keys, and sets was_found[i] if
  // keys[i] is cached.
  void ReadShard(Shard* shard, int table, absl::Span<const Key> keys,
                 absl::Span<const uint32_t> places, Time now, float* embeddings,
                 uint8_t* was_found);
  bool IsOver(const Entry& entry, Time now) const {
    return now - entry.asked_at >= lifetime_;
  }
  // Returns an entry for a name that is not in the cache: a free entry or, if
  // there is none, one whose row is dropped.
  Entry* Place(Shard* shard, const Name& name, Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard->mutex);

  // Constant after construction; each shard has its own lock.
  const std::chrono::nanoseconds lifetime_;
  const std::vector<int> dims_;
  const HashOfName hash_for_shards_;
  std::vector<Shard> shards_;  // The number is a power of two.

  std::atomic<int64_t> num_hits_{0};
  std::atomic<int64_t> num_misses_{0};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_CACHE_H_
