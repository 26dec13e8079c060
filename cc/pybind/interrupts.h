// Ctrl-C while ops wait.
//
// Python runs signal handlers in the main thread, between two instructions.
// During a step of TensorFlow the main thread executes none: it waits for ops,
// and these wait in threads of their own.

#ifndef TFSWITCH_CC_PYBIND_INTERRUPTS_H_
#define TFSWITCH_CC_PYBIND_INTERRUPTS_H_

namespace tfswitch {

// Whether a wait in this thread, which is not the main thread, should end,
// because Ctrl-C was pressed since it began and raises KeyboardInterrupt. Never
// true in threads of Python. A wait asks about ten times a second, without the
// GIL.
//
// Thread-safe.
int IsOpInterrupted();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_PYBIND_INTERRUPTS_H_
