// Tells processes of one machine apart, also when a process number is used
// again.
//
// Functions here are thread-safe.

#ifndef TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_
#define TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_

#include <string>

#include "absl/strings/string_view.h"

namespace tfswitch {

// The id that the kernel chooses at each boot; empty if it is not available.
std::string BootId();

// The identity of a running process: the boot id of the machine, the namespace
// of process numbers, the process number and the start time, separated by '/'.
// Empty if there is no such process, or /proc cannot be read.
std::string ProcessIdentity(int number);

// The number of the process with this identity. 0 if the process does not run,
// belongs to another machine or namespace, or is this process itself.
int RunningProcess(absl::string_view identity);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PROCESS_IDENTITY_H_
