// The file `writes` is written last. Until then servers refuse the folder as
// they did before, so an interrupted repair can be repeated.

#include "cc/recovery/repair.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/log/push_log.h"
#include "cc/recovery/data_folder.h"
#include "cc/recovery/state_keeper.h"

namespace tfswitch {
namespace {

using Print = absl::FunctionRef<void(absl::string_view line)>;

// Prints the saves, the newest first. The first saves are damaged, with the
// errors `skipped`. The save after them is whole.
void PrintSaves(const std::string& state,
                const std::vector<std::string>& skipped, Print print) {
  for (size_t i = 0;; ++i) {
    const auto save =
        checkpoint::ReadManifest(state, /*number=*/0, static_cast<int>(i));
    if (absl::IsNotFound(save.status())) return;
    std::string line = i < skipped.size()    ? "  damaged: " + skipped[i]
                       : i == skipped.size() ? "  whole: "
                                             : "  not read, as older: ";
    if (save.ok() && save->has_server() && i >= skipped.size()) {
      absl::StrAppend(
          &line, "save ", save->save(), " of ",
          absl::FormatTime("%Y-%m-%d %H:%M:%S UTC",
                           absl::FromUnixMillis(save->server().saved_at_ms()),
                           absl::UTCTimeZone()),
          ", ", checkpoint::RowsOf(*save), " rows");
    }
    print(line);
  }
}

void PrintLog(const LogContents& log, Print print) {
  for (const auto& [begin, segment] : log.segments) {
    print(begin > log.last
              ? absl::StrCat("  ", segment.path, ": no record that is of use")
              : absl::StrCat("  ", segment.path, ": ", segment.num_records,
                             " whole records from ", begin, " on"));
  }
}

// Prints what is undamaged, and what each kind of repair would lose. Returns
// whether anything is damaged.
bool PrintFindings(const DataFolder& folder, const v1::CheckpointServer& save,
                   const LogContents& log, uint64_t known, Print print) {
  const std::string& path = folder.path();
  const bool is_damaged = !log.damage.ok() || folder.is_counter_lost();
  if (folder.is_counter_lost()) {
    print(absl::StrCat("damage: '", path, "/writes' is missing or damaged"));
  }
  if (!log.damage.ok()) {
    print(absl::StrCat("first damage: ", log.damage.message()));
  }
  const auto print_lost = [&](absl::string_view flag, absl::string_view what,
                              uint64_t whole) {
    print(absl::StrCat("`tfswitch repair ", path, flag, "` ", what, ": ",
                       DescribeLost(folder, known, whole), " are lost"));
  };
  if (is_damaged) {
    print_lost("", "keeps all before the damage", *folder.num_writes());
  }
  print_lost(" --to_save",
             save.saved_at_ms() > 0 ? "goes back to the newest whole save"
                                    : "starts without rows",
             save.num_writes());
  if (!is_damaged) {
    print("nothing is damaged: a server starts without a repair");
  }
  return is_damaged;
}

// Moves the removed records to a folder beside the log, and records in the data
// folder that the log ends with `last`.
absl::Status CutLog(DataFolder* folder, const LogContents& log, bool is_cut,
                    uint64_t known, uint64_t last, Print print) {
  const std::string& path = folder->path();
  const std::string aside = absl::StrCat(
      path, "/log.removed-",
      absl::FormatTime("%Y%m%dT%H%M%E3S", absl::Now(), absl::UTCTimeZone()));
  std::error_code error;
  if (is_cut) {
    TFSWITCH_RETURN_IF_ERROR(PushLog::CutAside(log, aside));
  } else if (!log.segments.empty()) {
    const std::string log_folder = DataFolder::LogOf(path);
    std::filesystem::rename(log_folder, aside, error);
    if (error) return ErrnoStatus("rename", log_folder, error.value());
    TFSWITCH_RETURN_IF_ERROR(SyncFolder(path));
  }
  TFSWITCH_RETURN_IF_ERROR(folder->NoteRepair(known, last));
  print(absl::StrCat("repaired: the log ends with record ", last, "; ",
                     std::filesystem::exists(aside, error)
                         ? absl::StrCat("what was removed is in '", aside, "'")
                         : "there was nothing to remove"));
  return absl::OkStatus();
}

}  // namespace

absl::Status Repair(const std::string& path, RepairKind kind,
                    const ShardOptions& limits, Print print) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::unique_ptr<DataFolder> folder,
                            DataFolder::OpenToRepair(path));
  ShardOptions shard_options = limits;
  shard_options.shard_index = folder->identity().shard_index;
  shard_options.num_shards = folder->identity().num_shards;
  std::atomic<uint64_t>& num_writes = *folder->num_writes();
  shard_options.num_writes = &num_writes;
  const uint64_t applied = num_writes;
  Shard shard(shard_options);
  TFSWITCH_RETURN_IF_ERROR(
      shard.tables().OpenColdFolder(shard_options.cold_folder));
  const std::string state = DataFolder::StateOf(path);
  absl::StatusOr<RecoveredState> recovered = shard.own_state().Recover(state);
  if (absl::IsNotFound(recovered.status())) {
    recovered = RecoveredState();
  }
  if (!recovered.ok()) {
    return absl::Status(
        recovered.status().code(),
        absl::StrCat("there is no save in '", state,
                     "' to go back to: ", recovered.status().message(),
                     ". Restore a checkpoint of `cluster.save` on a server "
                     "with a new data folder"));
  }
  const v1::CheckpointServer& save = recovered->server;
  num_writes = save.num_writes();
  TFSWITCH_RETURN_IF_ERROR(shard.own_state().RecoverGroups(save));
  PushLogOptions log_options;
  log_options.folder = DataFolder::LogOf(path);
  log_options.must_reach = folder->last_needed_record();
  TFSWITCH_ASSIGN_OR_RETURN(
      const LogContents log,
      PushLog::Read(
          log_options, save.last_record() + 1, save.last_record(),
          [&shard](uint64_t number, uint32_t type, absl::string_view payload) {
            return shard.Replay(number, type, payload);
          }));
  // If the file `writes` is lost, only the writes in the save and the log are
  // known.
  const uint64_t known = std::max<uint64_t>(applied, num_writes);

  print(absl::StrCat("data folder '", path, "', shard ",
                     shard_options.shard_index, " of ",
                     shard_options.num_shards));
  PrintSaves(state, recovered->skipped, print);
  PrintLog(log, print);
  const bool is_damaged = PrintFindings(*folder, save, log, known, print);
  const bool is_cut = kind == RepairKind::kCut;
  if (kind == RepairKind::kDryRun || (is_cut && !is_damaged)) {
    return absl::OkStatus();
  }
  return CutLog(folder.get(), log, is_cut, known,
                is_cut ? log.last : save.last_record(), print);
}

}  // namespace tfswitch
