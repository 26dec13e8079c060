// Rows that were read lately, for models that look up on servers.

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
  size_t max_rows = 0;  // In all tables together.
  // How long after a row was asked for it may be read here.
  absl::Duration lifetime = absl::Seconds(10);
  std::vector<int> dims;  // By table.
};

// Keeps the answer of servers for a key, a row or their table's value for keys
// without one, and forgets it after a time. When it is full, a row goes that
// was not read again lately (CLOCK): keys that come once do not drive out those
// that come often.
//
// Rows are spread over shards by their keys, each with a lock and its part of
// the places; two threads meet only in one shard. A batch goes through the
// shards one by one, and asks for memory before it is needed.
//
// Thread-safe.
class RowCache {
 public:
  // Does not jump, as the clock on the wall may.
  using Time = std::chrono::steady_clock::time_point;

  // REQUIRES: options.lifetime > 0, options.max_rows <= 2^32.
  explicit RowCache(const RowCacheOptions& options);

  // Writes the rows that are there to embeddings[i * dim, (i + 1) * dim) and
  // appends the places i of all other keys to *missing, in their order.
  //
  // REQUIRES: fewer than 2^31 keys, here and in Write().
  void Read(int table, absl::Span<const Key> keys, Time now, float* embeddings,
            std::vector<size_t>* missing);

  // Keeps rows (keys.size() x dim) that were asked for at `asked_at`. One that
  // is here and was asked for later stays.
  void Write(int table, absl::Span<const Key> keys, const float* rows,
             Time asked_at);

  // How many rows are here, also of those whose time is over.
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
  // Each has secrets of its own: a caller may choose the keys.
  struct HashOfName {
    KeyedHash hash = KeyedHash::Draw();
    size_t operator()(const Name& name) const;
  };
  // A batch in the order of its shards: those of shard i are the places from
  // ends[i - 1] to ends[i].
  struct Batch {
    std::vector<uint32_t> places;
    std::vector<size_t> ends;
  };
  struct Entry {
    Name name;
    Time asked_at;
    bool was_read = false;  // Since the hand came by.
    std::vector<float> row;
  };
  // On cache lines of its own.
  struct alignas(64) Shard {
    mutable Mutex mutex;
    size_t max_entries = 0;  // Constant after construction.
    absl::flat_hash_map<Name, uint32_t, HashOfName> places
        ABSL_GUARDED_BY(mutex);
    std::vector<Entry> entries ABSL_GUARDED_BY(mutex);
    size_t hand ABSL_GUARDED_BY(mutex) = 0;
  };

  Batch SplitByShard(int table, absl::Span<const Key> keys) const;
  // Reads the keys of one shard; sets was_found[i] for those keys[i] that are
  // there.
  void ReadShard(Shard* shard, int table, absl::Span<const Key> keys,
                 absl::Span<const uint32_t> places, Time now, float* embeddings,
                 uint8_t* was_found);
  bool IsOver(const Entry& entry, Time now) const {
    return now - entry.asked_at >= lifetime_;
  }
  // The entry for a name that has none: a new one, or one that is given up.
  Entry* Place(Shard* shard, const Name& name, Time now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(shard->mutex);

  // Constant after construction; shards have their own locks.
  const std::chrono::nanoseconds lifetime_;
  const std::vector<int> dims_;
  const HashOfName hash_for_shards_;
  std::vector<Shard> shards_;  // A power of two.

  std::atomic<int64_t> num_hits_{0};
  std::atomic<int64_t> num_misses_{0};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_CACHE_H_
