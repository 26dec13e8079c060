// Lets the user end waits of this process, for example by Ctrl-C.

#ifndef TFSWITCH_CC_BASE_INTERRUPT_H_
#define TFSWITCH_CC_BASE_INTERRUPT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tfswitch {

// How often waits check.
constexpr absl::Duration kInterruptInterval = absl::Milliseconds(100);

// Sets the function that CheckInterrupt() calls on the waiting thread. No lock
// is held during the call. A nonzero result ends the wait. Null, the initial
// value, means that nothing ends waits.
void SetInterruptCheck(int (*check)());

// Cancelled if the user wants this thread's wait to end.
absl::Status CheckInterrupt();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_INTERRUPT_H_
