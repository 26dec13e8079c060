#include "cc/table/row_undo_log.h"

#include <cstring>
#include <new>
#include <utility>

#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr size_t kKeyFloats = sizeof(Key) / sizeof(float);

}  // namespace

void RowUndoLog::Begin(size_t num_floats, size_t other_bytes) {
  MutexLock lock(&mutex_);
  is_active_ = true;
  is_whole_ = true;
  num_floats_ = kKeyFloats + num_floats;
  other_bytes_ = other_bytes;
  visited_ = 0;
}

void RowUndoLog::Keep(Key key, uint32_t position,
                      absl::FunctionRef<void(float*)> copy) {
  if (IsVisited(position)) return;
  MutexLock lock(&mutex_);
  if (!is_active_ || !is_whole_) return;
  const size_t at = num_rows_ % rows_per_block();
  if (at == 0) {
    // Catches exceptions, because otherwise the caller's bucket would stay
    // locked.
    try {
      const size_t block = rows_per_block() * num_floats_;
      blocks_.push_back(std::make_unique<float[]>(block));
    } catch (const std::bad_alloc&) {
      is_whole_ = false;
      return;
    }
  }
  float* const row = blocks_.back().get() + at * num_floats_;
  std::memcpy(row, &key, sizeof(key));
  copy(row + kKeyFloats);
  ++num_rows_;
  bytes_ += static_cast<int64_t>(num_floats_ * sizeof(float) + other_bytes_);
}

absl::Status RowUndoLog::End(
    absl::FunctionRef<absl::Status(Key, const float*)> visit) {
  std::vector<std::unique_ptr<float[]>> blocks;
  size_t num_rows = 0;
  size_t num_floats = 0;
  size_t per_block = 0;
  {
    MutexLock lock(&mutex_);
    is_active_ = false;
    blocks.swap(blocks_);
    std::swap(num_rows, num_rows_);
    num_floats = num_floats_;
    bytes_ = 0;
    if (!is_whole_) {
      return absl::ResourceExhaustedError(
          "no memory for copies of rows that change during the save");
    }
    if (num_rows > 0) per_block = rows_per_block();
  }
  for (size_t i = 0; i < num_rows; ++i) {
    const float* const row =
        blocks[i / per_block].get() + (i % per_block) * num_floats;
    Key key = 0;
    std::memcpy(&key, row, sizeof(key));
    TFSWITCH_RETURN_IF_ERROR(visit(key, row + kKeyFloats));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
