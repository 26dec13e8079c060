// The software pipeline that a batch of keys goes through, for each instruction
// set. Memory latency is hidden by working on three blocks of the batch in
// turn:
//
//   block b       hash the keys, prefetch their buckets
//   block b - 1   search the buckets, prefetch the rows
//   block b - 2   copy the rows, or step the optimizer on them
//
// No lock is taken for reading. Where a bucket turns out to be locked, moved or
// changed in between, the key is handed to a RetrySink, which takes its time.

#ifndef TFSWITCH_CC_TABLE_BATCH_KERNELS_H_
#define TFSWITCH_CC_TABLE_BATCH_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "cc/base/cpu_features.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/stripe_index.h"

namespace tfswitch {

inline constexpr int kNumStripes = 16;

// Keys per call of a kernel. It bounds the buffers on the stack and how long a
// stripe is locked for the missing keys of a call.
inline constexpr uint32_t kMaxKernelKeys = 8192;

// Does what the kernel could not do at the first attempt, for one key.
class RetrySink {
 public:
  // Both return false if the key has no row.
  virtual bool Read(Key key, float* embedding) = 0;
  virtual bool Step(Key key, const float* gradient) = 0;

 protected:
  ~RetrySink() = default;
};

struct KernelBatch {
  const Key* keys = nullptr;
  uint32_t num_keys = 0;  // At most kMaxKernelKeys.
  int dim = 0;
  size_t row_bytes = 0;  // Embedding and slots.
  size_t stride = 0;
  const IndexView* views = nullptr;  // One per stripe.
  // Counts how often `retry` has put newer views in their places.
  const uint32_t* num_refreshes = nullptr;
  RetrySink* retry = nullptr;
  // Positions of keys without a row are put here; room for num_keys.
  uint16_t* missing = nullptr;
};

// Both return the number of missing keys.
struct BatchKernels {
  // Copies the embedding of keys[i] to embeddings + i * dim. Those of missing
  // keys are left as they are.
  uint32_t (*read)(const KernelBatch&, float* embeddings);
  // Steps the row of keys[i] with gradients + i * dim.
  uint32_t (*step)(const KernelBatch&, const Optimizer&, const float* gradients,
                   float learning_rate);
};

namespace scalar {
BatchKernels FindBatchKernels(int dim);
}
namespace avx2 {
BatchKernels FindBatchKernels(int dim);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_BATCH_KERNELS_H_
