// The checkpoints that clients ask a shard to restore.

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
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/shard_core.h"
#include "cc/table/table_config.h"
#include "tfswitch/v1/checkpoint.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// The state that a restore has read.
struct LoadedRows {
  TableCatalogue::TableMap tables;
  v1::SavedWorkQueues work_queues;
  bool is_whole = false;  // Whether it has all tables of the checkpoint.
  std::string path;
  int64_t bytes = 0;    // Bytes read from files.
  std::string seconds;  // The duration of loading.
};

// One restore, from StageRestore() to CommitRestore().
//
// Thread-safe.
class Restore {
 public:
  using Answer = absl::StatusOr<v1::StageRestoreResponse>;

  // Makes loading end with an error. Without effect if it has ended.
  void GiveUp() { is_given_up_ = true; }
  bool is_given_up() const { return is_given_up_; }

  // Called once, when loading has ended.
  void Finish(const Answer& answer, LoadedRows rows);
  // Waits until loading has ended. Calls `interrupt` meanwhile, and returns its
  // error.
  absl::Status Wait(const Interrupt& interrupt);
  bool is_loading() const {
    MutexLock lock(&mutex_);
    return is_loading_;
  }
  // The result of loading; an error before it has ended.
  Answer answer() const {
    MutexLock lock(&mutex_);
    return answer_;
  }
  LoadedRows TakeRows() {
    MutexLock lock(&mutex_);
    return std::move(rows_);
  }
  // Null before it is known.
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

// Paths of clients are resolved by ShardOptions::ResolvePath(), with its
// errors. Thread-safe.
class Restores {
 public:
  explicit Restores(ShardCore* core) : core_(*core) {}

  // Reads and verifies the rows of `tables` (empty means all) that this shard
  // owns. If all tables are restored, also reads the work queues, with the
  // errors of Coordinator::CheckRestore. The present state does not change
  // before Commit(). InvalidArgument for an invalid `new_names` or `state`.
  // Reports to `progress`, or on stderr if that is null.
  //
  // Only one restore can be staged: an earlier one that was not committed is
  // dropped. A repetition waits for the first call, or gets its answer. Staged
  // rows that are not committed or asked for again are dropped after
  // options.staged_restore_expiry.
  Restore::Answer Stage(const v1::StageRestoreRequest& request,
                        const Interrupt& interrupt = Never,
                        Progress* progress = nullptr);

  // Drops the staged state. OK if nothing is staged under `restore_id`.
  void Abort(const std::string& restore_id);
  // Replaces tables by the staged state, and sets `*former` to the former ones,
  // which take time to free. Returns whether it did: false if this is a
  // repetition of the last commit. NotFound if nothing is staged under
  // `restore_id`.
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
  // Replaces tables and work queues by these, and leaves the former tables in
  // `*loaded`.
  void Install(LoadedRows* loaded);

  // Adds the progress of the restores whose id begins with `id`.
  void AddProgressTo(const std::string& id,
                     v1::GetProgressResponse* response) const;

  size_t num_staged() const {
    MutexLock lock(&mutex_);
    return restores_.size();
  }

 private:
  // The ids of this many ended restores are kept.
  static constexpr size_t kMaxEnded = 64;

  // Returns the restore of this id, or else makes it, gives up the others, and
  // sets `*is_new`. Aborted if it has ended.
  absl::StatusOr<std::shared_ptr<Restore>> Begin(const std::string& restore_id,
                                                 bool* is_new);
  // Keeps the restore for options.staged_restore_expiry. False if it has ended.
  bool Keep(const std::string& restore_id, const Restore& restore);
  absl::Status GivenUp(const std::string& restore_id) const;
  // Removes the restore, and notes that it has ended: a late Stage() must not
  // start it. Null if it is not staged.
  std::shared_ptr<Restore> Remove(const std::string& restore_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The config that a table of the checkpoint at `path` gets under this name.
  absl::StatusOr<TableConfig> ConfigFor(
      const std::string& path, const std::string& name,
      const TableConfig& saved, const TableCatalogue::TableMap& loaded) const;

  ShardCore& core_;

  mutable Mutex mutex_;  // Taken before the lock of a Restore.
  // The keys are restore ids; at most one entry.
  std::map<std::string, std::shared_ptr<Restore>> restores_
      ABSL_GUARDED_BY(mutex_);
  // The ids of the last few ended restores.
  std::deque<std::string> ended_ ABSL_GUARDED_BY(mutex_);
  // The restore that was committed last.
  std::string last_committed_ ABSL_GUARDED_BY(mutex_);

  // Declared last, so that its thread ends before the members that it uses.
  IntervalTimer expiry_timer_{[this](const std::string& id) { Abort(id); }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_RESTORES_H_
