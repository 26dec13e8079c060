#include "cc/shard/snapshots.h"

#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <future>
#include <new>
#include <optional>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/memory_region.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

// Saves run with low priority, so that training is not slowed down.
constexpr int kNiceness = 10;

constexpr std::chrono::milliseconds kPollInterval(10);

}  // namespace

absl::StatusOr<Snapshots> TakeSnapshots(
    const std::vector<std::shared_ptr<EmbeddingTable>>& tables,
    const std::map<std::string, ChangeCursor>& since) {
  Snapshots snapshots;
  // Stops lookups, because they may make rows even while the gate is closed.
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

absl::Status WriteSnapshots(const ShardOptions& options,
                            const Snapshots& snapshots,
                            const Interrupt& interrupt,
                            absl::FunctionRef<absl::Status()> write,
                            WriteGate* gate, std::atomic<bool>* stops) {
  const uint64_t max_bytes = options.max_save_bytes != 0
                                 ? options.max_save_bytes
                                 : AvailableMemoryBytes() / 2;
  TFSWITCH_RETURN_IF_ERROR(interrupt());
  const std::thread::id caller = std::this_thread::get_id();
  // If no thread can be started, get() calls the function on the caller's
  // thread.
  std::future<absl::Status> written =
      std::async(std::launch::async | std::launch::deferred, [&] {
        if (std::this_thread::get_id() == caller) return write();
        errno = 0;
        // If nice() fails, the save has normal priority.
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
    if (gate != nullptr && bytes > max_bytes && !closed.has_value()) {
      closed.emplace(gate);
    }
  } while (written.wait_for(kPollInterval) == std::future_status::timeout);
  try {
    const absl::Status status = written.get();
    return interrupted.ok() ? status : interrupted;
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("no memory to save rows");
  }
}

int64_t RowsOf(const Snapshots& snapshots) {
  int64_t num_rows = 0;
  for (const auto& snapshot : snapshots) num_rows += snapshot->num_rows;
  return num_rows;
}

void TellOfSave(const Journal& journal, const Snapshots& snapshots,
                const std::string& folder,
                const std::vector<std::string>& files, absl::Time begin) {
  uint64_t bytes = 0;
  for (const std::string& file : files) {
    const auto stamp = StampOf(absl::StrCat(folder, "/", file));
    if (stamp.ok()) bytes += static_cast<uint64_t>(stamp->size);
  }
  journal.Tell("saved", {{"path", folder},
                         {"tables", snapshots.size()},
                         {"rows", RowsOf(snapshots)},
                         {"bytes", bytes},
                         {"seconds", SecondsSince(begin)}});
}

bool SaveTurn::IsTaken() {
  if (!mutex_.TryLock()) return true;
  mutex_.Unlock();
  return false;
}

absl::Status SaveTurn::CheckNotSaving() const {
  if (saver_ != std::this_thread::get_id()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "this thread is saving already; a handler of a signal must not save or "
      "restore then");
}

absl::Status SaveTurn::Take(const std::string& save,
                            const Interrupt& interrupt) {
  TFSWITCH_RETURN_IF_ERROR(CheckNotSaving());
  const absl::Time begin = SteadyNow();
  const auto lock = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    if (!mutex_.TryLock()) return false;
    if (!hold_.IsHeldByOther(save)) return true;
    mutex_.Unlock();
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

void SaveTurn::Return() {
  saver_ = std::thread::id();
  mutex_.Unlock();
}

}  // namespace tfswitch
