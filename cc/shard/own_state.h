// The state that a server saves for its own restart: all tables, the marks of
// writes, the staged pushes, and on shard 0 the work queues. It is in the
// server's own folder, not in a client's.

#ifndef TFSWITCH_CC_SHARD_OWN_STATE_H_
#define TFSWITCH_CC_SHARD_OWN_STATE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/mutex.h"
#include "cc/base/write_gate.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/log/push_log.h"
#include "cc/shard/restores.h"
#include "cc/shard/shard_core.h"
#include "tfswitch/v1/checkpoint.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

struct RecoveredState {
  v1::CheckpointServer server;
  size_t num_tables = 0;
  int64_t num_rows = 0;
  std::vector<std::string> skipped;  // Why newer saves cannot be read.
};

// Thread-safe, apart from the methods that say otherwise.
class OwnState {
 public:
  OwnState(ShardCore* core, Restores* restores)
      : core_(*core), restores_(*restores) {}

  // Saves the state as it is at one moment. Writes wait only for that moment,
  // not for the files, unless copies of rows that change meanwhile take more
  // memory than options.max_save_bytes.
  absl::StatusOr<v1::CheckpointServer> Save(const std::string& folder,
                                            const Interrupt& interrupt = Never);
  // The same for a caller that has closed the gate. Opens the gate as soon as it
  // can if `closed` is not null.
  //
  // REQUIRES: the caller has the turn.
  absl::StatusOr<v1::CheckpointServer> SaveClosed(
      const std::string& folder, const Interrupt& interrupt,
      std::optional<WriteGate::Closed>* closed);

  // The report for clients about the recovery of this run; nullopt if there was
  // no recovery.
  void SetReport(const v1::Recovery& report) {
    MutexLock lock(&mutex_);
    report_ = report;
  }
  std::optional<v1::Recovery> report() const {
    MutexLock lock(&mutex_);
    return report_;
  }

  // The methods below require that no other thread uses the shard.

  // Reads the newest undamaged state. NotFound if no state was ever saved;
  // DataLoss if none can be read.
  //
  // REQUIRES: the shard is new.
  absl::StatusOr<RecoveredState> Recover(const std::string& folder,
                                         const Interrupt& interrupt = Never);

  // Restores the worker groups of the recovered state. Called only if records
  // follow the state: without them the groups would be older than their
  // workers.
  absl::Status RecoverGroups(const v1::CheckpointServer& server) {
    return core_.coordinator->RestoreGroups(server.groups());
  }
  // Called after StartLog() if records are missing, so that workers join again.
  absl::Status ForgetGroups() { return core_.coordinator->ForgetGroups(); }

  // Called after Recover() and the replay. Starts the eviction at intervals.
  void EndRecovery();
  // See Journal::Start().
  absl::Status StartLog(PushLog* log);

 private:
  // By table name, the base on which a save of changes builds.
  struct SavedBase {
    std::weak_ptr<EmbeddingTable> table;
    checkpoint::TableBase base;
  };
  using Bases = std::map<std::string, SavedBase>;

  // The state without rows.
  v1::CheckpointServer DescribeServer();
  std::vector<checkpoint::StagedMessage> StagedMessages();
  absl::Status StageAgain(const checkpoint::StagedMessage& message);
  // Makes the bases those of `tables`. Returns whether the next save should
  // have only what has changed.
  bool UpdateBases(const std::vector<std::shared_ptr<EmbeddingTable>>& tables)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_.turn);
  // Publishes what the writer has written. After an error removes it.
  absl::Status Publish(const std::string& folder, const std::string& save_id,
                       absl::Status written, checkpoint::PartWriter* writer,
                       const Interrupt& interrupt)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_.turn);

  ShardCore& core_;
  Restores& restores_;
  DiskEvents disk_events_;

  Bases bases_ ABSL_GUARDED_BY(core_.turn);
  int num_changes_saved_ ABSL_GUARDED_BY(core_.turn) = 0;

  mutable Mutex mutex_;
  std::optional<v1::Recovery> report_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_OWN_STATE_H_
