// A software pipeline that processes a batch of keys, compiled for each
// instruction set. While it waits for memory it works on other keys: it
// processes three blocks of the batch in turn:
//
//   block b - 1   search the buckets, prefetch the rows
//   block b - 2   copy the rows, or step the optimizer on them
//   block b       between them, hash the keys, prefetch their buckets
//
// Reads take no lock. If a bucket turns out to be locked, moved or changed, the
// key is given to a RetrySink, which may wait.

#ifndef TFSWITCH_CC_TABLE_BATCH_KERNELS_H_
#define TFSWITCH_CC_TABLE_BATCH_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "cc/base/cpu_features.h"
#include "cc/base/key_observations.h"
#include "cc/base/keyed_hash.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/change_log.h"
#include "cc/table/row_codec.h"
#include "cc/table/row_statistics.h"
#include "cc/table/stripe_index.h"

namespace tfswitch {

inline constexpr int kNumStripes = 16;

// The most keys per call of a kernel. It limits the buffers on the stack, and
// how long a call locks a stripe for its missing keys.
inline constexpr uint32_t kMaxKernelKeys = 8192;

// Does a kernel's work for a key, after the kernel's own attempt has failed.
class RetrySink {
 public:
  // The kernel calls this before it changes a row for the first time since a
  // snapshot was taken. The row's bucket is locked.
  virtual void Keep(Key key, uint32_t row) = 0;
  // Read() and Step() return false if the key has no row.
  virtual bool Read(Key key, float* embedding) = 0;
  // Takes the step of key i of the StepBatch, which has the key's gradient.
  virtual bool Step(Key key, uint32_t i) = 0;

 protected:
  ~RetrySink() = default;
};

struct KernelBatch {
  const Key* keys = nullptr;
  uint32_t num_keys = 0;  // At most kMaxKernelKeys.
  const KeyedHash* hash = nullptr;
  int dim = 0;
  const RowCodec* codec = nullptr;
  // A buffer for the decoded floats of a row, or of two rows for
  // read_caught_up. Not used if rows are stored as plain floats.
  float* scratch = nullptr;
  // One array per stripe. In it, the statistics of a row begin at [stripe] +
  // row * statistics_stride.
  char* const* statistics = nullptr;
  size_t statistics_stride = 0;
  // One array per stripe, with the stamp of each row: the epoch of its last
  // change. A step raises the row's stamp to stamp.epoch.
  uint32_t* const* stamps = nullptr;
  ChangeStamp stamp;
  size_t stride = 0;
  // One per stripe.
  const IndexView* views = nullptr;
  // Counts how often `retry` has replaced the views by newer ones.
  const uint32_t* num_refreshes = nullptr;
  RetrySink* retry = nullptr;
  // Used by read_caught_up to add the steps that a row has missed to its copy.
  const Optimizer* optimizer = nullptr;
  const StepHistory* history = nullptr;
  // Receives the indices of the keys that have no row. Has room for num_keys.
  uint16_t* missing = nullptr;
};

// The gradients of a batch and the data that comes with them.
struct StepBatch {
  const Optimizer* optimizer = nullptr;
  // num_keys x dim.
  const float* gradients = nullptr;
  // The input of each step. Its count is for keys to which the push gives none.
  StepInput input;

  // The fields below are used only if has_observations().

  // Null if rows have no statistics.
  const RowStatistics* statistics = nullptr;
  KeyObservations observations;
  float day = 0.0f;
  RowRounding rounding;  // With a seed for the batch.
  uint64_t number = 0;   // The batch's number, for random draws.

  bool has_observations() const {
    return statistics != nullptr || !observations.counts.empty() ||
           !observations.shows.empty();
  }

  // The number of steps of the table before this one; 0 if the table does not
  // count steps.
  uint32_t step() const {
    return input.history != nullptr ? input.history->last_step : 0;
  }

  // One step of `row`, with gradient i.
  [[gnu::always_inline]] void Step(int dim, const RowFloats& row,
                                   uint32_t i) const {
    optimizer->Step(row.embedding, row.slots,
                    gradients + static_cast<size_t>(i) * dim, input);
  }

  // Takes one step of `row` with gradient i and the observations of key i.
  [[gnu::always_inline]] void StepAndObserve(int dim, const RowFloats& row,
                                             uint32_t i) const {
    const StepInput own = InputOf(i);
    optimizer->Step(row.embedding, row.slots,
                    gradients + static_cast<size_t>(i) * dim, own);
    if (statistics == nullptr) return;
    statistics->Observe(own.count, own.shows, ClicksOf(i), day, row.statistics);
  }

  [[gnu::always_inline]] StepInput InputOf(uint32_t i) const {
    StepInput own = input;
    if (observations.counts.data() != nullptr) {
      own.count = observations.counts.data()[i];
    }
    own.shows = observations.shows.data() != nullptr
                    ? observations.shows.data()[i]
                    : own.count;
    return own;
  }

  [[gnu::always_inline]] RowRounding RoundingOf(Key key) const {
    return {rounding.is_stochastic,
            rounding.seed ^ static_cast<uint32_t>(HashKey(key))};
  }

  [[gnu::always_inline]] float ClicksOf(uint32_t i) const {
    return observations.clicks.data() != nullptr ? observations.clicks.data()[i]
                                                 : 0.0f;
  }
};

// All return the number of missing keys.
struct BatchKernels {
  // Writes the embedding of keys[i] to embeddings + i * dim. Leaves the output
  // of missing keys unchanged.
  uint32_t (*read)(const KernelBatch&, float* embeddings) = nullptr;
  // Like `read`, but adds the steps that rows have missed to the output. The
  // rows in the table do not change.
  uint32_t (*read_caught_up)(const KernelBatch&, float* embeddings) = nullptr;
  // Call Step() or StepAndObserve() for the row of each key.
  uint32_t (*step)(const KernelBatch&, const StepBatch&) = nullptr;
  uint32_t (*step_and_observe)(const KernelBatch&, const StepBatch&) = nullptr;
};

namespace scalar {
BatchKernels FindBatchKernels(int dim, const RowCodec& codec);
}
namespace avx2 {
BatchKernels FindBatchKernels(int dim, const RowCodec& codec);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_BATCH_KERNELS_H_
