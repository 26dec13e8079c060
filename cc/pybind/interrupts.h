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

// Between KeepException() and the end of a wait in the main thread there is an
// exception of a signal handler that ran during the wait. The caller of the
// wait raises it by RestoreException(). If the wait was in an op, or in a
// destructor, nothing else does, so Python raises it soon after the wait. These
// functions need the GIL.
bool HasKeptException();
void KeepException();  // The exception that is set in this thread.
void RestoreException();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_PYBIND_INTERRUPTS_H_
