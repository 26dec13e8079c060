// The bound on the memory of a shard's tables.

#ifndef TFSWITCH_CC_SHARD_MEMORY_CEILING_H_
#define TFSWITCH_CC_SHARD_MEMORY_CEILING_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/base/mutex.h"
#include "cc/shard/journal.h"
#include "cc/shard/shard_options.h"
#include "cc/shard/table_catalogue.h"
#include "cc/table/embedding_table.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Decides which new keys get rows, so that the memory of all tables stays below
// a ceiling. The ceiling counts what EmbeddingTable::stats() counts; memory
// that a table has touched, but not used yet, counts only for the other tables.
// Memory that grows in other ways than by rows, and calls that run at the same
// time, may go beyond the ceiling by some rows of each call.
//
// Decisions are made before a write is logged, and the log has only what is
// applied. So a replay, which decides nothing, makes the same rows.
//
// Thread-safe.
class MemoryCeiling {
 public:
  MemoryCeiling(const ShardOptions& options, const TableCatalogue& tables,
                const Journal& journal)
      : options_(options),
        tables_(tables),
        journal_(journal),
        max_bytes_(static_cast<int64_t>(options.max_memory)) {}

  // In bytes; 0 means no ceiling.
  void set_max_bytes(int64_t max_bytes) {
    MutexLock lock(&mutex_);
    max_bytes_ = max_bytes;
    credit_ = 0;
  }
  int64_t max_bytes() const { return max_bytes_; }
  // Whether the call may insert rows for all of `keys`, which may repeat.
  bool HasRoom(const EmbeddingTable& table, absl::Span<const Key> keys);
  // The same, but counts only keys without a row.
  bool HasRoomForMissing(const EmbeddingTable& table,
                         absl::Span<const Key> keys);
  // The distinct keys without a row, sorted: those that may get one, and the
  // others, which count as refused.
  struct Decision {
    std::vector<Key> admitted;
    std::vector<Key> refused;
  };
  Decision Decide(EmbeddingTable& table, absl::Span<const Key> keys);
  // ResourceExhausted unless rows for all of `keys` fit.
  absl::Status CheckRoom(const EmbeddingTable& table,
                         absl::Span<const Key> keys);
  // ResourceExhausted if these tables, which a restore brings, do not fit
  // together with the present tables that they do not replace. During a
  // recovery all tables fit.
  absl::Status CheckRestore(const TableCatalogue::TableMap& coming) const;
  // Prepares memory for this shard's share of the table's capacity, as far as
  // it is below the ceiling. That takes up to a second per GB of index, so no
  // lock should be held.
  void ReserveCapacity(EmbeddingTable& table) const;

 private:
  bool is_on(const EmbeddingTable& table) const;
  // The memory of all tables.
  int64_t UsedBytes() const;
  // Takes room for `num_rows` rows, or for as many as fit. Returns how many.
  int64_t Take(const EmbeddingTable& table, int64_t num_rows);

  const ShardOptions& options_;
  const TableCatalogue& tables_;
  const Journal& journal_;
  std::atomic<int64_t> max_bytes_;
  // Bytes that may be taken without counting the memory again.
  std::atomic<int64_t> credit_{0};
  std::atomic<bool> has_told_{false};
  Mutex mutex_;  // Held while the memory is counted.
};

// A push without some of its keys. Points to itself, so it must not be moved.
class PartOfPush {
 public:
  // Leaves out the keys in `refused`, which is sorted. `batch` has the unique
  // keys of `push`, which must outlive this object.
  PartOfPush(int dim, const PushRequest& push, const GradientBatch& batch,
             absl::Span<const Key> refused);
  PartOfPush(const PartOfPush&) = delete;
  PartOfPush& operator=(const PartOfPush&) = delete;

  const PushRequest& push() const { return push_; }

 private:
  std::vector<Key> keys_;
  std::vector<float> gradients_;
  OwnedObservations observations_;
  PushRequest push_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_MEMORY_CEILING_H_
