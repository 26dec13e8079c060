#include "cc/base/awake_clock.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

// Ticks often, so that even on a busy machine two ticks are seldom more than
// kLongestStep apart. If they are, the clock falls behind; leases last longer.
constexpr std::chrono::milliseconds kTickInterval{100};

// Thread-safe.
class TickingClock {
 public:
  // Never deleted: its thread does not end.
  static TickingClock& Get() {
    static auto* const clock = new TickingClock;
    return *clock;
  }

  absl::Time Now() {
    if (!is_ticking_) return SteadyNow();
    MutexLock lock(&mutex_);
    return time_.At(SteadyNow());
  }

 private:
  TickingClock() {
    try {
      std::thread(&TickingClock::Run, this).detach();
      is_ticking_ = true;
    } catch (const std::system_error&) {
      // Without a thread, pauses count.
    }
  }

  void Run() {
    for (;;) {
      {
        MutexLock lock(&mutex_);
        time_.Tick(SteadyNow());
      }
      std::this_thread::sleep_for(kTickInterval);
    }
  }

  Mutex mutex_;
  bool is_ticking_ = false;
  AwakeTime time_ ABSL_GUARDED_BY(mutex_){SteadyNow()};
};

}  // namespace

void AwakeTime::Tick(absl::Time now) {
  left_out_ += std::max(now - last_tick_ - kLongestStep, absl::ZeroDuration());
  last_tick_ = now;
}

absl::Time AwakeTime::At(absl::Time now) const {
  return std::min(now, last_tick_ + kLongestStep) - left_out_;
}

absl::Time AwakeNow() { return TickingClock::Get().Now(); }

}  // namespace tfswitch
