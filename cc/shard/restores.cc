// Files are read without a lock. After that, each call checks whether its
// restore was given up in the meantime.

#include "cc/shard/restores.h"

#include <algorithm>
#include <new>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

// Checks that no two tables of a client's request get the same name.
absl::Status CheckNames(const v1::StageRestoreRequest& request) {
  if (!v1::StageRestoreRequest::State_IsValid(request.state())) {
    return absl::InvalidArgumentError(
        absl::StrCat("state of a restore: expected 0, 1 or 2, got ",
                     static_cast<int>(request.state())));
  }
  std::set<absl::string_view> names;
  int num_renamed = 0;
  for (const std::string& saved_name : request.tables()) {
    absl::string_view name = saved_name;
    if (const auto renamed = request.new_names().find(saved_name);
        renamed != request.new_names().end()) {
      name = renamed->second;
      ++num_renamed;
    }
    if (!names.insert(name).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "two tables of a restore would get the name '", name, "'"));
    }
  }
  if (num_renamed != request.new_names_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "new names of a restore: expected those of some of its ",
        request.tables_size(), " tables, got ", request.new_names_size(),
        " names, ", num_renamed, " of these"));
  }
  return absl::OkStatus();
}

// Returns the tables to restore, by their new names. NotFound if the checkpoint
// does not have one of them.
absl::StatusOr<std::map<std::string, const v1::CheckpointTable*>>
TablesToRestore(const std::string& path, const v1::CheckpointManifest& manifest,
                const v1::StageRestoreRequest& request) {
  std::map<std::string, const v1::CheckpointTable*> tables;
  for (const auto& [name, saved] : manifest.tables()) {
    if (request.tables().empty()) tables.emplace(name, &saved);
  }
  for (const std::string& name : request.tables()) {
    const auto saved = manifest.tables().find(name);
    if (saved == manifest.tables().end()) {
      std::set<std::string> names;
      for (const auto& [other, table] : manifest.tables()) {
        names.insert(absl::StrCat("'", other, "'"));
      }
      return absl::NotFoundError(
          absl::StrCat("checkpoint '", path, "' has no table '", name,
                       "'; it has: ", absl::StrJoin(names, ", ")));
    }
    const auto new_name = request.new_names().find(name);
    const bool is_renamed = new_name != request.new_names().end();
    tables.emplace(is_renamed ? new_name->second : name, &saved->second);
  }
  return tables;
}

// The identity that a saved table gets if it is restored under this name.
TableIdentity RestoredIdentity(const std::string& name,
                               const v1::CheckpointTable& saved,
                               const v1::StageRestoreRequest& request) {
  const auto& instances = request.shard_instances().empty()
                              ? saved.shard_instances()
                              : request.shard_instances();
  TableIdentity identity{saved.incarnation(),
                         {instances.begin(), instances.end()}};
  const auto given = request.table_incarnations().find(name);
  if (given != request.table_incarnations().end()) {
    identity.incarnation = given->second;
  } else if (identity.incarnation == 0 || name != saved.config().name()) {
    identity.incarnation = request.new_incarnation();
  }
  return identity;
}

absl::Status WithCheckpoint(const std::string& path,
                            const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("checkpoint '", path,
                                                  "': ", status.message()));
}

}  // namespace

void Restore::Finish(const Answer& answer, LoadedRows rows) {
  MutexLock lock(&mutex_);
  is_loading_ = false;
  answer_ = answer;
  rows_ = std::move(rows);
  has_loaded_.NotifyAll();
}

absl::Status Restore::Wait(const Interrupt& interrupt) {
  while (is_loading() && !is_given_up()) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());  // May run Python.
    MutexLock lock(&mutex_);
    if (is_loading_) has_loaded_.WaitFor(&mutex_, absl::Milliseconds(100));
  }
  return absl::OkStatus();
}

absl::Status Restores::GivenUp(const std::string& restore_id) const {
  return absl::AbortedError(absl::StrCat(
      "restore '", restore_id, "' was given up", core_.options.OnShard(),
      ", or another one has begun since"));
}

absl::StatusOr<std::shared_ptr<Restore>> Restores::Begin(
    const std::string& restore_id, bool* is_new) {
  std::vector<std::shared_ptr<Restore>> left_behind;  // Freed after the unlock.
  const auto restore = std::make_shared<Restore>();
  MutexLock lock(&mutex_);
  if (std::find(ended_.begin(), ended_.end(), restore_id) != ended_.end()) {
    return GivenUp(restore_id);
  }
  const auto first = restores_.find(restore_id);
  *is_new = first == restores_.end();
  if (!*is_new) return first->second;
  while (!restores_.empty()) {
    const std::string other = restores_.begin()->first;
    left_behind.push_back(Remove(other));
    left_behind.back()->GiveUp();
  }
  restores_.emplace(restore_id, restore);
  return restore;
}

bool Restores::Keep(const std::string& restore_id, const Restore& restore) {
  MutexLock lock(&mutex_);
  const auto it = restores_.find(restore_id);
  if (it == restores_.end() || it->second.get() != &restore) return false;
  expiry_timer_.Set(restore_id, core_.options.staged_restore_expiry);
  return true;
}

void Restores::Keep(const std::string& restore_id) {
  std::shared_ptr<Restore> restore;
  {
    MutexLock lock(&mutex_);
    const auto it = restores_.find(restore_id);
    if (it == restores_.end()) return;
    restore = it->second;
  }
  if (!restore->is_loading()) Keep(restore_id, *restore);
}

Restore::Answer Restores::Stage(const v1::StageRestoreRequest& request,
                                const Interrupt& interrupt,
                                Progress* progress) {
  const std::string& id = request.restore_id();
  TFSWITCH_RETURN_IF_ERROR(CheckId("restore_id", id));
  TFSWITCH_RETURN_IF_ERROR(CheckNames(request));
  std::shared_ptr<Restore> restore;
  for (bool is_new = false;;) {
    TFSWITCH_ASSIGN_OR_RETURN(restore, Begin(id, &is_new));
    if (is_new) break;
    // A restore with this id exists, so the call is repeated.
    TFSWITCH_RETURN_IF_ERROR(restore->Wait(interrupt));
    Restore::Answer answer = restore->answer();
    if (answer.ok() && Keep(id, *restore)) return answer;
  }
  std::optional<Progress> own_progress;
  if (progress == nullptr) {
    progress = &own_progress.emplace(
        absl::StrCat("restoring from '", absl::CHexEscape(request.path()), "'"),
        /*total_rows=*/0);
  }
  restore->set_counts(progress->counts());
  const auto check = [&]() -> absl::Status {
    return restore->is_given_up() ? GivenUp(id) : interrupt();
  };
  const absl::Time begin = SteadyNow();
  LoadedRows loaded;
  const auto load = [&]() -> Restore::Answer {
    TFSWITCH_ASSIGN_OR_RETURN(const std::string path,
                              core_.options.ResolvePath(request.path()));
    TFSWITCH_ASSIGN_OR_RETURN(
        const v1::CheckpointManifest manifest,
        checkpoint::ReadManifest(path, request.save(),
                                 static_cast<int>(std::min<uint32_t>(
                                     request.newer_than(), INT32_MAX))));
    return Load(path, manifest, request, check, &loaded, progress);
  };
  Restore::Answer answer;
  try {
    answer = load();
  } catch (const std::bad_alloc&) {
    answer = absl::ResourceExhaustedError("no memory for the restored rows");
  }
  if (absl::Status end = check(); answer.ok() && !end.ok()) answer = end;
  loaded.seconds = SecondsSince(begin);
  if (answer.ok()) {
    restore->Finish(answer, std::move(loaded));
    return Keep(id, *restore) ? answer : GivenUp(id);
  }
  {
    // Removes the restore before its loading ends, so that a repeated call that
    // waits for it tries again.
    MutexLock lock(&mutex_);
    const auto it = restores_.find(id);
    if (it != restores_.end() && it->second == restore) restores_.erase(it);
  }
  restore->Finish(answer, LoadedRows());
  return answer;
}

// If a table of this name exists and the saved rows fit its settings, it keeps
// its settings.
absl::StatusOr<TableConfig> Restores::ConfigFor(
    const std::string& path, const std::string& name, const TableConfig& saved,
    const TableCatalogue::TableMap& loaded) const {
  TableConfig config = saved;
  config.name = name;
  if (name != saved.name) TFSWITCH_RETURN_IF_ERROR(config.ValidateNew());
  const auto present = core_.tables.Find(name);
  if (!present.ok()) {
    const absl::Status room = core_.tables.CheckRoom(config, loaded);
    if (!room.ok()) return WithCheckpoint(path, room);
    return config;
  }
  config = (*present)->config();
  if (config.optimizer.is_open) config.optimizer = saved.optimizer;
  if (config.layout == saved.layout) return config;
  return absl::InvalidArgumentError(absl::StrCat(
      "dense table '", saved.name, "' of checkpoint '", path,
      "' holds other variables: ", DescribeDifference(config, saved),
      "; restore it before another model is built, or under another name"));
}

absl::StatusOr<v1::StageRestoreResponse> Restores::Load(
    const std::string& path, const v1::CheckpointManifest& manifest,
    const v1::StageRestoreRequest& request, const Interrupt& interrupt,
    LoadedRows* loaded, Progress* progress) const {
  v1::StageRestoreResponse staged;
  staged.set_save(manifest.save());
  TFSWITCH_ASSIGN_OR_RETURN(const auto tables,
                            TablesToRestore(path, manifest, request));
  for (const auto& [name, saved] : tables) {
    const checkpoint::RowsToRead to_read = checkpoint::FindRowsToRead(
        *saved, core_.options.shard_index, core_.options.num_shards);
    progress->AddTotal(to_read.num_rows);
    loaded->bytes += to_read.bytes;
  }
  loaded->path = path;
  loaded->is_whole = request.tables().empty();
  if (request.tables().empty() && core_.options.shard_index == 0) {
    loaded->work_queues = manifest.work_queues();
    TFSWITCH_RETURN_IF_ERROR(WithCheckpoint(
        path, core_.coordinator->CheckRestore(loaded->work_queues)));
  }
  using checkpoint::LoadedState;
  static_assert(static_cast<int>(LoadedState::kResetIfDifferent) ==
                v1::StageRestoreRequest::RESET_IF_DIFFERENT);
  static_assert(static_cast<int>(LoadedState::kReset) ==
                v1::StageRestoreRequest::RESET);
  const auto state = static_cast<LoadedState>(request.state());
  for (const auto& [name, saved] : tables) {
    staged.add_tables(name);
    TFSWITCH_ASSIGN_OR_RETURN(
        const TableConfig config,
        ConfigFor(path, name, FromProto(saved->config()), loaded->tables));
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                              core_.tables.Make(config));
    core_.limits.ReserveCapacity(*table);
    TableIdentity identity = RestoredIdentity(name, *saved, request);
    if (identity.incarnation != 0) table->set_identity(std::move(identity));
    if (const auto present = core_.tables.Find(name); present.ok()) {
      table->NoteDay((*present)->last_day());
    }
    TFSWITCH_RETURN_IF_ERROR(checkpoint::LoadTable(
        path, *saved, core_.options.shard_index, core_.options.num_shards,
        interrupt, *table, progress, state));
    if (state != LoadedState::kSaved &&
        (state == LoadedState::kReset ||
         !checkpoint::HasStateOf(*saved, *table))) {
      staged.add_reset_tables(name);
    }
    TFSWITCH_RETURN_IF_ERROR(core_.limits.TrimLoaded(*table));
    staged.set_num_rows(staged.num_rows() + table->size());
    loaded->tables.emplace(name, std::move(table));
    // This table may have taken memory that the earlier ones filled.
    for (const auto& [other, each] : loaded->tables) {
      TFSWITCH_RETURN_IF_ERROR(core_.limits.Relieve(*each));
    }
    TFSWITCH_RETURN_IF_ERROR(
        WithCheckpoint(path, core_.limits.CheckRestore(loaded->tables)));
  }
  return staged;
}

std::shared_ptr<Restore> Restores::Remove(const std::string& restore_id) {
  const auto it = restores_.find(restore_id);
  if (it == restores_.end()) return nullptr;
  std::shared_ptr<Restore> removed = std::move(it->second);
  restores_.erase(it);
  expiry_timer_.Set(restore_id, absl::ZeroDuration());
  if (ended_.size() == kMaxEnded) ended_.pop_front();
  ended_.push_back(restore_id);
  return removed;
}

void Restores::Abort(const std::string& restore_id) {
  std::shared_ptr<Restore> dropped;  // Freed after the unlock.
  MutexLock lock(&mutex_);
  dropped = Remove(restore_id);
  if (dropped != nullptr) dropped->GiveUp();
}

absl::StatusOr<bool> Restores::Commit(const std::string& restore_id,
                                      LoadedRows* former) {
  std::shared_ptr<Restore> restore;
  {
    MutexLock lock(&mutex_);
    const auto it = restores_.find(restore_id);
    if (it == restores_.end() || it->second->is_loading()) {
      // The call is repeated, because the answer to the first call was lost.
      if (restore_id == last_committed_) return false;
      return absl::NotFoundError(absl::StrCat(
          "restore '", restore_id, "' is not staged", core_.options.OnShard(),
          "; another restore has begun since, its time was over, or the server "
          "was restarted. Restore again"));
    }
    restore = Remove(restore_id);
    last_committed_ = restore_id;
  }
  LoadedRows& rows = *former;
  rows = restore->TakeRows();
  core_.journal.Tell("restored", {{"path", rows.path},
                                  {"tables", rows.tables.size()},
                                  {"rows", restore->answer()->num_rows()},
                                  {"bytes", rows.bytes},
                                  {"seconds", rows.seconds}});
  Install(&rows);
  return true;
}

void Restores::Install(LoadedRows* loaded) {
  core_.tables.Install(&loaded->tables);
  core_.coordinator->RestoreWorkQueues(loaded->work_queues,
                                       /*voids_open_steps=*/loaded->is_whole);
}

void Restores::AddProgressTo(const std::string& id,
                             v1::GetProgressResponse* response) const {
  MutexLock lock(&mutex_);
  for (const auto& [restore_id, restore] : restores_) {
    const std::shared_ptr<const RowCounts> counts = restore->counts();
    if (counts != nullptr && absl::StartsWith(restore_id, id)) {
      AddCounts(*counts, response);
    }
  }
}

}  // namespace tfswitch
