// A row has the same number in all columns, which are arrays for embeddings and
// slots, statistics, and stamps. Extend() extends all columns before it
// changes end_row_, so that no row is used if one of them fails. Freed
// rows are reused before new ones are made, the last freed one first.
//
// SortFreeRows() sorts the list of free rows from the highest to the lowest. So
// AllocateBelow() takes the lowest row from the end of the list, and
// ReleaseTail() the highest rows from its beginning. num_released_ is the
// number of rows at the beginning whose memory was given back. They are erased
// from the list together, when nothing is left to give back; until then other
// functions ignore them.

#include "cc/table/row_store.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "cc/base/page_keeper.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

constexpr size_t kSmallStrideBytes = 16;

// The smallest amount of memory that is worth giving back. With ThreadSanitizer
// it is small, because ThreadSanitizer needs hundreds of bytes for each float
// that threads share, so tests have only small tables.
#if TFSWITCH_THREAD_SANITIZER
constexpr size_t kMinReleaseBytes = size_t{64} << 10;
#else
constexpr size_t kMinReleaseBytes = 2 * kHugePageBytes;
#endif
constexpr size_t kReleaseStepBytes = 8 * kHugePageBytes;

// Memory is made usable for this many rows at a time.
constexpr uint64_t kRowsPerExtension = 64;

}  // namespace

size_t RowStride(int row_floats) {
  const size_t bytes = static_cast<size_t>(row_floats) * sizeof(float);
  const size_t stride = RoundUpTo(bytes, kCacheLineBytes);
  if ((stride - bytes) * 8 <= stride) return stride;
  return RoundUpTo(bytes, kSmallStrideBytes);
}

void RowStore::Column::Init(MemorySpan column_span, size_t column_stride,
                            size_t column_begin) {
  span = column_span;
  begin = column_begin;
  stride = column_stride;
  touch_end = std::min(kHugePageBytes, span.capacity());
}

void RowStore::Init(MemorySpan span, size_t stride) {
  columns_[0].Init(span, stride, 0);
}

void RowStore::InitStatistics(MemorySpan span, size_t stride) {
  columns_[1].Init(span, stride, kStatisticsOffset);
}

void RowStore::InitStamps(MemorySpan span) {
  columns_[2].Init(span, sizeof(uint32_t), 0);
  columns_[2].is_touched_ahead = false;
}

RowStore::~RowStore() {
  for (const Column& column : columns_) PageKeeper::Get().Cancel(column.span);
}

bool RowStore::Extend() {
  constexpr uint64_t kMaxRows =
      uint64_t{std::numeric_limits<uint32_t>::max()} + 1;
  const uint64_t end = std::min(next_row_ + kRowsPerExtension, kMaxRows);
  if (end == next_row_) return false;
  for (Column& column : columns_) {
    if (column.stride > 0 && !column.span.Extend(column.EndOf(end))) {
      return false;
    }
  }
  end_row_ = end;
  for (Column& column : columns_) column.TouchAhead(end_row_);
  return true;
}

void RowStore::Free(uint32_t row) { free_rows_.push_back(row); }

bool RowStore::IsWorthCompacting(uint64_t min_share) const {
  return free_rows_.size() * stride() >= kMinReleaseBytes &&
         free_rows_.size() * min_share >= next_row_;
}

uint64_t RowStore::SortFreeRows() {
  const uint64_t num_used = next_row_ - free_rows_.size();
  std::vector<bool> is_free(next_row_, false);
  for (const uint32_t row : free_rows_) is_free[row] = true;
  free_rows_.clear();
  for (uint64_t row = next_row_; row-- > 0;) {
    if (is_free[row]) free_rows_.push_back(static_cast<uint32_t>(row));
  }
  return num_used;
}

bool RowStore::AllocateBelow(uint64_t limit, uint32_t* row) {
  if (free_rows_.size() == num_released_ || free_rows_.back() >= limit) {
    return false;
  }
  *row = free_rows_.back();
  free_rows_.pop_back();
  return true;
}

bool RowStore::ReleaseTail() {
  const uint64_t end = next_row_;
  while (num_released_ < free_rows_.size() &&
         free_rows_[num_released_] + 1 == next_row_ &&
         (end - next_row_) * stride() < kReleaseStepBytes) {
    ++num_released_;
    --next_row_;
  }
  if (end == next_row_) {
    free_rows_.erase(
        free_rows_.begin(),
        free_rows_.begin() + static_cast<std::ptrdiff_t>(num_released_));
    num_released_ = 0;
    free_rows_.shrink_to_fit();
    return false;
  }
  end_row_ = next_row_;
  for (Column& column : columns_) column.ReleaseTail(next_row_, end);
  return true;
}

// Gives back the memory of the rows from `num_rows` to `end`.
void RowStore::Column::ReleaseTail(uint64_t num_rows, uint64_t end) {
  if (stride == 0) return;
  // Cancels requests to the PageKeeper to touch memory behind the used rows:
  // the column no longer needs that memory.
  PageKeeper::Get().Cancel(span);
  const size_t release_begin = RoundUpTo(EndOf(num_rows), kHugePageBytes);
  const size_t touched = std::max(
      {touch_end, reserved_end, RoundUpTo(EndOf(end), kHugePageBytes)});
  if (release_begin < touched) {
    span.Release(release_begin, std::min(touched, span.capacity()));
  }
  touch_end = std::max(release_begin, kHugePageBytes);
  reserved_end = 0;
}

void RowStore::Column::TouchAhead(uint64_t num_rows) {
  if (stride == 0 || !is_touched_ahead) return;
  // Asks the PageKeeper to touch one or two huge pages behind the used memory:
  // two if the column is large.
  const size_t used = num_rows * stride;
  const size_t wanted = RoundDownTo(
      begin + used + kHugePageBytes + std::min(used / 4, kHugePageBytes),
      kHugePageBytes);
  if (wanted <= touch_end || wanted > span.capacity() || !span.Extend(wanted)) {
    return;
  }
  PageKeeper::Get().Touch(span.data() + touch_end, wanted - touch_end);
  touch_end = wanted;
}

void RowStore::Reserve(uint64_t num_rows) {
  for (Column& column : columns_) column.Reserve(num_rows, next_row_ == 0);
}

void RowStore::Column::Reserve(uint64_t num_rows, bool is_empty) {
  if (stride == 0 || !is_touched_ahead) return;
  const size_t end = RoundUpTo(EndOf(num_rows), kHugePageBytes);
  if (end > span.capacity() || !span.Extend(end)) return;
  // A table that becomes large can have huge pages from the beginning.
  const bool has_no_page = is_empty && begin == 0 && reserved_end == 0;
  const size_t from = has_no_page ? 0 : std::max(touch_end, reserved_end);
  if (end <= std::max(from, kHugePageBytes)) return;
  PageKeeper::Get().TouchWhenIdle(span.data() + from, end - from);
  reserved_end = end;
}

std::vector<bool> RowStore::RowsWithStamps(uint32_t first,
                                           uint32_t last) const {
  std::vector<bool> rows(next_row_);
  bool is_any = false;
  for (uint64_t row = 0; row < next_row_; ++row) {
    const uint32_t stamp = RacyLoad(stamps() + row);
    if (stamp < first || stamp > last) continue;
    rows[row] = true;
    is_any = true;
  }
  return is_any ? rows : std::vector<bool>();
}

void RowStore::SampleStamps(uint64_t count,
                            std::vector<uint32_t>* sample) const {
  std::vector<bool> is_free(next_row_);
  for (const uint32_t row : free_rows_) is_free[row] = true;
  const uint64_t distance = std::max<uint64_t>(1, next_row_ / count);
  for (uint64_t row = 0; row < next_row_; row += distance) {
    if (!is_free[row]) sample->push_back(RacyLoad(stamps() + row));
  }
}

size_t RowStore::Column::resident_bytes(uint64_t num_rows) const {
  if (stride == 0) return 0;
  const size_t end = RoundUpTo(EndOf(num_rows), kSmallPageBytes);
  const size_t touched = std::max(touch_end, reserved_end);
  return (touched > kHugePageBytes ? std::max(touched, end) : end) - begin;
}

size_t RowStore::resident_bytes() const {
  return columns_[0].resident_bytes(next_row_) +
         columns_[1].resident_bytes(next_row_);
}

}  // namespace tfswitch
