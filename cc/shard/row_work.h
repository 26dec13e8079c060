// Works on the rows of one table, for the calls of a shard and for closed
// rounds. The functions have no state.

#ifndef TFSWITCH_CC_SHARD_ROW_WORK_H_
#define TFSWITCH_CC_SHARD_ROW_WORK_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/base/parallel.h"
#include "cc/shard/shard_options.h"
#include "cc/table/embedding_table.h"
#include "cc/wire/row_calls.h"

namespace tfswitch {

// Sets the day that the next calls for the table use; see
// EmbeddingTable::NoteDay. InvalidArgument if `day` is not a valid day.
absl::Status NoteDay(EmbeddingTable& table, float day);

// InvalidArgument if a key belongs to another shard.
absl::Status CheckOwnership(const ShardOptions& options,
                            const EmbeddingTable& table,
                            absl::Span<const Key> keys);

// A push that was checked, with the gradients of repeated keys added up.
struct PreparedPush {
  GradientBatch batch;
  std::vector<Key> unique;
  std::vector<float> sums;
  OwnedObservations summed;
};

// Checks whether the push fits the table, and fills in `prepared`. It contains
// pointers to itself, so it must not be moved. REQUIRES: CheckPush() is OK.
absl::Status PreparePush(const ShardOptions& options,
                         const EmbeddingTable& table, const PushRequest& push,
                         PreparedPush* prepared);

// Calls work(begin, size) for ranges of keys. Uses several threads if `threads`
// lends some and there are enough keys. Returns the first error.
absl::Status RunKeyRanges(const LentThreads* threads, size_t num_keys,
                          size_t dim,
                          absl::FunctionRef<absl::Status(size_t, size_t)> work);

// Takes one optimizer step. Returns the number of updated rows.
absl::StatusOr<int64_t> ApplyBatch(EmbeddingTable& table,
                                   const GradientBatch& batch,
                                   const LentThreads* threads);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_ROW_WORK_H_
