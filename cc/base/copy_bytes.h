// memcpy for arrays of megabytes.

#ifndef TFSWITCH_CC_BASE_COPY_BYTES_H_
#define TFSWITCH_CC_BASE_COPY_BYTES_H_

#include <cstddef>
#include <cstring>

namespace tfswitch {

// The same as memcpy. Above 4 KiB glibc's memcpy uses `rep movsb`, which on
// AMD Zen 3 and 4 takes ten times as long when the target lies just below the
// source modulo the page size (measured: 1.30 instead of 0.13 ms for 3.8 MB).
// Pieces received from a socket lie anywhere. In blocks of 2 KiB memcpy uses
// vector registers and does not care.
inline void CopyBytes(void* to, const void* from, size_t size) {
  constexpr size_t kBlock = 2048;
  char* out = static_cast<char*>(to);
  const char* in = static_cast<const char*>(from);
  while (size > 0) {
    size_t part = size < kBlock ? size : kBlock;
    // A compiler that knows the bound puts a `rep movsq` here instead of a
    // call.
    asm("" : "+r"(part));
    std::memcpy(out, in, part);
    out += part;
    in += part;
    size -= part;
  }
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_COPY_BYTES_H_
