// The folder with the state from which a server recovers.
//
//   FOLDER/.lock           held while a server has the folder
//   FOLDER/identity.json   the server that owns the folder
//   FOLDER/writes          how many writes the server has applied, and which
//                          record of the push log it has acknowledged last
//   FOLDER/state/          the checkpoints that the server makes of itself
//   FOLDER/log/            the push log, if there is one
//   FOLDER/log.removed-*/  what `tfswitch repair` has removed from the log
//   FOLDER/checkpoints/    the checkpoints that clients ask for

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

// The sentence that ends errors about lost writes.
std::string RepairHint(const std::string& path);

// A data folder, locked by this process. Thread-safe.
class DataFolder {
 public:
  // Makes the folder if it does not exist. Aborted if another process has it.
  // FailedPrecondition if it belongs to another server, has a newer format, or
  // is no data folder and not empty. DataLoss if its identity cannot be read,
  // or it has a push log and the file `writes` is lost.
  static absl::StatusOr<std::unique_ptr<DataFolder>> Open(
      const std::string& path, const ServerIdentity& identity);
  // Opens the folder of any server, with a copy of `writes` in memory, and
  // changes nothing in it. NotFound if it is not the folder of a server.
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

  // The counter of applied writes. The kernel writes its memory to the disk. So
  // it is exact after the process was killed, but may be some seconds old after
  // the machine went down.
  std::atomic<uint64_t>* num_writes() const { return &counter_->num_writes; }
  // False if the machine may have gone down since the last server had the
  // folder.
  bool is_counter_exact() const { return is_counter_exact_; }
  // True if the machine is known to have gone down since then.
  bool has_machine_gone_down() const { return has_machine_gone_down_; }
  // The progress of the push log, in the same memory.
  LogProgress* log_progress() const { return &counter_->log; }
  // If the push log ends before this record, it has lost acknowledged writes.
  // After the machine went down, records that were not flushed may be missing.
  uint64_t last_needed_record() const {
    return is_same_boot_ ? counter_->log.acknowledged : counter_->log.flushed;
  }
  // Whether records were removed since the last server had the folder.
  bool is_repaired() const { return counter_->is_repaired; }
  // Only for OpenToRepair(): whether the file `writes` cannot be used.
  bool is_counter_lost() const { return is_counter_lost_; }

  // Notes that a server has recovered from the folder.
  void NoteRecovery();
  // Writes to identity.json whether there is a push log.
  //
  // REQUIRES: no other thread calls this meanwhile.
  absl::Status NoteLog(bool has_log);
  // Writes to the file `writes` that the log may end after `last_record`, and
  // that `num_writes` were applied. The next start counts the missing ones.
  //
  // REQUIRES: opened by OpenToRepair().
  absl::Status NoteRepair(uint64_t num_writes, uint64_t last_record);

 private:
  struct Counter {
    std::atomic<uint64_t> num_writes;
    char boot_id[40];  // The machine's boot when a server last had the folder.
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
  // With `is_copy` changes do not reach the file.
  absl::Status MapCounter(bool is_copy);

  // Constant after Open(), except for has_log_, which NoteLog() sets.
  const std::string path_;
  const std::unique_ptr<FolderLock> lock_;
  ServerIdentity identity_;
  bool has_log_ = false;
  Counter* counter_ = nullptr;
  std::string boot_id_;  // The machine's present boot.
  bool is_same_boot_ = false;
  bool is_counter_lost_ = false;
  bool is_counter_exact_ = true;
  bool has_machine_gone_down_ = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_
