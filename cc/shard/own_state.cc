// A save has the state of one moment. The gate is closed, so that no row
// changes while snapshots of all tables are taken. The snapshots are written
// while training continues.
//
// The server's own saves have the format of a client's save. They have only
// this server's part, and are in the server's own folder.
//
// Recovery tries the newest save first. It skips damaged saves, because an
// older model is better than none. The caller reports the damaged saves and
// sets them aside.

#include "cc/shard/own_state.h"

#include <atomic>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/shard/row_work.h"
#include "cc/wire/codec.h"

namespace tfswitch {
namespace {

// After a save of all rows, this many saves have only the changes.
constexpr int kMaxChangesSaved = 30;

}  // namespace

absl::StatusOr<v1::CheckpointServer> OwnState::Save(
    const std::string& folder, const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(core_.turn.Take(folder, interrupt));
  const absl::Cleanup end_turn = [this] { core_.turn.Return(); };
  std::optional<WriteGate::Closed> closed(core_.journal.gate());
  return SaveClosed(folder, interrupt, &closed);
}

std::vector<checkpoint::StagedMessage> OwnState::StagedMessages() {
  std::vector<checkpoint::StagedMessage> staged;
  core_.stage.ForEachStaged([&](const StepTag& tag, const std::string& table,
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
  return staged;
}

v1::CheckpointServer OwnState::DescribeServer() {
  v1::CheckpointServer server;
  server.set_last_record(core_.journal.last_record());
  server.set_saved_at_ms(absl::ToUnixMillis(absl::Now()));
  if (core_.options.num_writes != nullptr) {
    server.set_num_writes(*core_.options.num_writes);
  }
  core_.stage.SaveGroups(server.mutable_rounds());
  if (core_.journal.log() != nullptr) {
    *server.mutable_groups() = core_.coordinator->SaveGroups();
  }
  return server;
}

bool OwnState::UpdateBases(
    const std::vector<std::shared_ptr<EmbeddingTable>>& tables) {
  // Either all tables add changes to their files, or all write all rows. So a
  // save of all rows shares no file with older saves.
  bool adds_changes = num_changes_saved_ < kMaxChangesSaved;
  for (const auto& table : tables) {
    SavedBase& base = bases_[table->config().name];
    if (base.table.lock() != table) base = {table, {}};
    adds_changes =
        adds_changes && checkpoint::IsWorthExtending(base.base, *table);
  }
  return adds_changes;
}

absl::StatusOr<v1::CheckpointServer> OwnState::SaveClosed(
    const std::string& folder, const Interrupt& interrupt,
    std::optional<WriteGate::Closed>* closed) {
  core_.turn.AssertTaken();
  const absl::Time begin = SteadyNow();
  const v1::CheckpointServer server = DescribeServer();
  const std::vector<checkpoint::StagedMessage> staged = StagedMessages();
  const std::vector<checkpoint::WriteMark> marks =
      core_.journal.ledger()->Marks();
  const std::string save_id =
      absl::StrFormat("%016x%016x", server.saved_at_ms(), DrawId());
  std::atomic<bool> stops{false};
  checkpoint::PartWriter writer(folder, save_id, core_.options.shard_index,
                                core_.options.num_shards, /*all_tables=*/true,
                                StopsIf(stops));
  const v1::SavedWorkQueues queues = core_.coordinator->SaveWorkQueues();
  const auto tables = core_.tables.All();
  const bool adds_changes = UpdateBases(tables);
  std::map<std::string, ChangeCursor> since;
  for (const auto& [name, base] : bases_) {
    if (adds_changes) since[name] = base.base.cursor;
  }
  TFSWITCH_ASSIGN_OR_RETURN(const Snapshots snapshots,
                            TakeSnapshots(tables, since));
  WriteGate* const gate = closed == nullptr ? nullptr : core_.journal.gate();
  if (closed != nullptr) closed->reset();
  if (core_.options.shard_index == 0) writer.SetWorkQueues(queues);
  Progress progress(absl::StrCat("saving to '", folder, "'"),
                    RowsOf(snapshots));
  const Bases former = bases_;
  Bases bases;
  const auto write = [&]() -> absl::Status {
    for (size_t i = 0; i < tables.size(); ++i) {
      const std::string& name = tables[i]->config().name;
      TFSWITCH_RETURN_IF_ERROR(writer.AddTable(
          *snapshots[i], [&](int64_t rows) { progress.Add(rows); },
          former.at(name).base));
      bases[name] = {tables[i],
                     {snapshots[i]->moment, writer.FilesOf(*tables[i])}};
    }
    return writer.AddServer(server, marks, staged);
  };
  absl::Status written =
      WriteSnapshots(core_.options, snapshots, interrupt, write, gate, &stops);
  TFSWITCH_RETURN_IF_ERROR(
      Publish(folder, save_id, std::move(written), &writer, interrupt));
  bases_ = std::move(bases);
  num_changes_saved_ = adds_changes ? num_changes_saved_ + 1 : 0;
  TellOfSave(core_.journal, snapshots, folder, writer.files(), begin);
  core_.last_save_ms = server.saved_at_ms();
  return server;
}

absl::Status OwnState::Publish(const std::string& folder,
                               const std::string& save_id, absl::Status written,
                               checkpoint::PartWriter* writer,
                               const Interrupt& interrupt) {
  absl::Status status = std::move(written);
  // The records of the writes in the save must be on the disk before the save.
  PushLog* const log = core_.journal.log();
  if (status.ok() && log != nullptr && !log->has_failed()) status = log->Sync();
  if (status.ok()) {
    checkpoint::CommitOptions options;
    options.interrupt = interrupt;
    options.is_own = true;
    status = checkpoint::Commit(folder, save_id, {writer->Finish()}, options)
                 .status();
    if (!status.ok()) bases_.clear();  // It may be published.
  }
  disk_events_.Note(status, folder);
  if (status.ok()) return status;
  const absl::Status clean_up = checkpoint::RemoveUnpublished(folder, save_id);
  if (clean_up.ok() || absl::IsNotFound(clean_up)) return status;
  return absl::Status(
      status.code(),
      absl::StrCat(status.message(),
                   "; and files of this save stay: ", clean_up.message()));
}

absl::Status OwnState::StageAgain(const checkpoint::StagedMessage& message) {
  DecodeScratch scratch;
  PushRequest push;
  if (!ReadPushRequest({message.bytes}, &scratch, &push).ok()) {
    return absl::DataLossError("a staged push is damaged");
  }
  const auto table = core_.tables.Find(push.table);
  if (!table.ok()) return absl::OkStatus();  // The table was dropped.
  TFSWITCH_RETURN_IF_ERROR(CheckPush(push, (*table)->dim()));
  PreparedPush prepared;
  TFSWITCH_RETURN_IF_ERROR(
      PreparePush(core_.options, **table, push, &prepared));
  prepared.batch.number = message.number;
  return core_.stage.Add(push.step, push.table, StagedPush(prepared.batch));
}

absl::StatusOr<RecoveredState> OwnState::Recover(const std::string& folder,
                                                 const Interrupt& interrupt) {
  core_.journal.BeginRecovery();
  RecoveredState recovered;
  absl::Status newest;
  for (int newer_than = 0;; ++newer_than) {
    LoadedRows loaded;
    std::vector<checkpoint::WriteMark> marks;
    std::vector<checkpoint::StagedMessage> staged_pushes;
    std::map<std::string, checkpoint::Files> files;
    const auto load = [&]() -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(
          const v1::CheckpointManifest manifest,
          checkpoint::ReadManifest(folder, /*number=*/0, newer_than));
      if (!manifest.has_server()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "save ", manifest.save(), " in '", folder,
            "' is not one that a server has made of itself; move it away"));
      }
      Progress progress(absl::StrCat("recovering from '", folder, "'"),
                        /*total_rows=*/0);
      TFSWITCH_ASSIGN_OR_RETURN(
          marks, checkpoint::LoadMarks(folder, manifest.server()));
      TFSWITCH_ASSIGN_OR_RETURN(
          staged_pushes, checkpoint::LoadStaged(folder, manifest.server()));
      TFSWITCH_ASSIGN_OR_RETURN(
          const v1::StageRestoreResponse staged,
          restores_.Load(folder, manifest, v1::StageRestoreRequest(), interrupt,
                         &loaded, &progress));
      TFSWITCH_RETURN_IF_ERROR(
          core_.stage.RestoreGroups(manifest.server().rounds()));
      recovered.server = manifest.server();
      for (const auto& [name, table] : manifest.tables()) {
        files[name] = table.files();
      }
      recovered.num_tables = loaded.tables.size();
      recovered.num_rows = staged.num_rows();
      return absl::OkStatus();
    };
    const absl::Status status = load();
    if (status.ok()) {
      core_.journal.ledger()->Restore(marks);
      core_.journal.SetLastRecord(recovered.server.last_record());
      core_.last_save_ms = recovered.server.saved_at_ms();
      // No other thread uses the shard now.
      core_.turn.AssertTaken();
      for (auto& [name, table] : loaded.tables) {
        bases_[name] = {table, {table->EndEpoch(), std::move(files[name])}};
      }
      restores_.Install(&loaded);
      for (const checkpoint::StagedMessage& message : staged_pushes) {
        TFSWITCH_RETURN_IF_ERROR(StageAgain(message));
      }
      return recovered;
    }
    // There is no earlier save.
    if (!newest.ok() && absl::IsNotFound(status)) return newest;
    if (!absl::IsDataLoss(status)) return status;
    newest.Update(status);
    recovered.skipped.emplace_back(status.message());
  }
}

void OwnState::EndRecovery() {
  core_.coordinator->RenewLeases();
  core_.journal.EndRecovery();
}

absl::Status OwnState::StartLog(PushLog* log) {
  Coordinator::Log of_groups;
  if (log != nullptr) {
    of_groups = [this](absl::string_view event) {
      return core_.journal.Log(RecordType::kCoordination, {event}).status();
    };
  }
  core_.coordinator->StartLog(std::move(of_groups), core_.journal.gate());
  return core_.journal.Start(log);
}

}  // namespace tfswitch
