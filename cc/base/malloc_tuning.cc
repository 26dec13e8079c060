#include "cc/base/malloc_tuning.h"

#include <cstdlib>
#include <cstring>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define TFSWITCH_MALLOC_IS_SANITIZED
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define TFSWITCH_MALLOC_IS_SANITIZED
#endif
#endif

namespace tfswitch {
namespace {

bool TuneMallocNow() {
  const char* keep = std::getenv("TFSWITCH_KEEP_MALLOC_DEFAULTS");
  if (keep != nullptr && std::strcmp(keep, "1") == 0) return true;
#if defined(TFSWITCH_MALLOC_IS_SANITIZED)
  // With a sanitizer, malloc is the sanitizer's own: there is nothing to tune.
  return true;
#elif defined(__GLIBC__)
  constexpr int kMiB = 1 << 20;
  // Sets all three values even if malloc refuses one: each helps by itself.
  const bool mmap_set = mallopt(M_MMAP_THRESHOLD, 32 * kMiB) == 1;
  const bool trim_set = mallopt(M_TRIM_THRESHOLD, 512 * kMiB) == 1;
  const bool pad_set = mallopt(M_TOP_PAD, 64 * kMiB) == 1;
  return mmap_set && trim_set && pad_set;
#else
  return false;
#endif
}

}  // namespace

bool TuneMalloc() {
  static const bool tuned = TuneMallocNow();
  return tuned;
}

}  // namespace tfswitch
