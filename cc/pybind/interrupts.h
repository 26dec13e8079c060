// Ctrl-C while ops wait.
//
// Python runs signal handlers in the main thread, between two instructions.
// During a step of TensorFlow the main thread executes no instructions: it
// waits for ops, which wait in threads of their own.

#ifndef TFSWITCH_CC_PYBIND_INTERRUPTS_H_
#define TFSWITCH_CC_PYBIND_INTERRUPTS_H_

namespace tfswitch {

// Whether a wait in this thread should end, because Ctrl-C was pressed since
// the wait began and will raise KeyboardInterrupt. Called by threads other than
// the main thread. Always false in threads that Python has started. A wait
// calls this about ten times a second, without the GIL.
//
// Thread-safe.
int IsOpInterrupted();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_PYBIND_INTERRUPTS_H_
