// Before the replay the counter of writes is set to the number of writes in the
// save, and the replay increments it. The number of lost writes is the former
// value of the counter minus the new one.

#include "cc/recovery/state_keeper.h"

#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

void Warn(absl::string_view event, absl::string_view message) {
  // Clients cannot cause these lines, so a high limit is safe. One start may
  // write many of them.
  LogMessage(LogLevel::kWarning, {event, /*burst=*/1000, /*per_second=*/10},
             message);
}

std::string Format(absl::Time time) {
  return absl::FormatTime("%Y-%m-%d%ET%H:%M:%SZ", time, absl::UTCTimeZone());
}

}  // namespace

std::string DescribeLost(const DataFolder& folder, uint64_t applied,
                         uint64_t whole) {
  return absl::StrCat(folder.is_counter_exact() ? "" : "at least ",
                      applied > whole ? applied - whole : 0,
                      " acknowledged writes");
}

absl::Status StateKeeper::Recover(const Shard::Interrupt& interrupt) {
  const absl::Time begin = SteadyNow();
  const std::string state = DataFolder::StateOf(folder_.path());
  std::atomic<uint64_t>& num_writes = *folder_.num_writes();
  const uint64_t applied = num_writes;
  recovers_to_ = applied;
  const auto recovery_ended = absl::MakeCleanup([this] { recovers_to_ = 0; });
  absl::StatusOr<RecoveredState> recovered =
      shard_.own_state().Recover(state, interrupt);
  const bool is_first = absl::IsNotFound(recovered.status());
  if (is_first) recovered = RecoveredState();
  int64_t num_replayed = 0;
  absl::Status status = recovered.status();
  if (status.ok()) {
    num_writes = recovered->server.num_writes();
    status = OpenLog(*recovered, interrupt, &num_replayed);
    shard_.own_state().EndRecovery();
    if (status.ok()) status = folder_.NoteLog(options_.has_log);
  }
  if (!status.ok()) {
    std::string remedy = ". To start without these rows, move the folder away";
    if (absl::IsDataLoss(status) && recovered.ok()) {
      // Only the log is damaged; the rows before its damage are recovered.
      remedy =
          absl::StrCat("; ", DescribeLost(folder_, applied, num_writes),
                       " from there on are lost. ", RepairHint(folder_.path()));
    } else if (!absl::IsDataLoss(status) &&
               !absl::IsFailedPrecondition(status)) {
      remedy = ". The rows are still there: start again when that is mended";
    }
    num_writes = applied;  // A retry needs the former value.
    return absl::Status(status.code(),
                        absl::StrCat("cannot recover from '", folder_.path(),
                                     "': ", status.message(), remedy));
  }
  folder_.NoteRecovery();
  const uint64_t now = num_writes;
  v1::Recovery report;
  report.set_lost_writes(applied > now ? applied - now : 0);
  report.set_are_at_least(!folder_.is_counter_exact());
  saved_at_ms_ = recovered->server.saved_at_ms();
  const absl::Time saved_at =
      absl::FromUnixMillis(recovered->server.saved_at_ms());
  if (!is_first || num_replayed > 0) {
    report.set_saved_at_ms(recovered->server.saved_at_ms());
    shard_.own_state().SetReport(report);
  }
  for (const std::string& why : recovered->skipped) {
    Warn("save_damaged", absl::StrCat("a newer save is skipped: ", why));
  }
  if (is_first && num_replayed == 0 && report.lost_writes() == 0) {
    return absl::OkStatus();
  }
  int64_t num_rows = 0;
  const auto tables = shard_.tables().All();
  for (const auto& table : tables) num_rows += table->size();
  LogServerEvent(
      report.lost_writes() > 0 ? LogLevel::kWarning : LogLevel::kInfo,
      "recovered",
      {{"tables", tables.size()},
       {"rows", num_rows},
       {"saved", is_first ? "never" : Format(saved_at)},
       {"log_records", num_replayed},
       {"lost_writes", report.lost_writes()},
       {"lost_writes_are", report.are_at_least() ? "a_minimum" : "exact"},
       {"seconds", SecondsSince(begin)}});
  return absl::OkStatus();
}

absl::Status StateKeeper::SetSkippedAside(
    const RecoveredState& recovered) const {
  const std::string state = DataFolder::StateOf(folder_.path());
  for (size_t i = 0; i < recovered.skipped.size(); ++i) {
    TFSWITCH_RETURN_IF_ERROR(checkpoint::SetNewestAside(state));
  }
  const auto damaged = checkpoint::SetDamagedAside(state);
  absl::Status cleaned = damaged.status();
  if (damaged.ok() && !damaged->empty()) {
    Warn("save_damaged",
         absl::StrCat("former saves are set aside, as nobody can read them: ",
                      absl::StrJoin(*damaged, "; ")));
  } else if (damaged.ok() && recovered.skipped.empty()) {
    // The files of a save that was set aside stay until the next start.
    cleaned = checkpoint::RemoveUnpublished(state);
  }
  // Remaining files do no harm, so the error is only logged.
  if (!cleaned.ok() && !absl::IsNotFound(cleaned)) {
    Warn("files_left", absl::StrCat("files that no save needs stay in '", state,
                                    "': ", cleaned.message()));
  }
  return absl::OkStatus();
}

absl::Status StateKeeper::OpenLog(const RecoveredState& recovered,
                                  const Shard::Interrupt& interrupt,
                                  int64_t* num_replayed) {
  const v1::CheckpointServer& server = recovered.server;
  PushLogOptions options = options_.log;
  options.folder = DataFolder::LogOf(folder_.path());
  std::error_code error;
  const bool had_log = std::filesystem::exists(options.folder, error);
  options.must_reach = folder_.last_needed_record();
  options.progress = folder_.log_progress();
  if (!options_.has_log && !had_log &&
      options.must_reach <= server.last_record()) {
    return SetSkippedAside(recovered);
  }
  TFSWITCH_RETURN_IF_ERROR(shard_.own_state().RecoverGroups(server));
  absl::StatusOr<std::unique_ptr<PushLog>> log =
      PushLog::Open(options, server.last_record() + 1, server.last_record(),
                    [&](uint64_t number, uint32_t type,
                        absl::string_view payload) -> absl::Status {
                      TFSWITCH_RETURN_IF_ERROR(interrupt());
                      ++*num_replayed;
                      return shard_.Replay(number, type, payload);
                    });
  TFSWITCH_RETURN_IF_ERROR(log.status());
  // Changes the folder only here, because a failed start must not change it.
  TFSWITCH_RETURN_IF_ERROR(SetSkippedAside(recovered));
  MutexLock lock(&saving_);
  first_record_ = server.last_record() + 1;
  log_ = *std::move(log);
  TFSWITCH_RETURN_IF_ERROR(shard_.own_state().StartLog(log_.get()));
  // Records may be missing, and with them the last steps of workers. Groups
  // that lack these steps would refuse the next steps, so the groups are
  // forgotten.
  const bool lacks_records = !had_log || folder_.is_repaired() ||
                             (folder_.has_machine_gone_down() &&
                              options.sync_every > absl::ZeroDuration());
  if (lacks_records)
    TFSWITCH_RETURN_IF_ERROR(shard_.own_state().ForgetGroups());
  if (options_.has_log) return absl::OkStatus();
  // The folder has a log, but the log is switched off now. Its writes must be
  // saved before the shard gets writes without records. Groups are not saved,
  // because later calls of their workers have no records, either.
  TFSWITCH_RETURN_IF_ERROR(shard_.own_state().StartLog(nullptr));
  TFSWITCH_RETURN_IF_ERROR(
      shard_.own_state()
          .Save(DataFolder::StateOf(folder_.path()), interrupt)
          .status());
  log_ = nullptr;
  options.progress->acknowledged = 0;
  options.progress->flushed = 0;
  std::filesystem::remove_all(options.folder, error);
  return error ? ErrnoStatus("remove", options.folder, error.value())
               : absl::OkStatus();
}

void StateKeeper::Start() {
  if (options_.save_every < absl::InfiniteDuration()) {
    timer_.Set(kSaveName, options_.save_every);
  }
  if (log_ != nullptr) timer_.Set(kLogName, absl::Seconds(1));
}

bool StateKeeper::IsLogLong() const {
  return log_->has_failed() || log_->num_bytes() > options_.log.max_bytes / 2;
}

absl::Status StateKeeper::Stop() {
  timer_.Set(kSaveName, absl::ZeroDuration());
  timer_.Set(kLogName, absl::ZeroDuration());
  is_stopping_ = true;
  return Save();
}

absl::Status StateKeeper::Save(const Shard::Interrupt& interrupt) {
  MutexLock lock(&saving_);
  // A timed save that waited for the save of Stop() must not begin after it.
  if (is_stopping_) TFSWITCH_RETURN_IF_ERROR(interrupt());
  const absl::Time begin = SteadyNow();
  TFSWITCH_ASSIGN_OR_RETURN(
      const v1::CheckpointServer saved,
      shard_.own_state().Save(DataFolder::StateOf(folder_.path()), interrupt));
  saved_at_ms_ = saved.saved_at_ms();
  save_secs_ = absl::ToDoubleSeconds(SteadyNow() - begin);
  ++num_saves_;
  if (log_ == nullptr) return absl::OkStatus();
  // Keeps the records since the previous save, in case this save proves
  // damaged. If a flush has failed, the records are uncertain and not kept.
  const uint64_t first_record = saved.last_record() + 1;
  const uint64_t before = std::exchange(first_record_, first_record);
  return log_->StartAfterSave(log_->has_failed() ? first_record : before);
}

void StateKeeper::SaveOnTime() {
  const absl::Status status = Save([this] {
    return is_stopping_ ? absl::CancelledError("the server is stopping")
                        : absl::OkStatus();
  });
  if (status.ok() || is_stopping_) return;
  ++num_failed_saves_;
  Warn("not_saved", absl::StrCat("the state was not saved: ", status.message(),
                                 ". Saves before it stay; it is tried again"));
}

void StateKeeper::AddMetrics(MetricList* list) const {
  const auto as_double = [](auto value) { return static_cast<double>(value); };
  list->Gauge("tfswitch_save_timestamp_seconds",
              "The time of the last save to --data_dir, in seconds since 1970; "
              "0: there is none.",
              as_double(saved_at_ms_.load()) / 1000);
  list->Gauge("tfswitch_save_duration_seconds",
              "How long the last save of this run took, in seconds.",
              save_secs_);
  list->Counter("tfswitch_saves_total", "Saves to --data_dir.",
                as_double(num_saves_.load()));
  list->Counter("tfswitch_failed_saves_total", "Failed saves to --data_dir.",
                as_double(num_failed_saves_.load()));
  const uint64_t to = recovers_to_;
  const uint64_t now = *folder_.num_writes();
  list->Gauge("tfswitch_recovery_remaining_writes",
              "Writes of the log that a recovery in progress still has to "
              "repeat.",
              as_double(to > now ? to - now : 0));
  std::error_code error;
  const auto space = std::filesystem::space(folder_.path(), error);
  if (error) return;
  list->Gauge("tfswitch_disk_free_bytes",
              "Free bytes of the disk of --data_dir.",
              as_double(space.available));
  list->Gauge("tfswitch_disk_size_bytes", "Size of the disk of --data_dir.",
              as_double(space.capacity));
}

}  // namespace tfswitch
