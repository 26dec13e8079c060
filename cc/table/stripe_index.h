// The hash index of one stripe. It maps keys to row numbers, and grows without
// a pause.
//
//   home bucket of a key = (position * num_buckets) >> 32,
//   position = 32 bits of the key's hash (base/keyed_hash.h)
//
//   old array   |xxxxxxxxxxxxxxxx|......................|     x moved, not live
//                                ^ cursor
//   new array   |........................|                      (1.4 x as long)
//
// If a bucket is full, its keys overflow into the next one; if an overflow
// reaches the last bucket, buckets are added behind it. Keys with larger hashes
// have later homes, so the order of keys is the same in the old and the new
// array. While the index grows, inserts move the keys of some buckets to the
// new array and advance the cursor. A key is in the new array if its old
// home is before the cursor, else in the old one. The cursor stops only after a
// bucket without overflow, so no search crosses it. Memory before the cursor is
// given back at once, so the peak is the size of the new array, not of both.
//
// The two arrays alternate between two reserved spans of memory. Readers use an
// IndexView, a copy of the arrays' addresses and sizes. It may be out of date.
// Readers notice this as follows:
//
// * A bucket that has moved is not live: take a new view.
// * If the key is found, the result is valid if its bucket is unchanged
//   (bucket.h).
// * If the key is not found, the result is valid if every searched bucket is
//   unchanged and the phase is still that of the view. The phase counts the
//   beginnings and ends of growth; in a later phase the span may contain
//   another array.

#ifndef TFSWITCH_CC_TABLE_STRIPE_INDEX_H_
#define TFSWITCH_CC_TABLE_STRIPE_INDEX_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "cc/base/keyed_hash.h"
#include "cc/base/memory_region.h"
#include "cc/table/bucket.h"

namespace tfswitch {

// All positions in a stripe are below this.
inline constexpr uint64_t kEndOfPositions = uint64_t{1} << 32;
// The most memory of a large index for each of its keys.
inline constexpr size_t kMaxIndexBytesPerKey = 26;
// The largest number of home buckets.
inline constexpr uint64_t kMaxBuckets = kEndOfPositions - 1;

// Where the buckets of one stripe are, as a reader has seen it. Plain data,
// because the batch kernels use it.
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

// True if the index is still in `phase`, in which the view was taken.
TFSWITCH_ALWAYS_INLINE bool IsPhase(const IndexView& view, uint64_t phase) {
  return __atomic_load_n(view.current_phase, __ATOMIC_ACQUIRE) == phase;
}

// Thread-compatible: View() may be called by any thread at any time; everything
// else needs the mutex of the stripe.
class StripeIndex {
 public:
  // An entry in a bucket. `bucket` is null if the key is absent.
  struct Entry {
    uint32_t row() const { return RacyLoad(&bucket->rows[at]); }

    Bucket* bucket = nullptr;
    int at = 0;
  };

  // *hash computes positions. It must outlive this object.
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

  // Adds an absent key. If the index is growing, also moves some keys to the
  // new array. False, with nothing changed, if the address space is used up.
  //
  // If `present` is given, the key need not be absent: sets *present to its
  // entry if it has one, and then adds nothing.
  bool Insert(Key key, uint32_t position, uint32_t row,
              Entry* present = nullptr);

  // Grows the index now, so that it can hold `num_keys` keys without growing
  // again. If there is no memory for that, it grows later as usual.
  void Reserve(uint64_t num_keys);

  // Removes the entry, which Find() returned for `position`.
  void Erase(Entry entry, uint32_t position);

  // Calls visit(bucket) once for each bucket that contains keys of positions
  // [begin, end). These buckets may contain other keys, too.
  void VisitBuckets(uint64_t begin, uint64_t end,
                    const std::function<void(Bucket*)>& visit) const;

  // Calls visit(key, entry) for entries from position `begin` on, in about
  // `num_buckets` buckets. Returns the position at which to continue, at most
  // kEndOfPositions. If `rows` is given, visits only entries with (*rows)[row
  // number] true. `visit` must not insert or erase keys.
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
    // The number of home buckets.
    uint64_t num_buckets = 0;
    // The number of initialised buckets: home and overflow buckets.
    uint64_t limit = 0;
    // [0, huge_bytes) is for huge pages.
    size_t huge_bytes = 0;
    // The end of the memory that the PageKeeper was asked to touch.
    size_t touch_end = 0;
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

  // Asks the PageKeeper to touch the array up to a huge page beyond `end`.
  void TouchAhead(Array* array, size_t end);
  // Makes buckets [0, limit) of `array` live.
  bool ExtendLimit(Array* array, uint64_t limit);
  bool InsertInto(Array* array, Key key, uint32_t position, uint32_t row);

  // Prepares the next array, of `num_buckets`, and asks for its first pages to
  // be touched. Growth may begin after that. If memory is still being given
  // back, returns without doing so, unless `is_urgent`.
  void PrepareGrowth(uint64_t num_buckets, bool is_urgent);
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
  uint64_t inserts_until_move_ = 0;  // Used while is_growing_.
  uint64_t cursor_ = 0;
  int64_t num_keys_ = 0;

  // View() copies this. It changes under the stripe's mutex; the phase is odd
  // while the fields are inconsistent. Within a phase only the cursor changes.
  IndexView published_;
  uint64_t phase_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_STRIPE_INDEX_H_
