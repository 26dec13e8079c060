// A clock for leases, which stands still while this process does not run: it is
// stopped, or its virtual machine is moved. Those who renew a lease cannot do
// it then, and must not lose it.

#ifndef TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
#define TFSWITCH_CC_BASE_AWAKE_CLOCK_H_

#include "absl/time/time.h"

namespace tfswitch {

// Leaves out all but `kLongestStep` of each time in which nobody calls Tick().
//
// Thread-compatible.
class AwakeTime {
 public:
  static constexpr absl::Duration kLongestStep = absl::Milliseconds(500);

  explicit AwakeTime(absl::Time now) : last_tick_(now) {}

  void Tick(absl::Time now);
  // Never less than before, if `now` never is.
  absl::Time At(absl::Time now) const;

 private:
  absl::Time last_tick_;
  absl::Duration left_out_;
};

// Only differences mean something, and those to SteadyNow() do not. A thread of
// this process ticks from the first call.
absl::Time AwakeNow();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_AWAKE_CLOCK_H_
