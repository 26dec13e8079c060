// Keeps the state of a shard in its data folder. It recovers the state at the
// start, saves it at intervals and at the end, and logs writes in between.

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
  // How often the state is saved. Infinite means only at the end.
  absl::Duration save_every = absl::Minutes(10);
  bool has_log = false;
  // See PushLogOptions. The log is always in the data folder.
  PushLogOptions log;
};

// Describes the writes that a state with `whole` writes lacks of the `applied`
// ones of a folder, as "52 acknowledged writes", or "at least 52 ..." if the
// counter is not exact.
std::string DescribeLost(const DataFolder& folder, uint64_t applied,
                         uint64_t whole);

// Thread-safe.
class StateKeeper {
 public:
  // The shard counts its writes in `folder`. Both must outlive this.
  StateKeeper(const StateKeeperOptions& options, DataFolder* folder,
              Shard* shard)
      : options_(options), folder_(*folder), shard_(*shard) {}
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;

  // Recovers the newest whole state, if there is one, and then the writes of
  // the log. Sets in the shard how many writes are lost, and starts the log.
  // Ends early with an error of `interrupt`.
  //
  // REQUIRES: the shard is new.
  absl::Status Recover(const Shard::Interrupt& interrupt);

  // Starts to save at intervals, and earlier when the log has half of its
  // maximal bytes. A failed save is logged, and tried again after an interval.
  void Start();

  // Saves now.
  absl::Status Save(const Shard::Interrupt& interrupt = [] {
    return absl::OkStatus();
  });

  // Ends a running save, and saves a last time. Returns the error of the last
  // save. Called when no writes to the shard can come any more.
  absl::Status Stop();

 private:
  static constexpr char kSaveName[] = "save";
  static constexpr char kLogName[] = "log";

  void SaveOnTime();
  // Whether the log is long or cannot be written.
  bool IsLogLong() const;
  // Sets damaged saves aside after a good one was found.
  absl::Status SetSkippedAside(const RecoveredState& recovered) const;
  // Opens the log, and replays the writes that the recovered state lacks.
  absl::Status OpenLog(const RecoveredState& recovered,
                       const Shard::Interrupt& interrupt,
                       int64_t* num_replayed);

  const StateKeeperOptions options_;
  DataFolder& folder_;
  Shard& shard_;
  std::unique_ptr<PushLog> log_;  // Constant after Recover().
  std::atomic<bool> is_stopping_{false};
  Mutex saving_;  // Held during a save.
  // The first record that the last save lacks.
  uint64_t first_record_ ABSL_GUARDED_BY(saving_) = 1;
  // Declared last, so that its thread ends before the members that it uses.
  IntervalTimer timer_{[this](const std::string& name) {
    if (name == kSaveName || IsLogLong()) SaveOnTime();
  }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
