// Keeps a shard at one round while a save brings all shards to the same.

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

// One save at a time holds rounds.
//
// Thread-safe.
class RoundHold {
 public:
  // A save whose client has died holds up nobody for longer.
  static constexpr absl::Duration kLongest = absl::Seconds(10);

  // From now on rounds wait, for `duration` or until End(). Repeated, it lasts
  // so long from now, though no longer than kLongest at a stretch. False if
  // another save holds them.
  bool Begin(const std::string& save_id, absl::Duration duration);
  // OK if the save holds nothing.
  void End(const std::string& save_id);

  bool IsHeldByOther(const std::string& save_id) {
    MutexLock lock(&mutex_);
    return is_held() && save_id_ != save_id;
  }

  // For a round that is to be applied: waits until the hold that is there has
  // ended. One that begins meanwhile is not waited for: the round has closed
  // before it, so that its save has the round anyway. Ends early with the error
  // of `interrupt`, which is asked every now and then.
  absl::Status Wait(absl::FunctionRef<absl::Status()> interrupt);

  // The work queues of the moment to which the save brings the shards. False if
  // it does not hold rounds (any more).
  bool SetWorkQueues(const std::string& save_id,
                     std::optional<v1::SavedWorkQueues> work_queues);

  // While it lives, the hold lasts; with the last one it ends.
  class Kept {
   public:
    Kept(RoundHold* hold, const std::string& save_id)
        : hold_(hold), is_held_(hold->Keep(save_id)) {}
    ~Kept() {
      if (is_held_) hold_->StopKeeping();
    }
    Kept(const Kept&) = delete;
    Kept& operator=(const Kept&) = delete;

    // False if the save does not hold rounds (any more): then it has no effect.
    bool is_held() const { return is_held_; }
    // nullopt: none were set since the hold began.
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
  // Of the last hold.
  std::string save_id_ ABSL_GUARDED_BY(mutex_);
  absl::Time begin_ ABSL_GUARDED_BY(mutex_);
  absl::Time expiry_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t num_kept_ ABSL_GUARDED_BY(mutex_) = 0;
  std::optional<v1::SavedWorkQueues> work_queues_ ABSL_GUARDED_BY(mutex_);
  // How many there have been.
  int64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_ROUND_HOLD_H_
