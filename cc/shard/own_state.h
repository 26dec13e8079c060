// The state that a server saves for its own restart: all tables, the marks of
// applied writes, the staged pushes, and on shard 0 the work queues. The save
// is in the server's own folder, which clients cannot use.

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
  std::vector<std::string> skipped;  // Why newer saves were skipped.
};

// Thread-safe, except for the methods below that say so.
class OwnState {
 public:
  OwnState(ShardCore* core, Restores* restores)
      : core_(*core), restores_(*restores) {}

  // Saves the state of one moment. Writes wait only while this moment is
  // recorded, not while the files are written. There is one exception: they
  // also wait if copies of rows that change during the save need more memory
  // than options.max_save_bytes.
  absl::StatusOr<v1::CheckpointServer> Save(const std::string& folder,
                                            const Interrupt& interrupt = Never);
  // Like Save(), for a caller that has closed the gate. If `closed` is not
  // null, opens the gate as soon as possible.
  //
  // REQUIRES: the caller has the turn.
  absl::StatusOr<v1::CheckpointServer> SaveClosed(
      const std::string& folder, const Interrupt& interrupt,
      std::optional<WriteGate::Closed>* closed);

  // Describes to clients the recovery at the start of this run; nullopt if
  // there was none.
  void SetReport(const v1::Recovery& report) {
    MutexLock lock(&mutex_);
    report_ = report;
  }
  std::optional<v1::Recovery> report() const {
    MutexLock lock(&mutex_);
    return report_;
  }

  // The methods below must not be called while another thread uses the shard.

  // Reads the newest undamaged save. NotFound if there is no save. DataLoss if
  // all saves are damaged.
  //
  // REQUIRES: the shard is new.
  absl::StatusOr<RecoveredState> Recover(const std::string& folder,
                                         const Interrupt& interrupt = Never);

  // Restores the worker groups of the recovered state. Called only if the log
  // has records after the save. Without these records the groups would lack the
  // last steps of their workers.
  absl::Status RecoverGroups(const v1::CheckpointServer& server) {
    return core_.coordinator->RestoreGroups(server.groups());
  }
  // Removes all groups, so that workers join again. Called after StartLog() if
  // records are missing.
  absl::Status ForgetGroups() { return core_.coordinator->ForgetGroups(); }

  // Called after Recover() and the replay. Starts the timer that evicts rows.
  void EndRecovery();
  // See Journal::Start().
  absl::Status StartLog(PushLog* log);

 private:
  // For each table name, the save on which the next save of changes builds.
  struct SavedBase {
    std::weak_ptr<EmbeddingTable> table;
    checkpoint::TableBase base;
  };
  using Bases = std::map<std::string, SavedBase>;

  // The parts of the state that are not rows.
  v1::CheckpointServer DescribeServer();
  std::vector<checkpoint::StagedMessage> StagedMessages();
  absl::Status StageAgain(const checkpoint::StagedMessage& message);
  // Sets the bases for the present `tables`. Returns whether the next save
  // should have only the changes.
  bool UpdateBases(const std::vector<std::shared_ptr<EmbeddingTable>>& tables)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(core_.turn);
  // Publishes the files that the writer has written. After an error removes
  // them.
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
