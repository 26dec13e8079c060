// The state of one server, without the network: its tables, and the writes that
// it has applied. Each part of a shard has a file of its own:
//
//   table_catalogue.h  tables by their names
//   journal.h          records of writes, the gate, and applied writes
//   growth_limits.h    which new keys get rows, and which rows make room for
//                      them
//   rounds.h           closed rounds of bsp training
//   saves.h            the checkpoints that clients save
//   restores.h         the checkpoints that clients restore
//   own_state.h        the state that a server saves for its own recovery
//
// The order of locks: a thread that has locked a lock of this list may then
// lock only locks that are below it in the list.
//
//   1. the turn of a save (SaveTurn)
//   2. the lock of evictions in GrowthLimits
//   3. the gate of writes (WriteGate): closed, or passed by a write
//   4. the lock of Coordinator, or that of a group in GradientAccumulator while
//      a round is applied
//   5. the lock of Saves or Restores, then that of one Save or Restore
//   6. the lock of GrowthLimits::Relieve() or that of counted memory, then that
//      of TableCatalogue
//   7. the locks of IntervalTimer, RoundHold, WriteLedger and PendingExports,
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
#include "cc/shard/shard_metrics.h"
#include "cc/table/embedding_table.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// One of the pushes of a call.
struct TablePush {
  std::shared_ptr<EmbeddingTable> table;
  const PushRequest* push = nullptr;
};

// The tables of one shard. The shard and its parts check all arguments of
// clients, so that tables in this process and tables on servers give the same
// errors. A call that returns an error has applied nothing, unless the method
// says otherwise.
//
// Thread-safe. Calls have shared pointers to tables, so a table that is dropped
// or replaced exists until the last call on it has ended.
class Shard {
 public:
  using Interrupt = tfswitch::Interrupt;

  // REQUIRES: options.Validate() is OK.
  explicit Shard(const ShardOptions& options) : core_(options, &shrink_timer_) {
    metrics_.Add([this](MetricList* list) { AddShardMetrics(core_, list); });
  }

  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  const ShardOptions& options() const { return core_.options; }
  // A random number that identifies this run of the shard.
  uint64_t instance_id() const { return instance_id_; }

  TableCatalogue& tables() { return core_.tables; }
  const TableCatalogue& tables() const { return core_.tables; }
  Journal& journal() { return core_.journal; }
  Rounds& rounds() { return rounds_; }
  Saves& saves() { return saves_; }
  Restores& restores() { return restores_; }
  OwnState& own_state() { return own_state_; }
  // Programs add sources of their own.
  MetricSources& metrics() { return metrics_; }
  // All metrics in Prometheus's text format, with the label `shard`.
  std::string MetricsText() const {
    return metrics_.Text({{"shard", absl::StrCat(options().shard_index)}});
  }

  // Fills in all fields but http_servers.
  void Describe(v1::ServerView* view) const;

  int64_t last_save_ms() const { return core_.last_save_ms; }
  // The present workers of all groups; 0 unless this is shard 0.
  int64_t num_workers() const { return core_.coordinator->num_workers(); }

  // The coordinator of all worker groups. FailedPrecondition unless this is
  // shard 0, which has the only coordinator.
  absl::StatusOr<std::shared_ptr<Coordinator>> FindCoordinator() const;

  // Ends calls that wait for other workers, now and from now on. Called when a
  // server stops.
  void EndWaits() { core_.coordinator->Shutdown(); }

  // NotFound, naming the existing tables, if there is no such table. DataLoss
  // if the shard has no table with the incarnation in `table`, and none was
  // dropped: the table was lost in a restart, or another table has taken its
  // name.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindTable(
      const TableRef& table) const {
    return core_.tables.Find(table);
  }

  // Reads rows. InvalidArgument if a key belongs to another shard, or the size
  // of `embeddings` is not keys.size() x dim. `threads` may be null. If the
  // table is full, Pull() and Push() give new keys no rows, or evict others for
  // them; see GrowthLimits.
  absl::Status Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                    IfMissing if_missing, absl::Span<float> embeddings,
                    const LentThreads* threads = nullptr);

  // Applies a push. InvalidArgument if a size is wrong, a gradient is NaN or
  // Inf (names the key), the learning rate is negative or not finite, or a key
  // belongs to another shard. ResourceExhausted if memory for new rows runs
  // out; only then have the other rows been updated. If the push is repeated,
  // returns the first answer. FailedPrecondition if the shard no longer knows
  // whether the push was applied; see WriteLedger.
  //
  // A push to a bsp table is staged until Rounds::Commit() and updates no row
  // now. FailedPrecondition if push.step is empty, or its round has been
  // applied.
  absl::StatusOr<WriteResult> Push(EmbeddingTable& table,
                                   const PushRequest& push,
                                   const LentThreads* threads = nullptr);

  // Applies several pushes. Pushes to the same table are applied in their
  // order. All are checked before any is applied. If one cannot be applied, the
  // others are. Returns the first error in the order of `pushes`. REQUIRES:
  // there are as many results as pushes.
  absl::Status PushMany(absl::Span<const TablePush> pushes,
                        absl::Span<WriteResult> results,
                        const LentThreads* threads = nullptr);
  // Like PushMany(), for pushes of this process. REQUIRES: CheckPush() is OK
  // for each push.
  absl::Status PushChecked(absl::Span<const TablePush> pushes,
                           absl::Span<WriteResult> results,
                           const LentThreads* threads);

  // Sets rows, and returns how many were set. With `only_missing`, rows that
  // exist are not changed. InvalidArgument if a value is NaN or Inf, naming the
  // key; ResourceExhausted if new rows do not fit below a limit. A repeated
  // request, with the same id, is applied once.
  absl::StatusOr<WriteResult> AssignOnce(const AssignRequest& request);

  absl::StatusOr<int64_t> Erase(EmbeddingTable& table,
                                absl::Span<const Key> keys) const;

  // Evicts rows by `rules`, or by the rules in the table's config if there are
  // none; see EmbeddingTable::Shrink. max_rows limits the rows of all shards
  // together, and this shard keeps its share of them. FailedPrecondition if
  // neither has rules.
  absl::StatusOr<ShrinkReport> Shrink(
      EmbeddingTable& table, const std::optional<EvictionConfig>& rules,
      float day, bool dry_run);

  // See EmbeddingTable::ReadUsage.
  absl::Status ReadUsage(const EmbeddingTable& table,
                         absl::Span<const Key> keys, float day,
                         absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) const;

  // Visits changed rows; see EmbeddingTable::ForEachChange. If there is a rule,
  // the scores of these rows are kept under `export_id` until CommitExport(),
  // which clients call after they have published the export. InvalidArgument if
  // the rule is invalid.
  absl::StatusOr<ChangeCursor> ExportChanges(
      const std::shared_ptr<EmbeddingTable>& table, const ChangeFilter& filter,
      const std::string& export_id, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit);
  // Commits or aborts an export. May be repeated.
  absl::Status CommitExport(const EmbeddingTable& table,
                            const std::string& export_id, bool commit) {
    return pending_exports_.End(table, export_id, commit);
  }

  // Replaces tables by the staged ones. Staged pushes to these tables are
  // dropped, because they are newer than the restored rows. If `abort`, only
  // drops the staged tables. NotFound if nothing is staged under `restore_id`;
  // but aborting and repeating the last commit are always OK.
  absl::Status CommitRestore(const std::string& restore_id, bool abort,
                             const Interrupt& interrupt = Never);

  // Applies a write of the log that the recovered state lacks. DataLoss if the
  // record is invalid.
  //
  // REQUIRES: no other thread uses the shard.
  absl::Status Replay(uint64_t number, uint32_t type,
                      absl::string_view payload);

  // See GrowthLimits.
  void ReserveCapacity(const std::string& table) const {
    const auto found = core_.tables.Find({table});
    if (found.ok()) core_.limits.ReserveCapacity(**found);
  }
  int64_t max_memory() const { return core_.limits.max_bytes(); }
  // For clients in this process.
  void set_max_memory(int64_t bytes) { core_.limits.set_max_bytes(bytes); }

 private:
  // Whether the table was not replaced while a write waited at the gate. OK if
  // calls find this table under its name, or if there is no log and the table's
  // optimizer is not open.
  absl::Status CheckPresent(const EmbeddingTable& table) const;
  // Checks an assignment. `slots` is empty or has keys.size() x slot_floats
  // floats.
  absl::Status CheckAssign(const EmbeddingTable& table,
                           absl::Span<const Key> keys,
                           absl::Span<const float> embeddings,
                           absl::Span<const float> slots) const;
  // Logs that a pull gives these keys rows. REQUIRES: the gate is passed.
  absl::Status LogInsertion(const EmbeddingTable& table,
                            absl::Span<const Key> keys);
  // Moves the rows of those of `keys` whose embeddings are marked as cold to
  // memory, as far as there is room, and fills in their embeddings. Marks those
  // that have no row, as FindAndMark() does. Returns how many have one.
  absl::StatusOr<int64_t> PromoteMarked(EmbeddingTable& table,
                                        absl::Span<const Key> keys,
                                        absl::Span<float> embeddings);
  // Makes rows for those of `keys` whose embeddings are marked as missing, and
  // moves those that are marked as cold to memory, as far as the table's limits
  // allow it. Fills in the embeddings. Returns how many distinct keys had a
  // row.
  absl::StatusOr<int64_t> InsertMarked(EmbeddingTable& table,
                                       absl::Span<const Key> keys,
                                       GrowthLimits::Claim* claim,
                                       absl::Span<float> embeddings);
  // Claims the rows that a push may make, and passes the gate. Returns the keys
  // that get no rows.
  absl::StatusOr<std::vector<Key>> EnterGate(
      EmbeddingTable& table, const GradientBatch& batch,
      std::optional<GrowthLimits::Claim>* claim,
      std::optional<WriteGate::Pass>* pass);
  absl::StatusOr<WriteResult> ApplyPush(EmbeddingTable& table,
                                        const PushRequest& push,
                                        const GradientBatch& batch,
                                        const LentThreads* threads);
  // Repeats a logged call.
  absl::Status ReplayCall(RecordType type, absl::string_view payload);
  absl::Status ReplayPush(absl::string_view payload);
  absl::Status ReplayPull(absl::string_view payload);
  absl::Status ReplayAssign(absl::string_view payload);
  // Called by shrink_timer_.
  void ShrinkOnTime(const std::string& table);

  const uint64_t instance_id_ = DrawId();
  // Each part uses only parts that are declared before it.
  ShardCore core_;
  PendingExports pending_exports_;
  Rounds rounds_{&core_};
  Saves saves_{&core_, &rounds_};
  Restores restores_{&core_};
  OwnState own_state_{&core_, &restores_};
  MetricSources metrics_;

  // Declared last and so destroyed first: its thread uses the members above.
  IntervalTimer shrink_timer_{
      [this](const std::string& table) { ShrinkOnTime(table); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_H_
