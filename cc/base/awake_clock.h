// A clock for leases. It does not advance while this process is stopped or its
// virtual machine is moved: workers cannot renew their leases during that time,
// so it must not count against the leases.

#ifndef TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
#define TFSWITCH_CC_BASE_AWAKE_CLOCK_H_

#include "absl/time/time.h"

namespace tfswitch {

// If the time since the last Tick() is longer than `kLongestStep`, the clock
// advances by `kLongestStep` only.
//
// Thread-compatible.
class AwakeTime {
 public:
  static constexpr absl::Duration kLongestStep = absl::Milliseconds(500);

  explicit AwakeTime(absl::Time now) : last_tick_(now) {}

  void Tick(absl::Time now);
  // Never decreases if `now` does not.
  absl::Time At(absl::Time now) const;

 private:
  absl::Time last_tick_;
  absl::Duration left_out_;
};

// Only differences between two of these times have a meaning. Do not compare
// them with times of SteadyNow(). The first call starts a thread that ticks.
absl::Time AwakeNow();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
