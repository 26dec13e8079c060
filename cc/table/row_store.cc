#include "cc/table/row_store.h"

#include <algorithm>
#include <limits>

#include "cc/base/page_keeper.h"

namespace tfswitch {
namespace {

constexpr size_t kCacheLineBytes = 64;
constexpr size_t kSmallStrideBytes = 16;

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
  if (!free_rows_.empty()) {
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
