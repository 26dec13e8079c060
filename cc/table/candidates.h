// Candidates: the keys of one stripe that wait for a row, each with a short
// record. They have an index and a store of rows like those of the stripe, but
// all access needs the stripe's mutex.

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
  // *hash computes positions. It must outlive this object.
  //
  // REQUIRES: called once, before anything else. False if there is no memory.
  bool Init(MemorySpan index_0, MemorySpan index_1, MemorySpan records,
            int record_floats, const KeyedHash* hash);
  // Makes room for a stamp of each record: the epoch of its last change
  // (table/change_log.h). REQUIRES: called at most once, after Init() and
  // before anything else.
  void InitStamps(MemorySpan stamps) { records_.InitStamps(stamps); }

  // The record of a key; null if the key is not a candidate.
  float* Find(Key key, uint32_t position) const;
  // Finds the records of several keys. Their cache misses overlap.
  void FindMany(const Key* keys, const uint32_t* positions, size_t count,
                const float** records) const;

  // Adds a key that is not a candidate yet. The caller must fill its record,
  // whose contents are undefined. Null if there is no memory.
  float* Insert(Key key, uint32_t position);

  // Removes a key; does nothing if it is not a candidate.
  void Erase(Key key, uint32_t position);

  // The epoch of the last change of a record. REQUIRES: InitStamps(); the
  // record comes from Find(), Insert() or Visit().
  uint32_t& StampOf(const float* record) const {
    return records_.stamps()[records_.RowOf(record)];
  }

  // Calls visit(key, record) for keys from position `begin` on, until it has
  // visited about `num_buckets` buckets. Returns the position at which to
  // continue. `visit` must not insert or erase keys.
  uint64_t Visit(uint64_t begin, uint64_t num_buckets,
                 const std::function<void(Key, const float*)>& visit) const;

  // If enough records are free, moves the used records together and gives
  // memory back. `with_stamps` also moves their stamps (epochs of last
  // changes).
  void Compact(bool with_stamps);

  int64_t size() const { return size_; }
  // The number of records that have memory and are not in use.
  int64_t num_free() const {
    return static_cast<int64_t>(records_.resident_bytes() /
                                RowStride(static_cast<int>(record_floats_))) -
           size_;
  }
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
