// Opens libtfswitch_core.so, which is in the same folder as the library that
// contains this code.
//
// TensorFlow exports thousands of protobuf and gRPC symbols, and the core has
// its own copies of these libraries. So the core must be opened with
// RTLD_DEEPBIND, which makes it look for symbols in its own dependencies first.
// Linking to the core, or opening it without that flag, leads to a segmentation
// fault.

#ifndef TFSWITCH_CC_CAPI_CORE_LOADER_H_
#define TFSWITCH_CC_CAPI_CORE_LOADER_H_

#include <string>

#include "cc/capi/tfswitch.h"

namespace tfswitch {

// Returns the core's functions. The first call opens the core, which then stays
// open as long as the process lives. On failure returns nullptr, and *error
// contains the file, the message of the loader, and the remedy.
//
// Looks for the core in the folder of the library that this code is linked
// into, or at the path in the environment variable TFSWITCH_CORE_LIBRARY.
//
// Thread-safe.
const Tfswitch_Api* OpenCore(std::string* error);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CORE_LOADER_H_
