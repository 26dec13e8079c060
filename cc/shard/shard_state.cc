// A save of the state goes the way of a client's save, but alone: one part, in
// a folder of this server's own. The counts of writes are read before the rows
// and the marks after them, so that each write that is not whole in the save is
// counted as lost and is never applied twice.
//
// Recovery tries the newest save first. One that is damaged is skipped, because
// an older model serves its workers better than none; the caller says so. It is
// set aside only after that, so that a folder without a good save is refused
// each time.

#include <cstdint>
#include <memory>
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
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/shard/shard.h"
#include "cc/sync/work_queue_json.h"
#include "cc/wire/codec.h"

namespace tfswitch {

absl::StatusOr<checkpoint::SavedServer> Shard::SaveState(
    const std::string& folder, const Interrupt& interrupt) {
  const WriteGate::Closed closed(gate());
  return SaveClosedState(folder, interrupt);
}

absl::StatusOr<checkpoint::SavedServer> Shard::SaveClosedState(
    const std::string& folder, const Interrupt& interrupt) {
  checkpoint::SavedServer server;
  server.last_record = log_ == nullptr ? last_record_ : log_->last();
  server.saved_at_ms = absl::ToUnixMillis(absl::Now());
  if (options_.num_writes != nullptr) server.num_writes = *options_.num_writes;
  server.rounds = stage_.SaveGroups();
  std::vector<checkpoint::StagedMessage> staged;
  if (log_ != nullptr) {
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
    // The save must not be on the disk before the records that it counts.
    if (!log_->has_failed()) TFSWITCH_RETURN_IF_ERROR(log_->Sync());
  }
  const std::string save_id =
      absl::StrFormat("%016x%016x", server.saved_at_ms, DrawId());
  checkpoint::PartWriter writer(folder, save_id, options_.shard_index,
                                options_.num_shards, /*all_tables=*/true,
                                interrupt);
  if (options_.shard_index == 0) {
    // Before the tables, as SaveShard() does.
    writer.SetWorkQueues(SavedWorkQueuesToJson(coordinator_->SaveWorkQueues()));
  }
  for (const auto& table : Tables()) {
    TFSWITCH_RETURN_IF_ERROR(writer.AddTable(*table));
  }
  TFSWITCH_RETURN_IF_ERROR(writer.AddServer(server, ledger_.Marks(), staged));
  const std::vector<std::string> files = writer.files();
  checkpoint::CommitOptions options;
  options.interrupt = interrupt;
  options.is_own = true;
  const absl::StatusOr<int64_t> number =
      checkpoint::Commit(folder, save_id, {writer.Finish()}, options);
  if (number.ok()) return server;
  const absl::Status clean_up =
      checkpoint::RemoveUnpublished(folder, files, interrupt);
  if (clean_up.ok()) return number.status();
  return absl::Status(
      number.status().code(),
      absl::StrCat(number.status().message(),
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
                        static_cast<int64_t>(checkpoint::RowsOf(manifest)));
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
      recovered.num_tables = loaded.tables.size();
      recovered.num_rows = staged.num_rows();
      return absl::OkStatus();
    };
    const absl::Status status = load();
    if (status.ok()) {
      for (int i = 0; i < newer_than; ++i) {
        TFSWITCH_RETURN_IF_ERROR(checkpoint::SetNewestAside(folder));
      }
      // Files of a save that is set aside stay until the next start.
      if (newer_than == 0) {
        TFSWITCH_RETURN_IF_ERROR(checkpoint::RemoveUnpublished(folder));
      }
      ledger_.Restore(marks);
      last_record_ = recovered.server.last_record;
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
