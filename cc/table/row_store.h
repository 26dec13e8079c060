// The rows of one stripe: an array that grows in place, so that a row keeps its
// address, unless the table moves it.
//
//   | row 0 | row 1 | ...  in use, freed ones between  | touched ahead |
//   |<------------- next_row_ x stride -------------->|
//
// The first 2 MiB are in small pages, so that a small table stays small; the
// rest is in huge pages, touched ahead by the PageKeeper while the table
// grows.

#ifndef TFSWITCH_CC_TABLE_ROW_STORE_H_
#define TFSWITCH_CC_TABLE_ROW_STORE_H_

#include <cstdint>
#include <vector>

#include "cc/base/memory_region.h"

namespace tfswitch {

// Bytes from one row to the next: a multiple of a cache line, or of 16 bytes
// where that would waste more than an eighth.
size_t RowStride(int row_floats);

// Thread-compatible: guarded by the mutex of the stripe. Any thread may access
// the rows themselves; table/bucket.h has the rules.
class RowStore {
 public:
  // REQUIRES: called once, before anything else.
  void Init(MemorySpan span, size_t stride);
  ~RowStore();

  char* data() const { return span_.data(); }
  float* At(uint32_t row) const {
    return reinterpret_cast<float*>(span_.data() + row * stride_);
  }

  // A row that is not in use, holding garbage. False if memory is used up.
  bool Allocate(uint32_t* row);
  void Free(uint32_t row);

  // For moving rows together, which is the user's part. So many rows lie so far
  // apart that it pays:
  bool IsWorthCompacting() const;
  // Has the lowest of the free rows used first. Returns the number of rows in
  // use, below which all of them have room.
  uint64_t SortFreeRows();
  // The next free row if it is below `limit`.
  bool AllocateBelow(uint64_t limit, uint32_t* row);
  // Gives memory behind the last row in use back, a little at a time because
  // the stripe is locked meanwhile. False if there was none. Goes by the order
  // of SortFreeRows().
  bool ReleaseTail();

  size_t resident_bytes() const;

 private:
  void TouchAhead();

  MemorySpan span_;
  size_t stride_ = 0;
  uint64_t next_row_ = 0;
  size_t touch_end_ = 0;
  std::vector<uint32_t> free_rows_;
  // Of free_rows_, the first ones, which are gone while ReleaseTail() returns
  // true.
  size_t num_released_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_STORE_H_
