// The folder with the state from which a server recovers.
//
// FOLDER/.lock           locked while a server uses the folder

#ifndef TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_
#define TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/files.h"
#include "cc/log/push_log.h"

namespace tfswitch {

// Identifies the server that owns a folder.
struct ServerIdentity {
  std::string cluster;
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;

  friend bool operator==(const ServerIdentity& a, const ServerIdentity& b) {
    return a.cluster == b.cluster && a.shard_index == b.shard_index &&
           a.num_shards == b.num_shards;
  }
};

// The last sentence of errors about lost writes: it names the command for a
// repair.
std::string RepairHint(const std::string& path);

// A data folder, locked by this process. Thread-safe.
class DataFolder {
 public:
  // Makes the folder if it does not exist. Aborted if another process uses it.
  // FailedPrecondition if it belongs to another server, has a newer format, or
  // is not empty and no data folder. DataLoss if its identity cannot be read,
  // or if it has a push log and the file `writes` is lost.
  static absl::StatusOr<std::unique_ptr<DataFolder>> Open(
      const std::string& path, const ServerIdentity& identity);
  // Opens the folder of any server, and changes nothing in it: changes of
  // `writes` stay in memory. NotFound if it is not the folder of a server.
  static absl::StatusOr<std::unique_ptr<DataFolder>> OpenToRepair(
      const std::string& path);
  ~DataFolder();
  DataFolder(const DataFolder&) = delete;
  DataFolder& operator=(const DataFolder&) = delete;

  const std::string& path() const { return path_; }
  const ServerIdentity& identity() const { return identity_; }
  static std::string StateOf(const std::string& path) {
    return path + "/state";
  }
  static std::string LogOf(const std::string& path) { return path + "/log"; }
  static std::string CheckpointsOf(const std::string& path) {
    return path + "/checkpoints";
  }

  // The counter of applied writes. It is in mapped memory, which the kernel
  // writes to the disk. So it is exact after the process was killed, but may be
  // some seconds old after the machine has crashed.
  std::atomic<uint64_t>* num_writes() const { return &counter_->num_writes; }
  // False if the machine may have crashed or restarted since the last server
  // used the folder.
  bool is_counter_exact() const { return is_counter_exact_; }
  // True if the machine is known to have crashed or restarted since then.
  bool has_machine_gone_down() const { return has_machine_gone_down_; }
  // The progress of the push log. It is in the same mapped memory as
  // num_writes().
  LogProgress* log_progress() const { return &counter_->log; }
  // The last record that the push log must have. If the log ends before it,
  // acknowledged writes are lost. After a restart of the machine, records that
  // were not flushed to the disk may be missing, and are not needed.
  uint64_t last_needed_record() const {
    return is_same_boot_ ? counter_->log.acknowledged : counter_->log.flushed;
  }
  // Whether a repair has removed records since the last server used the folder.
  bool is_repaired() const { return counter_->is_repaired; }
  // Only for OpenToRepair(): whether the file `writes` is missing or damaged.
  bool is_counter_lost() const { return is_counter_lost_; }

  // Records in the folder that a server has recovered from it.
  void NoteRecovery();
  // Writes to identity.json whether the server has a push log.
  //
  // REQUIRES: no other thread calls this at the same time.
  absl::Status NoteLog(bool has_log);
  // Writes to the file `writes` that the log may end after `last_record`, and
  // that `num_writes` writes were applied. From that the next start counts the
  // missing writes.
  //
  // REQUIRES: the folder was opened by OpenToRepair().
  absl::Status NoteRepair(uint64_t num_writes, uint64_t last_record);

 private:
  struct Counter {
    std::atomic<uint64_t> num_writes;
    // The machine's boot id when a server last used the folder. The kernel
    // draws a new id each time the machine starts.
    char boot_id[40];
    LogProgress log;
    std::atomic<uint64_t> is_repaired;
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  DataFolder(std::string path, std::unique_ptr<FolderLock> lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}
  static absl::StatusOr<std::unique_ptr<DataFolder>> Lock(
      const std::string& path);
  // NotFound if there is no identity.
  absl::Status ReadIdentity();
  absl::Status CheckIdentity(const ServerIdentity& identity);
  absl::Status WriteIdentity() const;
  // With `is_copy`, changes of the counter do not reach the file.
  absl::Status MapCounter(bool is_copy);

  // Constant after Open(), except for has_log_, which NoteLog() sets.
  const std::string path_;
  const std::unique_ptr<FolderLock> lock_;
  ServerIdentity identity_;
  bool has_log_ = false;
  Counter* counter_ = nullptr;
  std::string boot_id_;  // For the present run of the machine.
  bool is_same_boot_ = false;
  bool is_counter_lost_ = false;
  bool is_counter_exact_ = true;
  bool has_machine_gone_down_ = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_
