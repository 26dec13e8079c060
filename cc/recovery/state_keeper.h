// Keeps the state of a shard in its data folder: recovers it at the start,
// saves it at intervals and at the end.

#ifndef TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
#define TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_

#include <atomic>
#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/recovery/data_folder.h"
#include "cc/shard/interval_timer.h"
#include "cc/shard/shard.h"

namespace tfswitch {

// Says on stderr, as tfswitch-server, what it has done.
//
// Thread-safe.
class StateKeeper {
 public:
  // The shard counts its writes in `folder`. Both must live as long.
  StateKeeper(DataFolder* folder, Shard* shard)
      : folder_(*folder), shard_(*shard) {}
  StateKeeper(const StateKeeper&) = delete;
  StateKeeper& operator=(const StateKeeper&) = delete;

  // Takes the newest whole state that there is, if there is one, and notes in
  // the shard how many writes are lost. Errors of `interrupt` end it.
  //
  // REQUIRES: the shard is new.
  absl::Status Recover(const Shard::Interrupt& interrupt);

  // From now on it saves each `every`; infinite: only when it is stopped. A
  // save that fails is said, and tried again after as long.
  void Start(absl::Duration every);

  // Ends a save that is under way, and saves a last time. The error is that of
  // this save. To be called when the shard is written to no more.
  absl::Status Stop();

 private:
  absl::Status Save(const Shard::Interrupt& interrupt);

  DataFolder& folder_;
  Shard& shard_;
  std::atomic<bool> is_stopping_{false};
  Mutex saving_;  // Held by the save that is under way.
  IntervalTimer timer_{[this](const std::string&) { SaveOnTime(); }};

  void SaveOnTime();
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RECOVERY_STATE_KEEPER_H_
