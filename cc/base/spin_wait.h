// Waits a few nanoseconds for another thread, for example until it releases a
// lock.

#ifndef TFSWITCH_CC_BASE_SPIN_WAIT_H_
#define TFSWITCH_CC_BASE_SPIN_WAIT_H_

#include <sched.h>

namespace tfswitch {

// Call Pause() in each turn of the waiting loop. The first calls only pause the
// core for a moment; later calls yield the core to other threads, because the
// thread for which this one waits may have been preempted.
//
// Not thread-safe: each waiter has its own.
class SpinWait {
 public:
  void Pause() {
    if (++turns_ <= kTurnsBeforeYield) {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    } else {
      sched_yield();
    }
  }

 private:
  static constexpr int kTurnsBeforeYield = 64;
  int turns_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_SPIN_WAIT_H_
