// Open() locks the folder before it reads anything. So if two servers start on
// a new folder at the same time, only one of them gets it.

#include "cc/recovery/data_folder.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "cc/base/process_identity.h"
#include "cc/base/status_macros.h"
#include "cc/wire/json.h"
#include "tfswitch/v1/checkpoint.pb.h"

namespace tfswitch {
namespace {

constexpr size_t kMaxIdentityBytes = 64 << 10;
// The file `writes` begins with the number of writes and the boot's id. The id
// ends at this offset.
constexpr size_t kBootIdEnd = 48;
// How long to wait for a server that is ending. A killed server has no lock.
constexpr absl::Duration kLockTimeout = absl::Seconds(1);

std::string Describe(const ServerIdentity& identity) {
  return absl::StrCat("shard ", identity.shard_index, " of ",
                      identity.num_shards, " of cluster '", identity.cluster,
                      "'");
}

}  // namespace

std::string RepairHint(const std::string& path) {
  return absl::StrCat("`tfswitch repair ", path,
                      " --dry_run` shows what is whole, and `tfswitch repair ",
                      path,
                      "` has a server start from that, "
                      "and keeps aside what it removes");
}

absl::StatusOr<std::unique_ptr<DataFolder>> DataFolder::Lock(
    const std::string& path) {
  TFSWITCH_ASSIGN_OR_RETURN(
      std::unique_ptr<FolderLock> lock,
      FolderLock::Take(path, kLockTimeout, [] { return absl::OkStatus(); }));
  if (lock == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "data folder '", path,
        "' is on a file system without locks, so that two servers could write "
        "to it; use one with locks"));
  }
  return absl::WrapUnique(new DataFolder(path, std::move(lock)));
}

absl::StatusOr<std::unique_ptr<DataFolder>> DataFolder::Open(
    const std::string& path, const ServerIdentity& identity) {
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<DataFolder> folder, Lock(path));
  TFSWITCH_RETURN_IF_ERROR(folder->CheckIdentity(identity));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(StateOf(path)));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(CheckpointsOf(path)));
  TFSWITCH_RETURN_IF_ERROR(folder->MapCounter(/*is_copy=*/false));
  return folder;
}

absl::StatusOr<std::unique_ptr<DataFolder>> DataFolder::OpenToRepair(
    const std::string& path) {
  // Checks this before Lock(), because Lock() makes a file in the folder.
  const absl::Status there = StampOf(path + "/identity.json").status();
  if (absl::IsNotFound(there)) {
    return absl::NotFoundError(
        absl::StrCat("'", path,
                     "' has no identity.json: it is not the data folder of a "
                     "server; give the --data_dir of one"));
  }
  TFSWITCH_RETURN_IF_ERROR(there);
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<DataFolder> folder, Lock(path));
  TFSWITCH_RETURN_IF_ERROR(folder->ReadIdentity());
  TFSWITCH_RETURN_IF_ERROR(folder->MapCounter(/*is_copy=*/true));
  return folder;
}

DataFolder::~DataFolder() {
  if (counter_ != nullptr) munmap(counter_, sizeof(Counter));
}

absl::Status DataFolder::WriteIdentity() const {
  v1::DataFolderIdentity saved;
  saved.set_cluster(identity_.cluster);
  saved.set_shard_index(identity_.shard_index);
  saved.set_num_shards(identity_.num_shards);
  saved.set_push_log(has_log_);
  return WriteMessageFile(path_ + "/identity.json", kMaxIdentityBytes, &saved);
}

absl::Status DataFolder::ReadIdentity() {
  v1::DataFolderIdentity saved;
  TFSWITCH_RETURN_IF_ERROR(
      ReadMessageFile(path_ + "/identity.json", kMaxIdentityBytes, &saved));
  identity_ = {saved.cluster(), saved.shard_index(), saved.num_shards()};
  has_log_ = saved.push_log();
  return absl::OkStatus();
}

absl::Status DataFolder::CheckIdentity(const ServerIdentity& identity) {
  const absl::Status read = ReadIdentity();
  if (absl::IsNotFound(read)) {
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                              ListFolder(path_));
    // Ignores files that a file system or a crash may have left in the folder.
    const auto other =
        std::find_if(names.begin(), names.end(), [](const std::string& name) {
          return name[0] != '.' && name != "lost+found" &&
                 name.rfind("identity.json.", 0) != 0;
        });
    if (other != names.end()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "folder '", path_, "' has '", *other,
          "' and no identity.json: it is not the data folder of a server; give "
          "--data_dir a folder that is new or empty"));
    }
    identity_ = identity;
    return WriteIdentity();
  }
  TFSWITCH_RETURN_IF_ERROR(read);
  if (identity_ == identity) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("data folder '", path_, "' belongs to ", Describe(identity_),
                   ", and this is ", Describe(identity),
                   "; give each server a folder of its own. For another number "
                   "of servers, save with `cluster.save` and restore"));
}

absl::Status DataFolder::MapCounter(bool is_copy) {
  const std::string file = path_ + "/writes";
  const absl::StatusOr<std::string> text =
      ReadWholeFile(file, kMaxIdentityBytes);
  if (!text.ok() && !absl::IsNotFound(text.status())) return text.status();
  // A server with a push log has always written the boot's id. If the id is
  // missing, the file is damaged.
  is_counter_lost_ = has_log_ && (!text.ok() || text->size() < kBootIdEnd ||
                                  (*text)[sizeof(uint64_t)] == '\0');
  if (is_counter_lost_ && !is_copy) {
    return absl::DataLossError(absl::StrCat(
        "'", file, "' is ", text.ok() ? "damaged at offset 0" : "missing",
        ": it says where the push log must end, so that nobody can tell how "
        "many writes are lost. ",
        RepairHint(path_)));
  }
  int fd = -1;
  auto close_file = absl::MakeCleanup([&fd] {
    if (fd >= 0) close(fd);
  });
  if (!is_copy) {
    fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd < 0) return ErrnoStatus("open", file, errno);
    // Allocates the blocks of the file on the disk now. Otherwise a write to
    // the counter on a full disk would end the process.
    if (const int error = posix_fallocate(fd, 0, sizeof(Counter)); error != 0) {
      return ErrnoStatus("allocate", file, error);
    }
  }
  void* const memory =
      mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE,
           is_copy ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return ErrnoStatus("map", file, errno);
  counter_ = static_cast<Counter*>(memory);
  if (is_copy && text.ok() && !is_counter_lost_) {
    std::memcpy(memory, text->data(), std::min(text->size(), sizeof(Counter)));
  }
  boot_id_ = BootId().substr(0, sizeof(counter_->boot_id));
  const size_t size = boot_id_.size();
  is_same_boot_ =
      size > 0 && std::memcmp(counter_->boot_id, boot_id_.data(), size) == 0;
  is_counter_exact_ =
      !is_counter_lost_ && (*num_writes() == 0 || is_same_boot_);
  has_machine_gone_down_ = counter_->boot_id[0] != '\0' && !is_same_boot_;
  return absl::OkStatus();
}

void DataFolder::NoteRecovery() {
  // If the boot's id is not known, writes "?", which differs from all ids.
  const std::string id = boot_id_.empty() ? "?" : boot_id_;
  std::memcpy(counter_->boot_id, id.data(), id.size());
  counter_->is_repaired = 0;
}

absl::Status DataFolder::NoteLog(bool has_log) {
  if (has_log == has_log_) return absl::OkStatus();
  if (has_log) {
    // With the new identity.json a start requires a boot's id in the file
    // `writes`. So `writes` is flushed to the disk first.
    if (counter_->boot_id[0] == '\0') counter_->boot_id[0] = '?';
    if (msync(counter_, sizeof(Counter), MS_SYNC) != 0) {
      return ErrnoStatus("flush", path_ + "/writes", errno);
    }
    TFSWITCH_RETURN_IF_ERROR(SyncFolder(path_));
  }
  has_log_ = has_log;
  return WriteIdentity();
}

absl::Status DataFolder::NoteRepair(uint64_t num_writes, uint64_t last_record) {
  counter_->num_writes = num_writes;
  counter_->log.acknowledged = last_record;
  counter_->log.flushed = std::min(last_record, counter_->log.flushed.load());
  counter_->is_repaired = 1;
  if (counter_->boot_id[0] == '\0') counter_->boot_id[0] = '?';
  return WriteFileAtomically(
      path_ + "/writes",
      absl::string_view(reinterpret_cast<const char*>(counter_),
                        sizeof(Counter)));
}

}  // namespace tfswitch
