// A save request names the incarnations of the tables that it has listed. So a
// server refuses to save a table that was dropped and made again since then. If
// writing or publishing fails, all servers remove their files of the save.
//
// A save has the rows after one and the same round on all servers. To get that,
// all servers first stop applying rounds; then the save chooses a round that
// none of them has passed. The request has all that a server needs to apply the
// rounds up to the chosen one, so that no worker has to help. A server applies
// rounds again when it has read its rows.
//
// A restore stages the rows on all servers before any server commits them. If
// the newest save is damaged and the caller named no save, the staged rows are
// dropped and the save before it is tried. If there is none, the error of the
// newest save is returned. Tables that exist keep their incarnations, so that
// other processes can continue to use them.

#include "cc/client/checkpoints.h"

#include <algorithm>
#include <chrono>
#include <random>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/interrupt.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

// The longest time for which servers stop applying rounds: from the first pause
// until the last server has read its rows.
constexpr absl::Duration kHold = absl::Seconds(10);
// How long a save waits for other saves on the same servers.
constexpr absl::Duration kLongestWait = absl::Hours(1);

// The ids sort by time. A random part makes them differ between processes.
std::string NewId() {
  const auto now = std::chrono::duration_cast<std::chrono::milliseconds>(
                       std::chrono::system_clock::now().time_since_epoch())
                       .count();
  std::random_device random;
  return absl::StrFormat("%012x%08x", now, random());
}

std::vector<std::string> WithoutRepetition(
    const google::protobuf::RepeatedPtrField<std::string>& given) {
  std::vector<std::string> names(given.begin(), given.end());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  return names;
}

// No progress lines if there is a `progress_id`: its caller asks for the
// progress by that id.
Progress::Options LinesOf(const std::string& progress_id) {
  Progress::Options options;
  options.is_silent = !progress_id.empty();
  return options;
}

absl::Status CheckPath(const std::string& path) {
  if (!path.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("a checkpoint needs a path. Received: ''");
}

// Returns the error that ended a call. If cleaning up failed too, the message
// says why, and names the files or data that were not removed (`stays`).
absl::Status WithCleanUp(const absl::Status& failed,
                         const absl::Status& clean_up,
                         absl::string_view stays) {
  // If the server refused the caller's path or role to both calls, the first
  // call has begun nothing that needs cleaning up.
  const bool is_refused =
      absl::IsPermissionDenied(clean_up) && absl::IsPermissionDenied(failed);
  if (clean_up.ok() || is_refused) return failed;
  return absl::Status(failed.code(),
                      absl::StrCat(failed.message(), "; and ", stays, ": ",
                                   clean_up.message()));
}

// Makes all servers stop applying rounds. Returns the rounds that they have
// applied.
absl::Status PauseRounds(ParameterClient& client, const std::string& save_id,
                         v1::PauseRoundsResponse* held) {
  v1::PauseRoundsRequest hold;
  hold.set_save_id(save_id);
  const absl::Time give_up = SteadyNow() + kLongestWait;
  for (;;) {
    hold.set_hold_ms(absl::ToInt64Milliseconds(kHold));
    // Shard 0 is asked first: of two saves at the same time it lets only one
    // continue.
    TFSWITCH_RETURN_IF_ERROR(client.first_shard().Call(hold, held));
    if (held->waiting_for().empty()) {
      TFSWITCH_RETURN_IF_ERROR(client.Call(hold, held));
    }
    if (held->waiting_for().empty()) return absl::OkStatus();
    if (SteadyNow() >= give_up) {
      return absl::DeadlineExceededError(
          absl::StrCat("a save has waited for ", held->waiting_for(), " for ",
                       absl::FormatDuration(kLongestWait)));
    }
    // Another save is running. Ends this pause, so that workers do not wait
    // until that save has ended.
    hold.set_hold_ms(0);
    TFSWITCH_RETURN_IF_ERROR(client.Call(hold, held));
    TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
    absl::SleepFor(kInterruptInterval);
  }
}

// Makes all servers stop applying rounds, and chooses the round of the save.
absl::Status ChooseSnapshotRound(ParameterClient& client,
                                 v1::SaveShardRequest* request) {
  v1::PauseRoundsResponse held;
  TFSWITCH_RETURN_IF_ERROR(PauseRounds(client, request->save_id(), &held));
  v1::ChooseSnapshotRoundRequest take;
  take.set_save_id(request->save_id());
  *take.mutable_committed() = held.committed();
  take.set_with_work_queues(request->all_tables());
  v1::ChooseSnapshotRoundResponse taken;
  TFSWITCH_RETURN_IF_ERROR(client.first_shard().Call(take, &taken));
  *request->mutable_cut() = taken.cut();
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<v1::CheckpointReport> SaveCheckpoint(
    ParameterClient& client, const v1::SaveRequest& asked) {
  TFSWITCH_RETURN_IF_ERROR(CheckPath(asked.path()));
  const std::vector<std::string> names = WithoutRepetition(asked.tables());
  if (!names.empty() && !asked.dropped_tables().empty()) {
    return absl::InvalidArgumentError(
        "tables to drop can be named only if all others are saved");
  }
  v1::SaveShardRequest request;
  request.set_path(asked.path());
  request.set_save_id(asked.progress_id().empty() ? NewId()
                                                  : asked.progress_id());
  request.set_all_tables(names.empty());
  v1::CheckpointReport report;
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(""));
  for (const TableInfo& info : infos) {
    const std::string& name = info.config.name;
    if (!names.empty() &&
        !std::binary_search(names.begin(), names.end(), name)) {
      continue;
    }
    TFSWITCH_RETURN_IF_ERROR(info.lost);
    if (info.num_shards != client.num_shards()) {
      return absl::FailedPreconditionError(
          absl::StrCat("table '", name, "' is on ", info.num_shards, " of ",
                       client.num_shards(),
                       " servers: it is being made or dropped. Save again"));
    }
    report.add_tables(name);
    report.set_num_rows(report.num_rows() + info.stats.num_rows);
    request.add_tables(name);
    request.add_table_incarnations(info.identity.incarnation);
  }
  for (const std::string& name : names) {
    if (std::find(report.tables().begin(), report.tables().end(), name) !=
        report.tables().end()) {
      continue;
    }
    return absl::NotFoundError(absl::StrCat(
        "no table '", name, "' to save; there are: ",
        absl::StrJoin(infos, ", ", [](std::string* out, const TableInfo& info) {
          absl::StrAppend(out, "'", info.config.name, "'");
        })));
  }
  v1::CommitCheckpointRequest commit;
  commit.set_path(asked.path());
  commit.set_save_id(request.save_id());
  commit.set_keep(asked.keep());
  *commit.mutable_dropped_tables() = asked.dropped_tables();
  Progress progress(absl::StrCat("saving to '", asked.path(), "'"),
                    report.num_rows(), LinesOf(asked.progress_id()));
  const auto save = [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(ChooseSnapshotRound(client, &request));
    TFSWITCH_ASSIGN_OR_RETURN(v1::SaveShardResponse saved,
                              client.SaveShard(request, &progress));
    commit.mutable_manifest_parts()->Swap(saved.mutable_manifest_parts());
    v1::CommitCheckpointResponse committed;
    TFSWITCH_RETURN_IF_ERROR(client.first_shard().Call(commit, &committed));
    report.set_save(committed.save());
    return absl::OkStatus();
  };
  if (const absl::Status failed = save(); !failed.ok()) {
    v1::AbortSaveRequest abort;
    abort.set_path(asked.path());
    abort.set_save_id(request.save_id());
    v1::AbortSaveResponse aborted;
    return WithCleanUp(failed, client.Call(abort, &aborted),
                       "files of this save stay in the folder");
  }
  return report;
}

absl::StatusOr<v1::CheckpointReport> RestoreCheckpoint(
    ParameterClient& client, const v1::RestoreRequest& asked) {
  TFSWITCH_RETURN_IF_ERROR(CheckPath(asked.path()));
  if (asked.save() < 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "save: expected the number of a save, or 0 for the newest, got ",
        asked.save()));
  }
  v1::StageRestoreRequest request;
  request.set_path(asked.path());
  const std::vector<std::string> names = WithoutRepetition(asked.tables());
  request.mutable_tables()->Add(names.begin(), names.end());
  *request.mutable_new_names() = asked.new_names();
  request.set_state(asked.state());
  request.set_save(asked.save());
  request.set_new_incarnation(DrawId());
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<uint64_t> instances,
                            client.ShardInstances());
  request.mutable_shard_instances()->Add(instances.begin(), instances.end());
  // A table that exists, even in part, keeps its incarnation, because other
  // processes know it.
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(""));
  for (const TableInfo& info : infos) {
    if (info.num_shards == 0) continue;
    (*request.mutable_table_incarnations())[info.config.name] =
        info.identity.incarnation;
  }
  v1::CheckpointReport report;
  absl::StatusOr<v1::StageRestoreResponse> staged;
  absl::Status newest;
  for (;; request.set_newer_than(request.newer_than() + 1)) {
    // The id begins with the progress_id, by which GetProgress() finds the
    // restore.
    request.set_restore_id(absl::StrCat(asked.progress_id(), NewId()));
    Progress progress(absl::StrCat("restoring from '", asked.path(), "'"),
                      /*total_rows=*/0, LinesOf(asked.progress_id()));
    staged = client.StageRestore(request, &progress);
    if (staged.ok()) break;
    // If dropping the staged rows fails here, the next StageRestore() drops
    // them.
    const absl::Status dropped =
        client.CommitRestore(request.restore_id(), /*abort=*/true);
    // There is no earlier save.
    if (!newest.ok() && absl::IsNotFound(staged.status())) return newest;
    if (asked.save() != 0 || !absl::IsDataLoss(staged.status())) {
      return WithCleanUp(staged.status(), dropped,
                         "servers keep rows of this restore until the next");
    }
    newest.Update(staged.status());
    report.add_skipped(std::string(staged.status().message()));
  }
  *report.mutable_tables() = staged->tables();
  *report.mutable_reset_tables() = staged->reset_tables();
  report.set_num_rows(staged->num_rows());
  report.set_save(staged->save());
  TFSWITCH_RETURN_IF_ERROR(
      client.CommitRestore(request.restore_id(), /*abort=*/false));
  return report;
}

}  // namespace tfswitch
