// A save of the state goes the way of a client's save, but alone: one part, in
// a folder of this server's own. It is the state of one moment, in which the
// gate is closed and no row changes: then a child process is forked, which has
// a copy of all memory and writes the files.
//
// Recovery tries the newest save first. One that is damaged is skipped, because
// an older model serves its workers better than none; the caller says so, and
// sets it aside.

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/forked_work.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/page_keeper.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/shard/shard.h"
#include "cc/sync/work_queue_json.h"
#include "cc/wire/codec.h"

namespace tfswitch {
namespace {

// Among so many saves one has all rows, and others only what has changed.
constexpr int kMaxChangesSaved = 30;

}  // namespace

absl::StatusOr<checkpoint::SavedServer> Shard::SaveState(
    const std::string& folder, const Interrupt& interrupt) {
  MutexLock lock(&saving_state_);
  std::optional<WriteGate::Closed> closed(gate());
  return SaveClosedState(folder, interrupt, &closed);
}

absl::StatusOr<checkpoint::SavedServer> Shard::SaveClosedState(
    const std::string& folder, const Interrupt& interrupt,
    std::optional<WriteGate::Closed>* closed) {
  checkpoint::SavedServer server;
  server.last_record = log_ == nullptr ? last_record_ : log_->last();
  server.saved_at_ms = absl::ToUnixMillis(absl::Now());
  if (options_.num_writes != nullptr) server.num_writes = *options_.num_writes;
  server.rounds = stage_.SaveGroups();
  if (log_ != nullptr) server.groups = coordinator_->SaveGroups();
  std::vector<checkpoint::StagedMessage> staged;
  stage_.ForEachStaged([&](const StepTag& tag, const std::string& table,
                           const StagedPush& each) {
    PushRequest push;
    static_cast<GradientBatch&>(push) = each;
    push.table = table;
    push.keys_are_unique = true;
    push.step = tag;
    checkpoint::StagedMessage& message = staged.emplace_back();
    message.number = each.number;
    message.bytes.resize(PushRequestBytes(push));
    WritePushRequest(push, message.bytes.data());
  });
  const std::vector<checkpoint::WriteMark> marks = ledger_.Marks();
  const std::string save_id =
      absl::StrFormat("%016x%016x", server.saved_at_ms, DrawId());
  checkpoint::PartWriter writer(folder, save_id, options_.shard_index,
                                options_.num_shards, /*all_tables=*/true,
                                /*interrupt=*/Never);
  writer.BeginServer(server);
  if (options_.shard_index == 0) {
    writer.SetWorkQueues(SavedWorkQueuesToJson(coordinator_->SaveWorkQueues()));
  }
  const std::vector<std::shared_ptr<EmbeddingTable>> tables = Tables();
  int64_t num_rows = 0;
  for (const auto& table : tables) num_rows += table->size();
  Progress progress(absl::StrCat("saving to '", folder, "'"), num_rows);
  const auto add = [&](int64_t rows) { progress.Add(rows); };
  const auto write =
      [&](const ForkedWork::Report& report) -> absl::StatusOr<std::string> {
    for (const auto& table : tables) {
      TFSWITCH_RETURN_IF_ERROR(writer.WriteTable(*table, report));
    }
    TFSWITCH_RETURN_IF_ERROR(writer.WriteServer(marks, staged));
    return writer.WrittenFiles();
  };
  std::map<std::string, SavedBase> bases;
  // All tables get new files at the same time, so that there are saves without
  // files in common.
  bool adds_changes = num_changes_saved_ < kMaxChangesSaved;
  for (const auto& table : tables) {
    SavedBase& base = bases_[table->config().name];
    if (base.table.lock() != table) base = {table, {}};
    adds_changes =
        adds_changes && checkpoint::IsWorthExtending(base.base, *table);
  }
  for (const auto& table : tables) {
    const std::string& name = table->config().name;
    bases[name] = {table, {table->EndEpoch(), {}}};
    // Lookups may make rows while the gate is closed.
    table->Hold();
    writer.BeginTable(*table, adds_changes ? &bases_[name].base : nullptr);
  }
  // It would copy what the child has.
  PageKeeper::Get().ForgetJoins();
  const uint64_t max_copied = options_.max_save_bytes != 0
                                  ? options_.max_save_bytes
                                  : AvailableMemoryBytes() / 2;
  // Training goes before a save, unless writes wait for it.
  auto child = ForkedWork::Start(closed == nullptr ? 0 : 15,
                                 [&](const ForkedWork::Report& report) {
                                   for (const auto& table : tables)
                                     table->ResetAfterFork();
                                   return write(report);
                                 });
  for (const auto& table : tables) table->Release();
  absl::Status status = child.status();
  if (child.ok()) {
    if (closed != nullptr) closed->reset();
    const absl::StatusOr<std::string> files =
        (*child)->Wait(add, [&]() -> absl::Status {
          if (closed != nullptr && !closed->has_value() &&
              (*child)->copied_bytes() > max_copied) {
            closed->emplace(gate());
          }
          return interrupt();
        });
    status = files.ok() ? writer.TakeFiles(*files) : files.status();
    child->reset();  // It has ended, whatever the status.
    for (const auto& table : tables) table->JoinPages();
  } else {
    std::fprintf(stderr,
                 "tfswitch-server: warning: writes wait while the state is "
                 "saved: %s\n",
                 std::string(status.message()).c_str());
    status = interrupt();
    if (status.ok()) status = write(add).status();
  }
  // The save must not be on the disk before the records that it counts.
  if (status.ok() && log_ != nullptr && !log_->has_failed()) {
    status = log_->Sync();
  }
  if (status.ok()) {
    checkpoint::CommitOptions options;
    options.interrupt = interrupt;
    options.is_own = true;
    status = checkpoint::Commit(folder, save_id, {writer.Finish()}, options)
                 .status();
    if (!status.ok()) bases_.clear();  // It may have been published.
  }
  if (status.ok()) {
    for (const auto& table : tables) {
      bases[table->config().name].base.files = writer.FilesOf(*table);
    }
    bases_ = std::move(bases);
    num_changes_saved_ = adds_changes ? num_changes_saved_ + 1 : 0;
    return server;
  }
  const absl::Status clean_up = checkpoint::RemoveUnpublished(folder, save_id);
  if (clean_up.ok() || absl::IsNotFound(clean_up)) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   "; and files of this save stay: ", clean_up.message()));
}

absl::StatusOr<Shard::RecoveredState> Shard::RecoverState(
    const std::string& folder, const Interrupt& interrupt) {
  is_recovering_ = true;
  RecoveredState recovered;
  absl::Status newest;
  for (int newer_than = 0;; ++newer_than) {
    Loaded loaded;
    std::vector<checkpoint::WriteMark> marks;
    std::vector<checkpoint::StagedMessage> staged_pushes;
    std::map<std::string, std::vector<checkpoint::RowFile>> files;
    const auto load = [&]() -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(
          const checkpoint::Manifest manifest,
          checkpoint::ReadManifest(folder, /*number=*/0, newer_than));
      if (!manifest.server.has_value()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "save ", manifest.number, " in '", folder,
            "' is not one that a server has made of itself; move it away"));
      }
      Progress progress(absl::StrCat("recovering from '", folder, "'"),
                        /*total_rows=*/0);
      TFSWITCH_ASSIGN_OR_RETURN(
          marks, checkpoint::LoadMarks(folder, *manifest.server));
      TFSWITCH_ASSIGN_OR_RETURN(
          staged_pushes, checkpoint::LoadStaged(folder, *manifest.server));
      TFSWITCH_ASSIGN_OR_RETURN(
          const v1::StageRestoreResponse staged,
          Load(folder, manifest, v1::StageRestoreRequest(), interrupt, &loaded,
               &progress));
      TFSWITCH_RETURN_IF_ERROR(stage_.RestoreGroups(manifest.server->rounds));
      recovered.server = *manifest.server;
      for (const auto& [name, table] : manifest.tables) {
        files[name] = table.files;
      }
      recovered.num_tables = loaded.tables.size();
      recovered.num_rows = staged.num_rows();
      return absl::OkStatus();
    };
    const absl::Status status = load();
    if (status.ok()) {
      ledger_.Restore(marks);
      last_record_ = recovered.server.last_record;
      {
        MutexLock lock(&saving_state_);
        for (auto& [name, table] : loaded.tables) {
          bases_[name] = {table, {table->EndEpoch(), std::move(files[name])}};
        }
      }
      {
        MutexLock lock(&mutex_);
        PutInPlace(&loaded);
      }
      for (const checkpoint::StagedMessage& message : staged_pushes) {
        TFSWITCH_RETURN_IF_ERROR(StageAgain(message));
      }
      return recovered;
    }
    // There is no save before it.
    if (!newest.ok() && absl::IsNotFound(status)) return newest;
    if (!absl::IsDataLoss(status)) return status;
    newest.Update(status);
    recovered.skipped.emplace_back(status.message());
  }
}

}  // namespace tfswitch
