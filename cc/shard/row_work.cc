#include "cc/shard/row_work.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/key_batch.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"

namespace tfswitch {

absl::Status NoteDay(EmbeddingTable& table, float day) {
  TFSWITCH_RETURN_IF_ERROR(CheckDay(table.config().name, day));
  table.NoteDay(day);
  return absl::OkStatus();
}

absl::Status CheckOwnership(const ShardOptions& options,
                            const EmbeddingTable& table,
                            absl::Span<const Key> keys) {
  if (options.num_shards == 1) return absl::OkStatus();
  const uint32_t num_virtual = table.config().num_virtual_shards;
  for (const Key key : keys) {
    const uint32_t owner = OwnerOfVirtualShard(VirtualShardOf(key, num_virtual),
                                               num_virtual, options.num_shards);
    if (owner != options.shard_index) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", table.config().name, "': key ", key,
                       " belongs to shard ", owner, " of ", options.num_shards,
                       ", this is shard ", options.shard_index,
                       "; list the servers in shard order when connecting"));
    }
  }
  return absl::OkStatus();
}

absl::Status PreparePush(const ShardOptions& options,
                         const EmbeddingTable& table, const PushRequest& push,
                         PreparedPush* prepared) {
  const std::string& name = table.config().name;
  const int dim = table.dim();
  if (table.config().optimizer.is_open) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", name, "'", options.OnShard(),
                     " has no optimizer yet. Make it with one before the first "
                     "push"));
  }
  // The client has checked this, but since then the table may have been
  // replaced by one of a different dim.
  TFSWITCH_RETURN_IF_ERROR(CheckSize(name, "gradient", push.keys.size(), dim,
                                     push.gradients.size()));
  TFSWITCH_RETURN_IF_ERROR(CheckDay(name, push.day));
  TFSWITCH_RETURN_IF_ERROR(CheckOwnership(options, table, push.keys));

  GradientBatch& batch = prepared->batch;
  batch = push;
  std::vector<Key>& unique = prepared->unique;
  std::vector<float>& sums = prepared->sums;
  const size_t num_keys = push.keys.size();
  if (!push.keys_are_unique && num_keys > 1) {
    if (num_keys > size_t{INT32_MAX}) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", name, "': a push of ", num_keys,
                       " keys is too large; split the batch"));
    }
    unique.resize(num_keys);
    std::vector<int32_t> inverse(num_keys);
    unique.resize(ThreadUniqueKeys().Run(push.keys, absl::MakeSpan(unique),
                                         absl::MakeSpan(inverse)));
    if (unique.size() < num_keys) {
      sums.resize(unique.size() * dim);
      SumByInverse(inverse, dim, push.gradients, absl::MakeSpan(sums));
      prepared->summed =
          OwnedObservations(inverse, unique.size(), push.observations,
                            table.config().NeedsCounts());
      batch.keys = unique;
      batch.gradients = sums;
      batch.observations = prepared->summed.view();
      // The sum of finite numbers may be infinite.
      TFSWITCH_RETURN_IF_ERROR(
          CheckObservations(name, batch.keys, batch.observations));
      TFSWITCH_RETURN_IF_ERROR(
          CheckFinite(name, "gradient", batch.keys, batch.gradients));
    }
  }
  if (table.config().consistency.kind == ConsistencyKind::kBsp &&
      push.step.group.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", name, "' has consistency ",
        table.config().consistency.ToString(),
        ", so it is trained by a group of workers, and this push is of none. "
        "Join one first, with tfswitch.train.Worker"));
  }
  return absl::OkStatus();
}

absl::Status RunKeyRanges(
    const LentThreads* threads, size_t num_keys, size_t dim,
    absl::FunctionRef<absl::Status(size_t, size_t)> work) {
  // A range has about the same number of floats for every length of rows.
  const size_t min_keys_per_range = std::max<size_t>(16, 16384 / dim);
  Mutex mutex;
  absl::Status first;
  RunRanges(threads, num_keys, min_keys_per_range,
            [&](size_t begin, size_t end) {
              absl::Status status = work(begin, end - begin);
              if (status.ok()) return;
              MutexLock lock(&mutex);
              first.Update(std::move(status));
            });
  return first;
}

absl::StatusOr<int64_t> ApplyBatch(EmbeddingTable& table,
                                   const GradientBatch& batch,
                                   const LentThreads* threads) {
  const size_t dim = static_cast<size_t>(table.dim());
  std::atomic<int64_t> updated_rows{0};
  TFSWITCH_RETURN_IF_ERROR(
      table.TakeStep(batch.learning_rate, [&](const StepHistory* history) {
        return RunKeyRanges(
            threads, batch.keys.size(), dim,
            [&](size_t begin, size_t size) -> absl::Status {
              GradientBatch part = batch;
              part.history = history;
              part.keys = batch.keys.subspan(begin, size);
              part.gradients = batch.gradients.subspan(begin * dim, size * dim);
              part.observations = batch.observations.subspan(begin, size);
              TFSWITCH_ASSIGN_OR_RETURN(const int64_t updated,
                                        table.ApplyGradients(part));
              updated_rows += updated;
              return absl::OkStatus();
            });
      }));
  return updated_rows.load();
}

}  // namespace tfswitch
