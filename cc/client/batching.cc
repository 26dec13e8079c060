// The calls of all clusters are in flight together; the work before and after
// them is spread over the threads that the caller lends. A batch that repeats
// no key is read to, or sent from, where it lies.

#include "cc/client/batching.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "cc/base/key_batch.h"
#include "cc/base/key_observations.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/client/check_args.h"
#include "cc/client/joined_calls.h"

namespace tfswitch {
namespace {

// Batches are numbered with 32 bits on the way back.
constexpr size_t kMaxKeysPerCall = size_t{INT32_MAX};

absl::Status CheckNumBatches(size_t num_batches) {
  if (num_batches <= kMaxBatchesPerCall) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("at most ", kMaxBatchesPerCall, " tables in one call, got ",
                   num_batches, "; split them over several calls"));
}

// A pull of distinct keys is cheaper; finding out costs a pass over the batch.
// So a sample decides: fewer than 9 in 10 distinct.
bool RepeatsOften(absl::Span<const Key> keys) {
  constexpr size_t kSample = 1024;
  if (keys.size() < 2 * kSample) return false;
  Key sample[kSample];
  Key unique[kSample];
  int32_t inverse[kSample];
  const size_t step = keys.size() / kSample;
  for (size_t i = 0; i < kSample; ++i) sample[i] = keys[i * step];
  const size_t distinct = ThreadUniqueKeys().Run(sample, absl::MakeSpan(unique),
                                                 absl::MakeSpan(inverse));
  return distinct * 10 < kSample * 9;
}

// The step that a push belongs to, for tables that more than one worker trains
// in an order.
absl::StatusOr<StepTag> StepOf(const OpenTable& table) {
  const std::shared_ptr<WorkerSession> worker = table.cluster->worker();
  if (worker == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", table.config.name, "' has consistency ",
        table.config.consistency.ToString(),
        ", so it is trained by a group of workers, and this process is none; "
        "make a tfswitch.train.Worker first"));
  }
  TFSWITCH_RETURN_IF_ERROR(worker->CheckTable(table.config));
  return worker->CurrentStep(
      table.config.consistency.kind == ConsistencyKind::kBsp ? table.config.name
                                                             : "");
}

// Before they are summed, where one may hide behind another.
absl::Status CheckEachObservation(const OpenTable& table,
                                  absl::Span<const Key> keys,
                                  const KeyObservations& each) {
  if (each.shows.empty() && each.clicks.empty()) return absl::OkStatus();
  return CheckObservations(table.config.name, keys, each);
}

// A push as it goes out, and the data that it points to.
struct PreparedPush {
  PushArgs args;
  std::vector<Key> unique;
  std::vector<int32_t> inverse;  // The place of each key in `unique`.
  OwnedObservations observations;
  bool is_empty = false;
};

absl::Status Prepare(BatchPush* push, PreparedPush* prepared) {
  const OpenTable& table = *push->table;
  std::vector<Key>& unique = prepared->unique;
  std::vector<int32_t>& inverse = prepared->inverse;
  unique.resize(push->keys.size());
  inverse.resize(push->keys.size());
  unique.resize(ThreadUniqueKeys().Run(push->keys, absl::MakeSpan(unique),
                                       absl::MakeSpan(inverse)));
  // One of a table with dense updates is a step nevertheless, and the optimizer
  // of a table that was open may have them now.
  const OptimizerConfig& optimizer = table.config.optimizer;
  prepared->is_empty =
      unique.empty() && !optimizer.is_dense && !optimizer.is_open;
  PushArgs& args = prepared->args;
  static_cast<GradientBatch&>(args) = *push;
  args.keys = unique;
  args.observations = {};
  if (unique.empty()) return absl::OkStatus();
  const int dim = table.config.dim;
  if (unique.size() != inverse.size()) {
    const size_t size = unique.size() * dim;
    const std::shared_ptr<float[]> buffer(new float[size]);
    const absl::Span<float> sums(buffer.get(), size);
    SumByInverse(inverse, dim, args.gradients, sums);
    args.gradients = sums;
    args.gradients_owner = buffer;
  }
  if (push->skips_non_finite) {
    const int64_t place = FindNonFinite(args.gradients);
    push->is_skipped = place >= 0;
    if (push->is_skipped && !table.has_warned.exchange(true)) {
      LogWriter::Get().WriteInOrder(
          {"gradients"},
          absl::StrCat("tfswitch: warning: table '", table.config.name,
                       "': the gradient of id ", unique[place / dim],
                       " is NaN or Inf; the push is skipped, and the loss will "
                       "be NaN. Check the labels, the loss and the learning "
                       "rate."));
    }
  }
  if (push->is_skipped) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(
      CheckEachObservation(table, push->keys, push->observations));
  prepared->observations = OwnedObservations(
      inverse, unique.size(), push->observations, table.config.NeedsCounts());
  args.observations = prepared->observations.view();
  return absl::OkStatus();
}

// Whether the push is of a step that counts already.
bool IsRepeated(const OpenTable& table) {
  const std::shared_ptr<WorkerSession> worker = table.cluster->worker();
  return worker != nullptr && worker->is_repeating();
}

// Sets the arguments that are known once it is clear that the push goes out.
absl::Status Address(const OpenTable& table, const LentThreads* threads,
                     PushArgs* args) {
  args->table = table.config.name;
  args->dim = table.config.dim;
  args->keys_are_unique = true;
  args->day = table.cluster->day();
  args->id = table.cluster->NextPushId();
  args->threads = threads;
  if (table.config.consistency.kind != ConsistencyKind::kAsp) {
    TFSWITCH_ASSIGN_OR_RETURN(args->step, StepOf(table));
  } else if (const auto worker = table.cluster->worker(); worker != nullptr) {
    worker->NoteAppliedPush();
  }
  return absl::OkStatus();
}

// Nearly all calls have one batch, for which nothing is allocated.
template <typename T>
using Batches = absl::InlinedVector<T, 1>;

// Calls of several clusters, all in flight together. `parts` are grouped by the
// cluster that `cluster_of` says, and `start` gets each group.
template <typename Part, typename ClusterOf, typename Start>
absl::Status CallClusters(absl::Span<const Part> parts, ClusterOf cluster_of,
                          Start start) {
  if (parts.empty()) return absl::OkStatus();
  bool is_one = true;
  for (size_t i = 1; i < parts.size() && is_one; ++i) {
    is_one = cluster_of(i) == cluster_of(0);
  }
  if (is_one) return start(cluster_of(0)->client(), parts)->Wait();
  std::map<Cluster*, std::vector<Part>> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    groups[cluster_of(i)].push_back(parts[i]);
  }
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(groups.size());
  for (const auto& [cluster, group] : groups) {
    calls.push_back(start(cluster->client(), group));
  }
  return JoinedCalls(std::move(calls)).Wait();
}

}  // namespace

absl::Status CheckBatch(const OpenTable& table, size_t num_keys) {
  if (num_keys <= kMaxKeysPerCall) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.config.name, "': a batch of ", num_keys,
                   " ids is too large; split it below ", kMaxKeysPerCall));
}

absl::Status PullBatch(absl::Span<const BatchPull> pulls, bool insert_missing,
                       const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckNumBatches(pulls.size()));
  for (const BatchPull& pull : pulls) {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*pull.table, pull.keys.size()));
  }
  // The distinct keys of each batch, read in place if it repeats no key.
  struct Distinct {
    std::vector<Key> unique;
    std::vector<int32_t> inverse;
    std::unique_ptr<float[]> rows;
  };
  Batches<Distinct> distinct(pulls.size());
  RunRanges(threads, pulls.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const BatchPull& pull = pulls[i];
      Distinct& found = distinct[i];
      // In this process a repeated row costs less than finding out.
      if (!pull.table->cluster->is_remote() || !RepeatsOften(pull.keys)) {
        continue;
      }
      found.unique.resize(pull.keys.size());
      found.inverse.resize(pull.keys.size());
      found.unique.resize(
          ThreadUniqueKeys().Run(pull.keys, absl::MakeSpan(found.unique),
                                 absl::MakeSpan(found.inverse)));
      // Without repetition the order of first appearance is that of the batch.
      if (found.unique.size() == pull.keys.size()) continue;
      found.rows.reset(new float[found.unique.size() * pull.table->config.dim]);
    }
  });
  Batches<PullPart> parts;
  Batches<Cluster*> clusters;
  for (size_t i = 0; i < pulls.size(); ++i) {
    const BatchPull& pull = pulls[i];
    if (pull.keys.empty()) continue;
    const bool is_in_place = distinct[i].rows == nullptr;
    PullArgs args;
    args.table = pull.table->config.name;
    args.dim = pull.table->config.dim;
    args.keys =
        is_in_place ? pull.keys : absl::MakeConstSpan(distinct[i].unique);
    args.insert_missing = insert_missing;
    if (insert_missing) args.day = pull.table->cluster->day();
    args.threads = threads;
    float* const rows = is_in_place ? pull.embeddings : distinct[i].rows.get();
    const size_t size = args.keys.size() * args.dim;
    parts.push_back({std::move(args), absl::MakeSpan(rows, size)});
    clusters.push_back(pull.table->cluster.get());
  }
  TFSWITCH_RETURN_IF_ERROR(CallClusters<PullPart>(
      parts, [&](size_t i) { return clusters[i]; },
      [](ParameterClient& client, absl::Span<const PullPart> group) {
        return client.StartPull(group);
      }));
  RunRanges(threads, pulls.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (distinct[i].rows == nullptr) continue;
      const BatchPull& pull = pulls[i];
      ScatterRows(distinct[i].inverse, pull.table->config.dim,
                  distinct[i].rows.get(), pull.embeddings, threads);
    }
  });
  return absl::OkStatus();
}

absl::Status PushBatch(absl::Span<BatchPush> pushes,
                       const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckNumBatches(pushes.size()));
  for (BatchPush& push : pushes) {
    push.updated_rows = 0;
    push.is_skipped = false;
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*push.table, push.keys.size()));
  }
  Batches<PreparedPush> prepared(pushes.size());
  Batches<absl::Status> statuses(pushes.size());
  RunRanges(threads, pushes.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      statuses[i] = Prepare(&pushes[i], &prepared[i]);
    }
  });
  for (absl::Status& status : statuses) {
    TFSWITCH_RETURN_IF_ERROR(std::move(status));
  }
  const bool is_skipped =
      std::any_of(pushes.begin(), pushes.end(),
                  [](const BatchPush& push) { return push.is_skipped; });
  if (is_skipped) {
    for (BatchPush& push : pushes) push.is_skipped = true;
    return absl::OkStatus();
  }
  Batches<PushPart> parts;
  Batches<size_t> places;  // The places of `parts` in `pushes`.
  Batches<WriteResult> results(pushes.size());
  for (size_t i = 0; i < pushes.size(); ++i) {
    if (prepared[i].is_empty || IsRepeated(*pushes[i].table)) continue;
    TFSWITCH_RETURN_IF_ERROR(
        Address(*pushes[i].table, threads, &prepared[i].args));
    parts.push_back({std::move(prepared[i].args), &results[i]});
    places.push_back(i);
  }
  // Before the first one goes. One alone is checked where it arrives.
  if (parts.size() > 1) {
    TFSWITCH_RETURN_IF_ERROR(CheckPushes(parts));
    for (PushPart& part : parts) part.args.is_checked = true;
  }
  TFSWITCH_RETURN_IF_ERROR(CallClusters<PushPart>(
      parts, [&](size_t i) { return pushes[places[i]].table->cluster.get(); },
      [](ParameterClient& client, absl::Span<const PushPart> group) {
        return client.StartPush(group);
      }));
  for (const size_t i : places) {
    pushes[i].updated_rows = results[i].num_rows;
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
