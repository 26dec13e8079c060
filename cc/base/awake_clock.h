// A clock for leases, which stands still while this process does not run,
// because it is stopped or its virtual machine is moved. Workers cannot renew a
// lease then, and must not lose it.

#ifndef TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
#define TFSWITCH_CC_BASE_AWAKE_CLOCK_H_

#include "absl/time/time.h"

namespace tfswitch {

// If nobody calls Tick() for some time, counts at most `kLongestStep` of it.
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

// Use only differences, and not with SteadyNow(). A thread of this process
// ticks from the first call on.
absl::Time AwakeNow();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
