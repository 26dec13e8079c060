// The state of one server without the network: its tables, and the writes that
// it has applied.
//
//   shard.cc        tables, pushes, and the checkpoints that clients ask for
//   shard_cut.cc    the round at which such a checkpoint is taken
//   shard_state.cc  the state that a server saves for its own recovery
//   shard_log.cc    records of writes, and their replay

#ifndef TFSWITCH_CC_SHARD_SHARD_H_
#define TFSWITCH_CC_SHARD_SHARD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/key_observations.h"
#include "cc/base/log_writer.h"
#include "cc/base/mutex.h"
#include "cc/base/parallel.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/write_gate.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/log/push_log.h"
#include "cc/shard/gradient_accumulator.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/pending_exports.h"
#include "cc/shard/round_hold.h"
#include "cc/shard/write_ledger.h"
#include "cc/sync/coordinator.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"
#include "cc/wire/row_calls.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

struct ShardOptions {
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
  // The folder below which clients may save and restore. Empty means that they
  // may not. If not set, clients of this process may do so anywhere.
  std::optional<std::string> checkpoint_root = std::nullopt;
  // A folder below which clients may also give absolute paths, except below
  // `own_folder` and `log_folder`, which are in it. Empty if there is none.
  std::string data_folder = {};
  std::string own_folder = {};
  std::string log_folder = {};
  // Counts applied writes, if not null. Must outlive the shard.
  std::atomic<uint64_t>* num_writes = nullptr;
  absl::Duration staged_restore_expiry = absl::Minutes(5);
  // A later save aborts unpublished saves older than this.
  absl::Duration save_expiry = absl::Hours(1);

  // Limits on the state that clients may create. A table without rows takes
  // about 0.2 MiB.
  uint64_t max_tables = 2000;  // More do not fit into 47 bits of addresses.
  // Bytes for the Bloom filters of all tables. 0 means half of the machine's
  // memory.
  uint64_t max_bloom_bytes = 0;
  // Bytes for copies of rows that change during a save. 0 means half of the
  // memory that is available when the save begins.
  uint64_t max_save_bytes = 0;
  CoordinatorLimits coordinator = {};

  absl::Status Validate() const;
};

// One of several pushes.
struct TablePush {
  std::shared_ptr<EmbeddingTable> table;
  const PushRequest* push = nullptr;
};

// Types of the records of a push log. The payload is the present day, as a
// float, and then the message of the call.
enum class RecordType : uint32_t {
  kPush = 1,
  kPull = 2,  // A pull that has made rows.
  kAssign = 3,
  kCreateTable = 4,
  kDropTable = 5,
  kErase = 6,
  kShrink = 7,
  kCommitRound = 8,
  // A restore has replaced rows. No record has the restored rows.
  kRestore = 9,
  // The restored rows have been saved.
  kRestoreSaved = 10,
  // The server was killed before they were saved, and has continued with the
  // rows from before the restore.
  kRestoreUndone = 11,
  // A change of a group of workers or of a work queue; see
  // Coordinator::StartLog.
  kCoordination = 12,
};

// The tables of one shard. All arguments of clients are checked here, so that
// embedded and networked use give the same errors. After an error nothing of
// the request has been applied, unless the method says otherwise.
//
// Thread-safe. Tables are shared pointers: a dropped or replaced table lives
// until the last call on it has ended.
class Shard {
 public:
  // REQUIRES: options.Validate() is OK.
  explicit Shard(const ShardOptions& options);

  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  uint32_t shard_index() const { return options_.shard_index; }
  uint32_t num_shards() const { return options_.num_shards; }

  // The coordinator of worker groups. FailedPrecondition unless this is shard
  // 0, which coordinates for all.
  absl::StatusOr<std::shared_ptr<Coordinator>> FindCoordinator() const;

  // Ends present and later calls that wait for other workers. Called when a
  // server stops.
  void EndWaits() { coordinator_->Shutdown(); }

  // Does a write that is no push (CreateTable, DropTable, Assign, Erase) once,
  // also if it is repeated: calls `write` unless it has returned OK under the
  // same `id` before. With client_id 0 it is always called. First calls `log`,
  // which writes the record. With a log, `is_alone` keeps other writes out
  // meanwhile, so that a replay has the same order. FailedPrecondition as for
  // Push().
  absl::StatusOr<WriteResult> WriteOnce(
      const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
      absl::FunctionRef<absl::StatusOr<int64_t>()> write,
      bool is_alone = false);

  struct TableHandle {
    bool created = false;  // False if it existed with an equal config.
    uint64_t incarnation = 0;
  };

  // Makes the table with `identity`; for incarnation 0 draws one. An existing
  // table keeps its rows. It also keeps its identity, unless its incarnation is
  // `replaced_incarnation`: then it gets `identity`. If its optimizer is open,
  // it gets the optimizer of `config`. AlreadyExists, naming the fields, if its
  // config differs; ResourceExhausted if there are too many tables.
  absl::StatusOr<TableHandle> CreateTable(const TableConfig& config,
                                          const TableIdentity& identity = {},
                                          uint64_t replaced_incarnation = 0);

  // Returns the existing table. NotFound if there is none, and AlreadyExists as
  // for CreateTable().
  absl::StatusOr<TableHandle> OpenTable(const TableConfig& config) const;

  // Returns false if there was no such table.
  bool DropTable(const std::string& name);

  // Holds a table: it is dropped when the last hold is released. A hold is on
  // the name, so it also counts for a table that replaces this one. NotFound,
  // and no hold, if there is no such table.
  absl::Status HoldTable(const std::string& name);
  // REQUIRES: a HoldTable() of that name that has not been released.
  void ReleaseTable(const std::string& name);

  // NotFound, naming the existing tables, if there is no such table. DataLoss
  // if the incarnation that `table` names does not exist and was not dropped
  // here: it was lost in a restart, or another table has taken its name.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindTable(
      const TableRef& table) const;

  // A random id of this run of the shard.
  uint64_t instance_id() const { return instance_id_; }

  // All tables, in order of name.
  std::vector<std::shared_ptr<EmbeddingTable>> Tables() const;

  // Notes the day of the next calls for the table; see EmbeddingTable::NoteDay.
  // InvalidArgument if `day` is not a valid day.
  static absl::Status NoteDay(EmbeddingTable& table, float day);

  // InvalidArgument if a key belongs to another shard, or the size of
  // `embeddings` is not keys.size() x dim. `threads` may be null.
  absl::Status Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                    bool insert_missing, absl::Span<float> embeddings,
                    const LentThreads* threads = nullptr) const;

  // InvalidArgument for a wrong size, a NaN or Inf gradient (names the key), a
  // learning rate that is negative or not finite, or a key of another shard.
  // ResourceExhausted if memory for new rows runs out; only then have the other
  // rows taken their step. A push that was applied before gets the same answer
  // again. FailedPrecondition if it is no longer known whether it was applied;
  // see WriteLedger.
  //
  // A push to a bsp table is staged until CommitRound(), and updates nothing.
  // FailedPrecondition if push.step is empty, or its round has been applied.
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

  // Saves, restores and waits for a save call `interrupt` between chunks and
  // while they wait. If it returns an error, they end early with that error.
  using Interrupt = checkpoint::Interrupt;

  // Applies the staged pushes of a closed round; see
  // GradientAccumulator::Commit. Waits while a save holds rounds. DataLoss if
  // this shard has lost one of the tables `staged`, and with it the caller's
  // staged pushes.
  absl::StatusOr<int64_t> CommitRound(const std::string& group,
                                      const Round& round,
                                      const std::vector<TableRef>& staged = {},
                                      const LentThreads* threads = nullptr,
                                      const Interrupt& interrupt = Never);

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
      float day, bool dry_run) const;

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

  // Paths of clients must lie below options.checkpoint_root, else the calls
  // return PermissionDenied; FailedPrecondition if that is empty.

  // Saves and restores report to `progress`, or on stderr if that is null.
  // AddProgressTo() adds the progress of those whose id begins with `id`.
  void AddProgressTo(const std::string& id,
                     v1::GetProgressResponse* response) const;

  // Makes rounds of this shard wait for a save; see RoundHold.
  absl::StatusOr<v1::PauseRoundsResponse> PauseRounds(
      const v1::PauseRoundsRequest& request);
  // Called when all shards hold their rounds. Aborted if this shard does not
  // hold them (any more), FailedPrecondition unless it is shard 0.
  absl::StatusOr<v1::ChooseSnapshotRoundResponse> ChooseSnapshotRound(
      const v1::ChooseSnapshotRoundRequest& request);

  // Writes this shard's rows, and returns its part of the manifest. If all
  // tables are saved, shard 0 also saves the work queues. With a cut, first
  // applies the rounds of the cut; Aborted if the save does not hold rounds
  // (any more).
  absl::StatusOr<v1::CheckpointPart> SaveShard(
      const v1::SaveShardRequest& request, const Interrupt& interrupt = Never,
      Progress* progress = nullptr);

  // Publishes the manifest made of all shards' parts; see checkpoint::Commit.
  absl::StatusOr<int64_t> CommitCheckpoint(
      const v1::CommitCheckpointRequest& request,
      const Interrupt& interrupt = Never);

  // Ends a save that will not be committed: removes the files that this shard
  // has written, or is writing, for it. May be repeated. OK if the save is
  // unknown, or was published after all.
  absl::Status AbortSave(const std::string& path, const std::string& save_id,
                         const Interrupt& interrupt = Never);

  // Reads and verifies the rows of `tables` (empty means all) that this shard
  // owns. If all tables are restored, also reads the work queues, with the
  // errors of Coordinator::CheckRestore. The present state does not change
  // before CommitRestore(). InvalidArgument for an invalid `new_names` or
  // `state`.
  //
  // Only one restore can be staged: an earlier one that was not committed is
  // dropped. A repetition waits for the first call, or gets its answer. Staged
  // rows that are not committed or asked for again are dropped after
  // options.staged_restore_expiry.
  absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request,
      const Interrupt& interrupt = Never, Progress* progress = nullptr);

  // Replaces tables by the staged state, or drops that state if `abort`. Staged
  // pushes to these tables are dropped, because they came after the saved
  // state. NotFound if nothing is staged under `restore_id`; but then aborting
  // is OK, and so is repeating the last commit.
  absl::Status CommitRestore(const std::string& restore_id, bool abort,
                             const Interrupt& interrupt = Never);

  // The state for a restart: all tables, the marks of writes, and on shard 0
  // the work queues. `folder` is the server's own, not a client's.

  // Saves the state as it is at one moment. Writes wait only for that moment,
  // not for the files, unless copies of rows that change meanwhile take more
  // memory than options.max_save_bytes.
  absl::StatusOr<v1::CheckpointServer> SaveState(
      const std::string& folder, const Interrupt& interrupt = Never);

  struct RecoveredState {
    v1::CheckpointServer server;
    size_t num_tables = 0;
    int64_t num_rows = 0;
    std::vector<std::string> skipped;  // Why newer saves cannot be read.
  };

  // Reads the newest undamaged state. NotFound if no state was ever saved;
  // DataLoss if none can be read.
  //
  // REQUIRES: the shard is new.
  absl::StatusOr<RecoveredState> RecoverState(
      const std::string& folder, const Interrupt& interrupt = Never);

  // Restores the worker groups of the recovered state. Called only if records
  // follow the state: without them the groups would be older than their
  // workers.
  absl::Status RecoverGroups(const v1::CheckpointServer& server) {
    return coordinator_->RestoreGroups(server.groups());
  }
  // Called after StartLog() if records are missing, so that workers join again.
  absl::Status ForgetGroups() { return coordinator_->ForgetGroups(); }

  // Applies a write of an earlier run's log that the recovered state lacks.
  // DataLoss for an invalid record.
  //
  // REQUIRES: no other thread uses the shard.
  absl::Status Replay(uint64_t number, uint32_t type,
                      absl::string_view payload);
  // Called after RecoverState() and Replay(). Starts the eviction at intervals.
  void EndRecovery();

  // From now on writes a record to `log` before each write takes effect. `log`
  // must outlive the shard, or its replacement by null. If the replay ended
  // with a restore, writes a record that undoes it.
  //
  // REQUIRES: no other thread uses the shard.
  absl::Status StartLog(PushLog* log);

  // Appends the record of a call, and returns its number. Without a log returns
  // 0, or in a replay the number of the replayed record.
  absl::StatusOr<uint64_t> Log(
      RecordType type, const google::protobuf::MessageLite& request) const {
    if (log_ == nullptr) return replayed_number_;
    return Log(type, {request.SerializeAsString()});
  }

  // The report for clients about the recovery of this run; nullopt if there was
  // no recovery.
  void SetRecovery(const v1::Recovery& recovery) {
    MutexLock lock(&mutex_);
    recovery_ = recovery;
  }
  std::optional<v1::Recovery> recovery() const {
    MutexLock lock(&mutex_);
    return recovery_;
  }

  size_t num_staged_restores() const {
    MutexLock lock(&mutex_);
    return restores_.size();
  }

 private:
  using TableMap = std::map<std::string, std::shared_ptr<EmbeddingTable>>;

  static absl::Status Never() { return absl::OkStatus(); }

  WriteGate* gate() const { return &gate_; }
  absl::StatusOr<uint64_t> Log(
      RecordType type, std::initializer_list<absl::string_view> pieces) const;
  absl::StatusOr<uint64_t> LogPush(const PushRequest& push) const;
  absl::StatusOr<uint64_t> LogAssign(const AssignRequest& request) const;
  absl::Status ReplayPush(absl::string_view payload);
  std::vector<checkpoint::StagedMessage> StagedMessages();
  absl::Status StageAgain(const checkpoint::StagedMessage& message);
  // Checks that the table has not been replaced while a write waited at the
  // gate. OK if calls find this table under its name, or there is no log and
  // its optimizer is not open.
  absl::Status CheckPresent(const EmbeddingTable& table) const;
  // Saves the state, and opens the gate as soon as it can if `closed` is given.
  //
  // REQUIRES: the gate is closed.
  absl::StatusOr<v1::CheckpointServer> SaveClosedState(
      const std::string& folder, const Interrupt& interrupt,
      std::optional<WriteGate::Closed>* closed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(saving_);

  using Snapshots = std::vector<std::unique_ptr<TableSnapshot>>;
  // Takes snapshots of all tables at one moment. For a table named in `since`,
  // the snapshot has only what has changed since then.
  static absl::StatusOr<Snapshots> TakeSnapshots(
      const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
      const std::map<std::string, ChangeCursor>& since);
  // Calls write() on a thread of low priority, and `interrupt` at short
  // intervals. An error of `interrupt` sets `*stops`, and write() must then
  // end. Closes the gate if copies of rows take more than
  // options.max_save_bytes and `may_close_gate`.
  absl::Status WriteSnapshots(const Snapshots& snapshots,
                              const Interrupt& interrupt,
                              absl::FunctionRef<absl::Status()> write,
                              bool may_close_gate,
                              std::atomic<bool>* stops) const;
  // Takes saving_. Waits until no other save has it or holds rounds.
  absl::Status LockSaves(const std::string& save, const Interrupt& interrupt)
      ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void UnlockSaves() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // FailedPrecondition if this thread is in a save.
  absl::Status CheckNotSaving() const;

  // Logs an event of the server; does nothing in a replay.
  void Tell(absl::string_view event,
            std::initializer_list<LogField> fields) const;
  void TellOfSave(const Snapshots& snapshots, const std::string& folder,
                  const std::vector<std::string>& files,
                  absl::Time begin) const;
  // Logs when the disk of a folder has become full, and when writes succeed
  // again.
  static void NoteDisk(const absl::Status& status, const std::string& folder,
                       std::atomic<bool>* is_full);

  void CountWrite() {
    if (options_.num_writes != nullptr) {
      options_.num_writes->fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Gives a table with an open optimizer the optimizer of `config`, unless that
  // is open, too. Rows do not change. Unavailable if the table is dropped
  // meanwhile.
  //
  // REQUIRES: the gate is closed, or no other thread writes.
  absl::Status CloseOptimizer(const TableConfig& config);

  // CreateTable() for an existing table.
  absl::StatusOr<TableHandle> AttachExisting(
      EmbeddingTable* table, const TableConfig& config,
      const TableIdentity& identity, uint64_t replaced_incarnation) const;

  // The state that a restore has read.
  struct Loaded {
    TableMap tables;
    v1::SavedWorkQueues work_queues;
    bool is_whole = false;  // Whether it has all tables of the checkpoint.
    std::string path;
    int64_t bytes = 0;  // Bytes read from files.
  };

  // A restore from StageRestore() to CommitRestore().
  struct Restore {
    std::atomic<bool> is_given_up{false};
    // Guarded by mutex_.
    bool is_loading = true;
    absl::StatusOr<v1::StageRestoreResponse> result =
        absl::UnknownError("not loaded");
    Loaded loaded;
    std::string seconds;  // The duration of loading.
    std::shared_ptr<const RowCounts> counts;
  };

  // A save, from SaveShard() on. The last kMaxSaves are kept.
  struct Save {
    std::string save_id;
    bool is_given_up = false;
    std::string folder;
    std::vector<std::string> files;              // Unpublished, in `folder`.
    std::optional<v1::CheckpointPart> part;      // The answer of SaveShard().
    std::shared_ptr<const RowCounts> counts;     // Null before it is known.
    absl::Time expiry = absl::InfiniteFuture();  // A time of SteadyNow().
  };
  static constexpr size_t kMaxSaves = 64;

  // Returns the absolute path for a client's path.
  absl::StatusOr<std::string> ResolvePath(const std::string& path) const;
  Save& SaveOf(const std::string& save_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the save up, and removes its files.
  absl::Status EndSave(const std::string& save_id, const Interrupt& interrupt);
  void EndExpiredSaves(const Interrupt& interrupt);
  // InvalidArgument if the request names a table twice.
  absl::StatusOr<std::vector<std::shared_ptr<EmbeddingTable>>> TablesToSave(
      const v1::SaveShardRequest& request);
  // The config that a table of the checkpoint at `path` gets under this name.
  absl::StatusOr<TableConfig> RestoredConfig(const std::string& path,
                                             const std::string& name,
                                             const TableConfig& saved,
                                             const TableMap& loaded) const;
  // Reads the save that `manifest` describes.
  absl::StatusOr<v1::StageRestoreResponse> Load(
      const std::string& path, const v1::CheckpointManifest& manifest,
      const v1::StageRestoreRequest& request, const Interrupt& interrupt,
      Loaded* loaded, Progress* progress) const;
  void InstallRestored(Loaded* loaded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Does the work of CommitRestore(). Returns whether tables were replaced, and
  // sets `*taken` to the ended restore, with the former tables.
  absl::StatusOr<bool> TakeRestore(const std::string& restore_id, bool abort,
                                   std::shared_ptr<Restore>* taken);
  // Notes that the restore has ended: a late StageRestore() must not start it.
  void EndRestore(const std::string& restore_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Called by restore_timer_.
  void DropStagedRestore(const std::string& restore_id);

  // ResourceExhausted if there are too many tables, or the Bloom filters of
  // this table, of present ones and of `coming` ones need too much memory.
  // InvalidArgument if this table alone needs more than the limit.
  absl::Status CheckRoom(const TableConfig& config,
                         const TableMap& coming = {}) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Makes a table object without mutex_, which all calls need to find their
  // table: reserving addresses takes a millisecond, and longer with many
  // threads.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> MakeTable(
      const TableConfig& config) ABSL_LOCKS_EXCLUDED(mutex_);
  // Warns once about tables that were dropped with rows when their last hold
  // was released: the named table, or all.
  void WarnOfReleased(absl::string_view what, const std::string& name = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Removes and returns the table; null if it does not exist.
  std::shared_ptr<EmbeddingTable> RemoveTable(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // CommitRound() for the save that holds rounds.
  absl::StatusOr<int64_t> CommitHeldRound(const std::string& group,
                                          const Round& round,
                                          const LentThreads* threads);
  // Applies the missing rounds of a cut. Aborted if the shard is not at the cut
  // afterwards.
  //
  // REQUIRES: the save of the cut holds rounds.
  absl::Status ApplyRoundsUpTo(const v1::Cut& cut, const Interrupt& interrupt);
  absl::Status NotHeld(const std::string& save_id) const;
  absl::Status CheckOwnership(const EmbeddingTable& table,
                              absl::Span<const Key> keys) const;
  // A checked push, with the sums of its repeated keys.
  struct PreparedPush {
    GradientBatch batch;
    std::vector<Key> unique;
    std::vector<float> sums;
    OwnedObservations summed;
  };

  // Checks the push against the table. `prepared` points into itself and must
  // not move. REQUIRES: CheckPush() is OK.
  absl::Status Prepare(const EmbeddingTable& table, const PushRequest& push,
                       PreparedPush* prepared) const;
  absl::StatusOr<WriteResult> ApplyPush(EmbeddingTable& table,
                                        const PushRequest& push,
                                        const GradientBatch& batch,
                                        const LentThreads* threads);
  absl::StatusOr<int64_t> Apply(EmbeddingTable& table,
                                const GradientBatch& batch,
                                const LentThreads* threads) const;
  // Called by shrink_timer_.
  void ShrinkOnTime(const std::string& table) const;
  // Drops staged pushes to the tables that a restore replaces.
  void DropStagedPushes(const std::string& restore_id);
  // One optimizer step with the sum or mean of `pushes`.
  absl::Status ApplyRound(const std::string& table,
                          const std::vector<WeightedPush>& pushes,
                          double total_weight, uint64_t number,
                          const LentThreads* threads);

  // Constant after construction.
  const ShardOptions options_;
  const absl::Time started_ = absl::Now();
  const uint64_t instance_id_ = DrawId();

  // Constant before the first call of a client.
  PushLog* log_ = nullptr;
  // The last record that the recovered state, or the replay, has applied.
  uint64_t last_record_ = 0;
  uint64_t replayed_number_ = 0;  // The number of the replayed record.
  uint64_t restored_at_ = 0;      // The last restore's record in a replay.
  std::atomic<bool> is_recovering_{false};
  // For NoteDisk(): the disks of the log, of own saves, and of clients' saves.
  mutable std::atomic<bool> is_log_disk_full_{false};
  std::atomic<bool> is_state_disk_full_{false};
  std::atomic<bool> is_save_disk_full_{false};

  // These have their own locks.
  Mutex saving_;  // One save at a time. Taken before the gate is closed.
  std::atomic<std::thread::id> saver_{};
  // By table name, the base on which a save of changes builds.
  struct SavedBase {
    std::weak_ptr<EmbeddingTable> table;
    checkpoint::TableBase base;
  };
  std::map<std::string, SavedBase> bases_ ABSL_GUARDED_BY(saving_);
  int num_changes_saved_ ABSL_GUARDED_BY(saving_) = 0;
  mutable WriteGate gate_;
  WriteLedger ledger_;
  GradientAccumulator stage_{options_.coordinator.max_groups};
  RoundHold round_hold_;
  PendingExports pending_exports_;
  const std::shared_ptr<Coordinator> coordinator_ =
      std::make_shared<Coordinator>(options_.coordinator);

  mutable Mutex mutex_;
  std::optional<v1::Recovery> recovery_ ABSL_GUARDED_BY(mutex_);
  TableMap tables_ ABSL_GUARDED_BY(mutex_);
  // The keys are restore ids; at most one entry.
  std::map<std::string, std::shared_ptr<Restore>> restores_
      ABSL_GUARDED_BY(mutex_);
  CondVar restore_loaded_;
  // The ids of the last few ended restores.
  std::deque<std::string> ended_restores_ ABSL_GUARDED_BY(mutex_);
  std::deque<Save> saves_ ABSL_GUARDED_BY(mutex_);
  // The restore that was committed last.
  std::string last_restore_id_ ABSL_GUARDED_BY(mutex_);
  // The number of holds on each table.
  std::map<std::string, int64_t> holds_ ABSL_GUARDED_BY(mutex_);
  // Row counts of tables freed with their last hold. Erased after the warning
  // is logged or the table is dropped.
  std::map<std::string, size_t> released_rows_ ABSL_GUARDED_BY(mutex_);
  // The last dropped tables: they are not lost.
  std::deque<uint64_t> dropped_incarnations_ ABSL_GUARDED_BY(mutex_);

  // Declared last, so that their threads end before the members that they use.
  IntervalTimer shrink_timer_{
      [this](const std::string& table) { ShrinkOnTime(table); }};
  IntervalTimer restore_timer_{
      [this](const std::string& id) { DropStagedRestore(id); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_H_
