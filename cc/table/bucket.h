// A bucket of the hash index: five keys and their row numbers in one cache
// line, with a word that describes their state.
//
//   | key 0 .. key 4 (40 B) | row 0 .. row 4 (20 B) | meta (4 B) |
//
//   meta, from the low bits:
//     used:3      the number of valid entries; the entries behind them are
//                 garbage, so no key has to stand for "empty"
//     live:1      0: the entries have moved, or the page was released and reads
//                 as zeros: look again with a fresh IndexView
//     locked:1    someone is changing the bucket, or a row that it names
//     overflow:8  how many keys have their home at or before this bucket, and
//                 are stored behind it; 0 ends a search; 255 means "many" and
//                 never decreases
//     version:19  counts the changes
//
// Rules that make reading without a lock sound:
//
//   * Entries change only under the mutex of the stripe. Entries, and the rows
//     they name, change only while `locked` is set, which takes a
//     compare-and-swap of the whole meta word. Unlocking changes the version.
//     The first key of an empty bucket is written without `locked`, because
//     threads without the mutex lock only buckets in which they found a key.
//   * So a reader that finds the same unlocked meta before and after reading
//     has read one state of the bucket and whole rows. A writer that locks with
//     the meta under which it found an entry may trust that entry.
//
// A reader could miss a change if its bucket changed 2^19 times between two
// loads of the reader, because the version would be the same again. Writers
// look at the key again after locking.

#ifndef TFSWITCH_CC_TABLE_BUCKET_H_
#define TFSWITCH_CC_TABLE_BUCKET_H_

#include <cstdint>

#include "cc/base/hash.h"
#include "cc/base/racy_memory.h"
#include "cc/base/spin_wait.h"

namespace tfswitch {

inline constexpr int kKeysPerBucket = 5;

struct alignas(64) Bucket {
  Key keys[kKeysPerBucket];
  uint32_t rows[kKeysPerBucket];
  uint32_t meta;
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

inline constexpr uint32_t kMetaUsedMask = 0x7;
inline constexpr uint32_t kMetaLive = 1u << 3;
inline constexpr uint32_t kMetaLocked = 1u << 4;
inline constexpr int kMetaOverflowShift = 5;
inline constexpr uint32_t kMetaOverflowOne = 1u << kMetaOverflowShift;
inline constexpr uint32_t kMetaOverflowMask = 0xffu << kMetaOverflowShift;
inline constexpr int kMetaVersionShift = 13;
inline constexpr uint32_t kMetaVersionOne = 1u << kMetaVersionShift;

TFSWITCH_ALWAYS_INLINE uint32_t UsedOf(uint32_t meta) {
  return meta & kMetaUsedMask;
}
TFSWITCH_ALWAYS_INLINE bool HasOverflow(uint32_t meta) {
  return (meta & kMetaOverflowMask) != 0;
}
TFSWITCH_ALWAYS_INLINE bool IsReadable(uint32_t meta) {
  return (meta & (kMetaLive | kMetaLocked)) == kMetaLive;
}

TFSWITCH_ALWAYS_INLINE uint32_t LoadMeta(const Bucket* bucket) {
  return __atomic_load_n(&bucket->meta, __ATOMIC_ACQUIRE);
}

// True if nothing has changed since LoadMeta() returned `meta`, so all reads in
// between have seen one consistent state.
TFSWITCH_ALWAYS_INLINE bool IsUnchanged(const Bucket* bucket, uint32_t meta) {
  RacyReadFence();
  return __atomic_load_n(&bucket->meta, __ATOMIC_RELAXED) == meta;
}

// Locks the bucket if its meta word still is `meta`; returns whether it did.
TFSWITCH_ALWAYS_INLINE bool TryLockBucket(Bucket* bucket, uint32_t meta) {
  const bool is_locked = __atomic_compare_exchange_n(
      &bucket->meta, &meta, meta | kMetaLocked, /*weak=*/false,
      __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
  if (is_locked) RacyWriteFence();
  return is_locked;
}

// Unlocks the bucket, which makes the changes visible. `meta` is the new word,
// but without the lock and with the old version.
TFSWITCH_ALWAYS_INLINE void UnlockBucket(Bucket* bucket, uint32_t meta) {
  __atomic_store_n(&bucket->meta, meta + kMetaVersionOne, __ATOMIC_RELEASE);
}

// Locks the bucket, and waits if needed. Returns the meta word without the
// lock.
inline uint32_t LockBucket(Bucket* bucket) {
  SpinWait wait;
  for (;;) {
    const uint32_t meta = LoadMeta(bucket);
    if ((meta & kMetaLocked) == 0 && TryLockBucket(bucket, meta)) return meta;
    wait.Pause();
  }
}

// Parts of a key's KeyedHash that the table uses. They are taken from the high
// bits.
TFSWITCH_ALWAYS_INLINE uint32_t StripeOfHash(uint64_t hash) {
  return static_cast<uint32_t>(hash >> 60);
}
TFSWITCH_ALWAYS_INLINE uint32_t PositionOfHash(uint64_t hash) {
  return static_cast<uint32_t>(hash >> 28);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_BUCKET_H_
