// The hash index of one stripe: keys to row numbers, growing without a pause.
//
//   home bucket of a key = (position * num_buckets) >> 32,
//   position = 32 bits of the key's hash (base/keyed_hash.h)
//
//   old array   |xxxxxxxxxxxxxxxx|......................|     x moved, not live
//                                ^ cursor
//   new array   |........................|                      (1.4 x as long)
//
// A full bucket overflows into the next one; buckets are added behind the last
// home bucket when an overflow gets there. Homes are monotone in the hash, so
// growing keeps the order: each insert moves the cursor a few buckets through
// the old array. A key is in the new array if its old home is behind the
// cursor, else in the old one. The cursor stops only behind buckets without
// overflow, so no search crosses it. Memory behind it is given back at once:
// the peak is the new array, not both.
//
// The two arrays take turns in two reserved spans of memory. Readers use an
// IndexView, a copy of where things are. It may be out of date, which they
// notice:
//
//   * A bucket that has moved is not live: take a new view.
//   * A hit is valid if its bucket is unchanged (bucket.h).
//   * A miss is valid if every bucket searched was unchanged and the phase is
//     still that of the view. The phase counts beginnings and ends of growth;
//     in a later phase the span may hold another array.

#ifndef TFSWITCH_CC_TABLE_STRIPE_INDEX_H_
#define TFSWITCH_CC_TABLE_STRIPE_INDEX_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "cc/base/keyed_hash.h"
#include "cc/base/memory_region.h"
#include "cc/table/bucket.h"

namespace tfswitch {

// All positions in a stripe are below this.
inline constexpr uint64_t kEndOfPositions = uint64_t{1} << 32;
// The largest number of home buckets.
inline constexpr uint64_t kMaxBuckets = kEndOfPositions - 1;

// Where a reader finds the buckets of one stripe. Plain data, because the batch
// kernels use it.
struct alignas(64) IndexView {
  Bucket* buckets = nullptr;
  uint64_t num_buckets = 0;
  Bucket* next_buckets = nullptr;
  uint64_t next_num_buckets = 0;
  uint64_t cursor = 0;  // Homes below it are in next_buckets.
  uint64_t phase = 0;
  const uint64_t* current_phase = nullptr;
  char* rows = nullptr;  // Row r is at rows + r * stride.
};

TFSWITCH_ALWAYS_INLINE uint64_t HomeIndex(uint32_t position,
                                          uint64_t num_buckets) {
  return (position * num_buckets) >> 32;
}

TFSWITCH_ALWAYS_INLINE Bucket* HomeBucket(const IndexView& view,
                                          uint32_t position) {
  const uint64_t home = HomeIndex(position, view.num_buckets);
  if (__builtin_expect(home < view.cursor, 0)) {
    return view.next_buckets + HomeIndex(position, view.next_num_buckets);
  }
  return view.buckets + home;
}

// True if the index is still in `phase`, which the view was taken in.
TFSWITCH_ALWAYS_INLINE bool IsPhase(const IndexView& view, uint64_t phase) {
  return __atomic_load_n(view.current_phase, __ATOMIC_ACQUIRE) == phase;
}

// Thread-compatible: View() may be called by any thread at any time; everything
// else needs the mutex of the stripe.
class StripeIndex {
 public:
  // A place in the index. `bucket` is null if the key is absent.
  struct Entry {
    uint32_t row() const { return RacyLoad(&bucket->rows[at]); }

    Bucket* bucket = nullptr;
    int at = 0;
  };

  // Positions are made by *hash, which must outlive this object.
  //
  // REQUIRES: called once, before anything else. `spans` have equal capacity.
  // False if there is no memory for the first array.
  bool Init(MemorySpan span_0, MemorySpan span_1, uint64_t num_buckets,
            char* rows, const KeyedHash* hash);

  ~StripeIndex();

  IndexView View() const;

  // The bucket at which a search for `position` begins, for prefetching.
  const Bucket* Home(uint32_t position) const;

  Entry Find(Key key, uint32_t position) const;

  // Adds a key that is absent, and moves the cursor on if growing. False, with
  // nothing changed, if the address space is used up.
  bool Insert(Key key, uint32_t position, uint32_t row);

  // Removes the entry, which Find() returned for `position`.
  void Erase(Entry entry, uint32_t position);

  // Calls visit(bucket) for the buckets that hold keys of positions [begin,
  // end), once each. Other keys may be in them too.
  void VisitBuckets(uint64_t begin, uint64_t end,
                    const std::function<void(Bucket*)>& visit) const;

  // Calls visit(key, entry) for entries with a position in [begin, end), of
  // about `num_buckets` buckets; returns the position to go on from, at most
  // kEndOfPositions. With `rows`, visits only rows for which it is true.
  // Nothing may be inserted or erased meanwhile.
  uint64_t VisitEntries(uint64_t begin, uint64_t num_buckets,
                        const std::function<void(Key, Entry)>& visit,
                        const std::vector<bool>* rows = nullptr) const;

  bool is_growing() const { return is_growing_; }

  // Touched memory.
  size_t resident_bytes() const {
    return arrays_[0].resident_bytes() + arrays_[1].resident_bytes();
  }

 private:
  struct Array {
    MemorySpan span;
    uint64_t num_buckets = 0;   // Homes.
    uint64_t limit = 0;         // Initialised buckets: homes and overflow.
    size_t huge_bytes = 0;      // [0, huge_bytes) is for huge pages.
    size_t touch_end = 0;       // Asked to be touched ahead, up to here.
    size_t released_bytes = 0;  // Given back behind the cursor.

    Bucket* buckets() const { return reinterpret_cast<Bucket*>(span.data()); }
    size_t resident_bytes() const;
  };

  Array& current() { return arrays_[current_]; }
  const Array& current() const { return arrays_[current_]; }
  Array& next() { return arrays_[1 - current_]; }
  const Array& next() const { return arrays_[1 - current_]; }

  bool IsMoved(uint32_t position) const {
    return is_growing_ && HomeIndex(position, current().num_buckets) < cursor_;
  }

  // Asks for the pages up to one behind `end` to be touched.
  void TouchAhead(Array* array, size_t end);
  // Makes buckets [0, limit) of `array` live.
  bool ExtendLimit(Array* array, uint64_t limit);
  bool InsertInto(Array* array, Key key, uint32_t position, uint32_t row);

  // Lays out the next array and asks for its first pages to be touched; growth
  // may begin after that. Waits while memory is still being given back, unless
  // `is_urgent`.
  void PrepareGrowth(bool is_urgent);
  void BeginGrowth();
  bool MoveBuckets();
  void EndGrowth();
  void ReleaseMoved();
  void Publish();

  const KeyedHash* hash_ = nullptr;
  Array arrays_[2];
  int current_ = 0;
  bool is_prepared_ = false;  // next() is laid out.
  bool is_growing_ = false;
  uint64_t cursor_ = 0;
  int64_t num_keys_ = 0;

  // View() copies this. It is written under the stripe's mutex, with an odd
  // phase while the fields are inconsistent. Within a phase only the cursor
  // moves.
  IndexView published_;
  uint64_t phase_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_STRIPE_INDEX_H_
