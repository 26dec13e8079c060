// The rows of one stripe: arrays that grow in place, so that a row keeps its
// address, unless the table moves it.
//
//   | row 0 | row 1 | ...  in use, freed ones between  | touched ahead |
//   |<------------- next_row_ x stride -------------->|
//
// Embeddings and slots are in one array and statistics in another, which a
// lookup never touches, and beside which rows stay on whole cache lines. A
// third has the stamps of rows that change (table/change_log.h), and no memory
// before the first of them is written.
//
// The first 2 MiB, or 512 KiB of statistics, are in small pages, so that a
// small table stays small; the rest is in huge pages, touched ahead by the
// PageKeeper while the table grows.

#ifndef TFSWITCH_CC_TABLE_ROW_STORE_H_
#define TFSWITCH_CC_TABLE_ROW_STORE_H_

#include <cstdint>
#include <vector>

#include "cc/base/memory_region.h"

namespace tfswitch {

inline constexpr size_t kCacheLineBytes = 64;

// Bytes from one row to the next: a multiple of a cache line, or of 16 bytes
// where that would waste more than an eighth.
size_t RowStride(int row_floats);

// Thread-compatible: guarded by the mutex of the stripe. Any thread may access
// the rows themselves; table/bucket.h has the rules.
class RowStore {
 public:
  // Row 0 of the statistics begins so far in their span: 512 KiB of small pages
  // before the first huge one. With up to a whole huge page of small ones, as
  // embeddings have, most of a large table's statistics would be in these.
  static constexpr size_t kStatisticsOffset = kHugePageBytes - (512 << 10);

  // REQUIRES: called once, before anything else.
  void Init(MemorySpan span, size_t stride);
  // REQUIRES: called at most once, after Init() and before anything else.
  void InitStatistics(MemorySpan span, size_t stride);
  // The same for stamps.
  void InitStamps(MemorySpan span);
  ~RowStore();

  char* data() const { return columns_[0].data(); }
  float* At(uint32_t row) const { return columns_[0].At(row); }
  // The row that is At() there.
  uint32_t RowOf(const float* at) const {
    return static_cast<uint32_t>(
        static_cast<size_t>(reinterpret_cast<const char*>(at) - data()) /
        columns_[0].stride);
  }
  // Null without InitStatistics().
  char* statistics_data() const { return columns_[1].data(); }
  float* StatisticsAt(uint32_t row) const { return columns_[1].At(row); }

  // REQUIRES: InitStamps().
  uint32_t* stamps() const {
    return reinterpret_cast<uint32_t*>(columns_[2].data());
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

  // By row, whether its stamp is above `epoch`; empty if none is.
  // REQUIRES: InitStamps().
  std::vector<bool> ChangedSince(uint32_t epoch) const;

  // Without stamps.
  size_t resident_bytes() const;
  // The bytes of the stamps, if they have been written.
  size_t stamp_bytes() const { return columns_[2].resident_bytes(next_row_); }

 private:
  // One of the arrays; with stride 0 there is none.
  struct Column {
    MemorySpan span;
    size_t begin = 0;  // The start of row 0 in the span.
    size_t stride = 0;
    bool is_touched_ahead = true;
    size_t touch_end = 0;

    void Init(MemorySpan column_span, size_t column_stride,
              size_t column_begin);
    float* At(uint32_t row) const {
      return reinterpret_cast<float*>(data() + row * stride);
    }
    char* data() const { return span.data() + begin; }
    size_t EndOf(uint64_t num_rows) const { return begin + num_rows * stride; }
    void TouchAhead(uint64_t num_rows);
    void ReleaseTail(uint64_t num_rows, uint64_t end);
    size_t resident_bytes(uint64_t num_rows) const;
  };

  // A row's bytes, without the column that may have no memory.
  size_t stride() const { return columns_[0].stride + columns_[1].stride; }

  Column columns_[3];
  uint64_t next_row_ = 0;
  std::vector<uint32_t> free_rows_;
  // The first so many of free_rows_, which are gone while ReleaseTail() returns
  // true.
  size_t num_released_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_STORE_H_
