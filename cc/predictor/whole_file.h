// Reads files that come from others.

#ifndef CC_PREDICTOR_WHOLE_FILE_H_
#define CC_PREDICTOR_WHOLE_FILE_H_

#include <cstdint>
#include <string>

#include "tfswitch/status.h"

namespace tfswitch {

// The bytes of a file. NotFound if it cannot be opened, Unavailable if it
// cannot be read, such as a folder, and ResourceExhausted if it has more than
// `max_bytes`. Throws std::bad_alloc alone.
Result<std::string> ReadWholeFile(const std::string& path, uint64_t max_bytes);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_WHOLE_FILE_H_
