// Sends the calls of all clusters, and only then waits for the answers. The
// threads that the caller lends work before and after the calls. A batch
// without repeated keys is not copied.

#include "cc/capi/batching.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "cc/base/key_batch.h"
#include "cc/base/key_observations.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/capi/client_metrics.h"
#include "cc/capi/cluster.h"
#include "cc/client/joined_calls.h"

namespace tfswitch {
namespace {

// Indices into a batch have 32 bits.
constexpr size_t kMaxKeysPerCall = size_t{INT32_MAX};

template <typename Part>
absl::Status CheckBatches(absl::Span<Part> parts) {
  if (parts.size() > TFSWITCH_MAX_PARTS) {
    return absl::InvalidArgumentError(absl::StrCat(
        "at most ", TFSWITCH_MAX_PARTS, " tables in one call, got ",
        parts.size(), "; split them over several calls"));
  }
  for (const Part& part : parts) {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*part.table, part.num_keys));
  }
  return absl::OkStatus();
}

template <typename Part>
absl::Span<const Key> KeysOf(const Part& part) {
  return absl::MakeConstSpan(part.keys, part.num_keys);
}

// Whether to look for repeated keys. A pull without repeated keys is cheaper,
// but finding these takes a pass over the batch. So this tests a sample. The
// pass is worthwhile if fewer than 9 of 10 keys in the sample are distinct.
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

// Finds the step to which a push belongs. Not all kinds of consistency need it.
absl::StatusOr<StepTag> StepOf(const Tfswitch_Table& table) {
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

// Whether the worker is repeating a step that has already been counted. The
// push then belongs to this step.
bool IsRepeated(const Tfswitch_Table& table) {
  const std::shared_ptr<WorkerSession> worker = table.cluster->worker();
  return worker != nullptr && worker->is_repeating();
}

// A push to send, and the data that it points to.
struct PreparedPush {
  PushArgs args;
  std::vector<Key> unique;
  std::vector<int32_t> inverse;  // The index of each key in `unique`.
  OwnedObservations observations;
  bool is_empty = false;  // There is nothing to send.
};

// Checks the part, and sets part->result.skipped. If `copies` is true, the push
// does not point to the memory of the part.
absl::Status Prepare(Tfswitch_PushPart* part, bool copies,
                     PreparedPush* prepared) {
  Tfswitch_Table& table = *part->table;
  const Tfswitch_PushOptions& options = part->options;
  const int dim = table.config.dim;
  const absl::Span<const Key> keys = KeysOf(*part);
  std::vector<Key>& unique = prepared->unique;
  std::vector<int32_t>& inverse = prepared->inverse;
  unique.resize(keys.size());
  inverse.resize(keys.size());
  unique.resize(ThreadUniqueKeys().Run(keys, absl::MakeSpan(unique),
                                       absl::MakeSpan(inverse)));
  // A push without keys is sent to a table with dense updates, because each
  // push is a step of all rows. A table may have got dense updates since it was
  // opened, if its optimizer was not chosen yet.
  const OptimizerConfig& optimizer = table.config.optimizer;
  prepared->is_empty =
      IsRepeated(table) ||
      (unique.empty() && !optimizer.is_dense && !optimizer.is_open);
  PushArgs& args = prepared->args;
  args.table = table.config.name;
  args.dim = dim;
  args.keys = unique;
  args.keys_are_unique = true;
  args.wire_dtype = table.config.wire_dtype;
  args.gradients = absl::MakeConstSpan(part->gradients, keys.size() * dim);
  args.learning_rate = options.learning_rate;
  args.global_step = options.global_step;
  args.insert_missing = options.insert_missing != 0;
  if (prepared->is_empty) return absl::OkStatus();
  if (unique.empty()) return CheckSettings(args, dim);
  if (copies || unique.size() != keys.size()) {
    const size_t size = unique.size() * dim;
    const std::shared_ptr<float[]> buffer(new float[size]);
    const absl::Span<float> sums(buffer.get(), size);
    SumByInverse(inverse, dim, args.gradients, sums);
    args.gradients = sums;
    args.gradients_owner = buffer;
  }
  if (options.skip_non_finite == 0) {
    TFSWITCH_RETURN_IF_ERROR(
        CheckFinite(args.table, "gradient", args.keys, args.gradients));
  } else if (const int64_t place = FindNonFinite(args.gradients); place >= 0) {
    part->result.skipped = 1;
    if (table.has_warned.exchange(true)) return absl::OkStatus();
    LogWriter::Get().WriteInOrder(
        {"gradients"},
        absl::StrCat("tfswitch: warning: table '", args.table,
                     "': the gradient of id ", unique[place / dim],
                     " is NaN or Inf; the push is skipped, and the loss will "
                     "be NaN. Check the labels, the loss and the learning "
                     "rate."));
    return absl::OkStatus();
  }
  const auto of_each = [&](const float* values) {
    return absl::MakeConstSpan(values, values == nullptr ? 0 : keys.size());
  };
  const KeyObservations each = {
      {}, of_each(options.shows), of_each(options.clicks)};
  // Checks shows and clicks before they are summed, which could hide a wrong
  // one.
  if (!each.shows.empty() || !each.clicks.empty()) {
    TFSWITCH_RETURN_IF_ERROR(CheckObservations(args.table, keys, each));
  }
  prepared->observations = OwnedObservations(inverse, unique.size(), each,
                                             table.config.NeedsCounts());
  args.observations = prepared->observations.view();
  return CheckSettings(args, dim);
}

// Sets the day, the id and the step of a push that will be sent.
absl::Status Complete(const Tfswitch_Table& table, PushArgs* args) {
  args->day = table.cluster->day();
  args->id = table.cluster->NextPushId();
  const auto worker = table.cluster->worker();
  if (worker != nullptr) args->worker = worker->options().worker;
  if (table.config.consistency.kind != ConsistencyKind::kAsp) {
    TFSWITCH_ASSIGN_OR_RETURN(args->step, StepOf(table));
  } else if (worker != nullptr) {
    worker->NoteAppliedPush();
  }
  return absl::OkStatus();
}

// Allocates no memory for a single batch, which is all that most calls have.
template <typename T>
using Batches = absl::InlinedVector<T, 1>;

// Groups the parts of a call by `cluster_of`, which gets the index of a part.
template <typename Part, typename ClusterOf>
std::map<Cluster*, std::vector<Part>> GroupByCluster(
    absl::Span<const Part> parts, ClusterOf cluster_of) {
  std::map<Cluster*, std::vector<Part>> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    groups[cluster_of(i)].push_back(parts[i]);
  }
  return groups;
}

// Makes the calls of several clusters at the same time: calls `start` for the
// parts of each cluster.
template <typename Part, typename ClusterOf, typename Start>
absl::Status CallClusters(absl::Span<const Part> parts, ClusterOf cluster_of,
                          Start start) {
  if (parts.empty()) return absl::OkStatus();
  bool is_one = true;
  for (size_t i = 1; i < parts.size() && is_one; ++i) {
    is_one = cluster_of(i) == cluster_of(0);
  }
  if (is_one) return start(cluster_of(0)->client(), parts)->Wait();
  std::vector<std::unique_ptr<PendingCall>> calls;
  for (const auto& [cluster, group] : GroupByCluster(parts, cluster_of)) {
    calls.push_back(start(cluster->client(), group));
  }
  return JoinedCalls(std::move(calls)).Wait();
}

// Waits for the pushes in flight to the clusters of all parts.
template <typename Part>
absl::Status FinishPushes(absl::Span<Part> parts) {
  for (const Part& part : parts) {
    TFSWITCH_RETURN_IF_ERROR(part.table->cluster->FinishPushes());
  }
  return absl::OkStatus();
}

// A prepared push of one table.
struct ReadyPush {
  PushPart part;
  size_t num_ids = 0;
};

// The pushes of one call to one cluster. Tells the cluster's prefetches when
// they begin and end.
//
// Not thread-safe.
class OpenPushes {
 public:
  OpenPushes(Cluster* cluster, std::vector<ReadyPush> pushes)
      : cluster_(cluster), pushes_(std::move(pushes)) {}
  ~OpenPushes() { End(/*are_applied=*/false); }
  OpenPushes(const OpenPushes&) = delete;
  OpenPushes& operator=(const OpenPushes&) = delete;

  Cluster& cluster() const { return *cluster_; }

  absl::Status Begin() {
    for (const ReadyPush& push : pushes_) {
      TFSWITCH_ASSIGN_OR_RETURN(
          const uint64_t number,
          cluster_->prefetches().PushBegins(push.part.args));
      numbers_.push_back(number);
    }
    return absl::OkStatus();
  }

  std::unique_ptr<PendingCall> Start(const LentThreads* threads,
                                     MeasuredCall* measured) {
    std::vector<PushPart> parts;
    for (const ReadyPush& push : pushes_) {
      parts.push_back(push.part);
      PushArgs& args = parts.back().args;
      args.threads = threads;
      measured->AddBatch(args.table, push.num_ids, args.keys.size());
    }
    return cluster_->client().StartCheckedPush(parts);
  }

  // Returns whether there are prefetched rows to read again.
  bool End(bool are_applied) {
    bool reads_again = false;
    for (size_t i = 0; i < numbers_.size(); ++i) {
      reads_again = cluster_->prefetches().PushEnded(pushes_[i].part.args.table,
                                                     numbers_[i], are_applied);
    }
    const bool had_begun = !numbers_.empty();
    numbers_.clear();
    if (had_begun) DropPrefetchesOfTwins(*cluster_);
    return reads_again;
  }

 private:
  Cluster* const cluster_;
  const std::vector<ReadyPush> pushes_;
  std::vector<uint64_t> numbers_;  // The pushes that have begun, not ended.
};

// Makes the pushes, and reads prefetched rows again. On the queue's thread.
absl::Status SendFromQueue(const LentThreads* threads, OpenPushes* pushes) {
  MeasuredCall measured(ClientCall::kPush);
  absl::Status status = pushes->Start(threads, &measured)->Wait();
  if (status.ok()) measured.Succeed();
  if (pushes->End(status.ok())) pushes->cluster().prefetches().ReadAgain();
  return status;
}

// Makes the pushes now. Prefetched rows are read again in the background.
absl::Status SendNow(const LentThreads* threads,
                     absl::Span<const std::shared_ptr<OpenPushes>> groups) {
  MeasuredCall measured(ClientCall::kPush);
  std::vector<std::unique_ptr<PendingCall>> calls;
  for (const auto& pushes : groups) {
    calls.push_back(pushes->Start(threads, &measured));
  }
  absl::Status status = JoinedCalls(std::move(calls)).Wait();
  if (status.ok()) measured.Succeed();
  for (const auto& pushes : groups) {
    if (pushes->End(status.ok())) pushes->cluster().ReadAgainSoon();
  }
  return status;
}

// Reads the rows of parts that were not read ahead.
absl::Status PullNow(absl::Span<const Tfswitch_PullPart> parts,
                     bool insert_missing, const LentThreads* threads,
                     MeasuredCall* measured) {
  TFSWITCH_RETURN_IF_ERROR(FinishPushes(parts));
  // The distinct keys of each batch; empty if the batch is sent as it is.
  struct Distinct {
    std::vector<Key> unique;
    std::vector<int32_t> inverse;
    std::unique_ptr<float[]> rows;
  };
  Batches<Distinct> distinct(parts.size());
  RunRanges(threads, parts.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const absl::Span<const Key> keys = KeysOf(parts[i]);
      const Tfswitch_Table& table = *parts[i].table;
      Distinct& found = distinct[i];
      // If the table is in this process, reading a row twice takes less time
      // than the search for repeated keys.
      if (!table.cluster->is_remote() || !RepeatsOften(keys)) continue;
      found.unique.resize(keys.size());
      found.inverse.resize(keys.size());
      found.unique.resize(ThreadUniqueKeys().Run(
          keys, absl::MakeSpan(found.unique), absl::MakeSpan(found.inverse)));
      // Without repeated keys `unique` equals the batch.
      if (found.unique.size() == keys.size()) continue;
      found.rows.reset(new float[found.unique.size() * table.config.dim]);
    }
  });
  Batches<PullPart> pulls;
  Batches<Cluster*> clusters;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tfswitch_PullPart& part = parts[i];
    if (part.num_keys == 0) continue;
    const bool is_in_place = distinct[i].rows == nullptr;
    PullArgs args;
    args.table = part.table->config.name;
    args.dim = part.table->config.dim;
    args.keys =
        is_in_place ? KeysOf(part) : absl::MakeConstSpan(distinct[i].unique);
    args.wire_dtype = part.table->config.wire_dtype;
    args.insert_missing = insert_missing;
    if (insert_missing) args.day = part.table->cluster->day();
    args.threads = threads;
    float* const rows = is_in_place ? part.embeddings : distinct[i].rows.get();
    const size_t size = args.keys.size() * args.dim;
    measured->AddBatch(args.table, part.num_keys, args.keys.size());
    pulls.push_back({std::move(args), absl::MakeSpan(rows, size)});
    clusters.push_back(part.table->cluster.get());
  }
  TFSWITCH_RETURN_IF_ERROR(CallClusters<PullPart>(
      pulls, [&](size_t i) { return clusters[i]; },
      [](ParameterClient& client, absl::Span<const PullPart> group) {
        return client.StartPull(group);
      }));
  RunRanges(threads, parts.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (distinct[i].rows == nullptr) continue;
      ScatterRows(distinct[i].inverse, parts[i].table->config.dim,
                  distinct[i].rows.get(), parts[i].embeddings, threads);
    }
  });
  return absl::OkStatus();
}

}  // namespace
}  // namespace tfswitch

Tfswitch_Prefetch::~Tfswitch_Prefetch() {
  if (is_run) return;
  for (const auto& [cluster, group] : tickets) {
    cluster->prefetches().Abandon(group);
  }
}

Tfswitch_Table::~Tfswitch_Table() {
  if (cluster == nullptr) return;
  // Another call will return an error of a push.
  cluster->pushes().Wait();
  const absl::Status status = cluster->prefetches().InsertUsed(cluster->day());
  if (status.ok()) return;
  tfswitch::LogWriter::Get().WriteInOrder(
      {"push"}, absl::StrCat("tfswitch: error: table '", config.name,
                             "': ", status.message()));
}

namespace tfswitch {

absl::Status CheckBatch(const Tfswitch_Table& table, size_t num_keys) {
  if (num_keys <= kMaxKeysPerCall) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.config.name, "': a batch of ", num_keys,
                   " ids is too large; split it below ", kMaxKeysPerCall));
}

absl::Status PullBatch(absl::Span<const Tfswitch_PullPart> parts,
                       bool insert_missing, const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckBatches(parts));
  MeasuredCall measured(ClientCall::kPull);
  Batches<Tfswitch_PullPart> rest;
  for (const Tfswitch_PullPart& part : parts) {
    Cluster& cluster = *part.table->cluster;
    TFSWITCH_RETURN_IF_ERROR(FinishPushesOfTwins(cluster));
    TFSWITCH_ASSIGN_OR_RETURN(
        const bool is_here,
        cluster.prefetches().Use(part.table->config, KeysOf(part),
                                 insert_missing, cluster.day(), part.embeddings,
                                 threads));
    if (is_here) {
      measured.AddBatch(part.table->config.name, part.num_keys, /*keys=*/0);
    } else {
      rest.push_back(part);
    }
  }
  if (!rest.empty()) {
    TFSWITCH_RETURN_IF_ERROR(PullNow(rest, insert_missing, threads, &measured));
  }
  measured.Succeed();
  return absl::OkStatus();
}

absl::Status PushBatch(absl::Span<Tfswitch_PushPart> parts, int depth,
                       const LentThreads* threads) {
  for (Tfswitch_PushPart& part : parts) part.result = {};
  TFSWITCH_RETURN_IF_ERROR(CheckBatches(parts));
  if (depth < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("push_depth must be at least 0, got ", depth));
  }
  // Errors of earlier pushes come before this call changes anything.
  for (const Tfswitch_PushPart& part : parts) {
    Cluster& cluster = *part.table->cluster;
    TFSWITCH_RETURN_IF_ERROR(FinishPushesOfTwins(cluster));
    TFSWITCH_RETURN_IF_ERROR(cluster.pushes().WaitForRoom(std::max(depth, 1)));
  }
  struct Data {
    explicit Data(size_t size) : prepared(size), results(size) {}
    Batches<PreparedPush> prepared;
    Batches<WriteResult> results;
  };
  const auto data = std::make_shared<Data>(parts.size());
  TFSWITCH_RETURN_IF_ERROR(RunEach(threads, parts.size(), [&](size_t i) {
    return Prepare(&parts[i], /*copies=*/depth > 0, &data->prepared[i]);
  }));
  const bool is_skipped = std::any_of(
      parts.begin(), parts.end(),
      [](const Tfswitch_PushPart& part) { return part.result.skipped != 0; });
  if (is_skipped) {
    for (Tfswitch_PushPart& part : parts) part.result.skipped = 1;
    return absl::OkStatus();
  }
  Batches<ReadyPush> pushes;
  Batches<size_t> places;  // The index of each push in `parts`.
  for (size_t i = 0; i < parts.size(); ++i) {
    PreparedPush& prepared = data->prepared[i];
    if (prepared.is_empty) continue;
    TFSWITCH_RETURN_IF_ERROR(Complete(*parts[i].table, &prepared.args));
    pushes.push_back(
        {{std::move(prepared.args), &data->results[i]}, parts[i].num_keys});
    places.push_back(i);
  }
  std::vector<std::shared_ptr<OpenPushes>> groups;
  for (auto& [cluster, group] : GroupByCluster<ReadyPush>(
           pushes,
           [&](size_t i) { return parts[places[i]].table->cluster.get(); })) {
    groups.push_back(std::make_shared<OpenPushes>(cluster, std::move(group)));
    TFSWITCH_RETURN_IF_ERROR(groups.back()->Begin());
  }
  if (depth == 0) {
    TFSWITCH_RETURN_IF_ERROR(SendNow(threads, groups));
    for (const size_t i : places) {
      parts[i].result.updated_rows = data->results[i].num_rows;
    }
    return absl::OkStatus();
  }
  for (const size_t i : places) parts[i].result.updated_rows = -1;
  const int64_t step = parts.empty() ? 0 : parts[0].options.global_step;
  for (const auto& group : groups) {
    group->cluster().pushes().Add(
        step == 0 ? "an earlier push" : absl::StrCat("the push of step ", step),
        [group, data](const LentThreads* threads) {
          return SendFromQueue(threads, group.get());
        });
  }
  return absl::OkStatus();
}

std::unique_ptr<Tfswitch_Prefetch> BeginPrefetch(
    absl::Span<const Tfswitch_PullPart> parts, bool is_exact,
    const uint64_t* sources, size_t limit) {
  auto prefetch = std::make_unique<Tfswitch_Prefetch>();
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tfswitch_PullPart& part = parts[i];
    auto ticket = part.table->cluster->prefetches().Begin(
        part.table->config, KeysOf(part), {is_exact, sources[i], limit});
    if (ticket == nullptr) continue;
    prefetch->tickets[part.table->cluster].push_back(std::move(ticket));
  }
  return prefetch;
}

}  // namespace tfswitch
