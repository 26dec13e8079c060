// Stops a shard from applying rounds while a save brings all shards to the same
// round.

#ifndef TFSWITCH_CC_SHARD_ROUND_HOLD_H_
#define TFSWITCH_CC_SHARD_ROUND_HOLD_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

// A hold makes all rounds wait until it ends. Only one save at a time can hold
// rounds.
//
// Thread-safe.
class RoundHold {
 public:
  // A hold is never longer than this, because the client of the save may have
  // died.
  static constexpr absl::Duration kLongest = absl::Seconds(10);

  // Makes rounds wait for `duration` from now, or until End(). Another call for
  // the same save extends the hold, but to at most kLongest in all. False if
  // another save holds rounds.
  bool Begin(const std::string& save_id, absl::Duration duration);
  // Ends the hold of this save, if there is one.
  void End(const std::string& save_id);

  bool IsHeldByOther(const std::string& save_id) {
    MutexLock lock(&mutex_);
    return is_held() && save_id_ != save_id;
  }

  // Called before a round is applied: waits until the present hold has ended.
  // Does not wait for a hold that begins later. That is safe: the round had
  // closed before the later hold, so it belongs to its save in any case. Calls
  // `interrupt` at intervals; if that fails, returns its error at once.
  absl::Status Wait(absl::FunctionRef<absl::Status()> interrupt);

  // Stores the state that the work queues have at the save's round. Returns
  // false if no rounds wait for the save, or none wait any more.
  bool SetWorkQueues(const std::string& save_id,
                     std::optional<v1::SavedWorkQueues> work_queues);

  // Keeps a hold from ending by time. The hold ends when the last Kept is
  // destroyed.
  class Kept {
   public:
    Kept(RoundHold* hold, const std::string& save_id)
        : hold_(hold), is_held_(hold->Keep(save_id)) {}
    ~Kept() {
      if (is_held_) hold_->StopKeeping();
    }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

    // False if the save did not hold rounds (any more). Then this object has no
    // effect.
    bool is_held() const { return is_held_; }
    // Nullopt if SetWorkQueues() was not called since the hold began.
    std::optional<v1::SavedWorkQueues> work_queues() const {
      MutexLock lock(&hold_->mutex_);
      return hold_->work_queues_;
    }

   private:
    RoundHold* const hold_;
    const bool is_held_;
  };

 private:
  bool Keep(const std::string& save_id);
  void StopKeeping();
  bool is_held() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsHeldBy(const std::string& save_id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_held() && save_id_ == save_id;
  }
  void EndNow() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  CondVar ended_;
  // These describe the present hold, or the last one.
  std::string save_id_ ABSL_GUARDED_BY(mutex_);
  absl::Time begin_ ABSL_GUARDED_BY(mutex_);
  absl::Time expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t num_kept_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<v1::SavedWorkQueues> work_queues_ ABSL_GUARDED_BY(mutex_);
  // How many holds have begun.
  int64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_ROUND_HOLD_H_
