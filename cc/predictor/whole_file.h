// Reads files of unknown origin.

#ifndef CC_PREDICTOR_WHOLE_FILE_H_
#define CC_PREDICTOR_WHOLE_FILE_H_

#include <cstdint>
#include <string>

#include "tfswitch/status.h"

namespace tfswitch {

// Returns the bytes of a file. NotFound if it cannot be opened, Unavailable if
// it cannot be read, such as a folder, and ResourceExhausted if it has more
// than `max_bytes`. Throws only std::bad_alloc.
Result<std::string> ReadWholeFile(const std::string& path, uint64_t max_bytes);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_WHOLE_FILE_H_
