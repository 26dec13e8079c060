// The functions of cc/capi/tfswitch.h. Each converts C types to types of the
// core, calls the core, and converts the status back.

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
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/fork_guard.h"
#include "cc/base/interrupt.h"
#include "cc/base/parallel.h"
#include "cc/base/progress.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/capi/batching.h"
#include "cc/capi/cluster.h"
#include "cc/capi/control.h"
#include "cc/capi/replicas.h"
#include "cc/capi/tfswitch.h"
#include "cc/client/dense_keys.h"
#include "cc/client/worker_session.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/rpc/server/server_limits.h"
#include "cc/serving/file_watch.h"
#include "cc/serving/served_model.h"
#include "cc/shard/shard.h"
#include "cc/table/table_config.h"
#include "cc/wire/row_calls.h"
#include "cc/wire/table_config_conversion.h"

struct Tfswitch_Cluster {
  std::shared_ptr<tfswitch::Cluster> cluster;
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

// A Tfswitch_Round that owns the arrays to which its pointers point.
struct OwningRound : Tfswitch_Round {
  std::vector<int64_t> keys_storage;
  std::vector<double> weights_storage;
  std::vector<int64_t> active_storage;
};

namespace tfswitch {
namespace {

int Report(const absl::Status& status, char* error) {
  if (status.ok()) return 0;
  if (error != nullptr) {
    const absl::string_view message = status.message();
    size_t size = std::min<size_t>(message.size(), TFSWITCH_ERROR_SIZE - 1);
    if (size < message.size()) {
      // Does not cut in the middle of a UTF-8 character.
      while (size > 0 && (message[size] & 0xc0) == 0x80) --size;
    }
    std::memcpy(error, message.data(), size);
    error[size] = '\0';
  }
  return static_cast<int>(status.code());
}

// The cluster that the first argument of a function is, or whose table it is;
// or null.
template <typename First, typename... Rest>
Cluster* ClusterOf(First first, Rest...) {
  if constexpr (std::is_same_v<First, Tfswitch_Cluster*> ||
                std::is_same_v<First, Tfswitch_Table*>) {
    return first->cluster.get();
  }
  return nullptr;
}

// Says how a function of the C API uses rows, apart from pulls and pushes.
enum class Rows : uint8_t { kLeaves, kReads, kMayChange };

// Makes a function of the C API that runs kFunction and reports its status. In
// a child that was forked after the core was used, it reports an error. The
// core does not throw, but its libraries may, for example if memory runs out.
// The function catches these exceptions, because they must not reach C code.
template <auto kFunction, Rows kRows = Rows::kReads>
struct Guarded;
template <typename... Args, absl::Status (*kFunction)(Args...), Rows kRows>
struct Guarded<kFunction, kRows> {
  static int Run(Args... args, char* error) {
    try {
      absl::Status status = ForkGuard::Check();
      Cluster* const cluster =
          kRows == Rows::kLeaves ? nullptr : ClusterOf(args...);
      if (status.ok() && cluster != nullptr) {
        status = FinishAllPushes(*cluster);
      }
      if (!status.ok()) return Report(status, error);
      status = kFunction(args...);
      if (cluster != nullptr && kRows == Rows::kMayChange) {
        DropAllPrefetches(*cluster);
      }
      return Report(status, error);
    } catch (const std::bad_alloc&) {
      return Report(absl::ResourceExhaustedError("out of memory"), error);
    } catch (const std::exception& exception) {
      return Report(absl::InternalError(exception.what()), error);
    }
  }
};

// Frees an object of the core, but not in a forked child, which would wait for
// threads that do not exist there, and shut down sockets that the parent uses.
template <typename Handle>
void Free(Handle* handle) {
  if (!ForkGuard::IsTripped()) delete handle;
}

// The threads that a caller of the C API lends for one call.
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

// --- The functions of Tfswitch_Api, in its order --------------------------

const char* Version() { return TFSWITCH_VERSION; }

void FreeString(char* string) { std::free(string); }

TlsFiles ToTlsFiles(const Tfswitch_TlsFiles& tls) {
  return WithAbsolutePaths({tls.ca, tls.cert, tls.key, tls.server_name});
}

absl::Status OpenCluster(const char* address, double timeout_s,
                         const Tfswitch_Credentials* credentials, uint64_t id,
                         Tfswitch_Cluster** cluster) {
  *cluster = nullptr;
  if (!(timeout_s > 0.0) || !std::isfinite(timeout_s)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeout must be a positive number of seconds. Received: ", timeout_s));
  }
  tfswitch::Credentials given;
  if (credentials != nullptr) {
    if (credentials->tls != nullptr) given.tls = ToTlsFiles(*credentials->tls);
    given.token = {credentials->token, credentials->token_file};
  }
  TFSWITCH_ASSIGN_OR_RETURN(
      std::shared_ptr<Cluster> opened,
      tfswitch::OpenCluster(address, absl::Seconds(timeout_s), given, id));
  *cluster = new Tfswitch_Cluster{std::move(opened)};
  return absl::OkStatus();
}

uint64_t ClusterId(const Tfswitch_Cluster* cluster) {
  return cluster->cluster->id();
}

int32_t ClusterNumShards(const Tfswitch_Cluster* cluster) {
  return cluster->cluster->num_shards();
}

template <typename Handle>
int32_t IsRemote(const Handle* handle) {
  return handle->cluster->is_remote() ? 1 : 0;
}

absl::Status OpenTable(Tfswitch_Cluster* cluster, const char* config_json,
                       Tfswitch_Table** table) {
  *table = nullptr;
  auto opened = std::make_unique<Tfswitch_Table>();
  opened->cluster = cluster->cluster;
  TFSWITCH_RETURN_IF_ERROR(TableConfigFromJson(config_json, &opened->config));
  TFSWITCH_RETURN_IF_ERROR(opened->config.Validate());
  ParameterClient& client = opened->cluster->client();
  TableConfig made = opened->config;
  made.wire_dtype = {};  // It belongs to this process.
  absl::StatusOr<std::shared_ptr<const void>> hold;
  do {
    TFSWITCH_RETURN_IF_ERROR(client.CreateTable(made));
    hold = client.HoldTable(opened->config.name);
    // Another thread may just have dropped the table with its last close_table.
    // If so, tries again.
  } while (absl::IsNotFound(hold.status()));
  TFSWITCH_ASSIGN_OR_RETURN(opened->hold, std::move(hold));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                            client.ListTables(opened->config.name));
  if (infos.size() != 1) {
    return absl::NotFoundError(
        absl::StrCat("table '", opened->config.name,
                     "' was dropped while it was being opened"));
  }
  opened->slot_floats = infos[0].slot_floats;
  if (opened->config.wire_dtype != FloatType::kFloat32) {
    TFSWITCH_ASSIGN_OR_RETURN(const bool is_known,
                              opened->cluster->KnowsWireDtype());
    if (!is_known) opened->config.wire_dtype = {};
  }
  *table = opened.release();
  return absl::OkStatus();
}

int32_t TableDim(const Tfswitch_Table* table) { return table->config.dim; }

int32_t TableSlotFloats(const Tfswitch_Table* table) {
  return table->slot_floats;
}

const char* TableName(const Tfswitch_Table* table) {
  return table->config.name.c_str();
}

absl::Status TableSize(Tfswitch_Table* table, int64_t* num_rows) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::vector<TableInfo> infos,
      table->cluster->client().ListTables(table->config.name));
  *num_rows = infos.empty() ? 0 : infos[0].stats.num_rows;
  return absl::OkStatus();
}

// Returns how many rows were set.
absl::StatusOr<int64_t> AssignRows(const Tfswitch_Table& table,
                                   const int64_t* keys, size_t num_keys,
                                   const float* embeddings, const float* slots,
                                   bool only_missing) {
  TFSWITCH_RETURN_IF_ERROR(CheckBatch(table, num_keys));
  if (num_keys == 0) return 0;
  AssignArgs args;
  args.table = table.config.name;
  args.dim = table.config.dim;
  args.keys = Keys(keys, num_keys);
  args.embeddings =
      absl::MakeConstSpan(embeddings, num_keys * table.config.dim);
  if (slots != nullptr) {
    args.slots = absl::MakeConstSpan(slots, num_keys * table.slot_floats);
  }
  args.day = table.cluster->day();
  args.only_missing = only_missing;
  TFSWITCH_ASSIGN_OR_RETURN(const WriteResult result,
                            table.cluster->client().Assign(args));
  return result.num_rows;
}

absl::Status Assign(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                    const float* embeddings, const float* slots) {
  return AssignRows(*table, keys, num_keys, embeddings, slots,
                    /*only_missing=*/false)
      .status();
}

absl::Status AssignMissing(Tfswitch_Table* table, const int64_t* keys,
                           size_t num_keys, const float* embeddings,
                           int64_t* assigned_rows) {
  *assigned_rows = 0;
  TFSWITCH_ASSIGN_OR_RETURN(
      *assigned_rows, AssignRows(*table, keys, num_keys, embeddings,
                                 /*slots=*/nullptr, /*only_missing=*/true));
  return absl::OkStatus();
}

void DenseKeysC(const Tfswitch_Table* table, size_t num_blocks, int64_t* keys) {
  DenseKeys(table->config.num_virtual_shards, absl::MakeSpan(keys, num_blocks));
}

template <typename Handle>
absl::Status EndStep(Handle* handle, double weight, int64_t* round) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*handle->cluster));
  const absl::Status ended = worker->EndStep(weight);
  DropPrefetchesOfTwins(*handle->cluster);
  TFSWITCH_RETURN_IF_ERROR(ended);
  *round = worker->round();
  return absl::OkStatus();
}

absl::Status AdvanceWorkItem(Tfswitch_Cluster* cluster, const char* queue,
                             int64_t epoch, int64_t index, int64_t offset) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
  return worker->AdvanceWorkItem(queue, epoch, index, offset);
}

absl::Status WorkItemState(Tfswitch_Cluster* cluster, const char* queue,
                           int64_t epoch, int64_t index, int32_t* state) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto worker, FindWorker(*cluster->cluster));
  static_assert(static_cast<int>(WorkerSession::ItemState::kInStep) ==
                TFSWITCH_WORK_ITEM_IN_STEP);  // The other values agree, too.
  *state = static_cast<int32_t>(worker->GetItemState(queue, epoch, index));
  return absl::OkStatus();
}

absl::Status Erase(Tfswitch_Table* table, const int64_t* keys, size_t num_keys,
                   int64_t* erased_rows) {
  TFSWITCH_ASSIGN_OR_RETURN(
      *erased_rows,
      table->cluster->client().Erase(table->config.name, Keys(keys, num_keys)));
  return absl::OkStatus();
}

absl::Status ExportRows(Tfswitch_Table* table, int32_t with_slots,
                        Tfswitch_VisitRows visit, void* context) {
  Progress progress(
      absl::StrCat("reading all rows of table '", table->config.name, "'"),
      /*total_rows=*/0);
  return table->cluster->client().Export(
      table->config.name, with_slots != 0,
      [&](const RowChunk& chunk) -> absl::Status {
        TFSWITCH_RETURN_IF_ERROR(CheckInterrupt());
        progress.Add(static_cast<int64_t>(chunk.keys.size()));
        // Checks sizes: a server has sent them, and the visitor relies on them.
        TFSWITCH_RETURN_IF_ERROR(CheckSize(table->config.name, "embedding",
                                           chunk.keys.size(), table->config.dim,
                                           chunk.embeddings.size()));
        if (with_slots != 0) {
          TFSWITCH_RETURN_IF_ERROR(
              CheckSize(table->config.name, "slot", chunk.keys.size(),
                        table->slot_floats, chunk.slots.size()));
        }
        const float* slots = with_slots != 0 ? chunk.slots.data() : nullptr;
        if (visit(context, chunk.keys.data(), chunk.embeddings.data(), slots,
                  chunk.keys.size()) != 0) {
          return absl::CancelledError("the export was stopped by its caller");
        }
        return absl::OkStatus();
      });
}

absl::Status StartServer(const Tfswitch_ServerOptions* options,
                         Tfswitch_Server** server) {
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
  if (options->tls != nullptr) {
    server_options.security.tls = ToTlsFiles(*options->tls);
    if (server_options.security.tls.cert.empty()) {
      return absl::InvalidArgumentError(
          "a server with `tls` needs `cert` and `key`");
    }
  }
  if (options->token_file != nullptr) {
    server_options.security.token_file = AbsolutePath(options->token_file);
  }
  server_options.security.is_insecure = options->is_insecure != 0;
  TFSWITCH_ASSIGN_OR_RETURN(
      std::unique_ptr<GrpcServer> started,
      GrpcServer::Start(server_options,
                        std::make_shared<Shard>(shard_options)));
  *server = new Tfswitch_Server{std::move(started)};
  return absl::OkStatus();
}

const char* ServerAddress(const Tfswitch_Server* server) {
  return server->server->address().c_str();
}

void StopServer(Tfswitch_Server* server, double grace_s) {
  if (ForkGuard::IsTripped()) return;  // The server belongs to the parent.
  server->server->Stop(absl::Seconds(std::max(0.0, grace_s)));
}

absl::Status ReplicasEndStep(const char* group, uint32_t worker, double weight,
                             double wait_s, Tfswitch_ReplicaPlace* place,
                             int32_t* has_arrived) {
  ReplicaPlace present;
  present.set_incarnation(place->incarnation);
  present.set_clock(place->clock);
  present.set_round(place->round);
  bool arrived = *has_arrived != 0;
  absl::Status status = ReplicasOf(group).EndStep(
      worker, weight, SteadyNow() + absl::Seconds(wait_s), &present, &arrived);
  *place = {present.incarnation(), present.clock(), present.round()};
  *has_arrived = arrived ? 1 : 0;
  return status;
}

absl::Status ReplicasHeartbeat(const char* group, uint32_t worker,
                               uint64_t incarnation, uint64_t applier) {
  return ReplicasOf(group).Heartbeat(worker, incarnation, applier);
}

absl::Status ReplicasNextRound(const char* group, uint64_t applier,
                               double wait_s, Tfswitch_Round** round) {
  TFSWITCH_ASSIGN_OR_RETURN(const Round next,
                            ReplicasOf(group).NextRound(
                                applier, SteadyNow() + absl::Seconds(wait_s)));
  auto owned = std::make_unique<OwningRound>();
  for (const Contribution& each : next.contributions()) {
    owned->keys_storage.insert(
        owned->keys_storage.end(),
        {each.worker(), static_cast<int64_t>(each.incarnation()),
         each.clock()});
    owned->weights_storage.push_back(each.weight());
  }
  for (const uint64_t incarnation : next.active()) {
    owned->active_storage.push_back(static_cast<int64_t>(incarnation));
  }
  owned->number = next.number();
  owned->total_weight = next.total_weight();
  owned->num_contributions = next.contributions().size();
  owned->keys = owned->keys_storage.data();
  owned->weights = owned->weights_storage.data();
  owned->num_active = next.active().size();
  owned->active = owned->active_storage.data();
  owned->next_incarnation = static_cast<int64_t>(next.next_incarnation());
  *round = owned.release();
  return absl::OkStatus();
}

void FreeRound(Tfswitch_Round* round) {
  delete static_cast<OwningRound*>(round);
}

absl::Status ReplicasConfirmRound(const char* group, uint64_t applier,
                                  int64_t number) {
  return ReplicasOf(group).ConfirmRound(applier, number);
}

absl::Status ReadUsage(Tfswitch_Table* table, const int64_t* keys,
                       size_t num_keys, float* usage, uint8_t* states) {
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
}

absl::Status Pull(const Tfswitch_PullPart* parts, size_t num_parts,
                  int32_t insert_missing, const Tfswitch_Threads* threads) {
  const ThreadsOfCaller lent(threads);
  return PullBatch(absl::MakeConstSpan(parts, num_parts), insert_missing != 0,
                   &lent);
}

absl::Status Push(Tfswitch_PushPart* parts, size_t num_parts, int32_t depth,
                  const Tfswitch_Threads* threads) {
  const ThreadsOfCaller lent(threads);
  return PushBatch(absl::MakeSpan(parts, num_parts), depth, &lent);
}

absl::Status OpenServedModelC(const char* model_file,
                              Tfswitch_ServedModel** model) {
  TFSWITCH_RETURN_IF_ERROR(ForkGuard::Arm(
      absl::StrCat("opened the served model '", model_file, "'")));
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<ServedModel> opened,
                            OpenServedModel(model_file, OpenReadingClient));
  *model = new Tfswitch_ServedModel{std::move(opened)};
  return absl::OkStatus();
}

int32_t ServedModelIsRemote(const Tfswitch_ServedModel* model) {
  return model->model->is_remote() ? 1 : 0;
}

Tfswitch_ServedRows* PinServedRows(Tfswitch_ServedModel* model) {
  try {
    // In a child that was forked after the core was used, returns an empty
    // object. served_lookup then returns the error.
    if (ForkGuard::IsTripped()) return new Tfswitch_ServedRows{};
    return new Tfswitch_ServedRows{model->model->Pin()};
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

absl::Status ServedLookup(const Tfswitch_ServedRows* rows,
                          const Tfswitch_ServedPart* parts, size_t num_parts,
                          const Tfswitch_Threads* threads) {
  const ThreadsOfCaller lent(threads);
  std::vector<LookupPart> lookups;
  lookups.reserve(num_parts);
  for (const Tfswitch_ServedPart& part :
       absl::MakeConstSpan(parts, num_parts)) {
    lookups.push_back({part.table, part.dim, Keys(part.keys, part.num_keys),
                       part.embeddings});
  }
  return rows->rows->Lookup(lookups, &lent);
}

absl::Status Call(Tfswitch_Cluster* cluster, const char* method,
                  const char* request_json, char** response_json) {
  TFSWITCH_ASSIGN_OR_RETURN(
      const std::string response,
      CallControl(cluster == nullptr ? nullptr : cluster->cluster.get(), method,
                  request_json));
  *response_json = strdup(response.c_str());
  if (*response_json != nullptr) return absl::OkStatus();
  return absl::ResourceExhaustedError("out of memory");
}

absl::Status BeginPrefetchC(const Tfswitch_PullPart* parts, size_t num_parts,
                            int32_t is_exact, const uint64_t* sources,
                            size_t limit, Tfswitch_Prefetch** prefetch) {
  *prefetch = BeginPrefetch(absl::MakeConstSpan(parts, num_parts),
                            is_exact != 0, sources, limit)
                  .release();
  return absl::OkStatus();
}

void RunPrefetch(Tfswitch_Prefetch* prefetch) {
  if (ForkGuard::IsTripped()) return;  // The threads belong to the parent.
  const std::unique_ptr<Tfswitch_Prefetch> owned(prefetch);
  try {
    for (auto& [cluster, tickets] : owned->tickets) {
      cluster->prefetches().Run(tickets);
      tickets.clear();
    }
  } catch (const std::exception&) {
    // Out of memory. The destructor drops the tickets, and lookups read rows.
  }
}

const Tfswitch_Api& Api() {
  static const Tfswitch_Api api = [] {
    Tfswitch_Api api = {};
    api.api_version = TFSWITCH_API_VERSION;
    api.version = Version;
    api.free_string = FreeString;
    api.open_cluster = Guarded<OpenCluster>::Run;
    api.close_cluster = Free;
    api.cluster_num_shards = ClusterNumShards;
    api.cluster_is_remote = IsRemote;
    // CallControl() knows what the method does with rows.
    api.call = Guarded<Call, Rows::kLeaves>::Run;
    // Another table may have had the name before.
    api.open_table = Guarded<OpenTable, Rows::kMayChange>::Run;
    api.close_table = Free;
    api.table_dim = TableDim;
    api.table_slot_floats = TableSlotFloats;
    api.table_is_remote = IsRemote;
    api.table_size = Guarded<TableSize>::Run;
    api.pull = Guarded<Pull>::Run;
    api.push = Guarded<Push>::Run;
    api.assign = Guarded<Assign, Rows::kMayChange>::Run;
    api.erase = Guarded<Erase, Rows::kMayChange>::Run;
    api.export_rows = Guarded<ExportRows>::Run;
    api.start_server = Guarded<StartServer>::Run;
    api.server_address = ServerAddress;
    api.stop_server = StopServer;
    api.delete_server = Free;
    api.table_name = TableName;
    api.dense_keys = DenseKeysC;
    api.assign_missing = Guarded<AssignMissing, Rows::kMayChange>::Run;
    api.end_step = Guarded<EndStep<Tfswitch_Cluster>>::Run;
    api.table_end_step = Guarded<EndStep<Tfswitch_Table>>::Run;
    api.replicas_end_step = Guarded<ReplicasEndStep>::Run;
    api.replicas_heartbeat = Guarded<ReplicasHeartbeat>::Run;
    api.replicas_next_round = Guarded<ReplicasNextRound>::Run;
    api.free_round = FreeRound;
    api.replicas_confirm_round = Guarded<ReplicasConfirmRound>::Run;
    api.advance_work_item = Guarded<AdvanceWorkItem, Rows::kLeaves>::Run;
    api.work_item_state = Guarded<WorkItemState, Rows::kLeaves>::Run;
    api.read_usage = Guarded<ReadUsage>::Run;
    api.open_served_model = Guarded<OpenServedModelC>::Run;
    api.close_served_model = Free;
    api.served_model_is_remote = ServedModelIsRemote;
    api.pin_served_rows = PinServedRows;
    api.unpin_served_rows = Free;
    api.served_lookup = Guarded<ServedLookup>::Run;
    api.set_interrupt_check = SetInterruptCheck;
    api.cluster_id = ClusterId;
    api.catch_bus_errors = CatchBusErrors;
    api.begin_prefetch = Guarded<BeginPrefetchC>::Run;
    api.run_prefetch = RunPrefetch;
    return api;
  }();
  return api;
}

}  // namespace
}  // namespace tfswitch

const Tfswitch_Api* Tfswitch_GetApi(uint32_t api_version) {
  return api_version == TFSWITCH_API_VERSION ? &tfswitch::Api() : nullptr;
}
