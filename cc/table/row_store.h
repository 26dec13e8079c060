// The rows of one stripe, in arrays that grow in place. So a row keeps its
// address unless the table moves it.
//
//   | row 0 | row 1 | ...  in use, freed ones between  | touched ahead |
//   |<------------- next_row_ x stride -------------->|
//
// Embeddings and slots are in one array and statistics in another, because
// lookups do not need statistics, and rows then fill whole cache lines. A third
// array has the stamps of changed rows (table/change_log.h). It takes no memory
// before the first stamp is written.
//
// Unless rows were reserved, the first 2 MiB, or 512 KiB of statistics, have
// small pages, so that a small table takes little memory. The rest has huge
// pages, which the PageKeeper touches ahead of use while the table grows.

#ifndef TFSWITCH_CC_TABLE_ROW_STORE_H_
#define TFSWITCH_CC_TABLE_ROW_STORE_H_

#include <cstdint>
#include <vector>

#include "cc/base/memory_region.h"

namespace tfswitch {

inline constexpr size_t kCacheLineBytes = 64;

// The distance in bytes from one row to the next. It is a multiple of a cache
// line, or only of 16 bytes if whole cache lines would waste more than an
// eighth of the memory.
size_t RowStride(int row_floats);

// Thread-compatible: the stripe's mutex guards it. But any thread may access
// the rows themselves, by the rules in table/bucket.h.
class RowStore {
 public:
  // Statistics begin at this offset in their span, so that 512 KiB with small
  // pages come before the first huge page. If a whole 2 MiB had small pages, as
  // for embeddings, most of a large table's statistics would have small pages.
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

  // Takes a row that is not in use; its floats are undefined. False if there is
  // no memory.
  bool Allocate(uint32_t* row) {
    if (free_rows_.size() > num_released_) {
      *row = free_rows_.back();
      free_rows_.pop_back();
      return true;
    }
    if (next_row_ == end_row_ && !Extend()) return false;
    *row = static_cast<uint32_t>(next_row_++);
    // The caller writes to the row, and then executes an instruction that waits
    // until this is done.
    const char* const ahead =
        reinterpret_cast<const char*>(At(*row + kPrefetchedRows));
    for (size_t at = 0; at < columns_[0].stride; at += kCacheLineBytes) {
      __builtin_prefetch(ahead + at, /*rw=*/1);
    }
    return true;
  }
  void Free(uint32_t row);
  // Prepares memory for `num_rows` rows in the background, if there is so much.
  void Reserve(uint64_t num_rows);

  // The caller moves rows together with the functions below. This one tells
  // whether one in `min_share` rows is free, and enough to make that
  // worthwhile.
  bool IsWorthCompacting(uint64_t min_share) const;
  // Makes Allocate() use the lowest free rows first. Returns the number of rows
  // in use. After the caller has moved rows together, they have the numbers
  // below this one.
  uint64_t SortFreeRows();
  // Takes the lowest free row, if it is below `limit`.
  bool AllocateBelow(uint64_t limit, uint32_t* row);
  // Gives back memory behind the last row in use. Each call gives back a
  // limited amount, because the stripe is locked meanwhile. False if there was
  // nothing to give back. REQUIRES: SortFreeRows() was called.
  bool ReleaseTail();

  // Element r tells whether the stamp of row r is from `first` to `last`. The
  // result is empty if no stamp is. REQUIRES: InitStamps().
  std::vector<bool> RowsWithStamps(uint32_t first, uint32_t last) const;
  // Adds about `count` stamps of rows in use.
  void SampleStamps(uint64_t count, std::vector<uint32_t>* sample) const;

  // The bytes of rows and statistics; stamps are not counted.
  size_t resident_bytes() const;
  // The bytes of the stamps; 0 if none have been written.
  size_t stamp_bytes() const { return columns_[2].resident_bytes(next_row_); }

 private:
  // One of the arrays. If `stride` is 0, the array does not exist.
  struct Column {
    MemorySpan span;
    size_t begin = 0;  // The offset of row 0 in the span's memory.
    size_t stride = 0;
    bool is_touched_ahead = true;
    size_t touch_end = 0;
    // The end of the memory that Reserve() has asked for; 0 if there is none.
    // The PageKeeper may not have touched it yet, so TouchAhead() ignores it.
    size_t reserved_end = 0;

    void Init(MemorySpan column_span, size_t column_stride,
              size_t column_begin);
    float* At(uint32_t row) const {
      return reinterpret_cast<float*>(data() + row * stride);
    }
    char* data() const { return span.data() + begin; }
    size_t EndOf(uint64_t num_rows) const { return begin + num_rows * stride; }
    void TouchAhead(uint64_t num_rows);
    void Reserve(uint64_t num_rows, bool is_empty);
    void ReleaseTail(uint64_t num_rows, uint64_t end);
    size_t resident_bytes(uint64_t num_rows) const;
  };

  // The bytes that a row takes in the array of embeddings and slots and in that
  // of statistics. The row's stamp is not counted.
  size_t stride() const { return columns_[0].stride + columns_[1].stride; }

  static constexpr uint32_t kPrefetchedRows = 12;

  // Makes memory for more rows usable. False if there is none.
  bool Extend();

  Column columns_[3];
  uint64_t next_row_ = 0;
  uint64_t end_row_ = 0;  // The memory of the rows below it is usable.
  std::vector<uint32_t> free_rows_;
  // The number of entries at the beginning of free_rows_ whose rows have no
  // memory any more. It is 0 except while ReleaseTail() returns true.
  size_t num_released_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_STORE_H_
