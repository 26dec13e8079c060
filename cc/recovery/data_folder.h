// The folder in which one server keeps its state while it is not running.
//
//   FOLDER/.lock           held while a server has the folder
//   FOLDER/identity.json   whose folder it is
//   FOLDER/writes          how many writes the server has applied
//   FOLDER/state/          the checkpoints that the server makes of itself
//   FOLDER/log/            the push log, if there is one
//   FOLDER/checkpoints/    those that clients ask for

#ifndef TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_
#define TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cc/base/files.h"

namespace tfswitch {

// Tells a server from all others that may have folders like it.
struct ServerIdentity {
  std::string cluster;
  uint32_t shard_index = 0;
  uint32_t num_shards = 1;
};

// Held by one process at a time. Thread-safe.
class DataFolder {
 public:
  static constexpr int kFormatVersion = 1;

  // Makes the folder if it is not there. Aborted if another process has it;
  // FailedPrecondition if it is the folder of another server, of a newer
  // format, or not one of a server and not empty; DataLoss if its identity
  // cannot be read.
  static absl::StatusOr<std::unique_ptr<DataFolder>> Open(
      const std::string& path, const ServerIdentity& identity);
  ~DataFolder();
  DataFolder(const DataFolder&) = delete;
  DataFolder& operator=(const DataFolder&) = delete;

  const std::string& path() const { return path_; }
  static std::string StateOf(const std::string& path) {
    return path + "/state";
  }
  static std::string LogOf(const std::string& path) { return path + "/log"; }
  static std::string CheckpointsOf(const std::string& path) {
    return path + "/checkpoints";
  }

  // In memory that the kernel writes to the disk: it is right after the process
  // was killed, and may be some seconds behind after the machine went down.
  std::atomic<uint64_t>* num_writes() const { return &counter_->num_writes; }
  // False if the machine went down since the last server had the folder.
  bool is_counter_exact() const { return is_counter_exact_; }
  // Whether that is known to have happened.
  bool has_machine_gone_down() const { return has_machine_gone_down_; }
  // A server has the folder: it has recovered from whatever had happened.
  void NoteRecovery();

 private:
  struct Counter {
    std::atomic<uint64_t> num_writes;
    char boot_id[40];  // Of the machine, when it was last counted.
  };
  static_assert(std::atomic<uint64_t>::is_always_lock_free);

  DataFolder(std::string path, std::unique_ptr<FolderLock> lock)
      : path_(std::move(path)), lock_(std::move(lock)) {}
  absl::Status CheckIdentity(const ServerIdentity& identity);
  absl::Status MapCounter();

  // Constant after Open().
  const std::string path_;
  const std::unique_ptr<FolderLock> lock_;
  Counter* counter_ = nullptr;
  std::string boot_id_;  // The present one of the machine.
  bool is_counter_exact_ = true;
  bool has_machine_gone_down_ = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_DATA_FOLDER_H_
