#include "cc/shard/shard_options.h"

#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/hash.h"

namespace tfswitch {

absl::Status ShardOptions::Validate() const {
  if (num_shards < 1 || num_shards > 65536) {
    return absl::InvalidArgumentError(absl::StrCat(
        "num_shards must be in [1, 65536]. Received: ", num_shards));
  }
  std::error_code error;
  if (checkpoint_root.has_value() && !checkpoint_root->empty() &&
      !std::filesystem::is_directory(*checkpoint_root, error)) {
    return absl::InvalidArgumentError(
        absl::StrCat("checkpoint_root must be a folder. Received: '",
                     *checkpoint_root, "'"));
  }
  if (shard_index >= num_shards) {
    return absl::InvalidArgumentError(
        absl::StrCat("shard_index must be below num_shards (", num_shards,
                     "). Received: ", shard_index));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> ShardOptions::ResolvePath(
    const std::string& path) const {
  if (!checkpoint_root.has_value()) return path;
  if (absl::StartsWith(path, "/") && !data_folder.empty()) {
    absl::StatusOr<std::string> resolved = ResolveBelow(data_folder, path);
    for (const std::string& own : {own_folder, log_folder}) {
      if (!resolved.ok() || !ResolveBelow(own, *resolved).ok()) continue;
      return absl::PermissionDeniedError(absl::StrCat(
          "path '", path, "' is in '", own,
          "', where the server keeps its own state; use a path below '",
          *checkpoint_root, "'"));
    }
    if (resolved.ok()) return resolved;
  }
  if (checkpoint_root->empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "shard ", shard_index,
        " has no folder for checkpoints; start it with --checkpoint_root "
        "FOLDER"));
  }
  absl::StatusOr<std::string> resolved = ResolveBelow(*checkpoint_root, path);
  if (absl::IsPermissionDenied(resolved.status())) {
    return absl::PermissionDeniedError(
        absl::StrCat(resolved.status().message(),
                     "; use a path below it, or start the server with another "
                     "--checkpoint_root"));
  }
  return resolved;
}

absl::Status ShardOptions::CheckCoordinates() const {
  if (shard_index == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "shard ", shard_index, " does not coordinate workers; shard 0 does"));
}

uint64_t ShardOptions::ShareOf(const TableConfig& config,
                               uint64_t num_rows) const {
  const uint32_t num_virtual = config.num_virtual_shards;
  const uint32_t owned =
      FirstVirtualShardOf(shard_index + 1, num_virtual, num_shards) -
      FirstVirtualShardOf(shard_index, num_virtual, num_shards);
  // 128 bits are used because the product may not fit into 64.
  return static_cast<uint64_t>(
      (static_cast<unsigned __int128>(num_rows) * owned + num_virtual - 1) /
      num_virtual);
}

std::string ShardOptions::OnShard() const {
  return num_shards == 1 ? "" : absl::StrCat(" on shard ", shard_index);
}

}  // namespace tfswitch
