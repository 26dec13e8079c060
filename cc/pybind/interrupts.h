// Ctrl-C while ops wait.
//
// Python runs the handlers of signals in the main thread, between two
// instructions. During a step of TensorFlow there is none: the main thread
// waits for ops, and these wait in threads of their own.

#ifndef TFSWITCH_CC_PYBIND_INTERRUPTS_H_
#define TFSWITCH_CC_PYBIND_INTERRUPTS_H_

namespace tfswitch {

// Whether a wait in this thread, which is not the main thread, should end, as
// Ctrl-C was pressed since it began and raises KeyboardInterrupt. Never in
// threads of Python. A wait asks about ten times in a second, and does not hold
// the GIL.
//
// Thread-safe.
int IsOpInterrupted();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_PYBIND_INTERRUPTS_H_
