#include "cc/table/row_store.h"

#include <algorithm>
#include <cstddef>
#include <limits>

#include "cc/base/page_keeper.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {
namespace {

constexpr size_t kCacheLineBytes = 64;
constexpr size_t kSmallStrideBytes = 16;

// Less than this is not worth the way. ThreadSanitizer keeps hundreds of bytes
// for each float that threads share, so there a small table must do.
#if TFSWITCH_THREAD_SANITIZER
constexpr size_t kMinReleaseBytes = size_t{64} << 10;
#else
constexpr size_t kMinReleaseBytes = 2 * kHugePageBytes;
#endif
constexpr size_t kReleaseStepBytes = 8 * kHugePageBytes;

}  // namespace

size_t RowStride(int row_floats) {
  const size_t bytes = static_cast<size_t>(row_floats) * sizeof(float);
  const size_t stride = RoundUpTo(bytes, kCacheLineBytes);
  if ((stride - bytes) * 8 <= stride) return stride;
  return RoundUpTo(bytes, kSmallStrideBytes);
}

void RowStore::Init(MemorySpan span, size_t stride) {
  span_ = span;
  stride_ = stride;
  touch_end_ = std::min(kHugePageBytes, span.capacity());
}

RowStore::~RowStore() { PageKeeper::Get().Cancel(span_); }

bool RowStore::Allocate(uint32_t* row) {
  if (free_rows_.size() > num_released_) {
    *row = free_rows_.back();
    free_rows_.pop_back();
    return true;
  }
  if (next_row_ > std::numeric_limits<uint32_t>::max() ||
      !span_.Extend((next_row_ + 1) * stride_)) {
    return false;
  }
  *row = static_cast<uint32_t>(next_row_++);
  TouchAhead();
  return true;
}

void RowStore::Free(uint32_t row) { free_rows_.push_back(row); }

bool RowStore::IsWorthCompacting() const {
  return free_rows_.size() * stride_ >= kMinReleaseBytes &&
         free_rows_.size() * 4 >= next_row_;
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
         (end - next_row_) * stride_ < kReleaseStepBytes) {
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
  // What was to be touched ahead is not wanted any more.
  PageKeeper::Get().Cancel(span_);
  const size_t begin = RoundUpTo(next_row_ * stride_, kHugePageBytes);
  const size_t touched =
      std::max(touch_end_, RoundUpTo(end * stride_, kHugePageBytes));
  if (begin < touched)
    span_.Release(begin, std::min(touched, span_.capacity()));
  touch_end_ = std::max(begin, kHugePageBytes);
  return true;
}

void RowStore::TouchAhead() {
  // One or two huge pages ahead of use, by the size of the table.
  const size_t used = next_row_ * stride_;
  const size_t wanted =
      RoundDownTo(used + kHugePageBytes + std::min(used / 4, kHugePageBytes),
                  kHugePageBytes);
  if (wanted <= touch_end_ || wanted > span_.capacity() ||
      !span_.Extend(wanted)) {
    return;
  }
  PageKeeper::Get().Touch(span_.data() + touch_end_, wanted - touch_end_);
  touch_end_ = wanted;
}

size_t RowStore::resident_bytes() const {
  const size_t used = RoundUpTo(next_row_ * stride_, kSmallPageBytes);
  return touch_end_ > kHugePageBytes ? std::max(touch_end_, used) : used;
}

}  // namespace tfswitch
