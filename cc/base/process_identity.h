// Tells processes of one machine apart, also after their numbers came again.
//
// Functions here are thread-safe.

#ifndef TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_
#define TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfswitch {

// The id that the kernel has drawn when the machine started; empty if it has
// none.
std::string BootId();

// The identity of a running process: the machine's boot, the namespace of
// process numbers, the number and the start time, separated by '/'. Empty if
// there is no such process, or /proc does not tell.
std::string ProcessIdentity(int number);

// The number of the process with this identity if it runs, on this machine and
// in this namespace, and is not this process; else 0.
int RunningProcess(absl::string_view identity);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_
