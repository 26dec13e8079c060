// A save shows one moment: the gate is closed, so that no row changes, and
// snapshots of all tables are taken. The snapshots are written while training
// continues.
//
// A save of the state has the format of a client's save, but only this server's
// part, and is in the server's own folder.
//
// Recovery tries the newest save first. It skips damaged saves, because workers
// are better served by an older model than by none. The caller reports them and
// sets them aside.

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/shard/shard.h"
#include "cc/wire/codec.h"
#include "cc/wire/json.h"

namespace tfswitch {
namespace {

// After a save of all rows, this many saves have only what has changed.
constexpr int kMaxChangesSaved = 30;

// Saves run with low priority, so that training is not slowed down.
constexpr int kNiceness = 10;

constexpr std::chrono::milliseconds kPollInterval(10);

}  // namespace

absl::StatusOr<Shard::Snapshots> Shard::TakeSnapshots(
    const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
    const std::map<std::string, ChangeCursor>& since) {
  Snapshots snapshots;
  // Lookups may make rows even while the gate is closed.
  for (const auto& table : tables) table->Hold();
  const absl::Cleanup release = [&tables] {
    for (const auto& table : tables) table->Release();
  };
  try {
    for (const auto& table : tables) {
      const auto from = since.find(table->config().name);
      TFSWITCH_ASSIGN_OR_RETURN(
          snapshots.emplace_back(),
          table->TakeSnapshot(from != since.end() ? from->second
                                                  : ChangeCursor()));
    }
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory to save rows");
  }
  return snapshots;
}

absl::Status Shard::WriteSnapshots(const Snapshots& snapshots,
                                   const Interrupt& interrupt,
                                   absl::FunctionRef<absl::Status()> write,
                                   bool may_close_gate,
                                   std::atomic<bool>* stops) const {
  const uint64_t max_bytes = options_.max_save_bytes != 0
                                 ? options_.max_save_bytes
                                 : AvailableMemoryBytes() / 2;
  TFSWITCH_RETURN_IF_ERROR(interrupt());
  const std::thread::id caller = std::this_thread::get_id();
  // If no thread can be started, get() calls the function on this one.
  std::future<absl::Status> written =
      std::async(std::launch::async | std::launch::deferred, [&] {
        if (std::this_thread::get_id() == caller) return write();
        errno = 0;
        // If this fails, the save has normal priority.
        if (nice(kNiceness) == -1 && errno != 0) errno = 0;
        return write();
      });
  std::optional<WriteGate::Closed> closed;
  absl::Status interrupted;
  do {
    if (interrupted.ok()) interrupted = interrupt();
    if (!interrupted.ok()) *stops = true;
    uint64_t bytes = 0;
    for (const auto& snapshot : snapshots) {
      bytes += static_cast<uint64_t>(snapshot->kept_bytes());
    }
    if (may_close_gate && bytes > max_bytes && !closed.has_value()) {
      closed.emplace(gate());
    }
  } while (written.wait_for(kPollInterval) == std::future_status::timeout);
  try {
    const absl::Status status = written.get();
    return interrupted.ok() ? status : interrupted;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory to save rows");
  }
}

void Shard::TellOfSave(const Snapshots& snapshots, const std::string& folder,
                       const std::vector<std::string>& files,
                       absl::Time begin) const {
  int64_t num_rows = 0;
  for (const auto& snapshot : snapshots) num_rows += snapshot->num_rows;
  uint64_t bytes = 0;
  for (const std::string& file : files) {
    const auto stamp = StampOf(absl::StrCat(folder, "/", file));
    if (stamp.ok()) bytes += static_cast<uint64_t>(stamp->size);
  }
  Tell("saved", {{"path", folder},
                 {"tables", snapshots.size()},
                 {"rows", num_rows},
                 {"bytes", bytes},
                 {"seconds", SecondsSince(begin)}});
}

absl::Status Shard::CheckNotSaving() const {
  if (saver_ != std::this_thread::get_id()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this thread is saving already; a handler of a signal must not save or "
      "restore then");
}

absl::Status Shard::LockSaves(const std::string& save,
                              const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(CheckNotSaving());
  const absl::Time begin = SteadyNow();
  const auto lock = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!saving_.TryLock()) return false;
    if (!round_hold_.IsHeldByOther(save)) return true;
    saving_.Unlock();
    return false;
  };
  for (bool is_said = false; !lock();) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    absl::SleepFor(absl::Milliseconds(10));
    if (is_said || SteadyNow() - begin < absl::Seconds(1)) continue;
    is_said = true;
    LogMessage(LogLevel::kInfo, {"save_waits"},
               absl::StrCat("save '", absl::CHexEscape(save),
                            "' waits for another save"));
  }
  saver_ = std::this_thread::get_id();
  return absl::OkStatus();
}

void Shard::UnlockSaves() {
  saver_ = std::thread::id();
  saving_.Unlock();
}

absl::StatusOr<v1::CheckpointServer> Shard::SaveState(
    const std::string& folder, const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(LockSaves(folder, interrupt));
  const absl::Cleanup unlock = [this] { UnlockSaves(); };
  saving_.AssertHeld();
  std::optional<WriteGate::Closed> closed(gate());
  return SaveClosedState(folder, interrupt, &closed);
}

std::vector<checkpoint::StagedMessage> Shard::StagedMessages() {
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
  return staged;
}

absl::StatusOr<v1::CheckpointServer> Shard::SaveClosedState(
    const std::string& folder, const Interrupt& interrupt,
    std::optional<WriteGate::Closed>* closed) {
  const absl::Time begin = SteadyNow();
  v1::CheckpointServer server;
  server.set_last_record(log_ == nullptr ? last_record_ : log_->last());
  server.set_saved_at_ms(absl::ToUnixMillis(absl::Now()));
  if (options_.num_writes != nullptr) {
    server.set_num_writes(*options_.num_writes);
  }
  stage_.SaveGroups(server.mutable_rounds());
  if (log_ != nullptr) *server.mutable_groups() = coordinator_->SaveGroups();
  const std::vector<checkpoint::StagedMessage> staged = StagedMessages();
  const std::vector<checkpoint::WriteMark> marks = ledger_.Marks();
  const std::string save_id =
      absl::StrFormat("%016x%016x", server.saved_at_ms(), DrawId());
  std::atomic<bool> stops{false};
  checkpoint::PartWriter writer(
      folder, save_id, options_.shard_index, options_.num_shards,
      /*all_tables=*/true, [&]() -> absl::Status {
        if (stops) return absl::CancelledError("the save was given up");
        return absl::OkStatus();
      });
  const v1::SavedWorkQueues queues = coordinator_->SaveWorkQueues();
  const std::vector<std::shared_ptr<EmbeddingTable>> tables = Tables();
  // All tables get base files in the same save, so that this save shares no
  // file with older ones.
  bool adds_changes = num_changes_saved_ < kMaxChangesSaved;
  for (const auto& table : tables) {
    SavedBase& base = bases_[table->config().name];
    if (base.table.lock() != table) base = {table, {}};
    adds_changes =
        adds_changes && checkpoint::IsWorthExtending(base.base, *table);
  }
  std::map<std::string, checkpoint::TableBase> former;
  std::map<std::string, ChangeCursor> since;
  for (const auto& [name, base] : bases_) {
    former[name] = base.base;
    if (adds_changes) since[name] = base.base.cursor;
  }
  TFSWITCH_ASSIGN_OR_RETURN(const Snapshots snapshots,
                            TakeSnapshots(tables, since));
  if (closed != nullptr) closed->reset();
  if (options_.shard_index == 0) writer.SetWorkQueues(queues);
  int64_t num_rows = 0;
  for (const auto& snapshot : snapshots) num_rows += snapshot->num_rows;
  Progress progress(absl::StrCat("saving to '", folder, "'"), num_rows);
  std::map<std::string, SavedBase> bases;
  const auto write = [&]() -> absl::Status {
    for (size_t i = 0; i < tables.size(); ++i) {
      const std::string& name = tables[i]->config().name;
      TFSWITCH_RETURN_IF_ERROR(writer.AddTable(
          *snapshots[i], [&](int64_t rows) { progress.Add(rows); },
          former.at(name)));
      bases[name] = {tables[i],
                     {snapshots[i]->moment, writer.FilesOf(*tables[i])}};
    }
    return writer.AddServer(server, marks, staged);
  };
  absl::Status status =
      WriteSnapshots(snapshots, interrupt, write,
                     /*may_close_gate=*/closed != nullptr, &stops);
  // The records that the save includes must be on the disk before the save.
  if (status.ok() && log_ != nullptr && !log_->has_failed()) {
    status = log_->Sync();
  }
  if (status.ok()) {
    checkpoint::CommitOptions options;
    options.interrupt = interrupt;
    options.is_own = true;
    status = checkpoint::Commit(folder, save_id, {writer.Finish()}, options)
                 .status();
    if (!status.ok()) bases_.clear();  // The save may be published or not.
  }
  NoteDisk(status, folder, &is_state_disk_full_);
  if (status.ok()) {
    bases_ = std::move(bases);
    num_changes_saved_ = adds_changes ? num_changes_saved_ + 1 : 0;
    TellOfSave(snapshots, folder, writer.files(), begin);
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
          Load(folder, manifest, v1::StageRestoreRequest(), interrupt, &loaded,
               &progress));
      TFSWITCH_RETURN_IF_ERROR(
          stage_.RestoreGroups(manifest.server().rounds()));
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
      ledger_.Restore(marks);
      last_record_ = recovered.server.last_record();
      {
        MutexLock lock(&saving_);
        for (auto& [name, table] : loaded.tables) {
          bases_[name] = {table, {table->EndEpoch(), std::move(files[name])}};
        }
      }
      {
        MutexLock lock(&mutex_);
        InstallRestored(&loaded);
      }
      for (const checkpoint::StagedMessage& message : staged_pushes) {
        TFSWITCH_RETURN_IF_ERROR(StageAgain(message));
      }
      return recovered;
    }
    // No earlier save exists.
    if (!newest.ok() && absl::IsNotFound(status)) return newest;
    if (!absl::IsDataLoss(status)) return status;
    newest.Update(status);
    recovered.skipped.emplace_back(status.message());
  }
}

}  // namespace tfswitch
