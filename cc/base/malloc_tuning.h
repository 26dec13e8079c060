// Keeps malloc from giving large buffers back to the kernel.

#ifndef TFSWITCH_CC_BASE_MALLOC_TUNING_H_
#define TFSWITCH_CC_BASE_MALLOC_TUNING_H_

namespace tfswitch {

// Each step allocates and frees messages of megabytes. With glibc's defaults
// each message is mapped, faulted in page by page and unmapped again, which
// costs more than all the copying. So this raises three settings for the whole
// process: the mmap threshold to 32 MiB (the largest that glibc accepts), the
// trim threshold to 512 MiB and the top pad to 64 MiB.
//
// Does nothing after the first call, and nothing if the environment variable
// TFSWITCH_KEEP_MALLOC_DEFAULTS is 1. Returns false if the allocator refused a
// setting; memory then works as before, only slower. Thread-safe.
bool TuneMalloc();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_MALLOC_TUNING_H_
