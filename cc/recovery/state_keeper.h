// Keeps the state of a shard in its data folder: recovers it at the start,
// saves it at intervals and at the end, and has a push log in between.

#ifndef TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
#define TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/log/push_log.h"
#include "cc/recovery/data_folder.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/shard.h"

namespace tfswitch {

struct StateKeeperOptions {
  // How often the state is saved; infinite: only at the end.
  absl::Duration save_every = absl::Minutes(10);
  bool has_log = false;
  // See PushLogOptions; the folder is that of the data folder.
  PushLogOptions log;
};

// "52 acknowledged writes", or "at least" so many: those that a state with
// `whole` writes lacks of the `applied` ones of a folder.
std::string DescribeLost(const DataFolder& folder, uint64_t applied,
                         uint64_t whole);

// Thread-safe.
class StateKeeper {
 public:
  // The shard counts its writes in `folder`. Both must live as long.
  StateKeeper(const StateKeeperOptions& options, DataFolder* folder,
              Shard* shard)
      : options_(options), folder_(*folder), shard_(*shard) {}
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;

  // Takes the newest whole state that there is, if there is one, and then the
  // writes of the log, and notes in the shard how many writes are lost. Starts
  // the log. Errors of `interrupt` end it.
  //
  // REQUIRES: the shard is new.
  absl::Status Recover(const Shard::Interrupt& interrupt);

  // From now on it saves at intervals, and earlier if the log has half of its
  // bytes. A save that fails is said, and tried again after as long.
  void Start();

  // Saves now.
  absl::Status Save(const Shard::Interrupt& interrupt = [] {
    return absl::OkStatus();
  });

  // Ends a save that is under way, and saves a last time. The error is that of
  // this save. To be called when the shard is written to no more.
  absl::Status Stop();

 private:
  static constexpr char kSaveName[] = "save";
  static constexpr char kLogName[] = "log";

  void SaveOnTime();
  // Or cannot be written.
  bool IsLogLong() const;
  // Takes damaged saves out of the folder, in which a good one was found.
  absl::Status SetSkippedAside(const Shard::RecoveredState& recovered) const;
  // Opens the log, and replays what the recovered state has not.
  absl::Status OpenLog(const Shard::RecoveredState& recovered,
                       const Shard::Interrupt& interrupt,
                       int64_t* num_replayed);

  const StateKeeperOptions options_;
  DataFolder& folder_;
  Shard& shard_;
  std::unique_ptr<PushLog> log_;  // Constant after Recover().
  std::atomic<bool> is_stopping_{false};
  Mutex saving_;  // Held by the save that is under way.
  // The first record that the last save has not.
  uint64_t first_record_ ABSL_GUARDED_BY(saving_) = 1;
  // Last, so that its thread ends before the members that it uses.
  IntervalTimer timer_{[this](const std::string& name) {
    if (name == kSaveName || IsLogLong()) SaveOnTime();
  }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
