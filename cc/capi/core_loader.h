// Opens libtfswitch_core.so beside the library that asks.
//
// TensorFlow exports thousands of protobuf and gRPC symbols. The core brings
// its own copies, so it must be opened with RTLD_DEEPBIND, which makes it look
// for symbols in its own dependencies first; linking to it, or opening it
// without that flag, ends in a segmentation fault.

#ifndef TFSWITCH_CC_CAPI_CORE_LOADER_H_
#define TFSWITCH_CC_CAPI_CORE_LOADER_H_

#include <string>

#include "cc/capi/tfswitch.h"

namespace tfswitch {

// The core's functions. Opens the core on the first call and keeps it for the
// life of the process. On failure returns nullptr and says why in *error:
// the file, the message of the loader, and the remedy.
//
// Looks for the core in the folder of the library that this code is linked
// into, or at the path in the environment variable TFSWITCH_CORE_LIBRARY.
//
// Thread-safe.
const Tfswitch_Api* OpenCore(std::string* error);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CORE_LOADER_H_
