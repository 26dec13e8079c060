// The restores of one shard, for clients that load a checkpoint.

#ifndef TFSWITCH_CC_SHARD_RESTORES_H_
#define TFSWITCH_CC_SHARD_RESTORES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/log_writer.h"
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/shard_core.h"
#include "cc/table/table_config.h"
#include "tfswitch/v1/checkpoint.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// The rows and queues that a restore has read from files.
struct LoadedRows {
  TableCatalogue::TableMap tables;
  v1::SavedWorkQueues work_queues;
  // Whether this is all that the checkpoint has.
  bool is_whole = false;
  std::string path;
  int64_t bytes = 0;  // Read from files.
  LogNumber seconds;  // How long it took.
};

// One restore, from StageRestore() to CommitRestore().
//
// Thread-safe.
class Restore {
 public:
  using Answer = absl::StatusOr<v1::StageRestoreResponse>;

  // Makes loading end with an error. Does nothing if loading has ended already.
  void GiveUp() { is_given_up_ = true; }
  bool is_given_up() const { return is_given_up_; }

  // Called once, at the end of loading.
  void Finish(const Answer& answer, LoadedRows rows);
  // Waits until loading has ended. Calls `interrupt` at intervals; if that
  // fails, returns its error.
  absl::Status Wait(const Interrupt& interrupt);
  bool is_loading() const {
    MutexLock lock(&mutex_);
    return is_loading_;
  }
  // The result of loading; an error while loading has not ended.
  Answer answer() const {
    MutexLock lock(&mutex_);
    return answer_;
  }
  LoadedRows TakeRows() {
    MutexLock lock(&mutex_);
    return std::move(rows_);
  }
  // May be null at first.
  std::shared_ptr<const RowCounts> counts() const {
    MutexLock lock(&mutex_);
    return counts_;
  }
  void set_counts(std::shared_ptr<const RowCounts> counts) {
    MutexLock lock(&mutex_);
    counts_ = std::move(counts);
  }

 private:
  std::atomic<bool> is_given_up_{false};
  mutable Mutex mutex_;
  CondVar has_loaded_;
  bool is_loading_ ABSL_GUARDED_BY(mutex_) = true;
  Answer answer_ ABSL_GUARDED_BY(mutex_) = absl::UnknownError("not loaded");
  LoadedRows rows_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const RowCounts> counts_ ABSL_GUARDED_BY(mutex_);
};

// ShardOptions::ResolvePath() resolves the paths of clients, and its errors are
// returned. Thread-safe.
class Restores {
 public:
  explicit Restores(ShardCore* core) : core_(*core) {}

  // Reads and verifies the rows of `tables` (if empty, of all tables) that this
  // shard owns. If all tables are restored, also reads the work queues, with
  // the errors of Coordinator::CheckRestore. The present tables do not change
  // before Commit(). InvalidArgument if `new_names` or `state` is invalid.
  // Reports to `progress`; if it is null, prints progress to stderr.
  //
  // Only one restore can be staged. An earlier restore that was not committed
  // is dropped. If the call is repeated, the second call waits for the first
  // one and returns its answer. Staged rows expire after
  // options.staged_restore_expiry, unless they are committed or the call is
  // repeated.
  Restore::Answer Stage(const v1::StageRestoreRequest& request,
                        const Interrupt& interrupt = Never,
                        Progress* progress = nullptr);

  // Keeps staged rows for another options.staged_restore_expiry.
  void Keep(const std::string& restore_id);
  // Drops the staged rows. OK if nothing is staged under `restore_id`.
  void Abort(const std::string& restore_id);
  // Replaces tables by the staged ones, and sets `*former` to the former
  // tables, because it takes time to free them. Returns true if it did so, and
  // false if the call repeats the last commit. NotFound if nothing is staged
  // under `restore_id`.
  //
  // REQUIRES: the gate is closed, and no save takes snapshots.
  absl::StatusOr<bool> Commit(const std::string& restore_id,
                              LoadedRows* former);

  // Reads the save that `manifest` describes.
  Restore::Answer Load(const std::string& path,
                       const v1::CheckpointManifest& manifest,
                       const v1::StageRestoreRequest& request,
                       const Interrupt& interrupt, LoadedRows* loaded,
                       Progress* progress) const;
  // Puts the loaded tables and work queues in the place of the present ones,
  // and leaves the former tables in `*loaded`.
  void Install(LoadedRows* loaded);

  // Adds the progress of all restores whose id begins with `id` to the
  // response.
  void AddProgressTo(const std::string& id,
                     v1::GetProgressResponse* response) const;

  size_t num_staged() const {
    MutexLock lock(&mutex_);
    return restores_.size();
  }

 private:
  // How many ids of ended restores are kept.
  static constexpr size_t kMaxEnded = 64;

  // Returns the restore of this id. If there is none, makes it, gives up the
  // other restores, and sets `*is_new`. Aborted if a restore of this id has
  // ended.
  absl::StatusOr<std::shared_ptr<Restore>> Begin(const std::string& restore_id,
                                                 bool* is_new);
  // Keeps the restore for another options.staged_restore_expiry. False if it
  // has ended.
  bool Keep(const std::string& restore_id, const Restore& restore);
  absl::Status GivenUp(const std::string& restore_id) const;
  // Removes the restore, and remembers that it has ended, so that a late
  // Stage() does not start it again. Returns null if it is not staged.
  std::shared_ptr<Restore> Remove(const std::string& restore_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The config that a table of the checkpoint at `path` gets if it is restored
  // under this name.
  absl::StatusOr<TableConfig> ConfigFor(
      const std::string& path, const std::string& name,
      const TableConfig& saved, const TableCatalogue::TableMap& loaded) const;

  ShardCore& core_;

  // Locked before the mutex of a Restore.
  mutable Mutex mutex_;
  // The keys are restore ids; at most one entry.
  std::map<std::string, std::shared_ptr<Restore>> restores_
      ABSL_GUARDED_BY(mutex_);
  // The ids of the last few ended restores.
  std::deque<std::string> ended_ ABSL_GUARDED_BY(mutex_);
  // The restore that was committed last.
  std::string last_committed_ ABSL_GUARDED_BY(mutex_);

  // Declared last and so destroyed first: its thread uses the members above.
  IntervalTimer expiry_timer_{[this](const std::string& id) { Abort(id); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_RESTORES_H_
