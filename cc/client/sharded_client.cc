// SplitByOwner() splits the keys of a call into one part per shard. A pull
// copies only keys, because each shard's client writes the rows directly to the
// caller's memory. A push or an assignment copies the values into memory of the
// part, and sends them from there. The function that puts the answers together
// owns the parts, so the parts live as long as the calls.
//
// If `on_lost_tables` asks for recovery, a call keeps the function that started
// it, and runs that function again after a DataLoss. Saves, restores and
// exports of changes block until they end, so OnAllShards() runs them on one
// thread per shard.

#include "cc/client/sharded_client.h"

#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <optional>
#include <system_error>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/key_batch.h"
#include "cc/base/mutex.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/cluster_tables.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"
#include "google/protobuf/message.h"

namespace tfswitch {
namespace {

// How often a restore renews its staged data on a server while other servers
// are still reading. Servers drop staged data after some minutes.
constexpr absl::Duration kStagingRenewal = absl::Seconds(30);

// The part of a batch that one shard owns.
struct Part {
  std::vector<Key> keys;
  std::vector<int32_t> places;      // The indices of `keys` in the batch.
  std::shared_ptr<float[]> values;  // keys.size() x dim floats, to send.
  std::shared_ptr<float[]> slots;
  OwnedObservations observations;
  WriteResult result;  // Only for a write.
};

std::vector<Part> SplitByOwner(absl::Span<const Key> keys,
                               uint32_t num_virtual_shards, size_t num_shards) {
  std::vector<Part> parts(num_shards);
  std::vector<uint32_t> owners(keys.size());
  std::vector<size_t> sizes(num_shards);
  for (size_t i = 0; i < keys.size(); ++i) {
    owners[i] = OwnerOfVirtualShard(VirtualShardOf(keys[i], num_virtual_shards),
                                    num_virtual_shards,
                                    static_cast<uint32_t>(num_shards));
    ++sizes[owners[i]];
  }
  for (size_t shard = 0; shard < num_shards; ++shard) {
    parts[shard].keys.resize(sizes[shard]);
    parts[shard].places.resize(sizes[shard]);
    sizes[shard] = 0;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    Part& part = parts[owners[i]];
    const size_t next = sizes[owners[i]]++;
    part.keys[next] = keys[i];
    part.places[next] = static_cast<int32_t>(i);
  }
  return parts;
}

// Copies the rows at `places`. A call shares ownership of the copy, so it can
// send the rows without copying them again.
std::shared_ptr<float[]> GatherRows(const std::vector<int32_t>& places,
                                    int width, const float* values) {
  std::shared_ptr<float[]> rows(new float[places.size() * width]);
  ScatterRows(places, width, values, rows.get());
  return rows;
}

// Makes the push of a part. The push points to values and observations that the
// part owns.
PushArgs PushOfPart(const PushArgs& args, Part* part) {
  part->values = GatherRows(part->places, args.dim, args.gradients.data());
  part->observations = OwnedObservations(args.observations, part->places);
  PushArgs part_args = args;
  part_args.keys = part->keys;
  part_args.gradients =
      absl::MakeConstSpan(part->values.get(), part->keys.size() * args.dim);
  part_args.gradients_owner = part->values;
  part_args.observations = part->observations.view();
  return part_args;
}

using Split = std::vector<std::vector<Part>>;  // Indexed by call, then shard.

template <typename T>
std::vector<T> ToVector(absl::Span<const T> span) {
  return {span.begin(), span.end()};
}

absl::Status CheckAssign(const AssignArgs& args) {
  TFSWITCH_RETURN_IF_ERROR(CheckSize(args.table, "embedding", args.keys.size(),
                                     args.dim, args.embeddings.size()));
  if (args.keys.empty()) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(
      CheckFinite(args.table, "embedding", args.keys, args.embeddings));
  return CheckFinite(args.table, "slot", args.keys, args.slots);
}

// The field of a request that holds the incarnation of its table; null if the
// request has no table.
const google::protobuf::FieldDescriptor* IncarnationField(
    const google::protobuf::Message& request) {
  return request.GetDescriptor()->FindFieldByName("table_incarnation");
}

// Adds an answer to a sum: adds int64 and double fields, and concatenates
// lists. Other fields keep the value of the last answer.
void AddTo(google::protobuf::Message* answer, google::protobuf::Message* sum) {
  using Field = google::protobuf::FieldDescriptor;
  const google::protobuf::Reflection& reflection = *answer->GetReflection();
  std::vector<const Field*> fields;
  reflection.ListFields(*answer, &fields);
  for (const Field* field : fields) {
    if (field->is_repeated()) continue;
    if (field->cpp_type() == Field::CPPTYPE_INT64) {
      reflection.SetInt64(answer, field,
                          reflection.GetInt64(*answer, field) +
                              reflection.GetInt64(*sum, field));
    } else if (field->cpp_type() == Field::CPPTYPE_DOUBLE) {
      reflection.SetDouble(answer, field,
                           reflection.GetDouble(*answer, field) +
                               reflection.GetDouble(*sum, field));
    }
  }
  sum->MergeFrom(*answer);
}

using Answers = std::vector<std::unique_ptr<google::protobuf::Message>>;

void SumUp(const Answers& answers, google::protobuf::Message* sum) {
  sum->Clear();
  for (const auto& answer : answers) AddTo(answer.get(), sum);
}

// A call that runs once more if a table was lost and has been recovered.
class RecoveringCall : public PendingCall {
 public:
  using Start = std::function<std::unique_ptr<PendingCall>()>;

  RecoveringCall(Start start, std::function<absl::Status()> recover)
      : start_(std::move(start)),
        recover_(std::move(recover)),
        call_(start_()) {}

  absl::Status Wait() override {
    absl::Status status = call_->Wait();
    if (!absl::IsDataLoss(status)) return status;
    TFSWITCH_RETURN_IF_ERROR(recover_());
    call_ = start_();
    return call_->Wait();
  }

 private:
  const Start start_;
  const std::function<absl::Status()> recover_;
  std::unique_ptr<PendingCall> call_;
};

class ShardedClient : public ParameterClient {
 public:
  ShardedClient(std::vector<std::unique_ptr<ParameterClient>> shards,
                OnLostTables on_lost_tables)
      : shards_(std::move(shards)),
        client_id_(DrawId()),
        tables_(shards_, on_lost_tables) {}

  ParameterClient& first_shard() override { return *shards_[0]; }
  GroupClient& groups() override { return shards_[0]->groups(); }

  // Sends the request to all shards, and sums up the answers. If a request does
  // not name the incarnation of its table, sends the one that this client
  // knows.
  std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) override {
    const auto answers = std::make_shared<Answers>();
    for (size_t i = 0; i < shards_.size(); ++i) {
      answers->emplace_back(response->New());
    }
    if (IncarnationField(request) == nullptr) {
      // A call without a table may take long. So if it fails on one shard, the
      // client of that shard repeats it, and not the other clients.
      absl::Status status = OnAllShards([&](size_t i) {
        return shards_[i]->Call(request, (*answers)[i].get(), timeout);
      });
      if (status.ok()) SumUp(*answers, response);
      return Done(std::move(status));
    }
    std::shared_ptr<google::protobuf::Message> own(request.New());
    own->CopyFrom(request);
    return Begin([this, own, answers, response, timeout] {
      return StartOnAll(*own, answers, response, timeout);
    });
  }

  absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                     const TableIdentity& identity,
                                     uint64_t) override {
    TFSWITCH_RETURN_IF_ERROR(config.Validate());
    return Recovering(
        [&] { return tables_.Make(config, identity.incarnation); });
  }

  absl::Status DropTable(const std::string& table) override {
    return tables_.Drop(table);
  }

  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table) override {
    if (table.name.empty()) return tables_.ListAll();
    return Recovering([&]() -> absl::StatusOr<std::vector<TableInfo>> {
      TFSWITCH_ASSIGN_OR_RETURN(TableInfo info, tables_.List(table));
      return std::vector<TableInfo>{std::move(info)};
    });
  }

  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    return tables_.ShardInstances();
  }

  RowChanges ChangesOf(const std::string& table) const override {
    RowChanges all;
    for (const auto& shard : shards_) {
      const RowChanges own = shard->ChangesOf(table);
      all.generations += own.generations;
      all.pushes_of_others =
          std::max(all.pushes_of_others, own.pushes_of_others);
    }
    return all;
  }
  absl::StatusOr<std::vector<v1::HandshakeResponse>> AskServers() override {
    std::vector<v1::HandshakeResponse> all;
    for (const auto& shard : shards_) {
      TFSWITCH_ASSIGN_OR_RETURN(const auto one, shard->AskServers());
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  void SetOnLostTables(OnLostTables on_lost_tables) override {
    tables_.set_on_lost_tables(on_lost_tables);
  }

  absl::StatusOr<std::vector<ResetTable>> ResetLostTables() override {
    return tables_.ResetLost();
  }

  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> pulls) override {
    return Begin([this, own = ToVector(pulls)] { return StartPulls(own); });
  }

  std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> pushes) override {
    std::vector<PushPart> own = ToVector(pushes);
    for (PushPart& push : own) Identify(&push.args.id);
    return Begin([this, own = std::move(own)] { return StartPushes(own); });
  }

  int num_shards() const override { return static_cast<int>(shards_.size()); }

  std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged) override {
    return Begin([this, own_shard = static_cast<size_t>(shard), group, round,
                  committed, staged] {
      // Sends the incarnations that this client knows now. If this process has
      // reset a lost table, the commit then continues without the gradients
      // that were staged for the table.
      std::vector<TableRef> own = staged;
      for (TableRef& table : own) {
        table.incarnation = tables_.KnownIncarnation(table.name);
      }
      return shards_[own_shard]->StartCommitRound(0, group, round, committed,
                                                  own);
    });
  }

  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           WriteResult* result) override {
    AssignArgs own = args;
    Identify(&own.id);
    return Begin([this, own, result] { return StartAssignOnce(own, result); });
  }

  absl::StatusOr<int64_t> Erase(const TableRef& table,
                                absl::Span<const Key> keys) override {
    // If the call is repeated, shards that have already erased their keys are
    // skipped.
    std::vector<std::optional<int64_t>> erased(shards_.size());
    TFSWITCH_RETURN_IF_ERROR(Recovering([&]() -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(const TableRouting routing,
                                tables_.RoutingOf(table.name));
      const std::vector<Part> parts =
          SplitByOwner(keys, routing.num_virtual_shards, shards_.size());
      for (size_t i = 0; i < shards_.size(); ++i) {
        if (parts[i].keys.empty() || erased[i].has_value()) continue;
        TFSWITCH_ASSIGN_OR_RETURN(
            erased[i], shards_[i]->Erase({table.name, routing.incarnation},
                                         parts[i].keys));
      }
      return absl::OkStatus();
    }));
    int64_t sum = 0;
    for (const std::optional<int64_t>& part : erased) sum += part.value_or(0);
    return sum;
  }

  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override {
    return Recovering([&]() -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(const TableRouting routing,
                                tables_.RoutingOf(table.name));
      const std::vector<Part> parts =
          SplitByOwner(keys, routing.num_virtual_shards, shards_.size());
      for (size_t i = 0; i < shards_.size(); ++i) {
        const Part& part = parts[i];
        if (part.keys.empty()) continue;
        std::vector<UsageOfRow> part_usage(part.keys.size());
        std::vector<KeyState> part_states(part.keys.size());
        TFSWITCH_RETURN_IF_ERROR(shards_[i]->ReadUsage(
            {table.name, routing.incarnation}, part.keys, day,
            absl::MakeSpan(part_usage), absl::MakeSpan(part_states)));
        for (size_t k = 0; k < part.places.size(); ++k) {
          usage[part.places[k]] = part_usage[k];
          states[part.places[k]] = part_states[k];
        }
      }
      return absl::OkStatus();
    });
  }

  // If a table is lost, the export fails and is not repeated: rows that were
  // visited cannot be taken back.
  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override {
    TFSWITCH_ASSIGN_OR_RETURN(const TableRouting routing,
                              RecoveredRoutingOf(table.name));
    for (const auto& shard : shards_) {
      TFSWITCH_RETURN_IF_ERROR(
          shard->Export({table.name, routing.incarnation}, with_slots, visit));
    }
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override {
    if (!args.since.empty() && args.since.size() != shards_.size()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", args.table, "' was exported from ", args.since.size(),
          " servers, and there are ", shards_.size(),
          " now, which do not know what has changed since. Export a base."));
    }
    uint64_t incarnation = args.table_incarnation;
    if (incarnation == 0) {
      TFSWITCH_ASSIGN_OR_RETURN(const TableRouting routing,
                                RecoveredRoutingOf(args.table));
      incarnation = routing.incarnation;
    }
    std::vector<std::vector<ChangeCursor>> results(shards_.size());
    Mutex visit_mutex;
    TFSWITCH_RETURN_IF_ERROR(OnAllShards([&](size_t i) -> absl::Status {
      ExportChangesArgs own = args;
      own.table_incarnation = incarnation;
      if (!args.since.empty()) own.since = {args.since[i]};
      TFSWITCH_ASSIGN_OR_RETURN(
          results[i],
          shards_[i]->ExportChanges(own, [&](const ChangeChunk& chunk) {
            MutexLock lock(&visit_mutex);
            return visit(chunk);
          }));
      return absl::OkStatus();
    }));
    std::vector<ChangeCursor> cursors;
    for (const std::vector<ChangeCursor>& result : results) {
      cursors.insert(cursors.end(), result.begin(), result.end());
    }
    return cursors;
  }

  absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress) override {
    // Shard 0 chooses the newest save; the other shards read the same one.
    std::vector<v1::StageRestoreResponse> staged(shards_.size());
    v1::StageRestoreRequest own = request;
    if (shards_.size() > 1 && own.save() == 0) {
      TFSWITCH_ASSIGN_OR_RETURN(staged[0],
                                shards_[0]->StageRestore(request, progress));
      own.set_save(staged[0].save());
    }
    // A server drops its staged data after some minutes. So calls that have
    // ended are repeated at intervals until the last server is ready.
    Mutex mutex;
    CondVar ended;
    size_t num_left = shards_.size();
    TFSWITCH_RETURN_IF_ERROR(OnAllShards([&](size_t i) -> absl::Status {
      absl::StatusOr<v1::StageRestoreResponse> result =
          shards_[i]->StageRestore(own, progress);
      MutexLock lock(&mutex);
      --num_left;
      ended.NotifyAll();
      absl::Time next = SteadyNow() + kStagingRenewal;
      while (result.ok() && num_left > 0) {
        ended.WaitFor(&mutex, next - SteadyNow());
        if (SteadyNow() < next) continue;
        mutex.Unlock();
        result = shards_[i]->StageRestore(own, progress);
        mutex.Lock();
        next = SteadyNow() + kStagingRenewal;
      }
      TFSWITCH_RETURN_IF_ERROR(result.status());
      staged[i] = *std::move(result);
      return absl::OkStatus();
    }));
    v1::StageRestoreResponse sum = staged[0];
    for (size_t i = 1; i < staged.size(); ++i) {
      sum.set_num_rows(sum.num_rows() + staged[i].num_rows());
    }
    MutexLock lock(&mutex_);
    staged_tables_ = {sum.tables().begin(), sum.tables().end()};
    return sum;
  }

  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override {
    absl::Status first = ParameterClient::CommitRestore(restore_id, abort);
    // The restored tables may have a different number of virtual shards and a
    // different incarnation.
    MutexLock lock(&mutex_);
    if (!abort) tables_.Forget(staged_tables_);
    return first;
  }

 private:
  using TableRouting = ClusterTables::TableRouting;

  // For calls that may start after a recovery, but are not repeated.
  absl::StatusOr<TableRouting> RecoveredRoutingOf(const std::string& table) {
    return Recovering([&] { return tables_.RoutingOf(table); });
  }

  // Calls call(shard) for all shards at the same time, on one thread each.
  // Returns the error of the first shard that has one.
  absl::Status OnAllShards(const std::function<absl::Status(size_t)>& call) {
    std::vector<absl::Status> statuses(shards_.size());
    std::vector<std::thread> threads;
    std::promise<bool> all_started;
    const std::shared_future<bool> may_begin(all_started.get_future());
    absl::Status first;
    try {
      for (size_t i = 1; i < shards_.size(); ++i) {
        threads.emplace_back([&, i] {
          if (may_begin.get()) statuses[i] = call(i);
        });
      }
    } catch (const std::system_error& error) {
      first = absl::ResourceExhaustedError(
          absl::StrCat("no thread for each of ", shards_.size(),
                       " servers: ", error.what()));
    }
    all_started.set_value(first.ok());
    if (first.ok()) statuses[0] = call(0);
    for (std::thread& thread : threads) thread.join();
    for (absl::Status& status : statuses) first.Update(std::move(status));
    return first;
  }

  // Gives a call that may be repeated an id, so that no shard applies its part
  // twice.
  void Identify(PushId* id) {
    if (tables_.recovers() && id->client_id == 0) {
      *id = {client_id_, next_sequence_.fetch_add(1)};
    }
  }

  std::unique_ptr<PendingCall> Begin(RecoveringCall::Start start) {
    if (!tables_.recovers()) return start();
    return std::make_unique<RecoveringCall>(
        std::move(start), [this] { return tables_.Recover(); });
  }

  template <typename Call>
  std::invoke_result_t<const Call&> Recovering(const Call& call) {
    std::invoke_result_t<const Call&> result = call();
    if (!tables_.recovers() || !absl::IsDataLoss(StatusOf(result))) {
      return result;
    }
    TFSWITCH_RETURN_IF_ERROR(tables_.Recover());
    return call();
  }

  std::unique_ptr<PendingCall> StartOnAll(
      const google::protobuf::Message& request,
      const std::shared_ptr<Answers>& answers,
      google::protobuf::Message* response, absl::Duration timeout) {
    const google::protobuf::Reflection& reflection = *request.GetReflection();
    const auto* incarnation = IncarnationField(request);
    const std::unique_ptr<google::protobuf::Message> own(request.New());
    own->CopyFrom(request);
    if (reflection.GetUInt64(request, incarnation) == 0) {
      const absl::StatusOr<TableRouting> routing =
          tables_.RoutingOf(reflection.GetString(
              request, request.GetDescriptor()->FindFieldByName("table")));
      if (!routing.ok()) return Done(routing.status());
      reflection.SetUInt64(own.get(), incarnation, routing->incarnation);
    }
    std::vector<std::unique_ptr<PendingCall>> calls;
    for (size_t i = 0; i < shards_.size(); ++i) {
      calls.push_back(
          shards_[i]->StartCall(*own, (*answers)[i].get(), timeout));
    }
    return std::make_unique<JoinedCalls>(
        std::move(calls), [answers, response] { SumUp(*answers, response); });
  }

  std::unique_ptr<PendingCall> StartPulls(std::vector<PullPart> pulls) {
    // The number of virtual shards of each table.
    std::vector<uint32_t> cuts;
    for (PullPart& pull : pulls) {
      PullArgs& args = pull.args;
      if (absl::Status status =
              CheckSize(args.table, "embedding", args.keys.size(), args.dim,
                        pull.embeddings.size());
          !status.ok()) {
        return Done(std::move(status));
      }
      const absl::StatusOr<TableRouting> routing =
          tables_.RoutingOf(args.table);
      if (!routing.ok()) return Done(routing.status());
      args.table_incarnation = routing->incarnation;
      cuts.push_back(routing->num_virtual_shards);
    }
    if (shards_.size() == 1) return shards_[0]->StartPull(pulls);
    const auto split = std::make_shared<Split>(pulls.size());
    std::vector<std::vector<PullPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pulls.size(); ++i) {
      (*split)[i] = SplitByOwner(pulls[i].args.keys, cuts[i], shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = (*split)[i][shard];
        if (part.keys.empty()) continue;
        by_shard[shard].push_back(
            {pulls[i].args, pulls[i].embeddings, part.places});
        by_shard[shard].back().args.keys = part.keys;
      }
    }
    std::vector<std::unique_ptr<PendingCall>> calls;
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      calls.push_back(shards_[shard]->StartPull(by_shard[shard]));
    }
    // The function does nothing: it owns `split` until the calls have ended.
    return std::make_unique<JoinedCalls>(std::move(calls), [split] {});
  }

  std::unique_ptr<PendingCall> StartPushes(std::vector<PushPart> pushes) {
    std::vector<uint32_t> cuts;
    for (PushPart& push : pushes) {
      const absl::StatusOr<TableRouting> routing =
          tables_.RoutingOf(push.args.table);
      if (!routing.ok()) return Done(routing.status());
      push.args.table_incarnation = routing->incarnation;
      push.args.is_dense = routing->is_dense;
      cuts.push_back(routing->num_virtual_shards);
    }
    if (shards_.size() == 1) return shards_[0]->StartCheckedPush(pushes);
    const auto split = std::make_shared<Split>(pushes.size());
    std::vector<std::vector<PushPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pushes.size(); ++i) {
      (*split)[i] = SplitByOwner(pushes[i].args.keys, cuts[i], shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = (*split)[i][shard];
        // A step of a dense table changes all rows, so shards without keys get
        // it too.
        if (part.keys.empty() && !pushes[i].args.is_dense) continue;
        by_shard[shard].push_back(
            {PushOfPart(pushes[i].args, &part), &part.result});
      }
    }
    std::vector<std::unique_ptr<PendingCall>> calls;
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      calls.push_back(shards_[shard]->StartCheckedPush(by_shard[shard]));
    }
    return std::make_unique<JoinedCalls>(
        std::move(calls), [split, pushes = std::move(pushes)] {
          for (size_t i = 0; i < pushes.size(); ++i) {
            *pushes[i].result = WriteResult();
            for (const Part& part : (*split)[i]) {
              pushes[i].result->Add(part.result);
            }
          }
        });
  }

  std::unique_ptr<PendingCall> StartAssignOnce(AssignArgs args,
                                               WriteResult* result) {
    *result = WriteResult();
    if (absl::Status status = CheckAssign(args); !status.ok()) {
      return Done(std::move(status));
    }
    const absl::StatusOr<TableRouting> routing = tables_.RoutingOf(args.table);
    if (!routing.ok()) return Done(routing.status());
    args.table_incarnation = routing->incarnation;
    if (shards_.size() == 1) return shards_[0]->StartAssign(args, result);
    if (args.keys.empty()) return Done(absl::OkStatus());
    const int slot_floats =
        static_cast<int>(args.slots.size() / args.keys.size());
    const auto parts = std::make_shared<std::vector<Part>>(
        SplitByOwner(args.keys, routing->num_virtual_shards, shards_.size()));
    std::vector<std::unique_ptr<PendingCall>> calls;
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = (*parts)[i];
      if (part.keys.empty()) continue;
      part.values = GatherRows(part.places, args.dim, args.embeddings.data());
      AssignArgs part_args = args;
      part_args.keys = part.keys;
      part_args.embeddings =
          absl::MakeConstSpan(part.values.get(), part.keys.size() * args.dim);
      if (!args.slots.empty()) {
        part.slots = GatherRows(part.places, slot_floats, args.slots.data());
        part_args.slots = absl::MakeConstSpan(part.slots.get(),
                                              part.keys.size() * slot_floats);
      }
      calls.push_back(shards_[i]->StartAssign(part_args, &part.result));
    }
    return std::make_unique<JoinedCalls>(std::move(calls), [parts, result] {
      for (const Part& part : *parts) {
        result->Add(part.result);
      }
    });
  }

  // Constant after construction.
  const std::vector<std::unique_ptr<ParameterClient>> shards_;
  const uint64_t client_id_;

  std::atomic<uint64_t> next_sequence_{1};
  ClusterTables tables_;
  Mutex mutex_;
  // The tables of the last StageRestore().
  std::vector<std::string> staged_tables_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    OnLostTables on_lost_tables) {
  return std::make_unique<ShardedClient>(std::move(shards), on_lost_tables);
}

}  // namespace tfswitch
