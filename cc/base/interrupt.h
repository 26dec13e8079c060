// Ends waits of this process when its user asks for it, as with Ctrl-C.

#ifndef TFSWITCH_CC_BASE_INTERRUPT_H_
#define TFSWITCH_CC_BASE_INTERRUPT_H_

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace tfswitch {

// How often waits ask.
constexpr absl::Duration kInterruptInterval = absl::Milliseconds(100);

// Sets the function that CheckInterrupt() asks, on the thread that waits and
// without a lock of ours: nonzero ends the wait. Null: none, as at first.
void SetInterruptCheck(int (*check)());

// Cancelled if the user wants the wait of this thread to end.
absl::Status CheckInterrupt();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_INTERRUPT_H_
