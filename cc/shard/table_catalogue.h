// The tables of a shard by their names.

#ifndef TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_
#define TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/shard/gradient_accumulator.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/journal.h"
#include "cc/shard/shard_options.h"
#include "cc/table/cold_tier.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Makes, finds and drops tables. The pushes that are staged for a table are
// dropped with it. A call locks the mutex only to find its table. It then works
// on a shared pointer, so no row is read or written under the lock. A table
// that is dropped or replaced exists until the last call on it has ended.
//
// GradientAccumulator has its own lock locked while it calls FindTable(), so it
// must not be called under the lock of this class.
//
// Thread-safe.
class TableCatalogue {
 public:
  using TableMap = std::map<std::string, std::shared_ptr<EmbeddingTable>>;

  struct Handle {
    // False if the table existed with an equal config.
    bool created = false;
    uint64_t incarnation = 0;
  };

  // `shrink_timer` is told the names of tables that are shrunk at intervals.
  // make_room(table) moves rows of a table to disk if it has too many.
  TableCatalogue(const ShardOptions& options, const Journal& journal,
                 GradientAccumulator* stage, IntervalTimer* shrink_timer,
                 std::function<absl::Status(EmbeddingTable&)> make_room)
      : options_(options),
        journal_(journal),
        stage_(*stage),
        shrink_timer_(*shrink_timer),
        make_room_(std::move(make_room)) {}

  // Makes a table that no client can use yet. FailedPrecondition if its rows
  // may go to disk and this shard has no folder for them.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> Make(
      const TableConfig& config) const;

  // Sets the folder for rows on disk, if there is none and `path` is not empty.
  // FailedPrecondition if there is another one, or the error of
  // ColdFolder::Open().
  absl::Status OpenColdFolder(const std::string& path);
  // All tables as they will be when the tables that are being loaded have
  // replaced those of the same names.
  std::vector<std::shared_ptr<EmbeddingTable>> WithLoading() const;

  // Makes the table with `identity`; draws an incarnation if that is 0. A table
  // that exists keeps its rows. It also keeps its identity, unless its
  // incarnation is `replaced_incarnation`; then it gets `identity`. If its
  // optimizer is open (not set yet), it gets the optimizer of `config`.
  // AlreadyExists, naming the fields, if its config differs. ResourceExhausted
  // if there are too many tables.
  //
  // REQUIRES: the gate is closed, or no other thread writes to this table.
  absl::StatusOr<Handle> Create(const TableConfig& config,
                                const TableIdentity& identity = {},
                                uint64_t replaced_incarnation = 0);

  // InvalidArgument if the table does not exist and its capacity is more than
  // the memory of this shard can ever hold.
  absl::Status CheckCapacity(const TableConfig& config) const;

  // Returns the table if it exists, else NotFound. AlreadyExists as in
  // Create().
  absl::StatusOr<Handle> Open(const TableConfig& config) const;

  // Returns false if there was no such table.
  bool Drop(const std::string& name);

  // Holds a table. The table is dropped when its last hold is released. A hold
  // belongs to the name, so it also counts for a table that replaces this one.
  // NotFound, without a hold, if there is no such table.
  absl::Status Hold(const std::string& name);
  // REQUIRES: a Hold() of that name that has not been released.
  void Release(const std::string& name);

  // See Shard::FindTable().
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> Find(
      const TableRef& table) const;
  // Whether calls find this very table under its name.
  bool IsPresent(const EmbeddingTable& table) const;
  // All tables, sorted by name.
  std::vector<std::shared_ptr<EmbeddingTable>> All() const;

  // ResourceExhausted if there are too many tables, or if Bloom filters need
  // too much memory: those of this table, of existing tables and of the tables
  // in `coming`. InvalidArgument if this table alone needs more than the limit.
  absl::Status CheckRoom(const TableConfig& config,
                         const TableMap& coming) const {
    MutexLock lock(&mutex_);
    return CheckRoomLocked(config, coming);
  }
  // Puts these tables in the place of the tables with the same names, and
  // leaves the former tables in `*tables`. Pushes staged for the former tables
  // are dropped.
  void Install(TableMap* tables);
  // Warns about tables that had rows when they were dropped with their last
  // hold: a save of all tables does not have them.
  void WarnOfUnsaved();

 private:
  void EndLoading(const EmbeddingTable& table)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckRoomLocked(const TableConfig& config,
                               const TableMap& coming) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // If the table's optimizer is open (not set yet), gives it the optimizer of
  // `config`, unless that is open, too. Rows do not change. Unavailable if the
  // table is dropped during the call.
  absl::Status CloseOptimizer(const TableConfig& config);
  // Does the work of Create() for a table that exists.
  absl::StatusOr<Handle> AttachExisting(EmbeddingTable* table,
                                        const TableConfig& config,
                                        const TableIdentity& identity,
                                        uint64_t replaced_incarnation) const;
  // Warns once about tables that had rows when they were dropped with their
  // last hold: about the named table, or about all.
  void WarnOfReleased(absl::string_view what, const std::string& name = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes and returns the table; null if it does not exist.
  std::shared_ptr<EmbeddingTable> Remove(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardOptions& options_;
  const Journal& journal_;
  GradientAccumulator& stage_;
  IntervalTimer& shrink_timer_;
  const std::function<absl::Status(EmbeddingTable&)> make_room_;
  const absl::Time started_ = absl::Now();

  mutable Mutex mutex_;
  std::shared_ptr<ColdFolder> cold_folder_ ABSL_GUARDED_BY(mutex_);
  // The tables of Make() that calls cannot use yet.
  mutable std::vector<std::weak_ptr<EmbeddingTable>> loading_
      ABSL_GUARDED_BY(mutex_);
  TableMap tables_ ABSL_GUARDED_BY(mutex_);
  // The number of holds on each table.
  std::map<std::string, int64_t> holds_ ABSL_GUARDED_BY(mutex_);
  // Row counts of tables that were dropped with their last hold. Erased when
  // the warning is written or the table is dropped by a call.
  std::map<std::string, size_t> released_rows_ ABSL_GUARDED_BY(mutex_);
  // The incarnations of the last dropped tables. These tables are not lost.
  std::deque<uint64_t> dropped_incarnations_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_
