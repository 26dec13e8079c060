// Files are written without a lock. After that, each call checks whether its
// save was given up in the meantime.

#include "cc/shard/saves.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

bool SavesAll(const v1::SaveShardRequest& request) {
  return request.all_tables() || request.tables().empty();
}

}  // namespace

absl::Status Save::CheckLocked() const {
  if (!is_given_up_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat("save '", id_, "' was given up"));
}

std::optional<v1::CheckpointPart> Save::AnswerFor(
    const std::string& folder) const {
  MutexLock lock(&mutex_);
  if (is_given_up_ || folder_ != folder) return std::nullopt;
  return part_;
}

absl::StatusOr<v1::CheckpointPart> Save::Finish(
    const std::string& folder, absl::Time expiry,
    checkpoint::PartWriter* writer) {
  MutexLock lock(&mutex_);
  TFSWITCH_RETURN_IF_ERROR(CheckLocked());
  if (part_.has_value() && folder_ == folder) return *part_;
  folder_ = folder;
  files_ = writer->files();
  part_ = writer->Finish();
  expiry_ = expiry;
  return *part_;
}

absl::Status Save::End(const Interrupt& interrupt) {
  std::string folder;
  std::vector<std::string> files;
  {
    MutexLock lock(&mutex_);
    is_given_up_ = true;
    // The folder in which the save is, even if the caller now names a different
    // one.
    folder = folder_;
    files = files_;
  }
  TFSWITCH_RETURN_IF_ERROR(
      checkpoint::RemoveUnpublished(folder, files, interrupt));
  NotePublished();
  return absl::OkStatus();
}

std::shared_ptr<Save> Saves::Find(const std::string& save_id) const {
  MutexLock lock(&mutex_);
  for (const auto& save : saves_) {
    if (save->id() == save_id) return save;
  }
  return nullptr;
}

std::shared_ptr<Save> Saves::FindOrMake(const std::string& save_id) {
  if (auto save = Find(save_id)) return save;
  const auto made = std::make_shared<Save>(save_id);
  MutexLock lock(&mutex_);
  for (const auto& save : saves_) {
    if (save->id() == save_id) return save;  // Another thread made it.
  }
  const auto is_unused = [](const auto& save) { return save.use_count() == 1; };
  while (saves_.size() >= kMaxSaves) {
    auto forgotten =
        std::find_if(saves_.begin(), saves_.end(), [&](const auto& save) {
          return is_unused(save) && !save->has_files();
        });
    if (forgotten == saves_.end()) {
      forgotten = std::find_if(saves_.begin(), saves_.end(), is_unused);
    }
    if (forgotten == saves_.end()) break;
    saves_.erase(forgotten);
  }
  return saves_.emplace_back(made);
}

absl::StatusOr<std::vector<std::shared_ptr<EmbeddingTable>>>
Saves::TablesToSave(const v1::SaveShardRequest& request) {
  std::vector<std::shared_ptr<EmbeddingTable>> tables;
  if (request.tables().empty()) tables = core_.tables.All();
  for (int i = 0; i < request.tables_size(); ++i) {
    const bool has_incarnation = i < request.table_incarnations_size();
    TFSWITCH_ASSIGN_OR_RETURN(
        auto table, core_.tables.Find(
                        {request.tables(i),
                         has_incarnation ? request.table_incarnations(i) : 0}));
    if (std::find(tables.begin(), tables.end(), table) != tables.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "save '", absl::CHexEscape(request.save_id()), "' names table '",
          table->config().name, "' twice; name each table once"));
    }
    tables.push_back(std::move(table));
  }
  if (SavesAll(request)) core_.tables.WarnOfUnsaved();
  return tables;
}

absl::StatusOr<v1::CheckpointPart> Saves::Write(
    const v1::SaveShardRequest& request, const Interrupt& interrupt,
    Progress* progress) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", request.save_id()));
  TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                            core_.options.ResolvePath(request.path()));
  EndExpired(interrupt);
  TFSWITCH_ASSIGN_OR_RETURN(const auto tables, TablesToSave(request));
  const std::shared_ptr<Save> save = FindOrMake(request.save_id());
  TFSWITCH_RETURN_IF_ERROR(save->Check());
  // The call is repeated, because the answer to the first call was lost.
  if (auto answer = save->AnswerFor(path); answer.has_value()) return *answer;
  std::optional<Progress> own_progress;
  if (progress == nullptr) {
    int64_t num_rows = 0;
    for (const auto& table : tables) num_rows += table->size();
    progress = &own_progress.emplace(
        absl::StrCat("saving to '", absl::CHexEscape(request.path()), "'"),
        num_rows);
  }
  save->set_counts(progress->counts());
  const auto check = [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(save->Check());
    return interrupt();
  };
  const absl::Time begin = SteadyNow();
  std::atomic<bool> stops{false};
  checkpoint::PartWriter writer(
      path, request.save_id(), core_.options.shard_index,
      core_.options.num_shards, SavesAll(request), StopsIf(stops));
  TFSWITCH_RETURN_IF_ERROR(core_.turn.Take(request.save_id(), check));
  const absl::Cleanup end_turn = [this] { core_.turn.Return(); };
  core_.turn.AssertTaken();
  const absl::StatusOr<Snapshots> snapshots =
      TakeAtCut(request, tables, check, &writer);
  if (absl::IsAborted(snapshots.status())) {
    // The call is repeated, and the first call has ended in the meantime.
    if (auto answer = save->AnswerFor(path); answer.has_value()) return *answer;
  }
  TFSWITCH_RETURN_IF_ERROR(snapshots.status());
  const auto write = [&]() -> absl::Status {
    for (const auto& snapshot : *snapshots) {
      TFSWITCH_RETURN_IF_ERROR(writer.AddTable(
          *snapshot, [&](int64_t rows) { progress->Add(rows); }));
    }
    return absl::OkStatus();
  };
  const absl::Status written = WriteSnapshots(
      core_.options, *snapshots, check, write, core_.journal.gate(), &stops);
  disk_events_.Note(written, path);
  TFSWITCH_RETURN_IF_ERROR(written);
  TFSWITCH_RETURN_IF_ERROR(interrupt());
  TellOfSave(core_.journal, *snapshots, path, writer.files(), begin);
  core_.last_save_ms = absl::ToUnixMillis(absl::Now());
  return save->Finish(path, SteadyNow() + core_.options.save_expiry, &writer);
}

absl::StatusOr<Snapshots> Saves::TakeAtCut(
    const v1::SaveShardRequest& request,
    const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
    const Interrupt& check, checkpoint::PartWriter* writer) {
  // No round is applied while `kept` is set.
  std::optional<RoundHold::Kept> kept;
  if (request.has_cut()) {
    kept.emplace(&core_.round_hold, request.save_id());
    if (!kept->is_held()) return rounds_.NotHeld(request.save_id());
    TFSWITCH_RETURN_IF_ERROR(rounds_.ApplyUpTo(request.cut(), check));
  }
  const WriteGate::Closed closed(core_.journal.gate());
  for (const auto& table : tables) {
    if (core_.tables.IsPresent(*table)) continue;
    return absl::AbortedError(
        absl::StrCat("table '", table->config().name,
                     "' was dropped or restored while the save waited for "
                     "another one. Save again"));
  }
  if (SavesAll(request) && core_.options.shard_index == 0) {
    const std::optional<v1::SavedWorkQueues> work_queues =
        kept.has_value() ? kept->work_queues()
                         : core_.coordinator->SaveWorkQueues();
    // The hold of this save has ended, and that of another save has begun.
    if (!work_queues.has_value()) return rounds_.NotHeld(request.save_id());
    writer->SetWorkQueues(*work_queues);
  }
  return TakeSnapshots(tables, /*since=*/{});
}

absl::StatusOr<int64_t> Saves::Commit(
    const v1::CommitCheckpointRequest& request, const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", request.save_id()));
  TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                            core_.options.ResolvePath(request.path()));
  checkpoint::CommitOptions options;
  if (request.keep() != 0) {
    options.keep =
        static_cast<int>(std::min<uint32_t>(request.keep(), INT32_MAX));
  }
  options.dropped_tables = {request.dropped_tables().begin(),
                            request.dropped_tables().end()};
  options.interrupt = interrupt;
  const std::shared_ptr<Save> save = Find(request.save_id());
  if (save != nullptr) {
    options.own_part = save->AnswerFor(path).value_or(v1::CheckpointPart());
  }
  absl::StatusOr<int64_t> number = checkpoint::Commit(
      path, request.save_id(),
      {request.manifest_parts().begin(), request.manifest_parts().end()},
      options);
  if (number.ok()) {
    if (save != nullptr) save->NotePublished();
    core_.journal.Tell("save_published", {{"path", path}, {"number", *number}});
  }
  return number;
}

absl::Status Saves::Abort(const std::string& path, const std::string& save_id,
                          const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(CheckId("save_id", save_id));
  core_.round_hold.End(save_id);
  TFSWITCH_RETURN_IF_ERROR(core_.options.ResolvePath(path).status());
  return FindOrMake(save_id)->End(interrupt);
}

void Saves::EndExpired(const Interrupt& interrupt) {
  std::vector<std::shared_ptr<Save>> expired;
  {
    MutexLock lock(&mutex_);
    for (const auto& save : saves_) {
      if (save->is_expired(SteadyNow())) expired.push_back(save);
    }
  }
  for (const auto& save : expired) {
    const absl::Status status = save->End(interrupt);
    if (status.ok()) continue;
    // The present save continues. A later save tries to remove these files
    // again.
    save->set_expiry(SteadyNow() + core_.options.save_expiry);
    LogMessage(LogLevel::kWarning, {"files_left"},
               absl::StrCat("files of save '", save->id(),
                            "' stay: ", status.message()));
  }
}

void Saves::AddProgressTo(const std::string& id,
                          v1::GetProgressResponse* response) const {
  MutexLock lock(&mutex_);
  for (const auto& save : saves_) {
    const std::shared_ptr<const RowCounts> counts = save->counts();
    if (counts != nullptr && absl::StartsWith(save->id(), id)) {
      AddCounts(*counts, response);
    }
  }
}

}  // namespace tfswitch
