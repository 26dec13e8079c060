// Waits that say what they wait for.

#ifndef TFSWITCH_CC_CLIENT_ALOUD_WAIT_H_
#define TFSWITCH_CC_CLIENT_ALOUD_WAIT_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/interrupt.h"
#include "cc/base/mutex.h"
#include "cc/base/progress.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// Waits until is_done() returns true. Calls it with the mutex held, after each
// notification. After a second says on stderr what it waits for, which is
// what_for(). Cancelled if the user interrupts the wait.
//
// REQUIRES: what is waited for ends by itself at some time.
template <typename IsDone, typename WhatFor>
absl::Status WaitAloud(Mutex* mutex, CondVar* changed, const IsDone& is_done,
                       const WhatFor& what_for)
    ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
  const absl::Time begin = SteadyNow();
  std::optional<Progress> progress;
  absl::Status interrupted;
  while (!is_done() && interrupted.ok()) {
    changed->WaitFor(mutex, kInterruptInterval);
    if (is_done()) break;
    if (!progress.has_value() && SteadyNow() - begin >= absl::Seconds(1)) {
      Progress::Options options;
      options.first = absl::ZeroDuration();
      progress.emplace("waiting for " + what_for(), /*total_rows=*/0, options);
    }
    mutex->Unlock();
    interrupted = CheckInterrupt();
    mutex->Lock();
  }
  if (progress.has_value()) {
    mutex->Unlock();
    progress.reset();  // May wait for its thread.
    mutex->Lock();
  }
  return interrupted;
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_ALOUD_WAIT_H_
