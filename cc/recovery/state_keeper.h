// Keeps the state of a shard in its data folder. Recovers the state at the
// start, saves it at intervals and at the end, and logs the writes between two
// saves.

#ifndef TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
#define TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/metric_list.h"
#include "cc/base/mutex.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/log/push_log.h"
#include "cc/recovery/data_folder.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/shard.h"

namespace tfswitch {

struct StateKeeperOptions {
  // How often the state is saved. If infinite, it is saved only at the end.
  absl::Duration save_every = absl::Minutes(10);
  bool has_log = false;
  // See PushLogOptions. `folder` is ignored: the log is always in the data
  // folder.
  PushLogOptions log;
};

// Describes the lost writes: `applied` were counted in the folder, and the
// state has only `whole` of them. The text is "52 acknowledged writes", or "at
// least 52 ..." if the counter is not exact.
std::string DescribeLost(const DataFolder& folder, uint64_t applied,
                         uint64_t whole);

// Thread-safe.
class StateKeeper {
 public:
  // The shard counts its writes in `folder`. Both must outlive this object.
  StateKeeper(const StateKeeperOptions& options, DataFolder* folder,
              Shard* shard)
      : options_(options), folder_(*folder), shard_(*shard) {}
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;

  // Recovers the newest undamaged save, if there is one, and then the writes in
  // the log. Tells the shard how many writes are lost, and starts the log. If
  // `interrupt` returns an error, ends with that error.
  //
  // REQUIRES: the shard is new.
  absl::Status Recover(const Shard::Interrupt& interrupt);

  // Starts to save at intervals, and also when the log has reached half of its
  // maximal size. A failed save is logged, and repeated after an interval.
  void Start();

  // Saves now.
  absl::Status Save(const Shard::Interrupt& interrupt = [] {
    return absl::OkStatus();
  });

  // Interrupts a running save, and saves a last time. Returns the error of the
  // last save. Call this when the shard can get no more writes.
  absl::Status Stop();

  // Adds the metrics of saves, of the recovery and of the disk.
  void AddMetrics(MetricList* list) const;

 private:
  static constexpr char kSaveName[] = "save";
  static constexpr char kLogName[] = "log";

  void SaveOnTime();
  // Whether the log needs a save, because it is long or cannot be written.
  bool IsLogLong() const;
  // Sets aside the damaged saves that were skipped. Called after an undamaged
  // save was found.
  absl::Status SetSkippedAside(const RecoveredState& recovered) const;
  // Opens the log, and replays the writes that the recovered save lacks.
  absl::Status OpenLog(const RecoveredState& recovered,
                       const Shard::Interrupt& interrupt,
                       int64_t* num_replayed);

  const StateKeeperOptions options_;
  DataFolder& folder_;
  Shard& shard_;
  std::unique_ptr<PushLog> log_;  // Constant after Recover().
  std::atomic<bool> is_stopping_{false};
  // For metrics.
  std::atomic<int64_t> saved_at_ms_{0};  // Since 1970; 0: there is no save.
  std::atomic<double> save_secs_{0};     // Duration of the last save.
  std::atomic<int64_t> num_saves_{0};
  std::atomic<int64_t> num_failed_saves_{0};
  // During a recovery, the number of writes at its end.
  std::atomic<uint64_t> recovers_to_{0};
  // Locked during a save.
  Mutex saving_;
  // The number of the first record whose write is not in the last save.
  uint64_t first_record_ ABSL_GUARDED_BY(saving_) = 1;
  // Declared last and so destroyed first: its thread uses the members above.
  IntervalTimer timer_{[this](const std::string& name) {
    if (name == kSaveName || IsLogLong()) SaveOnTime();
  }};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
