// The keys of one stripe that wait for a row, each with a short record. It has
// an index and a store of rows like the stripe's own, but is used under the
// stripe's mutex only.

#ifndef TFSWITCH_CC_TABLE_CANDIDATES_H_
#define TFSWITCH_CC_TABLE_CANDIDATES_H_

#include <cstddef>
#include <cstdint>
#include <functional>

#include "cc/base/hash.h"
#include "cc/base/keyed_hash.h"
#include "cc/base/memory_region.h"
#include "cc/table/row_store.h"
#include "cc/table/stripe_index.h"

namespace tfswitch {

// Thread-compatible: guarded by the mutex of the stripe.
class Candidates {
 public:
  // Positions are made by *hash, which must outlive this object.
  //
  // REQUIRES: called once, before anything else. False if there is no memory.
  bool Init(MemorySpan index_0, MemorySpan index_1, MemorySpan records,
            int record_floats, const KeyedHash* hash);
  // For records that have stamps (table/change_log.h).
  // REQUIRES: called at most once, after Init() and before anything else.
  void InitStamps(MemorySpan stamps) { records_.InitStamps(stamps); }

  // The record of a key; null if the key does not wait.
  float* Find(Key key, uint32_t position) const;
  // The same for several keys, whose cache misses overlap.
  void FindMany(const Key* keys, const uint32_t* positions, size_t count,
                const float** records) const;

  // Adds a key that does not wait yet. Its record holds garbage; null if memory
  // is used up.
  float* Insert(Key key, uint32_t position);

  // Does nothing if the key does not wait.
  void Erase(Key key, uint32_t position);

  // The epoch of the last change of a record. REQUIRES: InitStamps(); the
  // record comes from Find(), Insert() or Visit().
  uint32_t& StampOf(const float* record) const {
    return records_.stamps()[records_.RowOf(record)];
  }

  // Calls visit(key, record) for keys with a position in [begin, end), of about
  // `num_buckets` buckets; returns the position to go on from. Nothing may be
  // inserted or erased meanwhile.
  uint64_t Visit(uint64_t begin, uint64_t num_buckets,
                 const std::function<void(Key, const float*)>& visit) const;

  // Moves records together and gives memory back, if it pays. Moves stamps with
  // them if any has been written.
  void Compact(bool with_stamps);

  int64_t size() const { return size_; }
  size_t resident_bytes() const {
    return index_.resident_bytes() + records_.resident_bytes();
  }
  size_t stamp_bytes() const { return records_.stamp_bytes(); }

 private:
  StripeIndex index_;
  RowStore records_;
  size_t record_floats_ = 0;
  int64_t size_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_CANDIDATES_H_
