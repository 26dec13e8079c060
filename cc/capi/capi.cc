// The functions behind cc/capi/tfswitch.h. Each turns C types into those of the
// core, calls the client, and turns the status back. Pulls and pushes also make
// keys unique here, sum the gradients of a key, and divide by the loss scale.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/internal/raw_logging.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/fork_guard.h"
#include "cc/base/interrupt.h"
#include "cc/base/key_batch.h"
#include "cc/base/key_observations.h"
#include "cc/base/parallel.h"
#include "cc/base/progress.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/capi/cluster.h"
#include "cc/capi/json_reports.h"
#include "cc/capi/replicas.h"
#include "cc/capi/serving.h"
#include "cc/capi/tfswitch.h"
#include "cc/client/check_args.h"
#include "cc/client/checkpoints.h"
#include "cc/client/dense_keys.h"
#include "cc/client/joined_calls.h"
#include "cc/client/worker_session.h"
#include "cc/rpc/grpc_server.h"
#include "cc/rpc/server_limits.h"
#include "cc/serving/served_model.h"
#include "cc/shard/shard.h"
#include "cc/sync/work_queue_json.h"
#include "cc/table/table_config.h"

struct Tfswitch_Cluster {
  std::shared_ptr<tfswitch::Cluster> cluster;
};

struct Tfswitch_Table {
  std::shared_ptr<tfswitch::Cluster> cluster;
  tfswitch::TableConfig config;
  std::shared_ptr<const void> hold;  // Keeps a table of this process.
  int slot_floats = 0;
  // Of a gradient with NaN, which is followed by more of them.
  mutable std::atomic<bool> has_warned{false};
};

struct Tfswitch_ServedModel {
  std::shared_ptr<tfswitch::ServedModel> model;
};

struct Tfswitch_ServedRows {
  std::shared_ptr<const tfswitch::PinnedRows> rows;
};

struct Tfswitch_Server {
  std::unique_ptr<tfswitch::GrpcServer> server;
};

// A round with room for what it points to.
struct OwningRound : Tfswitch_Round {
  std::vector<int64_t> keys_storage;
  std::vector<double> weights_storage;
  std::vector<int64_t> active_storage;
};

namespace tfswitch {
namespace {

// Batches are numbered with 32 bits on the way back.
constexpr size_t kMaxKeysPerCall = size_t{INT32_MAX};

int Report(const absl::Status& status, char* error) {
  if (status.ok()) return 0;
  if (error != nullptr) {
    const absl::string_view message = status.message();
    size_t size = std::min<size_t>(message.size(), TFSWITCH_ERROR_SIZE - 1);
    if (size < message.size()) {
      // Not in the middle of a UTF-8 character.
      while (size > 0 && (message[size] & 0xc0) == 0x80) --size;
    }
    std::memcpy(error, message.data(), size);
    error[size] = '\0';
  }
  return static_cast<int>(status.code());
}

// Runs `body` and reports its status, unless this process is a fork that cannot
// use the core. The core does not throw; what its libraries throw (out of
// memory, above all) must not cross into C.
template <typename Body>
int Guarded(char* error, Body&& body) {
  try {
    const absl::Status usable = ForkGuard::Check();
    return Report(usable.ok() ? body() : usable, error);
  } catch (const std::bad_alloc&) {
    return Report(absl::ResourceExhaustedError("out of memory"), error);
  } catch (const std::exception& exception) {
    return Report(absl::InternalError(exception.what()), error);
  }
}

// Frees what the core has handed out. In a fork of the process that owns it
// that would wait for threads that are not there, and shut down sockets that
// the parent uses.
template <typename Handle>
void Free(Handle* handle) {
  if (!ForkGuard::IsTripped()) delete handle;
}

char* CopyToC(const std::string& text) {
  char* copy = static_cast<char*>(std::malloc(text.size() + 1));
  if (copy == nullptr) return nullptr;
  std::memcpy(copy, text.c_str(), text.size() + 1);
  return copy;
}

absl::Status HandOver(const std::string& text, char** out) {
  *out = CopyToC(text);
  if (*out == nullptr) return absl::ResourceExhaustedError("out of memory");
  return absl::OkStatus();
}

// Threads of the other side of the C API.
class ThreadsOfCaller final : public LentThreads {
 public:
  explicit ThreadsOfCaller(const Tfswitch_Threads* threads)
      : threads_(threads == nullptr ? Tfswitch_Threads{} : *threads) {}

  int num_threads() const override {
    return threads_.schedule == nullptr ? 0 : std::max(0, threads_.num_threads);
  }

  void Schedule(std::function<void()> task) const override {
    threads_.schedule(
        threads_.context,
        [](void* context) {
          const std::unique_ptr<std::function<void()>> owned(
              static_cast<std::function<void()>*>(context));
          (*owned)();
        },
        new std::function<void()>(std::move(task)));
  }

 private:
  const Tfswitch_Threads threads_;
};

absl::Span<const Key> Keys(const int64_t* keys, size_t num_keys) {
  return absl::MakeConstSpan(keys, num_keys);
}

absl::Status CheckBatch(const Tfswitch_Table& table, size_t num_keys) {
  if (num_keys <= kMaxKeysPerCall) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.config.name, "': a batch of ", num_keys,
                   " ids is too large; split it below ", kMaxKeysPerCall));
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

PullArgs MakePullArgs(const Tfswitch_Table& table, absl::Span<const Key> keys,
                      bool insert_missing, const LentThreads* threads) {
  PullArgs args;
  args.table = table.config.name;
  args.dim = table.config.dim;
  args.keys = keys;
  args.insert_missing = insert_missing;
  if (insert_missing) args.day = table.cluster->day();
  args.threads = threads;
  return args;
}

absl::Status PullDistinct(Tfswitch_Table& table, absl::Span<const Key> keys,
                          bool insert_missing, absl::Span<float> embeddings,
                          const LentThreads* threads) {
  return table.cluster->client().Pull(
      MakePullArgs(table, keys, insert_missing, threads), embeddings);
}

absl::Status PullUnique(Tfswitch_Table& table, absl::Span<const Key> keys,
                        bool insert_missing, float* embeddings,
                        int64_t* unique_keys, int32_t* inverse,
                        size_t* num_unique, const LentThreads* threads) {
  const int dim = table.config.dim;
  const size_t distinct =
      ThreadUniqueKeys().Run(keys, absl::MakeSpan(unique_keys, keys.size()),
                             absl::MakeSpan(inverse, keys.size()));
  *num_unique = distinct;
  if (distinct == keys.size()) {
    // The order of first appearance is then the order of the batch.
    return PullDistinct(table, keys, insert_missing,
                        absl::MakeSpan(embeddings, keys.size() * dim), threads);
  }
  const std::unique_ptr<float[]> rows(new float[distinct * dim]);
  TFSWITCH_RETURN_IF_ERROR(PullDistinct(
      table, absl::MakeConstSpan(unique_keys, distinct), insert_missing,
      absl::MakeSpan(rows.get(), distinct * dim), threads));
  ScatterRows(absl::MakeConstSpan(inverse, keys.size()), dim, rows.get(),
              embeddings, threads);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<WorkerSession>> FindWorker(
    const Cluster& cluster) {
  std::shared_ptr<WorkerSession> worker = cluster.worker();
  if (worker != nullptr) return worker;
  return absl::FailedPreconditionError(
      "this process is no worker of a group; make a tfswitch.train.Worker "
      "first");
}

// The step that a push belongs to, for tables that more than one worker trains
// in an order.
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

// What is wrong with an `inverse` that is not one of UniqueKeys::Run. OK if
// nothing is.
absl::Status CheckInverse(const Tfswitch_Table& table,
                          absl::Span<const int32_t> inverse,
                          size_t num_unique) {
  int32_t next_new = 0;
  for (size_t i = 0; i < inverse.size(); ++i) {
    if (inverse[i] < 0 || inverse[i] > next_new ||
        static_cast<size_t>(inverse[i]) >= num_unique) {
      return absl::InvalidArgumentError(
          absl::StrCat("table '", table.config.name, "': inverse[", i, "] is ",
                       inverse[i], ", expected places of the ", num_unique,
                       " unique ids in order of first appearance"));
    }
    if (inverse[i] == next_new) ++next_new;
  }
  if (static_cast<size_t>(next_new) == num_unique) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("table '", table.config.name, "': inverse names ", next_new,
                   " unique ids, got ", num_unique));
}

KeyObservations ObservationsOf(const Tfswitch_PushOptions& options,
                               size_t num_keys) {
  const auto span = [num_keys](const float* values) {
    return absl::MakeConstSpan(values, values == nullptr ? 0 : num_keys);
  };
  return {{}, span(options.shows), span(options.clicks)};
}

// Before they are summed, where one may hide behind another.
absl::Status CheckEachObservation(const Tfswitch_Table& table,
                                  absl::Span<const Key> unique_keys,
                                  absl::Span<const int32_t> inverse,
                                  const Tfswitch_PushOptions& options) {
  const KeyObservations each = ObservationsOf(options, inverse.size());
  if (each.shows.empty() && each.clicks.empty()) return absl::OkStatus();
  std::vector<Key> keys;
  keys.reserve(inverse.size());
  for (const int32_t place : inverse) {
    keys.push_back(unique_keys[static_cast<size_t>(place)]);
  }
  return CheckObservations(table.config.name, keys, each);
}

// A push as it goes out: the sums of its gradients, and what they are of.
struct PreparedPush {
  absl::Span<const float> sums;
  std::shared_ptr<float[]> buffer;  // Of sums that are not the caller's.
  OwnedObservations observations;
  bool is_empty = false;
  bool is_skipped = false;  // For NaN or Inf.
};

absl::Status PreparePush(const Tfswitch_Table& table,
                         absl::Span<const Key> unique_keys,
                         absl::Span<const int32_t> inverse,
                         const float* gradients,
                         const Tfswitch_PushOptions& options,
                         PreparedPush* prepared) {
  const bool sums_needed = unique_keys.size() != inverse.size();
  if (unique_keys.empty() || unique_keys.size() >= inverse.size()) {
    TFSWITCH_RETURN_IF_ERROR(CheckInverse(table, inverse, unique_keys.size()));
  }
  // One of a table with dense updates is a step nevertheless.
  prepared->is_empty = unique_keys.empty() && !table.config.optimizer.is_dense;
  if (unique_keys.empty()) return absl::OkStatus();
  const int dim = table.config.dim;
  // Below 1 it is no loss scale, but a weight that the loss has been given.
  const float scale = options.loss_scale < 1.0f ? 1.0f : options.loss_scale;
  const bool scaled = scale != 1.0f;
  prepared->sums = absl::MakeConstSpan(gradients, inverse.size() * dim);
  if (sums_needed || scaled) {
    const size_t size = unique_keys.size() * dim;
    prepared->buffer.reset(new float[size]);
    const absl::Span<float> target(prepared->buffer.get(), size);
    if (sums_needed) {
      if (!SumByInverse(inverse, dim, prepared->sums, target)) {
        return CheckInverse(table, inverse, unique_keys.size());
      }
    } else {
      std::copy(prepared->sums.begin(), prepared->sums.end(), target.begin());
    }
    if (scaled) Scale(1.0f / scale, target);
    prepared->sums = target;
  }
  if (scaled || options.skip_non_finite != 0) {
    const int64_t place = FindNonFinite(prepared->sums);
    prepared->is_skipped = place >= 0 || !std::isfinite(scale);
    if (place >= 0 && !scaled && !table.has_warned.exchange(true)) {
      ABSL_RAW_LOG(WARNING,
                   "table '%s': the gradient of id %lld is NaN or Inf; the "
                   "push is skipped, and the loss will be NaN. Check the "
                   "labels, the loss and the learning rate.",
                   table.config.name.c_str(),
                   static_cast<long long>(  // NOLINT(runtime/int): as printed.
                       unique_keys[place / dim]));
    }
  }
  if (prepared->is_skipped) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(
      CheckEachObservation(table, unique_keys, inverse, options));
  prepared->observations = OwnedObservations(
      inverse, unique_keys.size(), ObservationsOf(options, inverse.size()),
      table.config.NeedsCounts());
  return absl::OkStatus();
}

absl::StatusOr<PushArgs> MakePushArgs(const Tfswitch_Table& table,
                                      absl::Span<const Key> keys,
                                      const PreparedPush& prepared,
                                      const Tfswitch_PushOptions& options,
                                      const LentThreads* threads) {
  PushArgs args;
  args.table = table.config.name;
  args.dim = table.config.dim;
  args.keys = keys;
  args.gradients = prepared.sums;
  args.gradients_owner = prepared.buffer;
  args.learning_rate = options.learning_rate;
  args.insert_missing = options.insert_missing != 0;
  args.keys_are_unique = true;
  args.observations = prepared.observations.view();
  args.global_step = options.global_step;
  args.day = table.cluster->day();
  args.id = table.cluster->NextPushId();
  args.threads = threads;
  if (table.config.consistency.kind != ConsistencyKind::kAsp) {
    TFSWITCH_ASSIGN_OR_RETURN(args.step, StepOf(table));
  } else if (const auto worker = table.cluster->worker(); worker != nullptr) {
    worker->NoteAppliedPush();
  }
  return args;
}

absl::Status PushUnique(Tfswitch_Table& table,
                        absl::Span<const Key> unique_keys,
                        absl::Span<const int32_t> inverse,
                        const float* gradients,
                        const Tfswitch_PushOptions& options,
                        Tfswitch_PushResult* result,
                        const LentThreads* threads) {
  *result = Tfswitch_PushResult{};
  PreparedPush prepared;
  TFSWITCH_RETURN_IF_ERROR(
      PreparePush(table, unique_keys, inverse, gradients, options, &prepared));
  result->skipped = prepared.is_skipped ? 1 : 0;
  if (prepared.is_empty || prepared.is_skipped) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(
      const PushArgs args,
      MakePushArgs(table, unique_keys, prepared, options, threads));
  TFSWITCH_ASSIGN_OR_RETURN(const PushResult pushed,
                            table.cluster->client().Push(args));
  result->updated_rows = pushed.updated_rows;
  return absl::OkStatus();
}

absl::Status PushRepeated(Tfswitch_Table& table, absl::Span<const Key> keys,
                          const float* gradients,
                          const Tfswitch_PushOptions& options,
                          Tfswitch_PushResult* result,
                          const LentThreads* threads) {
  std::vector<Key> unique(keys.size());
  std::vector<int32_t> inverse(keys.size());
  unique.resize(ThreadUniqueKeys().Run(keys, absl::MakeSpan(unique),
                                       absl::MakeSpan(inverse)));
  return PushUnique(table, unique, inverse, gradients, options, result,
                    threads);
}

// Calls of several clusters, all in flight together. `parts` are grouped by the
// cluster that `cluster_of` says, and each group is what `start` gets.
template <typename Part, typename ClusterOf, typename Start>
absl::Status CallClusters(absl::Span<const Part> parts, ClusterOf cluster_of,
                          Start start) {
  std::vector<Cluster*> clusters;
  std::vector<std::vector<Part>> groups;
  for (size_t i = 0; i < parts.size(); ++i) {
    Cluster* const cluster = cluster_of(i);
    const size_t place = static_cast<size_t>(
        std::find(clusters.begin(), clusters.end(), cluster) -
        clusters.begin());
    if (place == clusters.size()) {
      clusters.push_back(cluster);
      groups.emplace_back();
    }
    groups[place].push_back(parts[i]);
  }
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(clusters.size());
  for (size_t i = 0; i < clusters.size(); ++i) {
    calls.push_back(start(clusters[i]->client(), groups[i]));
  }
  return JoinedCalls(std::move(calls)).Wait();
}

absl::Status CheckNumParts(size_t num_parts) {
  if (num_parts <= TFSWITCH_MAX_PARTS) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("at most ", TFSWITCH_MAX_PARTS, " tables in one call, got ",
                   num_parts, "; split them over several calls"));
}

absl::Status PullManyParts(absl::Span<const Tfswitch_PullPart> parts,
                           bool insert_missing, const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckNumParts(parts.size()));
  for (const Tfswitch_PullPart& part : parts) {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*part.table, part.num_keys));
    if (part.num_unique != nullptr) *part.num_unique = 0;
  }
  // What is read of each part, in place if it repeats no key.
  struct Distinct {
    std::vector<Key> keys;
    std::vector<int32_t> inverse;
    size_t num_unique = 0;
    std::unique_ptr<float[]> rows;
  };
  std::vector<Distinct> distinct(parts.size());
  RunRanges(threads, parts.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Tfswitch_PullPart& part = parts[i];
      const absl::Span<const Key> keys = Keys(part.keys, part.num_keys);
      Distinct& found = distinct[i];
      int64_t* unique = part.unique_keys;
      int32_t* inverse = part.inverse;
      if (unique == nullptr) {
        if (!part.table->cluster->is_remote() || !RepeatsOften(keys)) continue;
        found.keys.resize(keys.size());
        found.inverse.resize(keys.size());
        unique = found.keys.data();
        inverse = found.inverse.data();
      }
      found.num_unique =
          ThreadUniqueKeys().Run(keys, absl::MakeSpan(unique, keys.size()),
                                 absl::MakeSpan(inverse, keys.size()));
      if (part.num_unique != nullptr) *part.num_unique = found.num_unique;
      if (found.num_unique == keys.size()) continue;
      found.rows.reset(new float[found.num_unique * part.table->config.dim]);
    }
  });
  std::vector<PullPart> pulls;
  std::vector<Cluster*> clusters;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tfswitch_PullPart& part = parts[i];
    if (part.num_keys == 0) continue;
    const bool in_place = distinct[i].rows == nullptr;
    const int64_t* const unique = part.unique_keys != nullptr
                                      ? part.unique_keys
                                      : distinct[i].keys.data();
    const absl::Span<const Key> keys =
        in_place ? Keys(part.keys, part.num_keys)
                 : Keys(unique, distinct[i].num_unique);
    float* const rows = in_place ? part.embeddings : distinct[i].rows.get();
    pulls.push_back(
        {MakePullArgs(*part.table, keys, insert_missing, threads),
         absl::MakeSpan(rows, keys.size() * part.table->config.dim)});
    clusters.push_back(part.table->cluster.get());
  }
  TFSWITCH_RETURN_IF_ERROR(CallClusters<PullPart>(
      pulls, [&](size_t i) { return clusters[i]; },
      [](ParameterClient& client, absl::Span<const PullPart> group) {
        return client.StartPullMany(group);
      }));
  RunRanges(threads, parts.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (distinct[i].rows == nullptr) continue;
      const Tfswitch_PullPart& part = parts[i];
      const int32_t* const inverse =
          part.inverse != nullptr ? part.inverse : distinct[i].inverse.data();
      ScatterRows(absl::MakeConstSpan(inverse, part.num_keys),
                  part.table->config.dim, distinct[i].rows.get(),
                  part.embeddings, threads);
    }
  });
  return absl::OkStatus();
}

absl::Status PushManyParts(absl::Span<Tfswitch_PushPart> parts,
                           const LentThreads* threads) {
  TFSWITCH_RETURN_IF_ERROR(CheckNumParts(parts.size()));
  for (Tfswitch_PushPart& part : parts) {
    part.result = Tfswitch_PushResult{};
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*part.table, part.num_keys));
  }
  std::vector<PreparedPush> prepared(parts.size());
  std::vector<absl::Status> statuses(parts.size());
  RunRanges(threads, parts.size(), 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      const Tfswitch_PushPart& part = parts[i];
      statuses[i] =
          PreparePush(*part.table, Keys(part.unique_keys, part.num_unique),
                      absl::MakeConstSpan(part.inverse, part.num_keys),
                      part.gradients, part.options, &prepared[i]);
    }
  });
  for (absl::Status& status : statuses) {
    TFSWITCH_RETURN_IF_ERROR(std::move(status));
  }
  const bool is_skipped =
      std::any_of(prepared.begin(), prepared.end(),
                  [](const PreparedPush& each) { return each.is_skipped; });
  if (is_skipped) {
    for (Tfswitch_PushPart& part : parts) part.result.skipped = 1;
    return absl::OkStatus();
  }
  std::vector<PushPart> pushes;
  std::vector<size_t> places;  // Of `pushes` in `parts`.
  std::vector<PushResult> results(parts.size());
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tfswitch_PushPart& part = parts[i];
    if (prepared[i].is_empty) continue;
    TFSWITCH_ASSIGN_OR_RETURN(
        PushArgs args,
        MakePushArgs(*part.table, Keys(part.unique_keys, part.num_unique),
                     prepared[i], part.options, threads));
    pushes.push_back({std::move(args), &results[i]});
    places.push_back(i);
  }
  // Before the first cluster is called.
  TFSWITCH_RETURN_IF_ERROR(CheckPushes(pushes));
  for (PushPart& push : pushes) push.args.is_checked = true;
  TFSWITCH_RETURN_IF_ERROR(CallClusters<PushPart>(
      pushes, [&](size_t i) { return parts[places[i]].table->cluster.get(); },
      [](ParameterClient& client, absl::Span<const PushPart> group) {
        return client.StartPushMany(group);
      }));
  for (const size_t i : places) {
    parts[i].result.updated_rows = results[i].updated_rows;
  }
  return absl::OkStatus();
}

// --- The functions of the table, in its order ------------------------------

const char* Version() { return TFSWITCH_VERSION; }

void FreeString(char* string) { std::free(string); }

int OpenCluster(const char* address, double timeout_s,
                Tfswitch_Cluster** cluster, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    *cluster = nullptr;
    if (!(timeout_s > 0.0) || !std::isfinite(timeout_s)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "timeout must be a positive number of seconds. Received: ",
          timeout_s));
    }
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<Cluster> opened,
                              Cluster::Open(address, absl::Seconds(timeout_s)));
    *cluster = new Tfswitch_Cluster{std::move(opened)};
    return absl::OkStatus();
  });
}

void CloseCluster(Tfswitch_Cluster* cluster) { Free(cluster); }

int32_t ClusterNumShards(const Tfswitch_Cluster* cluster) {
  return cluster->cluster->num_shards();
}

int32_t ClusterIsRemote(const Tfswitch_Cluster* cluster) {
  return cluster->cluster->is_remote() ? 1 : 0;
}

int ListTables(Tfswitch_Cluster* cluster, const char* table, char** json,
               char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(
        const std::vector<TableInfo> infos,
        cluster->cluster->client().ListTables(table == nullptr ? "" : table));
    return HandOver(TableInfosToJson(infos), json);
  });
}

int DropTable(Tfswitch_Cluster* cluster, const char* table, char* error) {
  return Guarded(error,
                 [&] { return cluster->cluster->client().DropTable(table); });
}

int Save(Tfswitch_Cluster* cluster, const char* request_json,
         char** report_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const SaveOptions options,
                              SaveOptionsFromJson(request_json));
    TFSWITCH_ASSIGN_OR_RETURN(
        const CheckpointReport report,
        SaveCheckpoint(cluster->cluster->client(), options));
    return HandOver(CheckpointReportToJson(report), report_json);
  });
}

int Restore(Tfswitch_Cluster* cluster, const char* request_json,
            char** report_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const RestoreOptions options,
                              RestoreOptionsFromJson(request_json));
    TFSWITCH_ASSIGN_OR_RETURN(
        const CheckpointReport report,
        RestoreCheckpoint(cluster->cluster->client(), options));
    return HandOver(CheckpointReportToJson(report), report_json);
  });
}

int OpenTable(Tfswitch_Cluster* cluster, const char* config_json,
              Tfswitch_Table** table, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    *table = nullptr;
    auto opened = std::make_unique<Tfswitch_Table>();
    opened->cluster = cluster->cluster;
    TFSWITCH_RETURN_IF_ERROR(TableConfigFromJson(config_json, &opened->config));
    ParameterClient& client = opened->cluster->client();
    for (;;) {
      TFSWITCH_RETURN_IF_ERROR(client.CreateTable(opened->config));
      absl::StatusOr<std::shared_ptr<const void>> hold =
          client.HoldTable(opened->config.name);
      // Its last hold may have been released in between.
      if (absl::IsNotFound(hold.status())) continue;
      TFSWITCH_RETURN_IF_ERROR(hold.status());
      opened->hold = *std::move(hold);
      break;
    }
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                              client.ListTables(opened->config.name));
    if (infos.size() != 1) {
      return absl::NotFoundError(
          absl::StrCat("table '", opened->config.name,
                       "' was dropped while it was being opened"));
    }
    opened->slot_floats = infos[0].slot_floats;
    *table = opened.release();
    return absl::OkStatus();
  });
}

void CloseTable(Tfswitch_Table* table) { Free(table); }

int32_t TableDim(const Tfswitch_Table* table) { return table->config.dim; }

int32_t TableSlotFloats(const Tfswitch_Table* table) {
  return table->slot_floats;
}

int32_t TableIsRemote(const Tfswitch_Table* table) {
  return table->cluster->is_remote() ? 1 : 0;
}

const char* TableName(const Tfswitch_Table* table) {
  return table->config.name.c_str();
}

int TableSize(Tfswitch_Table* table, int64_t* num_rows, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(
        const std::vector<TableInfo> infos,
        table->cluster->client().ListTables(table->config.name));
    *num_rows = infos.empty() ? 0 : infos[0].stats.num_rows;
    return absl::OkStatus();
  });
}

int Pull(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
         int32_t insert_missing, float* embeddings,
         const Tfswitch_Threads* threads, char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    if (num_keys == 0) return absl::OkStatus();
    const absl::Span<const Key> batch = Keys(keys, num_keys);
    // In this process a repeated row costs less than finding out.
    if (!table->cluster->is_remote() || !RepeatsOften(batch)) {
      return PullDistinct(
          *table, batch, insert_missing != 0,
          absl::MakeSpan(embeddings, num_keys * table->config.dim), &lent);
    }
    std::vector<Key> unique(num_keys);
    std::vector<int32_t> inverse(num_keys);
    size_t num_unique = 0;
    return PullUnique(*table, batch, insert_missing != 0, embeddings,
                      unique.data(), inverse.data(), &num_unique, &lent);
  });
}

int PullUniqueC(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                int32_t insert_missing, float* embeddings, int64_t* unique_keys,
                int32_t* inverse, size_t* num_unique,
                const Tfswitch_Threads* threads, char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    *num_unique = 0;
    if (num_keys == 0) return absl::OkStatus();
    return PullUnique(*table, Keys(keys, num_keys), insert_missing != 0,
                      embeddings, unique_keys, inverse, num_unique, &lent);
  });
}

int Push(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
         const float* gradients, const Tfswitch_PushOptions* options,
         Tfswitch_PushResult* result, const Tfswitch_Threads* threads,
         char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    return PushRepeated(*table, Keys(keys, num_keys), gradients, *options,
                        result, &lent);
  });
}

int PushUniqueC(Tfswitch_Table* table, const int64_t* unique_keys,
                size_t num_unique, const int32_t* inverse, size_t num_keys,
                const float* gradients, const Tfswitch_PushOptions* options,
                Tfswitch_PushResult* result, const Tfswitch_Threads* threads,
                char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    return PushUnique(*table, Keys(unique_keys, num_unique),
                      absl::MakeConstSpan(inverse, num_keys), gradients,
                      *options, result, &lent);
  });
}

AssignArgs MakeAssignArgs(const Tfswitch_Table& table, const int64_t* keys,
                          size_t num_keys, const float* embeddings) {
  AssignArgs args;
  args.table = table.config.name;
  args.dim = table.config.dim;
  args.keys = Keys(keys, num_keys);
  args.embeddings =
      absl::MakeConstSpan(embeddings, num_keys * table.config.dim);
  args.day = table.cluster->day();
  return args;
}

int Assign(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
           const float* embeddings, const float* slots, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    if (num_keys == 0) return absl::OkStatus();
    AssignArgs args = MakeAssignArgs(*table, keys, num_keys, embeddings);
    if (slots != nullptr) {
      args.slots = absl::MakeConstSpan(slots, num_keys * table->slot_floats);
    }
    return table->cluster->client().Assign(args).status();
  });
}

int AssignMissing(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                  const float* embeddings, int64_t* assigned_rows,
                  char* error) {
  return Guarded(error, [&]() -> absl::Status {
    *assigned_rows = 0;
    TFSWITCH_RETURN_IF_ERROR(CheckBatch(*table, num_keys));
    if (num_keys == 0) return absl::OkStatus();
    AssignArgs args = MakeAssignArgs(*table, keys, num_keys, embeddings);
    args.only_missing = true;
    TFSWITCH_ASSIGN_OR_RETURN(const AssignResult result,
                              table->cluster->client().Assign(args));
    *assigned_rows = result.assigned_rows;
    return absl::OkStatus();
  });
}

void DenseKeysC(const Tfswitch_Table* table, size_t num_blocks, int64_t* keys) {
  DenseKeys(table->config.num_virtual_shards, absl::MakeSpan(keys, num_blocks));
}

int JoinGroup(Tfswitch_Cluster* cluster, const char* options_json,
              char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const WorkerOptions options,
                              WorkerOptionsFromJson(options_json));
    return cluster->cluster->Join(options);
  });
}

absl::Status EndStepOf(const Cluster& cluster, double weight, int64_t* round) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(cluster));
  TFSWITCH_RETURN_IF_ERROR(worker->EndStep(weight));
  *round = worker->round();
  return absl::OkStatus();
}

int EndStep(Tfswitch_Cluster* cluster, double weight, int64_t* round,
            char* error) {
  return Guarded(error,
                 [&] { return EndStepOf(*cluster->cluster, weight, round); });
}

int TableEndStep(Tfswitch_Table* table, double weight, int64_t* round,
                 char* error) {
  return Guarded(error,
                 [&] { return EndStepOf(*table->cluster, weight, round); });
}

int WaitAtBarrier(Tfswitch_Cluster* cluster, const char* barrier,
                  double timeout_s, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    return worker->WaitAtBarrier(barrier, absl::Seconds(timeout_s));
  });
}

int LeaveGroup(Tfswitch_Cluster* cluster, double timeout_s, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    return worker->Leave(absl::Seconds(timeout_s));
  });
}

int WorkerReport(Tfswitch_Cluster* cluster, char** json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    TFSWITCH_ASSIGN_OR_RETURN(const WorkerSession::Report report,
                              worker->GetReport());
    return HandOver(WorkerReportToJson(report), json);
  });
}

int CreateWorkQueue(Tfswitch_Cluster* cluster, const char* queue,
                    const char* options_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const WorkQueueOptions options,
                              WorkQueueOptionsFromJson(options_json));
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    return worker->CreateWorkQueue(queue, options);
  });
}

int TakeWorkItem(Tfswitch_Cluster* cluster, const char* queue, char** json,
                 char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    TFSWITCH_ASSIGN_OR_RETURN(const std::optional<WorkItem> item,
                              worker->TakeWorkItem(queue));
    return HandOver(item.has_value() ? WorkItemToJson(*item) : "null", json);
  });
}

int AdvanceWorkItem(Tfswitch_Cluster* cluster, const char* queue, int64_t epoch,
                    int64_t index, int64_t offset, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    return worker->AdvanceWorkItem(queue, epoch, index, offset);
  });
}

int FinishWorkItem(Tfswitch_Cluster* cluster, const char* queue, int64_t epoch,
                   int64_t index, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    return worker->FinishWorkItem(queue, epoch, index);
  });
}

int WorkItemState(Tfswitch_Cluster* cluster, const char* queue, int64_t epoch,
                  int64_t index, int32_t* state, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    switch (worker->GetItemState(queue, epoch, index)) {
      case WorkerSession::ItemState::kLost:
        *state = TFSWITCH_WORK_ITEM_LOST;
        break;
      case WorkerSession::ItemState::kOwn:
        *state = TFSWITCH_WORK_ITEM_OWN;
        break;
      case WorkerSession::ItemState::kInStep:
        *state = TFSWITCH_WORK_ITEM_IN_STEP;
        break;
    }
    return absl::OkStatus();
  });
}

int WorkQueueStats(Tfswitch_Cluster* cluster, const char* queue, char** json,
                   char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
    TFSWITCH_ASSIGN_OR_RETURN(const WorkQueue::Stats stats,
                              worker->WorkQueueStats(queue));
    return HandOver(WorkQueueStatsToJson(stats), json);
  });
}

int Erase(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
          int64_t* erased_rows, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(
        *erased_rows, table->cluster->client().Erase(table->config.name,
                                                     Keys(keys, num_keys)));
    return absl::OkStatus();
  });
}

int ExportRows(Tfswitch_Table* table, int32_t with_slots,
               Tfswitch_VisitRows visit, void* context, char* error) {
  return Guarded(error, [&] {
    Progress progress(
        absl::StrCat("reading all rows of table '", table->config.name, "'"),
        /*total_rows=*/0);
    return table->cluster->client().Export(
        table->config.name, with_slots != 0,
        [&](const RowChunk& chunk) -> absl::Status {
          TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
          progress.Add(static_cast<int64_t>(chunk.keys.size()));
          // The visitor relies on these sizes, which a server has sent.
          TFSWITCH_RETURN_IF_ERROR(
              CheckSize(table->config.name, chunk.keys.size(),
                        table->config.dim, chunk.embeddings.size()));
          if (with_slots != 0) {
            TFSWITCH_RETURN_IF_ERROR(
                CheckSize(table->config.name, chunk.keys.size(),
                          table->slot_floats, chunk.slots.size()));
          }
          const float* slots = with_slots != 0 ? chunk.slots.data() : nullptr;
          if (visit(context, chunk.keys.data(), chunk.embeddings.data(), slots,
                    chunk.keys.size()) != 0) {
            return absl::CancelledError("the export was stopped by its caller");
          }
          return absl::OkStatus();
        });
  });
}

int StartServer(const Tfswitch_ServerOptions* options, Tfswitch_Server** server,
                char* error) {
  return Guarded(error, [&]() -> absl::Status {
    *server = nullptr;
    ShardOptions shard_options;
    shard_options.shard_index = options->shard_index;
    shard_options.num_shards = options->num_shards;
    shard_options.checkpoint_root = options->checkpoint_root != nullptr
                                        ? options->checkpoint_root
                                        : DefaultRoot();
    TFSWITCH_RETURN_IF_ERROR(shard_options.Validate());
    TFSWITCH_RETURN_IF_ERROR(ForkGuard::Arm(
        absl::StrCat("started a server at '", options->address, "'")));
    GrpcServerOptions server_options;
    server_options.address = options->address;
    server_options.num_threads = options->num_threads;
    if (options->max_message_bytes != 0) {
      server_options.max_message_bytes = options->max_message_bytes;
    }
    for (size_t i = 0; i < options->num_limits; ++i) {
      const std::pair<absl::string_view, absl::string_view> limit =
          absl::StrSplit(options->limits[i], absl::MaxSplits('=', 1));
      TFSWITCH_RETURN_IF_ERROR(SetServerLimit(limit.first, limit.second,
                                              &server_options, &shard_options));
    }
    TFSWITCH_ASSIGN_OR_RETURN(
        std::unique_ptr<GrpcServer> started,
        GrpcServer::Start(server_options,
                          std::make_shared<Shard>(shard_options)));
    *server = new Tfswitch_Server{std::move(started)};
    return absl::OkStatus();
  });
}

const char* ServerAddress(const Tfswitch_Server* server) {
  return server->server->address().c_str();
}

void StopServer(Tfswitch_Server* server, double grace_s) {
  if (ForkGuard::IsTripped()) return;  // The parent's server goes on.
  server->server->Stop(absl::Seconds(std::max(0.0, grace_s)));
}

void DeleteServer(Tfswitch_Server* server) { Free(server); }

int ReplicasCall(const char* group, const char* request_json,
                 char** response_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const std::string response,
                              CallReplicas(group, request_json));
    return HandOver(response, response_json);
  });
}

int ReplicasEndStep(const char* group, uint32_t worker, double weight,
                    double wait_s, Tfswitch_ReplicaPlace* place,
                    int32_t* has_arrived, char* error) {
  return Guarded(error, [&] {
    ReplicaPlace present = {place->incarnation, place->clock, place->round};
    bool arrived = *has_arrived != 0;
    absl::Status status = ReplicasOf(group).EndStep(
        worker, weight, SteadyNow() + absl::Seconds(wait_s), &present,
        &arrived);
    *place = {present.incarnation, present.clock, present.round};
    *has_arrived = arrived ? 1 : 0;
    return status;
  });
}

int ReplicasBeat(const char* group, uint32_t worker, uint64_t incarnation,
                 uint64_t applier, char* error) {
  return Guarded(error, [&] {
    return ReplicasOf(group).Beat(worker, incarnation, applier);
  });
}

int ReplicasNextRound(const char* group, uint64_t applier, double wait_s,
                      Tfswitch_Round** round, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(
        const Round next, ReplicasOf(group).NextRound(
                              applier, SteadyNow() + absl::Seconds(wait_s)));
    auto owned = std::make_unique<OwningRound>();
    for (const Contribution& each : next.contributions) {
      owned->keys_storage.insert(
          owned->keys_storage.end(),
          {each.worker, static_cast<int64_t>(each.incarnation), each.clock});
      owned->weights_storage.push_back(each.weight);
    }
    for (const uint64_t incarnation : next.active) {
      owned->active_storage.push_back(static_cast<int64_t>(incarnation));
    }
    owned->number = next.number;
    owned->total_weight = next.total_weight;
    owned->num_contributions = next.contributions.size();
    owned->keys = owned->keys_storage.data();
    owned->weights = owned->weights_storage.data();
    owned->num_active = next.active.size();
    owned->active = owned->active_storage.data();
    owned->next_incarnation = static_cast<int64_t>(next.next_incarnation);
    *round = owned.release();
    return absl::OkStatus();
  });
}

void FreeRound(Tfswitch_Round* round) {
  delete static_cast<OwningRound*>(round);
}

int ReplicasConfirmRound(const char* group, uint64_t applier, int64_t number,
                         char* error) {
  return Guarded(
      error, [&] { return ReplicasOf(group).ConfirmRound(applier, number); });
}

void SetDay(Tfswitch_Cluster* cluster, double day) {
  // A NaN is no day, either.
  cluster->cluster->set_day(day >= 0.0 ? static_cast<float>(std::min(day, 1e9))
                                       : kServersDay);
}

double Day(const Tfswitch_Cluster* cluster) {
  return static_cast<double>(cluster->cluster->day());
}

int Shrink(Tfswitch_Table* table, const char* rules_json, int32_t dry_run,
           char** report_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    ShrinkArgs args;
    args.table = table->config.name;
    args.day = table->cluster->day();
    args.dry_run = dry_run != 0;
    if (rules_json != nullptr) {
      args.rules.emplace();
      TFSWITCH_RETURN_IF_ERROR(EvictionFromJson(rules_json, &*args.rules));
    }
    TFSWITCH_ASSIGN_OR_RETURN(const ShrinkReport report,
                              table->cluster->client().Shrink(args));
    return HandOver(ShrinkReportToJson(report), report_json);
  });
}

int ReadUsage(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
              float* usage, uint8_t* states, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    std::vector<UsageOfRow> rows(num_keys);
    std::vector<KeyState> key_states(num_keys);
    TFSWITCH_RETURN_IF_ERROR(table->cluster->client().ReadUsage(
        table->config.name, Keys(keys, num_keys), table->cluster->day(),
        absl::MakeSpan(rows), absl::MakeSpan(key_states)));
    for (size_t i = 0; i < num_keys; ++i) {
      const UsageOfRow& row = rows[i];
      const float values[] = {row.count, row.last_seen_day, row.show, row.click,
                              row.delta_score};
      std::copy(std::begin(values), std::end(values), usage + 5 * i);
      states[i] = static_cast<uint8_t>(key_states[i]);
    }
    return absl::OkStatus();
  });
}

int PullManyC(const Tfswitch_PullPart* parts, size_t num_parts,
              int32_t insert_missing, const Tfswitch_Threads* threads,
              char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&] {
    return PullManyParts(absl::MakeConstSpan(parts, num_parts),
                         insert_missing != 0, &lent);
  });
}

int PushUniqueManyC(Tfswitch_PushPart* parts, size_t num_parts,
                    const Tfswitch_Threads* threads, char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&] {
    return PushManyParts(absl::MakeSpan(parts, num_parts), &lent);
  });
}

int PublishExportC(Tfswitch_Cluster* cluster, const char* options_json,
                   char** report_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(ExportOptions options,
                              ExportOptionsFromJson(options_json));
    options.day = cluster->cluster->day();
    TFSWITCH_ASSIGN_OR_RETURN(
        const ExportReport report,
        PublishExport(cluster->cluster->client(), options));
    return HandOver(ExportReportToJson(report), report_json);
  });
}

int OpenServedModelC(const char* model_file, Tfswitch_ServedModel** model,
                     char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(ForkGuard::Arm(
        absl::StrCat("opened the served model '", model_file, "'")));
    TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<ServedModel> opened,
                              OpenServedModel(model_file, OpenReadingClient));
    *model = new Tfswitch_ServedModel{std::move(opened)};
    return absl::OkStatus();
  });
}

void CloseServedModel(Tfswitch_ServedModel* model) { Free(model); }

int32_t ServedModelIsRemote(const Tfswitch_ServedModel* model) {
  return model->model->is_remote() ? 1 : 0;
}

Tfswitch_ServedRows* PinServedRows(Tfswitch_ServedModel* model) {
  try {
    // Of rows that a fork cannot use served_lookup says so.
    if (ForkGuard::IsTripped()) return new Tfswitch_ServedRows{};
    return new Tfswitch_ServedRows{model->model->Pin()};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void UnpinServedRows(Tfswitch_ServedRows* rows) { Free(rows); }

int ServedLookup(const Tfswitch_ServedRows* rows,
                 const Tfswitch_ServedPart* parts, size_t num_parts,
                 const Tfswitch_Threads* threads, char* error) {
  const ThreadsOfCaller lent(threads);
  return Guarded(error, [&] {
    std::vector<LookupPart> lookups;
    lookups.reserve(num_parts);
    for (const Tfswitch_ServedPart& part :
         absl::MakeConstSpan(parts, num_parts)) {
      lookups.push_back({part.table, part.dim, Keys(part.keys, part.num_keys),
                         part.embeddings});
    }
    return rows->rows->Lookup(lookups, &lent);
  });
}

int ServedModelCall(const char* path, const char* request_json,
                    char** response_json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const std::string response,
                              CallServedModel(path, request_json));
    return HandOver(response, response_json);
  });
}

void SetRecreatesLostTables(Tfswitch_Cluster* cluster, int32_t recreates) {
  cluster->cluster->client().SetOnLostTables(
      recreates != 0 ? OnLostTables::kRecreate : OnLostTables::kFail);
}

int ResetLostTablesC(Tfswitch_Cluster* cluster, char** json, char* error) {
  return Guarded(error, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ResetTable> tables,
                              cluster->cluster->client().ResetLostTables());
    return HandOver(ResetTablesToJson(tables), json);
  });
}

constexpr Tfswitch_Api kApi = {
    TFSWITCH_API_VERSION,
    Version,
    FreeString,
    OpenCluster,
    CloseCluster,
    ClusterNumShards,
    ClusterIsRemote,
    ListTables,
    DropTable,
    Save,
    Restore,
    OpenTable,
    CloseTable,
    TableDim,
    TableSlotFloats,
    TableIsRemote,
    TableSize,
    Pull,
    PullUniqueC,
    Push,
    PushUniqueC,
    Assign,
    Erase,
    ExportRows,
    StartServer,
    ServerAddress,
    StopServer,
    DeleteServer,
    TableName,
    DenseKeysC,
    AssignMissing,
    JoinGroup,
    EndStep,
    TableEndStep,
    WaitAtBarrier,
    LeaveGroup,
    WorkerReport,
    ReplicasCall,
    ReplicasEndStep,
    ReplicasBeat,
    ReplicasNextRound,
    FreeRound,
    ReplicasConfirmRound,
    CreateWorkQueue,
    TakeWorkItem,
    AdvanceWorkItem,
    FinishWorkItem,
    WorkItemState,
    WorkQueueStats,
    SetDay,
    Day,
    Shrink,
    ReadUsage,
    PullManyC,
    PushUniqueManyC,
    PublishExportC,
    OpenServedModelC,
    CloseServedModel,
    ServedModelIsRemote,
    PinServedRows,
    UnpinServedRows,
    ServedLookup,
    ServedModelCall,
    SetRecreatesLostTables,
    ResetLostTablesC,
    SetInterruptCheck,
};

}  // namespace
}  // namespace tfswitch

const Tfswitch_Api* Tfswitch_GetApi(uint32_t api_version) {
  return api_version == TFSWITCH_API_VERSION ? &tfswitch::kApi : nullptr;
}
