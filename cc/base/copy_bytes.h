// memcpy for arrays of megabytes.

#ifndef TFSWITCH_CC_BASE_COPY_BYTES_H_
#define TFSWITCH_CC_BASE_COPY_BYTES_H_

#include <cstddef>
#include <cstring>

namespace tfswitch {

// Copies like memcpy, in a loop of vector moves; for 0 bytes the pointers may
// be null. glibc's memcpy uses `rep movsb` above 4 KiB. On AMD Zen 3 and 4 this
// takes ten times as long if the target's offset in its page is just below the
// source's (measured: 1.30 instead of 0.13 ms for 3.8 MB). Pieces received from
// a socket may have any address. For blocks of 2 KiB that are not in the cache,
// memcpy takes up to twice as long as this loop.
inline void CopyBytes(void* to, const void* from, size_t size) {
  constexpr size_t kStride = 128;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  for (; size >= kStride; size -= kStride) {
    std::memcpy(out, in, kStride);
    out += kStride;
    in += kStride;
    // Keeps compilers from replacing the loop by a call of memcpy.
    asm("" : "+r"(out), "+r"(in));
  }
  if (size > 0) std::memcpy(out, in, size);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_COPY_BYTES_H_
