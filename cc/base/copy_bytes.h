// memcpy for arrays of megabytes.

#ifndef TFSWITCH_CC_BASE_COPY_BYTES_H_
#define TFSWITCH_CC_BASE_COPY_BYTES_H_

#include <cstddef>
#include <cstring>

namespace tfswitch {

// The same as memcpy, in a loop of vector moves; no bytes may also lie nowhere.
// glibc's memcpy uses `rep movsb` above 4 KiB, which on AMD Zen 3 and 4 takes
// ten times as long when the target lies just below the source modulo the page
// size (measured: 1.30 instead of 0.13 ms for 3.8 MB). Pieces received from a
// socket lie anywhere. Calls of memcpy for blocks of 2 KiB take up to twice as
// long as this loop where the bytes come from memory.
inline void CopyBytes(void* to, const void* from, size_t size) {
  constexpr size_t kStride = 128;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  for (; size >= kStride; size -= kStride) {
    std::memcpy(out, in, kStride);
    out += kStride;
    in += kStride;
    // A compiler that knows the loop puts a call of memcpy in its place.
    asm("" : "+r"(out), "+r"(in));
  }
  if (size > 0) std::memcpy(out, in, size);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_COPY_BYTES_H_
