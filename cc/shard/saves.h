// The saves of one shard, for clients that save a checkpoint.

#ifndef TFSWITCH_CC_SHARD_SAVES_H_
#define TFSWITCH_CC_SHARD_SAVES_H_

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/shard/rounds.h"
#include "cc/shard/shard_core.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// One save, from its first call until it is published or given up.
//
// Thread-safe.
class Save {
 public:
  explicit Save(std::string id) : id_(std::move(id)) {}

  const std::string& id() const { return id_; }

  // Aborted if the save has been given up.
  absl::Status Check() const {
    MutexLock lock(&mutex_);
    return CheckLocked();
  }
  // The answer if an earlier call has written the save to `folder`; else
  // nullopt.
  std::optional<v1::CheckpointPart> AnswerFor(const std::string& folder) const;
  // Keeps the files that the writer has written to `folder` until `expiry`, a
  // time of SteadyNow(), and returns the answer. If an earlier call has
  // finished first, returns the answer of that call. Aborted if the save has
  // been given up; then the writer removes its files.
  absl::StatusOr<v1::CheckpointPart> Finish(const std::string& folder,
                                            absl::Time expiry,
                                            checkpoint::PartWriter* writer);
  void NotePublished() {
    MutexLock lock(&mutex_);
    files_.clear();
  }
  // Gives the save up, and removes its files. May be repeated. Returns OK and
  // keeps the files if they were published.
  absl::Status End(const Interrupt& interrupt);

  // Whether the time in which the files should be published is over.
  bool is_expired(absl::Time now) const {
    MutexLock lock(&mutex_);
    return !files_.empty() && expiry_ <= now;
  }
  bool has_files() const {
    MutexLock lock(&mutex_);
    return !files_.empty();
  }
  void set_expiry(absl::Time expiry) {
    MutexLock lock(&mutex_);
    expiry_ = expiry;
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
  absl::Status CheckLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::string id_;
  mutable Mutex mutex_;
  bool is_given_up_ ABSL_GUARDED_BY(mutex_) = false;
  std::string folder_ ABSL_GUARDED_BY(mutex_);
  // Not published yet.
  std::vector<std::string> files_ ABSL_GUARDED_BY(mutex_);
  std::optional<v1::CheckpointPart> part_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const RowCounts> counts_ ABSL_GUARDED_BY(mutex_);
  absl::Time expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
};

// ShardOptions::ResolvePath() resolves the paths of clients, and its errors are
// returned. Thread-safe.
class Saves {
 public:
  Saves(ShardCore* core, Rounds* rounds) : core_(*core), rounds_(*rounds) {}

  // Writes this shard's rows, and returns its part of the manifest. If all
  // tables are saved, shard 0 also saves the work queues. If the request has a
  // cut, first applies the rounds of the cut; Aborted if the save does not hold
  // rounds (any more). Reports to `progress`; if it is null, prints progress to
  // stderr.
  absl::StatusOr<v1::CheckpointPart> Write(const v1::SaveShardRequest& request,
                                           const Interrupt& interrupt = Never,
                                           Progress* progress = nullptr);

  // Joins the parts of all shards to a manifest and publishes it; see
  // checkpoint::Commit.
  absl::StatusOr<int64_t> Commit(const v1::CommitCheckpointRequest& request,
                                 const Interrupt& interrupt = Never);

  // Ends a save that will not be committed. Removes the files that this shard
  // has written for it or is still writing. May be repeated. OK if the save is
  // not known, or if it was published.
  absl::Status Abort(const std::string& path, const std::string& save_id,
                     const Interrupt& interrupt = Never);

  // Adds the progress of all saves whose id begins with `id` to the response.
  void AddProgressTo(const std::string& id,
                     v1::GetProgressResponse* response) const;

 private:
  // How many saves are remembered. A save that is in use, or has files to
  // publish, is remembered longer if it can be.
  static constexpr size_t kMaxSaves = 64;

  // Returns the save of this id; null if there is none.
  std::shared_ptr<Save> Find(const std::string& save_id) const;
  // The same, but makes the save if there is none.
  std::shared_ptr<Save> FindOrMake(const std::string& save_id);
  void EndExpired(const Interrupt& interrupt);
  // InvalidArgument if the request names a table twice.
  absl::StatusOr<std::vector<std::shared_ptr<EmbeddingTable>>> TablesToSave(
      const v1::SaveShardRequest& request);
  // Takes snapshots of `tables`, after the rounds of the cut if there is one.
  // On shard 0 also passes the work queues to the writer.
  absl::StatusOr<Snapshots> TakeAtCut(
      const v1::SaveShardRequest& request,
      const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
      const Interrupt& check, checkpoint::PartWriter* writer)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_.turn);

  ShardCore& core_;
  Rounds& rounds_;
  DiskEvents disk_events_;

  // Locked before the mutex of a Save.
  mutable Mutex mutex_;
  std::deque<std::shared_ptr<Save>> saves_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SAVES_H_
