// Open() takes the lock before it looks at anything, so that two servers that
// start on a new folder at once do not both make it theirs.

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
#include "cc/base/json.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr char kFormatName[] = "tfswitch-data";
constexpr size_t kMaxIdentityBytes = 64 << 10;
// A server that was just killed has given its lock back; one that ends may need
// a moment.
constexpr absl::Duration kLockTimeout = absl::Seconds(1);

std::string Describe(const ServerIdentity& identity) {
  return absl::StrCat("shard ", identity.shard_index, " of ",
                      identity.num_shards, " of cluster '", identity.cluster,
                      "'");
}

Json ToJson(const ServerIdentity& identity) {
  return {{"format", kFormatName},
          {"version", DataFolder::kFormatVersion},
          {"cluster", identity.cluster},
          {"shard_index", identity.shard_index},
          {"num_shards", identity.num_shards}};
}

bool IsNumber(const Json& json, const char* field) {
  return json.contains(field) && json[field].is_number_unsigned();
}

std::string BootId() {
  const auto id = ReadWholeFile("/proc/sys/kernel/random/boot_id", 256);
  return id.ok() ? std::string(absl::StripSuffix(*id, "\n")) : "";
}

}  // namespace

absl::StatusOr<std::unique_ptr<DataFolder>> DataFolder::Open(
    const std::string& path, const ServerIdentity& identity) {
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(path));
  TFSWITCH_ASSIGN_OR_RETURN(
      std::unique_ptr<FolderLock> lock,
      FolderLock::Take(path, kLockTimeout, [] { return absl::OkStatus(); }));
  if (lock == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "data folder '", path,
        "' is on a file system without locks, so that two servers could write "
        "to it; use one with locks"));
  }
  auto folder = absl::WrapUnique(new DataFolder(path, std::move(lock)));
  TFSWITCH_RETURN_IF_ERROR(folder->CheckIdentity(identity));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(StateOf(path)));
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(CheckpointsOf(path)));
  TFSWITCH_RETURN_IF_ERROR(folder->MapCounter());
  return folder;
}

DataFolder::~DataFolder() {
  if (counter_ != nullptr) munmap(counter_, sizeof(Counter));
}

absl::Status DataFolder::CheckIdentity(const ServerIdentity& identity) {
  const std::string file = path_ + "/identity.json";
  const absl::StatusOr<std::string> text =
      ReadWholeFile(file, kMaxIdentityBytes);
  if (absl::IsNotFound(text.status())) {
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                              ListFolder(path_));
    // What a file system or a crash may have left does not matter.
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
    return WriteFileAtomically(file, ToJson(identity).dump(2) + "\n");
  }
  TFSWITCH_RETURN_IF_ERROR(text.status());
  const absl::StatusOr<Json> json = ParseJson(*text);
  if (!json.ok() || !json->is_object() ||
      json->value("format", Json()) != kFormatName ||
      !IsNumber(*json, "version")) {
    return absl::DataLossError(absl::StrCat(
        "'", file, "' is damaged: it is not the identity of a server"));
  }
  if ((*json)["version"] != kFormatVersion) {
    return absl::FailedPreconditionError(
        absl::StrCat("data folder '", path_, "' has format version ",
                     DumpJson((*json)["version"]), "; this server reads ",
                     kFormatVersion, ". Use the tfswitch that wrote it"));
  }
  if (!json->contains("cluster") || !(*json)["cluster"].is_string() ||
      !IsNumber(*json, "shard_index") || !IsNumber(*json, "num_shards")) {
    return absl::DataLossError(
        absl::StrCat("'", file, "' is damaged: it names no shard"));
  }
  if (*json == ToJson(identity)) return absl::OkStatus();
  ServerIdentity owner;
  owner.cluster = (*json)["cluster"].get<std::string>();
  owner.shard_index = (*json)["shard_index"].get<uint32_t>();
  owner.num_shards = (*json)["num_shards"].get<uint32_t>();
  return absl::FailedPreconditionError(
      absl::StrCat("data folder '", path_, "' belongs to ", Describe(owner),
                   ", and this is ", Describe(identity),
                   "; give each server a folder of its own. For another number "
                   "of servers, save with `cluster.save` and restore"));
}

absl::Status DataFolder::MapCounter() {
  const std::string file = path_ + "/writes";
  const int fd = open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("open", file, errno);
  auto close_file = absl::MakeCleanup([fd] { close(fd); });
  // It has a block on the disk, so that a full disk does not end the process
  // when the counter is written.
  if (const int error = posix_fallocate(fd, 0, sizeof(Counter)); error != 0) {
    return ErrnoStatus("allocate", file, error);
  }
  void* const memory =
      mmap(nullptr, sizeof(Counter), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return ErrnoStatus("map", file, errno);
  counter_ = static_cast<Counter*>(memory);
  boot_id_ = BootId().substr(0, sizeof(counter_->boot_id));
  const size_t size = boot_id_.size();
  const bool is_same =
      size > 0 && std::memcmp(counter_->boot_id, boot_id_.data(), size) == 0;
  is_counter_exact_ = *num_writes() == 0 || is_same;
  has_machine_gone_down_ = counter_->boot_id[0] != '\0' && !is_same;
  return absl::OkStatus();
}

void DataFolder::NoteRecovery() {
  std::memcpy(counter_->boot_id, boot_id_.data(), boot_id_.size());
}

}  // namespace tfswitch
