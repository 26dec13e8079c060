// The tables of a shard by their names.

#ifndef TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_
#define TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
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
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Makes, finds and drops tables. The staged pushes of a table are dropped with
// it. A call holds the lock to find its table, and then works on a shared
// pointer without it: no row is read or written under the lock. A dropped or
// replaced table lives until the last call on it has ended.
//
// The accumulator holds its own lock while it calls FindTable(), so it must not
// be called under the lock of this.
//
// Thread-safe.
class TableCatalogue {
 public:
  using TableMap = std::map<std::string, std::shared_ptr<EmbeddingTable>>;

  struct Handle {
    bool created = false;  // False if it existed with an equal config.
    uint64_t incarnation = 0;
  };

  // `shrink_timer` gets the names of tables that are shrunk at intervals.
  TableCatalogue(const ShardOptions& options, const Journal& journal,
                 GradientAccumulator* stage, IntervalTimer* shrink_timer)
      : options_(options),
        journal_(journal),
        stage_(*stage),
        shrink_timer_(*shrink_timer) {}

  // Makes the table with `identity`; for incarnation 0 draws one. An existing
  // table keeps its rows. It also keeps its identity, unless its incarnation is
  // `replaced_incarnation`: then it gets `identity`. If its optimizer is open,
  // it gets the optimizer of `config`. AlreadyExists, naming the fields, if its
  // config differs; ResourceExhausted if there are too many tables.
  //
  // REQUIRES: the gate is closed, or no other thread writes to this table.
  absl::StatusOr<Handle> Create(const TableConfig& config,
                                const TableIdentity& identity = {},
                                uint64_t replaced_incarnation = 0);

  // Returns the existing table. NotFound if there is none, and AlreadyExists as
  // for Create().
  absl::StatusOr<Handle> Open(const TableConfig& config) const;

  // Returns false if there was no such table.
  bool Drop(const std::string& name);

  // Holds a table: it is dropped when the last hold is released. A hold is on
  // the name, so it also counts for a table that replaces this one. NotFound,
  // and no hold, if there is no such table.
  absl::Status Hold(const std::string& name);
  // REQUIRES: a Hold() of that name that has not been released.
  void Release(const std::string& name);

  // See Shard::FindTable().
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> Find(
      const TableRef& table) const;
  // Whether calls find this table under its name.
  bool IsPresent(const EmbeddingTable& table) const;
  // All tables, in order of name.
  std::vector<std::shared_ptr<EmbeddingTable>> All() const;

  // ResourceExhausted if there are too many tables, or the Bloom filters of
  // this table, of present ones and of `coming` ones need too much memory.
  // InvalidArgument if this table alone needs more than the limit.
  absl::Status CheckRoom(const TableConfig& config,
                         const TableMap& coming) const {
    MutexLock lock(&mutex_);
    return CheckRoomLocked(config, coming);
  }
  // Puts these tables in the place of those of their names, and leaves the
  // former ones in `*tables`. Staged pushes to these tables are dropped.
  void Install(TableMap* tables);
  // Warns about tables that were dropped with rows when their last hold was
  // released: a save of all tables lacks them.
  void WarnOfUnsaved();

 private:
  absl::Status CheckRoomLocked(const TableConfig& config,
                               const TableMap& coming) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives a table with an open optimizer the optimizer of `config`, unless that
  // is open, too. Rows do not change. Unavailable if the table is dropped
  // meanwhile.
  absl::Status CloseOptimizer(const TableConfig& config);
  // Create() for an existing table.
  absl::StatusOr<Handle> AttachExisting(EmbeddingTable* table,
                                        const TableConfig& config,
                                        const TableIdentity& identity,
                                        uint64_t replaced_incarnation) const;
  // Warns once about tables that were dropped with rows when their last hold
  // was released: the named table, or all.
  void WarnOfReleased(absl::string_view what, const std::string& name = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes and returns the table; null if it does not exist.
  std::shared_ptr<EmbeddingTable> Remove(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const ShardOptions& options_;
  const Journal& journal_;
  GradientAccumulator& stage_;
  IntervalTimer& shrink_timer_;
  const absl::Time started_ = absl::Now();

  mutable Mutex mutex_;
  TableMap tables_ ABSL_GUARDED_BY(mutex_);
  // The number of holds on each table.
  std::map<std::string, int64_t> holds_ ABSL_GUARDED_BY(mutex_);
  // Row counts of tables freed with their last hold. Erased after the warning
  // is logged or the table is dropped.
  std::map<std::string, size_t> released_rows_ ABSL_GUARDED_BY(mutex_);
  // The last dropped tables: they are not lost.
  std::deque<uint64_t> dropped_incarnations_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_TABLE_CATALOGUE_H_
