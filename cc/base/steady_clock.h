// A monotonic clock, which no change of the system time affects, for leases,
// waits for workers, locks and timers.

#ifndef TFSWITCH_CC_BASE_STEADY_CLOCK_H_
#define TFSWITCH_CC_BASE_STEADY_CLOCK_H_

#include <chrono>

#include "absl/time/time.h"

namespace tfswitch {

// Use only differences.
inline absl::Time SteadyNow() {
  return absl::UnixEpoch() +
         absl::FromChrono(std::chrono::steady_clock::now().time_since_epoch());
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_STEADY_CLOCK_H_
