// The state of one server, with no network: tables by name, and the writes that
// it has applied.
//
//   shard.cc        tables, pushes, and the checkpoints that clients ask for
//   shard_cut.cc    the round at which such a checkpoint is taken
//   shard_state.cc  the state that a server keeps to come back with
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
  // The folder below which clients may save and restore; empty: there is none,
  // so they may not. Not set: anywhere, for clients of this process.
  std::optional<std::string> checkpoint_root = std::nullopt;
  // A folder below which absolute paths are taken, too, but not below
  // `own_folder` and `log_folder`, which are in it. Empty: there is none.
  std::string data_folder = {};
  std::string own_folder = {};
  std::string log_folder = {};
  // Counts the writes that were applied, if it is there. It must live as long
  // as the shard.
  std::atomic<uint64_t>* num_writes = nullptr;
  absl::Duration staged_restore_expiry = absl::Minutes(5);
  // A later save after this takes one that was not published for given up.
  absl::Duration save_expiry = absl::Hours(1);

  // Limits on the state that clients may make it keep. A table without rows
  // takes about 0.2 MiB.
  uint64_t max_tables = 2000;  // More do not fit into 47 bits of addresses.
  // Cells of Bloom filters, of all tables; 0: half of the machine's memory.
  uint64_t max_bloom_bytes = 0;
  // Memory for copies of rows that change during a save; 0: half of what is
  // available when it begins.
  uint64_t max_save_bytes = 0;
  CoordinatorLimits coordinator = {};

  absl::Status Validate() const;
};

// One of several pushes.
struct TablePush {
  std::shared_ptr<EmbeddingTable> table;
  const PushRequest* push = nullptr;
};

// The types of the records of a push log. Their payload is the day of the
// clock, as a float, and the message of the call.
enum class RecordType : uint32_t {
  kPush = 1,
  kPull = 2,  // One that has made rows.
  kAssign = 3,
  kCreateTable = 4,
  kDropTable = 5,
  kErase = 6,
  kShrink = 7,
  kCommitRound = 8,
  // Rows were restored, which no record has.
  kRestore = 9,
  // There is a save of them.
  kRestoreSaved = 10,
  // The server was killed before there was one, and has gone on with the rows
  // from before.
  kRestoreUndone = 11,
  // A change of a group of workers or of a work queue; see
  // Coordinator::StartLog.
  kCoordination = 12,
};

// The tables of one shard. Everything that a client may get wrong is checked
// here, so that every way in (embedded or over the network) gives the same
// errors; after an error nothing of the request has been applied, unless it
// says otherwise.
//
// Thread-safe. Tables are shared pointers: one that is dropped or replaced
// lives until the last call on it has ended.
class Shard {
 public:
  // REQUIRES: options.Validate() is OK.
  explicit Shard(const ShardOptions& options);

  Shard(const Shard&) = delete;
  Shard& operator=(const Shard&) = delete;

  uint32_t shard_index() const { return options_.shard_index; }
  uint32_t num_shards() const { return options_.num_shards; }

  // The groups of workers. FailedPrecondition unless this is shard 0, which
  // coordinates for all.
  absl::StatusOr<std::shared_ptr<Coordinator>> FindCoordinator() const;

  // Ends the calls that wait for other workers, now and later; for the end of a
  // server.
  void EndWaits() { coordinator_->Shutdown(); }

  // Does a write that is no push (below: CreateTable, DropTable, Assign, Erase)
  // under the identity that it has under retry: calls `write`, unless it has
  // returned OK under this identity before. client_id 0: calls it always. `log`
  // is a Log() of it, which comes first. `is_alone`: with a log it runs while
  // no other write does, so that a replay has the same order.
  // FailedPrecondition as for Push().
  absl::StatusOr<WriteResult> WriteOnce(
      const PushId& id, absl::FunctionRef<absl::StatusOr<uint64_t>()> log,
      absl::FunctionRef<absl::StatusOr<int64_t>()> write,
      bool is_alone = false);

  struct TableHandle {
    bool created = false;  // False: it was there with an equal config.
    uint64_t incarnation = 0;
  };

  // Makes the table with `identity` (incarnation 0: a drawn one). One that is
  // there keeps its rows and its identity, or gets the new one if its
  // incarnation is `replaced_incarnation`. One with an open optimizer gets that
  // of `config`. AlreadyExists, naming the fields, if its config differs;
  // ResourceExhausted if that is one too many.
  absl::StatusOr<TableHandle> CreateTable(const TableConfig& config,
                                          const TableIdentity& identity = {},
                                          uint64_t replaced_incarnation = 0);

  // The table that is there. NotFound if there is none, and AlreadyExists as
  // above.
  absl::StatusOr<TableHandle> OpenTable(const TableConfig& config) const;

  // Returns false if there was no such table.
  bool DropTable(const std::string& name);

  // A table on which there were holds is dropped when the last one is released.
  // A hold is on the name: it also counts for a table that takes its place.
  // HoldTable() is NotFound, and holds nothing, if there is no such table.
  absl::Status HoldTable(const std::string& name);
  // REQUIRES: A HoldTable() of that name that has not been released.
  void ReleaseTable(const std::string& name);

  // NotFound, naming the tables there are. DataLoss if `table` names an
  // incarnation that was not dropped here and is not here: it was lost in a
  // restart, or another table has taken its name.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindTable(
      const TableRef& table) const;

  // Drawn at the start: tells this run of the shard from others.
  uint64_t instance_id() const { return instance_id_; }

  // In order of name.
  std::vector<std::shared_ptr<EmbeddingTable>> Tables() const;

  // Notes the day of the next calls for the table, see EmbeddingTable::NoteDay.
  // InvalidArgument if it is none.
  static absl::Status NoteDay(EmbeddingTable& table, float day);

  // InvalidArgument if a key belongs to another shard or `embeddings` has not
  // keys.size() x dim floats. `threads` may be null.
  absl::Status Pull(EmbeddingTable& table, absl::Span<const Key> keys,
                    bool insert_missing, absl::Span<float> embeddings,
                    const LentThreads* threads = nullptr) const;

  // InvalidArgument for a wrong size, a NaN or Inf gradient (names the key), a
  // learning rate that is negative or not finite, or a key of another shard.
  // ResourceExhausted if memory for new rows runs out; only then rows that were
  // there have taken their step. A push that had been applied before is
  // answered as it was then. FailedPrecondition if that is not known any more;
  // see WriteLedger.
  //
  // To a bsp table it stages the gradients until CommitRound(), and updates
  // nothing; FailedPrecondition if push.step says no step, or one whose round
  // has been applied.
  absl::StatusOr<WriteResult> Push(EmbeddingTable& table,
                                   const PushRequest& push,
                                   const LentThreads* threads = nullptr);

  // Several pushes; those to one table in their order. All are checked before
  // any is applied. An error of applying one leaves the others applied; the
  // first in their order is given. REQUIRES: as many results as pushes.
  absl::Status PushMany(absl::Span<const TablePush> pushes,
                        absl::Span<WriteResult> results,
                        const LentThreads* threads = nullptr);
  // The same for pushes of this process. REQUIRES: CheckPush() is OK for each.
  absl::Status PushChecked(absl::Span<const TablePush> pushes,
                           absl::Span<WriteResult> results,
                           const LentThreads* threads);

  // Saves and restores, and waits for a save, end early with the error of
  // `interrupt`, which they ask between chunks and while they wait.
  using Interrupt = checkpoint::Interrupt;

  // Applies the staged pushes of a closed round; see
  // GradientAccumulator::Commit. Waits while a save holds rounds. DataLoss if
  // this shard has lost one of the tables `staged`, and with it the pushes that
  // the caller had staged.
  absl::StatusOr<int64_t> CommitRound(const std::string& group,
                                      const Round& round,
                                      const std::vector<TableRef>& staged = {},
                                      const LentThreads* threads = nullptr,
                                      const Interrupt& interrupt = Never);

  // `slots` is empty or has keys.size() x slot_floats floats. With
  // `only_missing` rows that are there stay as they are; returns how many were
  // set. InvalidArgument for NaN or Inf values, naming the key.
  absl::StatusOr<int64_t> Assign(EmbeddingTable& table,
                                 absl::Span<const Key> keys,
                                 absl::Span<const float> embeddings,
                                 absl::Span<const float> slots,
                                 bool only_missing = false) const;

  // The same for the table that the request names, under its identity.
  absl::StatusOr<WriteResult> AssignOnce(const AssignRequest& request);

  absl::StatusOr<int64_t> Erase(EmbeddingTable& table,
                                absl::Span<const Key> keys) const;

  // Evicts by `rules`, or by those of the table's config; see
  // EmbeddingTable::Shrink. max_rows is that of the whole table, of which this
  // shard keeps its share. FailedPrecondition if there are no rules.
  absl::StatusOr<ShrinkReport> Shrink(
      EmbeddingTable& table, const std::optional<EvictionConfig>& rules,
      float day, bool dry_run) const;

  // See EmbeddingTable::ReadUsage.
  absl::Status ReadUsage(const EmbeddingTable& table,
                         absl::Span<const Key> keys, float day,
                         absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) const;

  // See EmbeddingTable::ForEachChange. With a rule the scores of the visited
  // rows are kept under `export_id`, until CommitExport(), which comes when the
  // model has been published. InvalidArgument for a rule that makes no sense.
  absl::StatusOr<ChangeCursor> ExportChanges(
      const std::shared_ptr<EmbeddingTable>& table, const ChangeFilter& filter,
      const std::string& export_id, int64_t max_keys,
      const std::function<absl::Status(const ChangeChunk&)>& visit);
  // Not `commit`: aborts the export. May be repeated.
  void CommitExport(const EmbeddingTable& table, const std::string& export_id,
                    bool commit) {
    pending_exports_.End(table, export_id, commit);
  }

  // Paths that clients name lie below options.checkpoint_root, else
  // PermissionDenied; FailedPrecondition if that is empty.

  // Saves and restores tell `progress` how far they are; null: they say it on
  // stderr. AddProgressTo() adds the same of those whose id begins with `id`.
  void AddProgressTo(const std::string& id,
                     v1::GetProgressResponse* response) const;

  // Keeps this shard at its rounds for a save; see RoundHold.
  absl::StatusOr<v1::PauseRoundsResponse> PauseRounds(
      const v1::PauseRoundsRequest& request);
  // To be called when all shards hold their rounds. Aborted if this one does
  // not (any more), FailedPrecondition unless it is shard 0.
  absl::StatusOr<v1::ChooseSnapshotRoundResponse> ChooseSnapshotRound(
      const v1::ChooseSnapshotRoundRequest& request);

  // Writes this shard's rows; returns its part of the manifest. Shard 0
  // saves the work queues with all tables. With a cut the rows are those of its
  // last rounds; Aborted if the save does not hold them (any more).
  absl::StatusOr<v1::CheckpointPart> SaveShard(
      const v1::SaveShardRequest& request, const Interrupt& interrupt = Never,
      Progress* progress = nullptr);

  // Publishes the manifest made of all shards' parts; see checkpoint::Commit.
  absl::StatusOr<int64_t> CommitCheckpoint(
      const v1::CommitCheckpointRequest& request,
      const Interrupt& interrupt = Never);

  // Ends a save that will not be committed: removes the files that this shard
  // has written for it, and those that it is writing. May be repeated; OK if
  // the save is not known, or was published after all.
  absl::Status AbortSave(const std::string& path, const std::string& save_id,
                         const Interrupt& interrupt = Never);

  // Reads and verifies the rows of `tables` (empty: all) that this shard owns,
  // with all tables also work queues, of which the errors are those of
  // Coordinator::CheckRestore. The present state is untouched until
  // CommitRestore. InvalidArgument if `new_names` or `state` cannot be.
  //
  // There is one restore at a time: an earlier one that was not committed is
  // dropped. A repetition waits for the first, or has its answer. Staged rows
  // that nobody commits or asks for again are dropped after
  // options.staged_restore_expiry.
  absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request,
      const Interrupt& interrupt = Never, Progress* progress = nullptr);

  // Puts the staged state in place, or drops it with `abort`. Pushes to these
  // tables that are not applied yet are dropped: they belong to the time that
  // the restore goes back over. NotFound if nothing is staged under
  // `restore_id`; aborting then is OK, and so is repeating the last commit.
  absl::Status CommitRestore(const std::string& restore_id, bool abort,
                             const Interrupt& interrupt = Never);

  // The state that comes back after a restart: all tables, the marks of writes,
  // and on shard 0 the work queues. `folder` is the server's own, not a
  // client's.

  // Saves it, as it is at one moment. Writes wait for that moment, but not
  // while files are written, unless copies of rows that change meanwhile take
  // more memory than options.max_save_bytes.
  absl::StatusOr<v1::CheckpointServer> SaveState(
      const std::string& folder, const Interrupt& interrupt = Never);

  struct RecoveredState {
    v1::CheckpointServer server;
    size_t num_tables = 0;
    int64_t num_rows = 0;
    std::vector<std::string> skipped;  // Why newer saves cannot be read.
  };

  // Takes the newest whole state there is. NotFound if there never was one;
  // DataLoss if none can be read.
  //
  // REQUIRES: the shard is new.
  absl::StatusOr<RecoveredState> RecoverState(
      const std::string& folder, const Interrupt& interrupt = Never);

  // Takes the groups of workers of the recovered state, which are followed by
  // records: alone they would be older than their workers.
  absl::Status RecoverGroups(const v1::CheckpointServer& server) {
    return coordinator_->RestoreGroups(server.groups());
  }
  // After StartLog(), if records are missing: workers join again.
  absl::Status ForgetGroups() { return coordinator_->ForgetGroups(); }

  // Takes a write of an earlier run from its log, one that the recovered state
  // has not. DataLoss for a record that makes no sense.
  //
  // REQUIRES: nobody else uses the shard.
  absl::Status Replay(uint64_t number, uint32_t type,
                      absl::string_view payload);
  // To be called after RecoverState() and Replay(). Rows are evicted by time
  // from now on.
  void EndRecovery();

  // From now on each write has a record in `log` before it takes effect. It
  // must live as long as the shard, or until it is replaced by null. Notes in
  // it that the restore at the end of the replay, if there is one, is undone.
  //
  // REQUIRES: nobody else uses the shard.
  absl::Status StartLog(PushLog* log);

  // Appends the record of a call, and returns its number; without a log 0, or
  // in a replay that of the record.
  absl::StatusOr<uint64_t> Log(
      RecordType type, const google::protobuf::MessageLite& request) const {
    if (log_ == nullptr) return replayed_number_;
    return Log(type, {request.SerializeAsString()});
  }

  // What a client is told about the recovery of this run; none: there was none.
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
  // OK if calls find this table under its name, or there is no log and the
  // table is not open: a write that has waited at the gate may come to one that
  // was replaced meanwhile.
  absl::Status CheckPresent(const EmbeddingTable& table) const;
  // REQUIRES: the gate is closed. Opens it as soon as it can, if `closed` is
  // given.
  absl::StatusOr<v1::CheckpointServer> SaveClosedState(
      const std::string& folder, const Interrupt& interrupt,
      std::optional<WriteGate::Closed>* closed)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(saving_);

  using Snapshots = std::vector<std::unique_ptr<TableSnapshot>>;
  // All tables as they are at one moment. With `since`, by table name, those
  // have what has changed from then on.
  static absl::StatusOr<Snapshots> TakeSnapshots(
      const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
      const std::map<std::string, ChangeCursor>& since);
  // Calls write() on a thread of low priority, and `interrupt` at short
  // intervals; its error sets `*stops`, upon which write() has to end. If
  // copies of rows take more than options.max_save_bytes, closes the gate if it
  // may.
  absl::Status WriteSnapshots(const Snapshots& snapshots,
                              const Interrupt& interrupt,
                              absl::FunctionRef<absl::Status()> write,
                              bool may_close_gate,
                              std::atomic<bool>* stops) const;
  // Waits until no other save has it, nor holds rounds for it.
  absl::Status LockSaves(const std::string& save, const Interrupt& interrupt)
      ABSL_NO_THREAD_SAFETY_ANALYSIS;
  void UnlockSaves() ABSL_NO_THREAD_SAFETY_ANALYSIS;
  // FailedPrecondition in a save of this thread.
  absl::Status CheckNotSaving() const;

  // Server events; silent in a replay.
  void Tell(absl::string_view event,
            std::initializer_list<LogField> fields) const;
  void TellOfSave(const Snapshots& snapshots, const std::string& folder,
                  const std::vector<std::string>& files,
                  absl::Time begin) const;
  // Tells when writes to a folder begin to fail for want of room, and when they
  // succeed again.
  static void NoteDisk(const absl::Status& status, const std::string& folder,
                       std::atomic<bool>* is_full);

  void CountWrite() {
    if (options_.num_writes != nullptr) {
      options_.num_writes->fetch_add(1, std::memory_order_relaxed);
    }
  }

  // Gives the table its optimizer if it is open and `config` is not. Rows stay
  // as they are. Unavailable if the table goes meanwhile.
  //
  // REQUIRES: the gate is closed, where others write.
  absl::Status CloseOptimizer(const TableConfig& config);

  // CreateTable() of a table that is there.
  absl::StatusOr<TableHandle> AttachExisting(
      EmbeddingTable* table, const TableConfig& config,
      const TableIdentity& identity, uint64_t replaced_incarnation) const;

  // The state that a restore has read.
  struct Loaded {
    TableMap tables;
    v1::SavedWorkQueues work_queues;
    bool is_whole = false;  // It has all tables of the checkpoint.
    std::string path;
    int64_t bytes = 0;  // Read from files.
  };

  // A restore from StageRestore() to CommitRestore().
  struct Restore {
    std::atomic<bool> is_given_up{false};
    // Guarded by mutex_.
    bool is_loading = true;
    absl::StatusOr<v1::StageRestoreResponse> result =
        absl::UnknownError("not loaded");
    Loaded loaded;
    std::string seconds;  // That loading has taken.
    std::shared_ptr<const RowCounts> counts;
  };

  // A save from SaveShard() on. The last ones are remembered.
  struct Save {
    std::string save_id;
    bool is_given_up = false;
    std::string folder;
    std::vector<std::string> files;              // In the folder.
    std::optional<v1::CheckpointPart> part;      // The answer.
    std::shared_ptr<const RowCounts> counts;     // Null before it is known.
    absl::Time expiry = absl::InfiniteFuture();  // By SteadyNow().
  };
  static constexpr size_t kMaxSaves = 64;

  // The path on this machine.
  absl::StatusOr<std::string> ResolvePath(const std::string& path) const;
  Save& SaveOf(const std::string& save_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives it up, and removes its files.
  absl::Status EndSave(const std::string& save_id, const Interrupt& interrupt);
  void EndExpiredSaves(const Interrupt& interrupt);
  // InvalidArgument if the request names one twice.
  absl::StatusOr<std::vector<std::shared_ptr<EmbeddingTable>>> TablesToSave(
      const v1::SaveShardRequest& request);
  // The config that a table of the checkpoint at `path` gets under this name.
  absl::StatusOr<TableConfig> RestoredConfig(const std::string& path,
                                             const std::string& name,
                                             const TableConfig& saved,
                                             const TableMap& loaded) const;
  // Of the save that `manifest` describes.
  absl::StatusOr<v1::StageRestoreResponse> Load(
      const std::string& path, const v1::CheckpointManifest& manifest,
      const v1::StageRestoreRequest& request, const Interrupt& interrupt,
      Loaded* loaded, Progress* progress) const;
  void InstallRestored(Loaded* loaded) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The work of CommitRestore(); whether it has put a state in place. `*taken`
  // is what it has replaced.
  absl::StatusOr<bool> TakeRestore(const std::string& restore_id, bool abort,
                                   std::shared_ptr<Restore>* taken);
  // A later StageRestore() does not begin it anew.
  void EndRestore(const std::string& restore_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The work of restore_timer_.
  void DropStagedRestore(const std::string& restore_id);

  // ResourceExhausted if there is no room for another table, or for the memory
  // of its admission beside that of others and of `coming`, which will be there
  // too; InvalidArgument if it needs more than all may.
  absl::Status CheckRoom(const TableConfig& config,
                         const TableMap& coming = {}) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reserves addresses, which takes a millisecond, and longer with many
  // threads: all calls take the lock to find their table.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> MakeTable(
      const TableConfig& config) ABSL_LOCKS_EXCLUDED(mutex_);
  // Says once that a table went with its rows: that of the name, or all.
  void WarnOfReleased(absl::string_view what, const std::string& name = "")
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Takes it out of the tables; null if it is not there.
  std::shared_ptr<EmbeddingTable> RemoveTable(const std::string& name)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // CommitRound() of the save that holds rounds.
  absl::StatusOr<int64_t> CommitHeldRound(const std::string& group,
                                          const Round& round,
                                          const LentThreads* threads);
  // Applies the rounds of a cut. Aborted if it is not the state after them.
  //
  // REQUIRES: the save of the cut holds rounds.
  absl::Status ApplyRoundsUpTo(const v1::Cut& cut, const Interrupt& interrupt);
  absl::Status NotHeld(const std::string& save_id) const;
  absl::Status CheckOwnership(const EmbeddingTable& table,
                              absl::Span<const Key> keys) const;
  // A push that may be applied, and the sums of its repeated keys.
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
  // The work of shrink_timer_.
  void ShrinkOnTime(const std::string& table) const;
  // Forgets the pushes that wait for their round, to the tables that a restore
  // replaces.
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

  // Constant once calls come in.
  PushLog* log_ = nullptr;
  uint64_t last_record_ = 0;      // Of the recovered state, or a former log.
  uint64_t replayed_number_ = 0;  // Of the record that is replayed.
  uint64_t restored_at_ = 0;      // The record of a restore in a replay.
  std::atomic<bool> is_recovering_{false};
  // See NoteDisk(): of the log, of the own state, and of clients' saves.
  mutable std::atomic<bool> is_log_disk_full_{false};
  std::atomic<bool> is_state_disk_full_{false};
  std::atomic<bool> is_save_disk_full_{false};

  // These have their own locks.
  Mutex saving_;  // One save at a time; before the gate is closed.
  std::atomic<std::thread::id> saver_{};
  // What the newest save of the state has, by table name.
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
  // By restore id; one at most.
  std::map<std::string, std::shared_ptr<Restore>> restores_
      ABSL_GUARDED_BY(mutex_);
  CondVar restore_loaded_;
  std::deque<std::string> ended_restores_ ABSL_GUARDED_BY(mutex_);  // The last.
  std::deque<Save> saves_ ABSL_GUARDED_BY(mutex_);
  std::string last_restore_id_ ABSL_GUARDED_BY(mutex_);  // Committed last.
  // How many holds there are on a table.
  std::map<std::string, int64_t> holds_ ABSL_GUARDED_BY(mutex_);
  // Rows of the tables that went with their last hold, until that is said, or
  // they are dropped.
  std::map<std::string, size_t> released_rows_ ABSL_GUARDED_BY(mutex_);
  // The last tables that were dropped, and so are not lost.
  std::deque<uint64_t> dropped_incarnations_ ABSL_GUARDED_BY(mutex_);

  // Last, so that their threads end before the members that they use.
  IntervalTimer shrink_timer_{
      [this](const std::string& table) { ShrinkOnTime(table); }};
  IntervalTimer restore_timer_{
      [this](const std::string& id) { DropStagedRestore(id); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHARD_H_
