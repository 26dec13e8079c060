#include "cc/table/former_rows.h"

#include <cstring>
#include <utility>

#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr size_t kKeyFloats = sizeof(Key) / sizeof(float);

}  // namespace

void FormerRows::Begin(size_t num_floats) {
  MutexLock lock(&mutex_);
  is_active_ = true;
  num_floats_ = kKeyFloats + num_floats;
  visited_ = 0;
}

void FormerRows::Keep(Key key, uint32_t position,
                      absl::FunctionRef<void(float*)> copy) {
  if (IsVisited(position)) return;
  MutexLock lock(&mutex_);
  if (!is_active_) return;
  const size_t at = num_rows_ % kRowsPerBlock;
  if (at == 0) {
    blocks_.emplace_back(new float[kRowsPerBlock * num_floats_]);
    bytes_ += static_cast<int64_t>(kRowsPerBlock * num_floats_ * sizeof(float));
  }
  float* const row = blocks_.back().get() + at * num_floats_;
  std::memcpy(row, &key, sizeof(key));
  copy(row + kKeyFloats);
  ++num_rows_;
}

absl::Status FormerRows::End(
    absl::FunctionRef<absl::Status(Key, const float*)> visit) {
  std::vector<std::unique_ptr<float[]>> blocks;
  size_t num_rows = 0;
  size_t num_floats = 0;
  {
    MutexLock lock(&mutex_);
    is_active_ = false;
    blocks.swap(blocks_);
    std::swap(num_rows, num_rows_);
    num_floats = num_floats_;
    bytes_ = 0;
  }
  for (size_t i = 0; i < num_rows; ++i) {
    const float* const row =
        blocks[i / kRowsPerBlock].get() + (i % kRowsPerBlock) * num_floats;
    Key key = 0;
    std::memcpy(&key, row, sizeof(key));
    TFSWITCH_RETURN_IF_ERROR(visit(key, row + kKeyFloats));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
