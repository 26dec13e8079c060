// Batches of ids as they come from a model, and the calls that they become:
// each id once, gradients summed and divided by the loss scale, all tables of
// one cluster in one call.

#ifndef TFSWITCH_CC_CLIENT_BATCHING_H_
#define TFSWITCH_CC_CLIENT_BATCHING_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/parallel.h"
#include "cc/client/cluster.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// Batches of one call at most.
inline constexpr size_t kMaxBatchesPerCall = 256;

// A table as this process uses it. Thread-safe.
struct OpenTable {
  // Constant once it is open.
  std::shared_ptr<Cluster> cluster;
  TableConfig config;
  // Warns once: a gradient with NaN is followed by more of them.
  mutable std::atomic<bool> has_warned{false};
};

// InvalidArgument for a batch of more keys than one call can have.
absl::Status CheckBatch(const OpenTable& table, size_t num_keys);

// Reads keys.size() x dim floats. Repeated keys are sent once where that pays.
struct BatchPull {
  const OpenTable* table = nullptr;
  absl::Span<const Key> keys;
  float* embeddings = nullptr;
};

// One step for each distinct key, with the sum of its gradients. Gradients and
// observations are of keys[i], which may repeat.
struct BatchPush : GradientBatch {
  const OpenTable* table = nullptr;
  // Whether gradients with NaN or Inf skip the push, with a warning on stderr,
  // or are an error.
  bool skips_non_finite = false;

  // Set by the call.
  int64_t updated_rows = 0;
  bool is_skipped = false;
};

// With one message to each server unless they are long. A table may come more
// than once.
absl::Status PullBatch(absl::Span<const BatchPull> pulls, bool insert_missing,
                       const LentThreads* threads);

// If one is skipped, so are all. Shapes, numbers and rates are checked first:
// if one is wrong none has been applied. After an error of a server others may
// have been; it names the table.
absl::Status PushBatch(absl::Span<BatchPush> pushes,
                       const LentThreads* threads);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_BATCHING_H_
