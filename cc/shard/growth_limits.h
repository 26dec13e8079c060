// The bounds on the tables of a shard: max_memory for all together, and
// max_rows for each.

#ifndef TFSWITCH_CC_SHARD_GROWTH_LIMITS_H_
#define TFSWITCH_CC_SHARD_GROWTH_LIMITS_H_

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
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

// Decides which keys get rows in memory, and evicts rows, or moves them to
// disk, of tables that do so when they are full (TableConfig::when_full).
//
// max_memory counts what EmbeddingTable::stats() counts; memory that a table
// has touched, but not used yet, counts only for the other tables. Memory that
// grows in other ways than by rows, and calls that run at the same time, may go
// beyond it by some rows of each call. max_rows, of which each shard has its
// share, is never exceeded, except by the new rows of a round of bsp, and by
// keys that share cells of a Bloom filter in one push.
//
// Decisions are made before a write is logged, and evicted keys are logged as
// erased. So a replay, which decides nothing, makes the same rows.
//
// Thread-safe.
class GrowthLimits {
 public:
  GrowthLimits(const ShardOptions& options, const TableCatalogue& tables,
               Journal& journal)
      : options_(options),
        tables_(tables),
        journal_(journal),
        max_bytes_(static_cast<int64_t>(options.max_memory)) {}

  // In bytes; 0 means that memory is not limited.
  void set_max_bytes(int64_t max_bytes) {
    MutexLock lock(&mutex_);
    max_bytes_ = max_bytes;
    credit_ = 0;
  }
  int64_t max_bytes() const { return max_bytes_; }

  // The right of one call to make rows, which ends with the claim. The table
  // must outlive it.
  //
  // Not thread-safe.
  class Claim {
   public:
    Claim(GrowthLimits* limits, EmbeddingTable* table)
        : limits_(*limits), table_(*table) {}
    ~Claim() {
      if (num_rows_ != 0) table_.claimed_rows() -= num_rows_;
    }
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

    // Claims rows for so many keys, if there is room for many times as many.
    bool TakeAll(size_t num_keys);
    // Claims rows for `keys`. If there are not enough, evicts rows of the
    // table or moves them to disk, but none of `kept`, if the table does so.
    // Returns the keys that get none, sorted. It may wait for all writes, so
    // the caller must not be inside the gate.
    std::vector<Key> TakeFor(KeysByKind keys, absl::Span<const Key> kept);

    int64_t num_rows() const { return num_rows_; }

   private:
    GrowthLimits& limits_;
    EmbeddingTable& table_;
    int64_t num_rows_ = 0;
  };

  // Moves the rows of `keys` that are on disk to memory. If there is no room,
  // first moves others to disk, but none of `kept`. Returns the keys for which
  // there is none, sorted. The caller must not be inside the gate.
  absl::StatusOr<std::vector<Key>> Promote(EmbeddingTable& table,
                                           absl::Span<const Key> keys,
                                           absl::Span<const Key> kept);
  // The same for sorted keys that FindColdKeys() or a mark has named.
  absl::StatusOr<std::vector<Key>> PromoteCold(EmbeddingTable& table,
                                               std::vector<Key> cold,
                                               absl::Span<const Key> kept);
  // Moves rows to disk if the memory of all tables is above max_memory, and the
  // table does so. Counts tables that are being loaded if this is one of them.
  // Logs errors of the disk.
  absl::Status Relieve(EmbeddingTable& table);
  // Whether a write may now give rows to all of `keys`.
  absl::StatusOr<bool> HasRoomFor(EmbeddingTable& table,
                                  absl::Span<const Key> keys);
  // The distinct keys that have no row.
  static absl::StatusOr<KeysByKind> KeysWithoutRows(const EmbeddingTable& table,
                                                    absl::Span<const Key> keys);
  // Counts and reports new keys that got no rows.
  void NoteRefused(EmbeddingTable& table, absl::Span<const Key> keys);
  // Whether the table can have rows for all of `keys` at the same time, if it
  // evicts others.
  bool CanHold(const EmbeddingTable& table, absl::Span<const Key> keys) const;
  // The error for keys that get no rows.
  absl::Status Error(const EmbeddingTable& table) const;
  // After a round of bsp: evicts its rows beyond max_rows, or moves its rows
  // beyond max_memory to disk, if the table does so.
  void Trim(EmbeddingTable& table);
  // The same for a table that no client can use yet.
  absl::Status TrimLoaded(EmbeddingTable& table) const;

  // ResourceExhausted if these tables, which a restore brings, do not fit
  // together with the present tables that they do not replace. During a
  // recovery all tables fit.
  absl::Status CheckRestore(const TableCatalogue::TableMap& coming) const;
  // Prepares memory for this shard's share of the table's capacity, as far as
  // the limits allow it. That takes up to a second per GB of index, so no lock
  // should be held.
  void ReserveCapacity(EmbeddingTable& table) const;

 private:
  // Numbers of rows, and of records of keys that wait for admission.
  struct Room {
    int64_t rows = 0;
    int64_t candidates = 0;
  };

  bool is_on(const EmbeddingTable& table) const;
  // This shard's share of max_rows.
  int64_t MaxRowsOf(const EmbeddingTable& table) const;
  // The rows beyond max_rows, if the table evicts when it is full.
  int64_t Surplus(const EmbeddingTable& table) const;
  // The memory of all tables. With `with_loading`, of those that will be there
  // when all loads have ended.
  int64_t UsedBytes(bool with_loading = false) const;
  // Takes what is wanted, or as much as there is. The caller must give back
  // the rows when they are in the table.
  Room Take(EmbeddingTable& table, Room wanted);
  Room TakeBytes(const EmbeddingTable& table, Room wanted);
  // The memory that new records of candidates may take in any case.
  int64_t BytesForCandidates(const EmbeddingTable& table,
                             const TableStats& stats) const;
  // The memory that new rows of the table may take.
  int64_t BytesForRows(const EmbeddingTable& table,
                       const TableStats& stats) const;
  // The rows that must leave memory to make room for `missing` rows.
  int64_t SurplusRows(const EmbeddingTable& table, int64_t missing) const;
  // False for some seconds after an error of the disk.
  bool MayDemote() const;
  // Logs an error of Demote().
  absl::StatusOr<int64_t> NoteDemotion(const EmbeddingTable& table,
                                       absl::StatusOr<int64_t> moved);
  // Makes room on behalf of a call. False if no row was moved.
  bool Demote(EmbeddingTable& table, int64_t missing,
              absl::Span<const Key> kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(evict_mutex_);
  // Makes room. False if nothing was evicted.
  bool Evict(EmbeddingTable& table, Room missing, TableCounter reason,
             absl::Span<const Key> kept)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(evict_mutex_);

  const ShardOptions& options_;
  const TableCatalogue& tables_;
  Journal& journal_;
  std::atomic<int64_t> max_bytes_;
  // Bytes that may be taken without counting the memory again.
  std::atomic<int64_t> credit_{0};
  std::atomic<bool> has_told_{false};
  std::atomic<bool> has_told_of_disk_{false};
  // One eviction or demotion at a time. Locked before the gate is closed.
  Mutex evict_mutex_;
  // After an error of the disk, in milliseconds of SteadyNow().
  std::atomic<int64_t> next_demotion_ms_{std::numeric_limits<int64_t>::min()};
  Mutex relieve_mutex_;
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

#endif  // TFSWITCH_CC_SHARD_GROWTH_LIMITS_H_
