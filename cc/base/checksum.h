// A checksum that is fast enough to verify data each time it is used.

#ifndef TFSWITCH_CC_BASE_CHECKSUM_H_
#define TFSWITCH_CC_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace tfswitch {

// XXH3, 64 bits, seed 0 (https://github.com/Cyan4973/xxHash): about as fast as
// memory is read.
uint64_t Checksum(const char* bytes, size_t size);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_CHECKSUM_H_
