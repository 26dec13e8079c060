// The state of one server without the network: its tables, and the writes that
// it has applied. The parts of a shard have a file each:
//
//   table_catalogue.h  tables by their names
//   journal.h          records of writes, the gate, and applied writes
//   rounds.h           closed rounds of bsp training
//   saves.h            the checkpoints that clients save
//   restores.h         the checkpoints that clients restore
//   own_state.h        the state that a server saves for its own recovery
//
// A thread that has locks of this list may take those further down in it:
//
//   1. the turn of a save (SaveTurn)
//   2. the gate of writes (WriteGate): closed, or passed by a write
//   3. the lock of Coordinator, or that of a group in GradientAccumulator while
//      a round is applied
//   4. the lock of Saves or Restores, then that of one Save or Restore
//   5. the lock of TableCatalogue
//   6. the locks of IntervalTimer, RoundHold, WriteLedger and PendingExports,
//      under which no other lock is taken

#ifndef TFSWITCH_CC_SHARD_SHARD_H_
#define TFSWITCH_CC_SHARD_SHARD_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/base/parallel.h"
#include "cc/base/random_id.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/own_state.h"
#include "cc/shard/pending_exports.h"
#include "cc/shard/restores.h"
#include "cc/shard/rounds.h"
#include "cc/shard/saves.h"
#include "cc/shard/shard_core.h"
#include "cc/table/embedding_table.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// One of several pushes.
struct TablePush {
  std::shared_ptr<EmbeddingTable> table;
  const PushRequest* push = nullptr;
};

// The tables of one shard. All arguments of clients are checked here and in the
// parts, so that embedded and networked use give the same errors. After an
// error nothing of the request has been applied, unless the method says
// otherwise.
//
// Thread-safe. Tables are shared pointers: a dropped or replaced table lives
// until the last call on it has ended.
class Shard {
 public:
  using Interrupt = tfswitch::Interrupt;

  // REQUIRES: options.Validate() is OK.
  explicit Shard(const ShardOptions& options)
      : core_(options, &shrink_timer_) {}

  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  const ShardOptions& options() const { return core_.options; }
  // A random id of this run of the shard.
  uint64_t instance_id() const { return instance_id_; }

  TableCatalogue& tables() { return core_.tables; }
  const TableCatalogue& tables() const { return core_.tables; }
  Journal& journal() { return core_.journal; }
  Rounds& rounds() { return rounds_; }
  Saves& saves() { return saves_; }
  Restores& restores() { return restores_; }
  OwnState& own_state() { return own_state_; }

  // The coordinator of worker groups. FailedPrecondition unless this is shard
  // 0, which coordinates for all.
  absl::StatusOr<std::shared_ptr<Coordinator>> FindCoordinator() const;

  // Ends present and later calls that wait for other workers. Called when a
  // server stops.
  void EndWaits() { core_.coordinator->Shutdown(); }

  // NotFound, naming the existing tables, if there is no such table. DataLoss
  // if the incarnation that `table` names does not exist and was not dropped
  // here: it was lost in a restart, or another table has taken its name.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindTable(
      const TableRef& table) const {
    return core_.tables.Find(table);
  }

  // InvalidArgument if a key belongs to another shard, or the size of
  // `embeddings` is not keys.size() x dim. `threads` may be null.
  absl::Status Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                    bool insert_missing, absl::Span<float> embeddings,
                    const LentThreads* threads = nullptr);

  // InvalidArgument for a wrong size, a NaN or Inf gradient (names the key), a
  // learning rate that is negative or not finite, or a key of another shard.
  // ResourceExhausted if memory for new rows runs out; only then have the other
  // rows taken their step. A push that was applied before gets the same answer
  // again. FailedPrecondition if it is no longer known whether it was applied;
  // see WriteLedger.
  //
  // A push to a bsp table is staged until Rounds::Commit(), and updates
  // nothing. FailedPrecondition if push.step is empty, or its round has been
  // applied.
  absl::StatusOr<WriteResult> Push(EmbeddingTable& table,
                                   const PushRequest& push,
                                   const LentThreads* threads = nullptr);

  // Applies several pushes; pushes to one table keep their order. All are
  // checked before any is applied. If applying one fails, the others are still
  // applied. Returns the first error in the order of `pushes`. REQUIRES: as
  // many results as pushes.
  absl::Status PushMany(absl::Span<const TablePush> pushes,
                        absl::Span<WriteResult> results,
                        const LentThreads* threads = nullptr);
  // As PushMany(), for pushes of this process. REQUIRES: CheckPush() is OK for
  // each.
  absl::Status PushChecked(absl::Span<const TablePush> pushes,
                           absl::Span<WriteResult> results,
                           const LentThreads* threads);

  // Sets rows, and returns how many. `slots` is empty or has
  // keys.size() x slot_floats floats. With `only_missing` present rows are not
  // changed. InvalidArgument for NaN or Inf values, naming the key.
  absl::StatusOr<int64_t> Assign(EmbeddingTable& table,
                                 absl::Span<const Key> keys,
                                 absl::Span<const float> embeddings,
                                 absl::Span<const float> slots,
                                 bool only_missing = false) const;

  // As Assign(), for the table and under the identity that the request names.
  absl::StatusOr<WriteResult> AssignOnce(const AssignRequest& request);

  absl::StatusOr<int64_t> Erase(EmbeddingTable& table,
                                absl::Span<const Key> keys) const;

  // Evicts rows by `rules`, or else by the rules of the table's config; see
  // EmbeddingTable::Shrink. max_rows counts the rows of all shards, and this
  // shard keeps its share of them. FailedPrecondition if there are no rules.
  absl::StatusOr<ShrinkReport> Shrink(
      EmbeddingTable& table, const std::optional<EvictionConfig>& rules,
      float day, bool dry_run);

  // See EmbeddingTable::ReadUsage.
  absl::Status ReadUsage(const EmbeddingTable& table,
                         absl::Span<const Key> keys, float day,
                         absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) const;

  // See EmbeddingTable::ForEachChange. With a rule the scores of the visited
  // rows are kept under `export_id` until CommitExport(), which clients call
  // when the export is published. InvalidArgument for an invalid rule.
  absl::StatusOr<ChangeCursor> ExportChanges(
      const std::shared_ptr<EmbeddingTable>& table, const ChangeFilter& filter,
      const std::string& export_id, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit);
  // Commits the export, or aborts it. May be repeated.
  void CommitExport(const EmbeddingTable& table, const std::string& export_id,
                    bool commit) {
    pending_exports_.End(table, export_id, commit);
  }

  // Replaces tables by the staged state, or drops that state if `abort`. Staged
  // pushes to these tables are dropped, because they came after the saved
  // state. NotFound if nothing is staged under `restore_id`; but then aborting
  // is OK, and so is repeating the last commit.
  absl::Status CommitRestore(const std::string& restore_id, bool abort,
                             const Interrupt& interrupt = Never);

  // Applies a write of an earlier run's log that the recovered state lacks.
  // DataLoss for an invalid record.
  //
  // REQUIRES: no other thread uses the shard.
  absl::Status Replay(uint64_t number, uint32_t type,
                      absl::string_view payload);

 private:
  // Checks that the table has not been replaced while a write waited at the
  // gate. OK if calls find this table under its name, or there is no log and
  // its optimizer is not open.
  absl::Status CheckPresent(const EmbeddingTable& table) const;
  absl::StatusOr<WriteResult> ApplyPush(EmbeddingTable& table,
                                        const PushRequest& push,
                                        const GradientBatch& batch,
                                        const LentThreads* threads);
  // Does the work of a logged call again.
  absl::Status ReplayCall(RecordType type, absl::string_view payload);
  absl::Status ReplayPush(absl::string_view payload);
  absl::Status ReplayPull(absl::string_view payload);
  absl::Status ReplayAssign(absl::string_view payload);
  // Called by shrink_timer_.
  void ShrinkOnTime(const std::string& table);

  const uint64_t instance_id_ = DrawId();
  // A part uses the ones above it.
  ShardCore core_;
  PendingExports pending_exports_;
  Rounds rounds_{&core_};
  Saves saves_{&core_, &rounds_};
  Restores restores_{&core_};
  OwnState own_state_{&core_, &restores_};

  // Declared last, so that its thread ends before the members that it uses.
  IntervalTimer shrink_timer_{
      [this](const std::string& table) { ShrinkOnTime(table); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_H_
