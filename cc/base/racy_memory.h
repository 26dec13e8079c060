// Reads memory that another thread may be writing. An optimistic reader copies
// first and then checks a version number. The writer changes this number, so a
// copy that mixes old and new values (a torn one) is noticed.
//
// In ordinary builds these are plain copies, as fast as memcpy(). The C++
// memory model calls that a race, although a torn copy is always dropped. So
// under ThreadSanitizer each element is accessed atomically. ThreadSanitizer
// can then check the rules that readers and writers follow around the copies.
//
// Reader: version = load; RacyLoad...; RacyReadFence(); version unchanged?
// Writer: lock version; RacyWriteFence(); RacyStore...; release version.

#ifndef TFSWITCH_CC_BASE_RACY_MEMORY_H_
#define TFSWITCH_CC_BASE_RACY_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SANITIZE_THREAD__)
#define TFSWITCH_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TFSWITCH_THREAD_SANITIZER 1
#endif
#endif
#ifndef TFSWITCH_THREAD_SANITIZER
#define TFSWITCH_THREAD_SANITIZER 0
#endif

// Inlined even in unoptimised builds, because files compiled for AVX2 use these
// functions, too: if the linker kept an out-of-line copy with AVX2
// instructions, other processors would run it.
#define TFSWITCH_ALWAYS_INLINE [[gnu::always_inline]] inline

namespace tfswitch {

#if TFSWITCH_THREAD_SANITIZER

// ThreadSanitizer does not understand fences. So in its builds each access is
// atomic, and has the memory order that otherwise comes from a fence.
template <typename T>
TFSWITCH_ALWAYS_INLINE T RacyLoad(const T* from) {
  T value;
  __atomic_load(from, &value, __ATOMIC_ACQUIRE);
  return value;
}
template <typename T>
TFSWITCH_ALWAYS_INLINE void RacyStore(T* to, T value) {
  __atomic_store(to, &value, __ATOMIC_RELEASE);
}
TFSWITCH_ALWAYS_INLINE void RacyReadFence() {}
TFSWITCH_ALWAYS_INLINE void RacyWriteFence() {}
TFSWITCH_ALWAYS_INLINE void RacyLoadFloats(float* to, const float* from,
                                           size_t count) {
  for (size_t i = 0; i < count; ++i) to[i] = RacyLoad(&from[i]);
}
TFSWITCH_ALWAYS_INLINE void RacyStoreFloats(float* to, const float* from,
                                            size_t count) {
  for (size_t i = 0; i < count; ++i) RacyStore(&to[i], from[i]);
}

#else

template <typename T>
TFSWITCH_ALWAYS_INLINE T RacyLoad(const T* from) {
  T value;
  __atomic_load(from, &value, __ATOMIC_RELAXED);
  return value;
}
template <typename T>
TFSWITCH_ALWAYS_INLINE void RacyStore(T* to, T value) {
  __atomic_store(to, &value, __ATOMIC_RELAXED);
}
// Keeps the loads before this call from moving behind the later check of the
// version.
TFSWITCH_ALWAYS_INLINE void RacyReadFence() {
  __atomic_thread_fence(__ATOMIC_ACQUIRE);
}
// Keeps the stores after this call from moving before the locking of the
// version.
TFSWITCH_ALWAYS_INLINE void RacyWriteFence() {
  __atomic_thread_fence(__ATOMIC_RELEASE);
}
TFSWITCH_ALWAYS_INLINE void RacyLoadFloats(float* to, const float* from,
                                           size_t count) {
  std::memcpy(to, from, count * sizeof(float));
}
TFSWITCH_ALWAYS_INLINE void RacyStoreFloats(float* to, const float* from,
                                            size_t count) {
  std::memcpy(to, from, count * sizeof(float));
}

#endif  // TFSWITCH_THREAD_SANITIZER

// Calls modify(floats) to change `count` floats in place, while optimistic
// readers may be reading. The caller holds the version's lock, or the floats
// are not published yet.
template <typename Modify>
TFSWITCH_ALWAYS_INLINE void RacyModifyFloats(float* floats, size_t count,
                                             const Modify& modify) {
#if TFSWITCH_THREAD_SANITIZER
  // A buffer for the longest row: an embedding, slots of three times its
  // length, and 64 floats.
  float scratch[4 * 4096 + 64];
  RacyLoadFloats(scratch, floats, count);
  modify(scratch);
  RacyStoreFloats(floats, scratch, count);
#else
  static_cast<void>(count);
  modify(floats);
#endif
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_RACY_MEMORY_H_
