#include "cc/client/checkpoints.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <utility>

#include "absl/strings/str_format.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Sorts by time, and two processes do not draw the same.
std::string NewId() {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  std::random_device random;
  return absl::StrFormat("%012x%08x", now, random());
}

std::vector<std::string> WithoutRepetition(std::vector<std::string> names) {
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

absl::Status CheckPath(const std::string& path) {
  if (!path.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("a checkpoint needs a path. Received: ''");
}

}  // namespace

absl::StatusOr<CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const std::string& path,
    const std::vector<std::string>& tables) {
  TFSWITCH_RETURN_IF_ERROR(CheckPath(path));
  CheckpointReport report;
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(""));
  for (const TableInfo& info : infos) {
    bool wanted = tables.empty();
    for (const std::string& name : tables) {
      wanted = wanted || name == info.config.name;
    }
    if (!wanted) continue;
    report.tables.push_back(info.config.name);
    report.num_rows += info.stats.num_rows;
  }
  SaveShardArgs args;
  args.path = path;
  args.tables = WithoutRepetition(tables);
  args.save_id = NewId();
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> parts,
                            client.SaveShard(args));
  TFSWITCH_RETURN_IF_ERROR(client.CommitCheckpoint(path, args.save_id, parts));
  return report;
}

absl::StatusOr<CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const std::string& path,
    const std::vector<std::string>& tables) {
  TFSWITCH_RETURN_IF_ERROR(CheckPath(path));
  StageRestoreArgs args;
  args.path = path;
  args.tables = WithoutRepetition(tables);
  args.restore_id = NewId();
  CheckpointReport report;
  absl::StatusOr<std::vector<std::string>> staged =
      client.StageRestore(args, &report.num_rows);
  if (!staged.ok()) {
    // The first error is the one to report; staged rows that could not be
    // dropped go with the next restore.
    (void)client.CommitRestore(args.restore_id, /*abort=*/true);
    return staged.status();
  }
  report.tables = *std::move(staged);
  TFSWITCH_RETURN_IF_ERROR(
      client.CommitRestore(args.restore_id, /*abort=*/false));
  return report;
}

}  // namespace tfswitch
