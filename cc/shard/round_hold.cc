// A hold ends at its expiry unless there is a Kept. No thread waits for the
// expiry: each method compares it with the present time.

#include "cc/shard/round_hold.h"

#include <algorithm>
#include <utility>

#include "cc/base/interrupt.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

bool RoundHold::Begin(const std::string& save_id, absl::Duration duration) {
  MutexLock lock(&mutex_);
  if (!is_held()) {
    ++number_;
    save_id_ = save_id;
    work_queues_.reset();
    begin_ = SteadyNow();
  }
  if (save_id_ != save_id) return false;
  expiry_ = std::min(SteadyNow() + duration, begin_ + kLongest);
  return true;
}

void RoundHold::End(const std::string& save_id) {
  MutexLock lock(&mutex_);
  if (IsHeldBy(save_id) && num_kept_ == 0) EndNow();
}

absl::Status RoundHold::Wait(absl::FunctionRef<absl::Status()> interrupt) {
  MutexLock lock(&mutex_);
  const int64_t met = number_;
  absl::Status status;
  while (status.ok() && is_held() && number_ == met) {
    absl::Duration pause = kInterruptInterval;
    if (num_kept_ == 0) pause = std::min(pause, expiry_ - SteadyNow());
    ended_.WaitFor(&mutex_, pause);
    // Unlocks the mutex, because `interrupt` may run Python code that calls
    // this object.
    mutex_.Unlock();
    status = interrupt();
    mutex_.Lock();
  }
  return status;
}

bool RoundHold::SetWorkQueues(const std::string& save_id,
                              std::optional<v1::SavedWorkQueues> work_queues) {
  MutexLock lock(&mutex_);
  if (!IsHeldBy(save_id)) return false;
  work_queues_ = std::move(work_queues);
  return true;
}

bool RoundHold::Keep(const std::string& save_id) {
  MutexLock lock(&mutex_);
  if (!IsHeldBy(save_id)) return false;
  ++num_kept_;
  return true;
}

void RoundHold::StopKeeping() {
  MutexLock lock(&mutex_);
  if (--num_kept_ == 0) EndNow();
}

bool RoundHold::is_held() const {
  return num_kept_ > 0 || SteadyNow() < expiry_;
}

void RoundHold::EndNow() {
  expiry_ = absl::InfinitePast();
  work_queues_.reset();
  ended_.NotifyAll();
}

}  // namespace tfswitch
