#ifndef TFSWITCH_TESTS_CC_TESTING_DEADLINES_H_
#define TFSWITCH_TESTS_CC_TESTING_DEADLINES_H_

#include "absl/time/time.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// A test that waits this long hangs.
inline constexpr absl::Duration kLong = absl::Seconds(60);

inline absl::Time Soon() { return SteadyNow() + kLong; }

// The deadline of a wait that must end without success.
inline absl::Time AtOnce() { return SteadyNow() + absl::Milliseconds(20); }

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_DEADLINES_H_
