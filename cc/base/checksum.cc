#include "cc/base/checksum.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace tfswitch {

uint64_t Checksum(const char* bytes, size_t size) {
  return XXH3_64bits(bytes, size);
}

}  // namespace tfswitch
