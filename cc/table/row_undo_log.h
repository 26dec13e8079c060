// Keeps the former state of rows of one stripe that change after a snapshot was
// taken and before the snapshot has visited them. This is the method "copy on
// update" of Vaz Salles et al. (An evaluation of checkpoint recovery for
// massively multiplayer online games, VLDB 2009), applied to single rows.
//
// A snapshot visits the stripe in the order of positions, and copies rows with
// old stamps from the table. Before a thread changes and stamps such a row, it
// copies the row to this log, unless the snapshot has already passed its
// position. If both happen at the same time, the snapshot gets the row twice,
// with equal values.

#ifndef TFSWITCH_CC_TABLE_ROW_UNDO_LOG_H_
#define TFSWITCH_CC_TABLE_ROW_UNDO_LOG_H_

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe.
class RowUndoLog {
 public:
  // Starts to keep rows, of `num_floats` floats each. For each kept row, the
  // log also counts `other_bytes` that the caller needs in other memory.
  void Begin(size_t num_floats, size_t other_bytes);

  // Keeps the present state of a row: copy(floats) writes it into the log. If
  // there is no memory for it, the caller changes the row all the same; End()
  // reports the error, and the snapshot fails.
  void Keep(Key key, uint32_t position, absl::FunctionRef<void(float*)> copy);

  // A row could not be kept.
  void Fail() {
    MutexLock lock(&mutex_);
    is_whole_ = false;
  }

  // The snapshot calls this after it has visited all rows before `position`.
  void SetVisited(uint64_t position) {
    visited_.store(position, std::memory_order_release);
  }
  bool IsVisited(uint32_t position) const {
    return position < visited_.load(std::memory_order_acquire);
  }

  // Stops keeping rows. Calls visit(key, floats) for each kept row, until
  // visit() returns an error. ResourceExhausted if a row could not be kept.
  absl::Status End(absl::FunctionRef<absl::Status(Key, const float*)> visit);
  // Stops keeping rows, and drops those that were kept.
  void Discard() {
    MutexLock lock(&mutex_);
    is_active_ = false;
    blocks_.clear();
    num_rows_ = 0;
    bytes_ = 0;
  }

  int64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  static constexpr size_t kBlockBytes = size_t{256} << 10;

  size_t rows_per_block() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::max<size_t>(1, kBlockBytes / (num_floats_ * sizeof(float)));
  }

  std::atomic<uint64_t> visited_{0};
  std::atomic<int64_t> bytes_{0};
  Mutex mutex_;
  bool is_active_ ABSL_GUARDED_BY(mutex_) = false;
  size_t num_floats_ ABSL_GUARDED_BY(mutex_) = 0;  // A row and its key.
  size_t other_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  size_t num_rows_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_whole_ ABSL_GUARDED_BY(mutex_) = true;
  // rows_per_block() rows each, after their keys.
  std::vector<std::unique_ptr<float[]>> blocks_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_UNDO_LOG_H_
