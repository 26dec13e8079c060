#include "cc/client/sharded_client.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <iterator>
#include <map>
#include <optional>
#include <thread>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/check_args.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"

namespace tfswitch {
namespace {

// How often a restore renews what it has staged on a server while it waits for
// another; servers keep it for minutes.
constexpr absl::Duration kStagingRenewal = absl::Seconds(30);

// The part of a batch that one shard owns.
struct Part {
  std::vector<Key> keys;
  std::vector<size_t> places;       // Of `keys` in the batch.
  std::shared_ptr<float[]> values;  // keys.size() x dim: to send or received.
  std::shared_ptr<float[]> slots;
  OwnedObservations observations;
  PushResult push_result;
  AssignResult assign_result;
  std::unique_ptr<PendingCall> call;
};

std::vector<Part> SplitByOwner(absl::Span<const Key> keys,
                               uint32_t num_virtual_shards, size_t num_shards) {
  std::vector<Part> parts(num_shards);
  for (Part& part : parts) {
    part.keys.reserve(keys.size() / num_shards + keys.size() / 8 + 8);
    part.places.reserve(part.keys.capacity());
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    Part& part = parts[OwnerOfVirtualShard(
        VirtualShardOf(keys[i], num_virtual_shards), num_virtual_shards,
        static_cast<uint32_t>(num_shards))];
    part.keys.push_back(keys[i]);
    part.places.push_back(i);
  }
  return parts;
}

// Copies the rows of `places`. Shared, so that a call may send the copy from
// where it lies.
std::shared_ptr<float[]> GatherRows(const std::vector<size_t>& places,
                                    int width, const float* values) {
  std::shared_ptr<float[]> rows(new float[places.size() * width]);
  for (size_t i = 0; i < places.size(); ++i) {
    std::memcpy(rows.get() + i * width, values + places[i] * width,
                sizeof(float) * width);
  }
  return rows;
}

// The push of a part, whose values and observations become what it points to.
// REQUIRES: CheckPush(args) is OK.
PushArgs PushOfPart(const PushArgs& args, Part* part) {
  part->values = GatherRows(part->places, args.dim, args.gradients.data());
  part->observations = OwnedObservations(args.observations, part->places);
  PushArgs part_args = args;
  part_args.keys = part->keys;
  part_args.gradients =
      absl::MakeConstSpan(part->values.get(), part->keys.size() * args.dim);
  part_args.gradients_owner = part->values;
  part_args.observations = part->observations.view();
  part_args.is_checked = true;
  return part_args;
}

// Waits for all parts, whatever happens, because they refer to our buffers;
// returns the first error.
absl::Status WaitForAll(std::vector<Part>& parts) {
  absl::Status first;
  for (Part& part : parts) {
    if (part.call == nullptr) continue;
    absl::Status status = part.call->Wait();
    part.call.reset();
    if (first.ok()) first = std::move(status);
  }
  return first;
}

class SplitPull : public PendingCall {
 public:
  SplitPull(std::vector<Part> parts, int dim, absl::Span<float> embeddings)
      : parts_(std::move(parts)), dim_(dim), embeddings_(embeddings) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(WaitForAll(parts_));
    for (const Part& part : parts_) {
      for (size_t i = 0; i < part.places.size(); ++i) {
        std::memcpy(embeddings_.data() + part.places[i] * dim_,
                    part.values.get() + i * dim_, sizeof(float) * dim_);
      }
    }
    return absl::OkStatus();
  }

  std::vector<Part>& parts() { return parts_; }

 private:
  std::vector<Part> parts_;
  const int dim_;
  const absl::Span<float> embeddings_;
};

// A push or an assignment.
template <typename Result>
class SplitWrite : public PendingCall {
 public:
  SplitWrite(std::vector<Part> parts, Result* result)
      : parts_(std::move(parts)), result_(result) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(WaitForAll(parts_));
    for (const Part& part : parts_) AddResult(part, result_);
    return absl::OkStatus();
  }

  std::vector<Part>& parts() { return parts_; }

 private:
  static void AddResult(const Part& part, PushResult* sum) {
    sum->Add(part.push_result);
  }
  static void AddResult(const Part& part, AssignResult* sum) {
    sum->assigned_rows += part.assign_result.assigned_rows;
    sum->duplicate = sum->duplicate || part.assign_result.duplicate;
  }

  std::vector<Part> parts_;
  Result* const result_;
};

// Several pulls, each split over the shards: one call for each shard.
class SplitPulls : public PendingCall {
 public:
  explicit SplitPulls(absl::Span<const PullPart> pulls)
      : pulls_(pulls.begin(), pulls.end()), parts_(pulls.size()) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(JoinedCalls(std::move(calls)).Wait());
    for (size_t i = 0; i < pulls_.size(); ++i) {
      const size_t dim = static_cast<size_t>(pulls_[i].args.dim);
      float* const to = pulls_[i].embeddings.data();
      for (const Part& part : parts_[i]) {
        for (size_t k = 0; k < part.places.size(); ++k) {
          std::memcpy(to + part.places[k] * dim, part.values.get() + k * dim,
                      sizeof(float) * dim);
        }
      }
    }
    return absl::OkStatus();
  }

  std::vector<Part>& parts(size_t pull) { return parts_[pull]; }

  std::vector<std::unique_ptr<PendingCall>> calls;

 private:
  const std::vector<PullPart> pulls_;
  std::vector<std::vector<Part>> parts_;  // Of each pull, by shard.
};

// The same for pushes.
class SplitPushes : public PendingCall {
 public:
  explicit SplitPushes(absl::Span<const PushPart> pushes)
      : parts_(pushes.size()) {
    for (const PushPart& push : pushes) results_.push_back(push.result);
  }

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(JoinedCalls(std::move(calls)).Wait());
    for (size_t i = 0; i < parts_.size(); ++i) {
      *results_[i] = PushResult();
      for (const Part& part : parts_[i]) results_[i]->Add(part.push_result);
    }
    return absl::OkStatus();
  }

  std::vector<Part>& parts(size_t push) { return parts_[push]; }

  std::vector<std::unique_ptr<PendingCall>> calls;

 private:
  std::vector<PushResult*> results_;
  std::vector<std::vector<Part>> parts_;  // Of each push, by shard.
};

// A shrink of every shard.
class SplitShrink : public PendingCall {
 public:
  SplitShrink(size_t num_shards, ShrinkReport* report)
      : parts_(num_shards), report_(report) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(JoinedCalls(std::move(calls)).Wait());
    *report_ = ShrinkReport();
    for (const ShrinkReport& part : parts_) report_->Add(part);
    return absl::OkStatus();
  }

  ShrinkReport* part(size_t shard) { return &parts_[shard]; }

  std::vector<std::unique_ptr<PendingCall>> calls;

 private:
  std::vector<ShrinkReport> parts_;  // Of each shard.
  ShrinkReport* const report_;
};

// A call that is made once more if a table had lost rows and goes on.
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

const absl::Status& StatusOf(const absl::Status& status) { return status; }
template <typename T>
const absl::Status& StatusOf(const absl::StatusOr<T>& result) {
  return result.status();
}

class ShardedClient : public ParameterClient {
 public:
  ShardedClient(std::vector<std::unique_ptr<ParameterClient>> shards,
                const ShardedClientOptions& options)
      : shards_(std::move(shards)),
        tracks_losses_(options.tracks_losses),
        on_lost_tables_(options.on_lost_tables) {}

  GroupClient& groups() override { return shards_[0]->groups(); }

  absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                     const TableIdentity& identity,
                                     uint64_t replaced_incarnation) override {
    if (!tracks_losses_) {
      return shards_[0]->MakeTable(config, identity, replaced_incarnation);
    }
    TFSWITCH_RETURN_IF_ERROR(config.Validate());
    return Recovering(
        [&] { return MakeOnAllShards(config, identity.incarnation); });
  }

  absl::Status DropTable(const std::string& table) override {
    // Every shard is asked, also after an error: what can go, goes. One that
    // has lost its part has nothing to drop.
    absl::Status first;
    bool is_dropped = false;
    for (const auto& shard : shards_) {
      absl::Status status = shard->DropTable(table);
      is_dropped = is_dropped || status.ok();
      if (first.ok() || absl::IsNotFound(first)) first = std::move(status);
    }
    if (is_dropped && absl::IsNotFound(first)) first = absl::OkStatus();
    if (first.ok() || absl::IsNotFound(first)) Forget(table);
    return first;
  }

  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table) override {
    if (!tracks_losses_) return shards_[0]->ListTables(table);
    if (table.name.empty()) return ListAll();
    TableRef known = table;
    if (known.incarnation == 0)
      known.incarnation = KnownIncarnation(table.name);
    return Recovering([&]() -> absl::StatusOr<std::vector<TableInfo>> {
      TFSWITCH_ASSIGN_OR_RETURN(const Parts parts, PartsOf(known));
      TFSWITCH_ASSIGN_OR_RETURN(TableInfo info, Join(known.name, parts));
      TFSWITCH_RETURN_IF_ERROR(info.lost);
      Remember(info, parts);
      return std::vector<TableInfo>{std::move(info)};
    });
  }

  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    std::vector<uint64_t> instances;
    for (const auto& shard : shards_) {
      TFSWITCH_ASSIGN_OR_RETURN(const std::vector<uint64_t> own,
                                shard->ShardInstances());
      instances.insert(instances.end(), own.begin(), own.end());
    }
    return instances;
  }

  void SetOnLostTables(OnLostTables on_lost_tables) override {
    on_lost_tables_ = on_lost_tables;
  }

  absl::StatusOr<std::vector<ResetTable>> ResetLostTables() override {
    return GoOn(/*may_reset=*/true);
  }

  std::unique_ptr<PendingCall> StartPull(
      const PullArgs& args, absl::Span<float> embeddings) override {
    if (!tracks_losses_) return shards_[0]->StartPull(args, embeddings);
    return Begin(
        [this, args, embeddings] { return StartPullOnce(args, embeddings); });
  }

  std::unique_ptr<PendingCall> StartPush(const PushArgs& args,
                                         PushResult* result) override {
    if (!tracks_losses_) return shards_[0]->StartPush(args, result);
    return Begin([this, args, result] { return StartPushOnce(args, result); });
  }

  std::unique_ptr<PendingCall> StartPullMany(
      absl::Span<const PullPart> pulls) override {
    if (!tracks_losses_) return shards_[0]->StartPullMany(pulls);
    return Begin(
        [this, own = std::vector<PullPart>(pulls.begin(), pulls.end())] {
          return StartPullManyOnce(own);
        });
  }

  std::unique_ptr<PendingCall> StartPushMany(
      absl::Span<const PushPart> pushes) override {
    if (!tracks_losses_) return shards_[0]->StartPushMany(pushes);
    return Begin(
        [this, own = std::vector<PushPart>(pushes.begin(), pushes.end())] {
          return StartPushManyOnce(own);
        });
  }

  int num_shards() const override { return static_cast<int>(shards_.size()); }

  std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged) override {
    const auto own_shard = static_cast<size_t>(shard);
    if (!tracks_losses_) {
      return shards_[own_shard]->StartCommitRound(0, group, round, committed,
                                                  staged);
    }
    return Begin([this, own_shard, group, round, committed, staged] {
      // As this process knows them now: who has reset a table that was lost
      // goes on without what was staged for it.
      std::vector<TableRef> own = staged;
      for (TableRef& table : own) {
        table.incarnation = KnownIncarnation(table.name);
      }
      return shards_[own_shard]->StartCommitRound(0, group, round, committed,
                                                  own);
    });
  }

  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           AssignResult* result) override {
    if (!tracks_losses_) return shards_[0]->StartAssign(args, result);
    return Begin(
        [this, args, result] { return StartAssignOnce(args, result); });
  }

  absl::StatusOr<int64_t> Erase(const TableRef& table,
                                absl::Span<const Key> keys) override {
    if (!tracks_losses_) return shards_[0]->Erase(table, keys);
    return Recovering([&]() -> absl::StatusOr<int64_t> {
      TFSWITCH_ASSIGN_OR_RETURN(const Facts facts, FactsOf(table.name));
      int64_t erased = 0;
      const std::vector<Part> parts =
          SplitByOwner(keys, facts.num_virtual_shards, shards_.size());
      for (size_t i = 0; i < shards_.size(); ++i) {
        if (parts[i].keys.empty()) continue;
        TFSWITCH_ASSIGN_OR_RETURN(
            const int64_t here,
            shards_[i]->Erase({table.name, facts.incarnation}, parts[i].keys));
        erased += here;
      }
      return erased;
    });
  }

  std::unique_ptr<PendingCall> StartShrink(const ShrinkArgs& args,
                                           ShrinkReport* report) override {
    if (!tracks_losses_) return shards_[0]->StartShrink(args, report);
    return Begin([this, args, report]() -> std::unique_ptr<PendingCall> {
      const absl::StatusOr<Facts> facts = FactsOf(args.table);
      if (!facts.ok()) return Done(facts.status());
      ShrinkArgs own = args;
      own.table_incarnation = facts->incarnation;
      auto split = std::make_unique<SplitShrink>(shards_.size(), report);
      for (size_t i = 0; i < shards_.size(); ++i) {
        split->calls.push_back(shards_[i]->StartShrink(own, split->part(i)));
      }
      return split;
    });
  }

  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override {
    if (!tracks_losses_) {
      return shards_[0]->ReadUsage(table, keys, day, usage, states);
    }
    return Recovering([&]() -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(const Facts facts, FactsOf(table.name));
      const std::vector<Part> parts =
          SplitByOwner(keys, facts.num_virtual_shards, shards_.size());
      for (size_t i = 0; i < shards_.size(); ++i) {
        const Part& part = parts[i];
        if (part.keys.empty()) continue;
        std::vector<UsageOfRow> part_usage(part.keys.size());
        std::vector<KeyState> part_states(part.keys.size());
        TFSWITCH_RETURN_IF_ERROR(shards_[i]->ReadUsage(
            {table.name, facts.incarnation}, part.keys, day,
            absl::MakeSpan(part_usage), absl::MakeSpan(part_states)));
        for (size_t k = 0; k < part.places.size(); ++k) {
          usage[part.places[k]] = part_usage[k];
          states[part.places[k]] = part_states[k];
        }
      }
      return absl::OkStatus();
    });
  }

  // What has been visited cannot be taken back, so that a table that a server
  // has lost ends the export.
  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override {
    if (!tracks_losses_) {
      return shards_[0]->Export(table, with_slots, visit);
    }
    TFSWITCH_ASSIGN_OR_RETURN(const Facts facts, FactsOf(table.name));
    for (const auto& shard : shards_) {
      TFSWITCH_RETURN_IF_ERROR(
          shard->Export({table.name, facts.incarnation}, with_slots, visit));
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
    if (!tracks_losses_) {
      return shards_[0]->ExportChanges(args, visit);
    }
    TFSWITCH_ASSIGN_OR_RETURN(const Facts facts, FactsOf(args.table));
    std::vector<std::vector<ChangeCursor>> results(shards_.size());
    Mutex visit_mutex;
    TFSWITCH_RETURN_IF_ERROR(OnAllShards([&](size_t i) -> absl::Status {
      ExportChangesArgs own = args;
      own.table_incarnation = facts.incarnation;
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

  absl::Status SettleExport(const TableRef& table, const std::string& export_id,
                            bool is_published) override {
    absl::Status first;
    for (const auto& shard : shards_) {
      first.Update(shard->SettleExport(table, export_id, is_published));
    }
    return first;
  }

  absl::StatusOr<std::vector<std::string>> SaveShard(
      const SaveShardArgs& args) override {
    std::vector<std::vector<std::string>> parts(shards_.size());
    TFSWITCH_RETURN_IF_ERROR(OnAllShards([&](size_t i) -> absl::Status {
      TFSWITCH_ASSIGN_OR_RETURN(parts[i], shards_[i]->SaveShard(args));
      return absl::OkStatus();
    }));
    std::vector<std::string> all;
    for (std::vector<std::string>& own : parts) {
      std::move(own.begin(), own.end(), std::back_inserter(all));
    }
    return all;
  }

  absl::StatusOr<int64_t> CommitCheckpoint(
      const CommitCheckpointArgs& args) override {
    return shards_[0]->CommitCheckpoint(args);
  }

  absl::Status AbortSave(const std::string& path,
                         const std::string& save_id) override {
    return OnAllShards(
        [&](size_t i) { return shards_[i]->AbortSave(path, save_id); });
  }

  absl::StatusOr<StagedRestore> StageRestore(
      const StageRestoreArgs& args) override {
    // Shard 0 says which save is the newest.
    std::vector<StagedRestore> staged(shards_.size());
    StageRestoreArgs own = args;
    if (shards_.size() > 1 && own.save == 0) {
      TFSWITCH_ASSIGN_OR_RETURN(staged[0], shards_[0]->StageRestore(args));
      own.save = staged[0].save;
    }
    // Those that are done ask again, so that the servers keep what they have
    // staged until the last one is done.
    Mutex mutex;
    CondVar ended;
    size_t num_left = shards_.size();
    TFSWITCH_RETURN_IF_ERROR(OnAllShards([&](size_t i) -> absl::Status {
      absl::StatusOr<StagedRestore> result = shards_[i]->StageRestore(own);
      MutexLock lock(&mutex);
      --num_left;
      ended.NotifyAll();
      absl::Time next = SteadyNow() + kStagingRenewal;
      while (result.ok() && num_left > 0) {
        ended.WaitFor(&mutex, next - SteadyNow());
        if (SteadyNow() < next) continue;
        mutex.Unlock();
        result = shards_[i]->StageRestore(own);
        mutex.Lock();
        next = SteadyNow() + kStagingRenewal;
      }
      TFSWITCH_RETURN_IF_ERROR(result.status());
      staged[i] = *std::move(result);
      return absl::OkStatus();
    }));
    StagedRestore sum = staged[0];
    for (size_t i = 1; i < staged.size(); ++i)
      sum.num_rows += staged[i].num_rows;
    MutexLock lock(&mutex_);
    staged_tables_ = sum.tables;
    return sum;
  }

  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override {
    absl::Status first = OnAllShards(
        [&](size_t i) { return shards_[i]->CommitRestore(restore_id, abort); });
    // Restored tables may be cut into another number of virtual shards, and
    // have another incarnation.
    MutexLock lock(&mutex_);
    if (!abort) {
      for (const std::string& table : staged_tables_) known_.erase(table);
    }
    return first;
  }

 private:
  // What a call has to know of a table.
  struct Facts {
    uint32_t num_virtual_shards = 0;
    uint64_t incarnation = 0;
  };
  // A table as this client has seen it last.
  struct Known {
    TableConfig config;
    uint64_t incarnation = 0;
    std::vector<int64_t> num_rows;  // Of each shard; empty if not counted.
  };
  // What each shard says of one table; nothing if it has none of that name.
  using Parts = std::vector<std::optional<TableInfo>>;

  // Calls call(shard) for all shards at once; returns the first shard's error.
  absl::Status OnAllShards(const std::function<absl::Status(size_t)>& call) {
    std::vector<absl::Status> statuses(shards_.size());
    std::vector<std::thread> threads;
    for (size_t i = 1; i < shards_.size(); ++i) {
      threads.emplace_back([&, i] { statuses[i] = call(i); });
    }
    statuses[0] = call(0);
    for (std::thread& thread : threads) thread.join();
    absl::Status first;
    for (absl::Status& status : statuses) first.Update(std::move(status));
    return first;
  }

  std::unique_ptr<PendingCall> Begin(RecoveringCall::Start start) {
    if (on_lost_tables_ == OnLostTables::kFail) return start();
    return std::make_unique<RecoveringCall>(std::move(start),
                                            [this] { return Recover(); });
  }

  template <typename Call>
  std::invoke_result_t<const Call&> Recovering(const Call& call) {
    std::invoke_result_t<const Call&> result = call();
    if (on_lost_tables_ == OnLostTables::kFail ||
        !absl::IsDataLoss(StatusOf(result))) {
      return result;
    }
    if (absl::Status status = Recover(); !status.ok()) {
      return status;
    }
    return call();
  }

  // Goes on by itself, and says so.
  absl::Status Recover() {
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<ResetTable> tables,
                              GoOn(on_lost_tables_ == OnLostTables::kRecreate));
    for (const ResetTable& table : tables) {
      std::fprintf(
          stderr, "tfswitch: warning: table '%s' %s\n", table.name.c_str(),
          table.shards.empty()
              ? "had lost rows, or was made again, and goes on as other "
                "processes have left it"
              : absl::StrCat("goes on with empty rows on shard ",
                             absl::StrJoin(table.shards, ", "),
                             ", which had lost ",
                             table.num_lost_rows < 0
                                 ? "it"
                                 : absl::StrCat(table.num_lost_rows,
                                                " rows, as last counted,"),
                             " in a restart")
                    .c_str());
    }
    return absl::OkStatus();
  }

  // Goes on with tables that are not those that this client has known: with
  // those that are whole, and, with `may_reset`, with those that are not.
  absl::StatusOr<std::vector<ResetTable>> GoOn(bool may_reset) {
    std::vector<ResetTable> changed;
    if (!tracks_losses_) return changed;
    TFSWITCH_ASSIGN_OR_RETURN(auto by_name, AllParts());
    std::map<std::string, Known> known;
    {
      MutexLock lock(&mutex_);
      known = known_;
    }
    for (const auto& [name, table] : known) {
      by_name.emplace(name, Parts(shards_.size()));
    }
    for (const auto& [name, parts] : by_name) {
      const auto before = known.find(name);
      if (FirstOf(parts) == nullptr) {
        const absl::Status lost =
            LostEverywhere({name, before->second.incarnation});
        if (lost.ok()) continue;  // Dropped.
        if (!absl::IsDataLoss(lost)) return lost;
      } else {
        TFSWITCH_ASSIGN_OR_RETURN(const TableInfo info, Join(name, parts));
        if (info.lost.ok()) {
          if (before != known.end() &&
              before->second.incarnation != info.identity.incarnation) {
            changed.push_back({name, {}, -1});
            Remember(info, parts);
          }
          continue;
        }
      }
      if (!may_reset) continue;
      TFSWITCH_ASSIGN_OR_RETURN(
          ResetTable reset,
          Reset(name, parts,
                before == known.end() ? nullptr : &before->second));
      changed.push_back(std::move(reset));
    }
    return changed;
  }

  // Makes the missing parts of a table. All parts get an incarnation that none
  // had before, so that other processes hear of it, and a checkpoint of before
  // is known as one.
  absl::StatusOr<ResetTable> Reset(const std::string& name, const Parts& parts,
                                   const Known* known) {
    const TableInfo* const present = FirstOf(parts);
    const TableConfig& config =
        present != nullptr ? present->config : known->config;
    ResetTable reset;
    reset.name = name;
    const bool is_counted =
        known != nullptr && known->num_rows.size() == shards_.size();
    if (is_counted) reset.num_lost_rows = 0;
    TFSWITCH_ASSIGN_OR_RETURN(std::vector<uint64_t> instances,
                              ShardInstances());
    TableIdentity identity{DrawId(), std::move(instances)};
    const std::optional<TableInfo>& last = parts.back();
    if (last.has_value() &&
        last->identity.incarnation != present->identity.incarnation) {
      // Another process is resetting it, and has begun with the last shard.
      identity.incarnation = last->identity.incarnation;
    }
    for (size_t i = shards_.size(); i-- > 0;) {
      if (!parts[i].has_value()) {
        reset.shards.insert(reset.shards.begin(), static_cast<int>(i));
        if (is_counted) reset.num_lost_rows += known->num_rows[i];
      }
      // If another process does the same, the last shard says whose counts.
      TFSWITCH_ASSIGN_OR_RETURN(
          identity.incarnation,
          shards_[i]->MakeTable(
              config, identity,
              parts[i].has_value() ? parts[i]->identity.incarnation : 0));
    }
    MutexLock lock(&mutex_);
    known_[name] = Known{config, identity.incarnation, {}};
    return reset;
  }

  static const TableInfo* FirstOf(const Parts& parts) {
    for (const std::optional<TableInfo>& part : parts) {
      if (part.has_value()) return &*part;
    }
    return nullptr;
  }

  // Of a table that no shard has: DataLoss if it is lost; OK, and it is
  // forgotten, if a shard knows that it was dropped.
  absl::Status LostEverywhere(const TableRef& table) {
    absl::Status lost;
    for (const auto& shard : shards_) {
      absl::Status status = shard->ListTables(table).status();
      if (absl::IsDataLoss(status)) {
        lost.Update(std::move(status));
        continue;
      }
      if (!status.ok() && !absl::IsNotFound(status)) return status;
      Forget(table.name);
      return absl::OkStatus();
    }
    return lost;
  }

  void Forget(const std::string& table) {
    MutexLock lock(&mutex_);
    known_.erase(table);
  }

  absl::StatusOr<Parts> PartsOf(const TableRef& table) {
    Parts parts(shards_.size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      auto infos = shards_[i]->ListTables(table);
      if (absl::IsNotFound(infos.status())) continue;
      TFSWITCH_RETURN_IF_ERROR(infos.status());
      if (infos->size() == 1) parts[i] = std::move(infos->front());
    }
    return parts;
  }

  absl::StatusOr<std::map<std::string, Parts>> AllParts() {
    std::map<std::string, Parts> by_name;
    for (size_t i = 0; i < shards_.size(); ++i) {
      TFSWITCH_ASSIGN_OR_RETURN(std::vector<TableInfo> infos,
                                shards_[i]->ListTables(""));
      for (TableInfo& info : infos) {
        Parts& parts = by_name[info.config.name];
        parts.resize(shards_.size());
        parts[i] = std::move(info);
      }
    }
    return by_name;
  }

  absl::StatusOr<std::vector<TableInfo>> ListAll() {
    TFSWITCH_ASSIGN_OR_RETURN(const auto by_name, AllParts());
    std::vector<TableInfo> infos;
    for (const auto& [name, parts] : by_name) {
      TFSWITCH_ASSIGN_OR_RETURN(TableInfo info, Join(name, parts));
      if (info.lost.ok()) Remember(info, parts);
      infos.push_back(std::move(info));
    }
    std::map<std::string, Known> known;
    {
      MutexLock lock(&mutex_);
      known = known_;
    }
    for (const auto& [name, table] : known) {
      if (by_name.count(name) > 0) continue;
      TableInfo info;
      info.config = table.config;
      info.num_shards = 0;
      info.lost = LostEverywhere({name, table.incarnation});
      if (info.lost.ok()) continue;  // Dropped.
      if (!absl::IsDataLoss(info.lost)) return info.lost;
      infos.push_back(std::move(info));
    }
    return infos;
  }

  // The sum of the parts, and whether a server has lost one. NotFound if there
  // is none.
  absl::StatusOr<TableInfo> Join(const std::string& name, const Parts& parts) {
    const TableInfo* const first = FirstOf(parts);
    if (first == nullptr) {
      // Names the tables there are.
      const absl::Status status = shards_[0]->ListTables(name).status();
      if (!status.ok()) return status;
      return absl::NotFoundError(absl::StrCat("no table '", name, "' yet"));
    }
    TableInfo sum;
    sum.config = first->config;
    sum.slot_floats = first->slot_floats;
    sum.stats.row_stride_bytes = first->stats.row_stride_bytes;
    sum.identity = first->identity;
    sum.num_shards = 0;
    for (const std::optional<TableInfo>& part : parts) {
      if (!part.has_value()) continue;
      ++sum.num_shards;
      sum.stats.num_rows += part->stats.num_rows;
      sum.stats.index_bytes += part->stats.index_bytes;
      sum.stats.row_bytes += part->stats.row_bytes;
      sum.stats.reserved_bytes += part->stats.reserved_bytes;
      sum.stats.inserted_rows += part->stats.inserted_rows;
      sum.stats.erased_rows += part->stats.erased_rows;
      sum.stats.num_candidates += part->stats.num_candidates;
      sum.stats.admission_bytes += part->stats.admission_bytes;
      sum.stats.change_bytes += part->stats.change_bytes;
    }
    const std::vector<uint64_t>& born = sum.identity.shard_instances;
    for (size_t i = 0; i < parts.size() && sum.lost.ok(); ++i) {
      if (!parts[i].has_value()) {
        // The run of the server that the table was made for has yet to make its
        // part, or has just dropped it. Another one has lost it.
        TFSWITCH_ASSIGN_OR_RETURN(const std::vector<uint64_t> now,
                                  shards_[i]->ShardInstances());
        if (born.size() == parts.size() && now[0] == born[i]) continue;
      } else if (parts[i]->identity.incarnation == sum.identity.incarnation) {
        continue;
      }
      sum.lost =
          shards_[i]->ListTables({name, sum.identity.incarnation}).status();
    }
    return sum;
  }

  absl::StatusOr<uint64_t> MakeOnAllShards(const TableConfig& config,
                                           uint64_t incarnation) {
    const uint64_t known = KnownIncarnation(config.name);
    TFSWITCH_ASSIGN_OR_RETURN(const Parts parts, PartsOf(config.name));
    if (FirstOf(parts) != nullptr) {
      TFSWITCH_ASSIGN_OR_RETURN(const TableInfo info, Join(config.name, parts));
      TFSWITCH_RETURN_IF_ERROR(info.lost);
      incarnation = info.identity.incarnation;
    }
    if (known != 0) {
      // Tells whether it was dropped, or lost.
      const absl::Status status =
          shards_[0]->ListTables({config.name, known}).status();
      if (!absl::IsNotFound(status)) TFSWITCH_RETURN_IF_ERROR(status);
    }
    TFSWITCH_ASSIGN_OR_RETURN(std::vector<uint64_t> instances,
                              ShardInstances());
    TableIdentity identity{incarnation, std::move(instances)};
    for (size_t i = shards_.size(); i-- > 0;) {
      TFSWITCH_ASSIGN_OR_RETURN(identity.incarnation,
                                shards_[i]->MakeTable(config, identity, 0));
    }
    MutexLock lock(&mutex_);
    known_[config.name] = Known{config, identity.incarnation, {}};
    return identity.incarnation;
  }

  uint64_t KnownIncarnation(const std::string& table) {
    MutexLock lock(&mutex_);
    const auto it = known_.find(table);
    return it == known_.end() ? 0 : it->second.incarnation;
  }

  void Remember(const TableInfo& info, const Parts& parts) {
    Known known{info.config, info.identity.incarnation, {}};
    for (const std::optional<TableInfo>& part : parts) {
      if (part.has_value()) known.num_rows.push_back(part->stats.num_rows);
    }
    MutexLock lock(&mutex_);
    known_[info.config.name] = std::move(known);
  }

  absl::StatusOr<Facts> FactsOf(const std::string& table) {
    for (bool has_asked = false;; has_asked = true) {
      {
        MutexLock lock(&mutex_);
        const auto it = known_.find(table);
        if (it != known_.end()) {
          return Facts{it->second.config.num_virtual_shards,
                       it->second.incarnation};
        }
      }
      if (has_asked) {
        return absl::NotFoundError(absl::StrCat("no table '", table, "'"));
      }
      TFSWITCH_RETURN_IF_ERROR(ListTables(table).status());
    }
  }

  std::unique_ptr<PendingCall> StartPullOnce(const PullArgs& args,
                                             absl::Span<float> embeddings) {
    if (absl::Status status = CheckSize(args.table, args.keys.size(), args.dim,
                                        embeddings.size());
        !status.ok()) {
      return Done(std::move(status));
    }
    const absl::StatusOr<Facts> facts = FactsOf(args.table);
    if (!facts.ok()) return Done(facts.status());
    if (shards_.size() == 1) {
      PullArgs own = args;
      own.table_incarnation = facts->incarnation;
      return shards_[0]->StartPull(own, embeddings);
    }
    auto pull = std::make_unique<SplitPull>(
        SplitByOwner(args.keys, facts->num_virtual_shards, shards_.size()),
        args.dim, embeddings);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = pull->parts()[i];
      if (part.keys.empty()) continue;
      const size_t num_floats = part.keys.size() * args.dim;
      part.values.reset(new float[num_floats]);
      PullArgs part_args = args;
      part_args.table_incarnation = facts->incarnation;
      part_args.keys = part.keys;
      part.call = shards_[i]->StartPull(
          part_args, absl::MakeSpan(part.values.get(), num_floats));
    }
    return pull;
  }

  std::unique_ptr<PendingCall> StartPushOnce(const PushArgs& args,
                                             PushResult* result) {
    *result = PushResult();
    if (shards_.size() == 1) {
      const absl::StatusOr<Facts> facts = FactsOf(args.table);
      if (!facts.ok()) return Done(facts.status());
      PushArgs own = args;
      own.table_incarnation = facts->incarnation;
      return shards_[0]->StartPush(own, result);
    }
    if (absl::Status status = CheckPush(args); !status.ok()) {
      return Done(std::move(status));
    }
    const absl::StatusOr<Facts> facts = FactsOf(args.table);
    if (!facts.ok()) return Done(facts.status());
    auto push = std::make_unique<SplitWrite<PushResult>>(
        SplitByOwner(args.keys, facts->num_virtual_shards, shards_.size()),
        result);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = push->parts()[i];
      if (part.keys.empty()) continue;
      PushArgs part_args = PushOfPart(args, &part);
      part_args.table_incarnation = facts->incarnation;
      part.call = shards_[i]->StartPush(part_args, &part.push_result);
    }
    return push;
  }

  std::unique_ptr<PendingCall> StartPullManyOnce(
      absl::Span<const PullPart> pulls) {
    if (shards_.size() == 1) {
      std::vector<PullPart> own(pulls.begin(), pulls.end());
      for (PullPart& pull : own) {
        const absl::StatusOr<Facts> facts = FactsOf(pull.args.table);
        if (!facts.ok()) return Done(facts.status());
        pull.args.table_incarnation = facts->incarnation;
      }
      return shards_[0]->StartPullMany(own);
    }
    auto split = std::make_unique<SplitPulls>(pulls);
    std::vector<std::vector<PullPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pulls.size(); ++i) {
      const PullArgs& args = pulls[i].args;
      if (absl::Status status = CheckSize(args.table, args.keys.size(),
                                          args.dim, pulls[i].embeddings.size());
          !status.ok()) {
        return Done(std::move(status));
      }
      const absl::StatusOr<Facts> facts = FactsOf(args.table);
      if (!facts.ok()) return Done(facts.status());
      split->parts(i) =
          SplitByOwner(args.keys, facts->num_virtual_shards, shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = split->parts(i)[shard];
        if (part.keys.empty()) continue;
        const size_t num_floats = part.keys.size() * args.dim;
        part.values.reset(new float[num_floats]);
        by_shard[shard].push_back(
            {args, absl::MakeSpan(part.values.get(), num_floats)});
        by_shard[shard].back().args.keys = part.keys;
        by_shard[shard].back().args.table_incarnation = facts->incarnation;
      }
    }
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      split->calls.push_back(shards_[shard]->StartPullMany(by_shard[shard]));
    }
    return split;
  }

  std::unique_ptr<PendingCall> StartPushManyOnce(
      absl::Span<const PushPart> pushes) {
    if (shards_.size() == 1) {
      std::vector<PushPart> own(pushes.begin(), pushes.end());
      for (PushPart& push : own) {
        const absl::StatusOr<Facts> facts = FactsOf(push.args.table);
        if (!facts.ok()) return Done(facts.status());
        push.args.table_incarnation = facts->incarnation;
      }
      return shards_[0]->StartPushMany(own);
    }
    if (absl::Status status = CheckPushes(pushes); !status.ok()) {
      return Done(std::move(status));
    }
    auto split = std::make_unique<SplitPushes>(pushes);
    std::vector<std::vector<PushPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pushes.size(); ++i) {
      const PushArgs& args = pushes[i].args;
      const absl::StatusOr<Facts> facts = FactsOf(args.table);
      if (!facts.ok()) return Done(facts.status());
      split->parts(i) =
          SplitByOwner(args.keys, facts->num_virtual_shards, shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = split->parts(i)[shard];
        if (part.keys.empty()) continue;
        by_shard[shard].push_back({PushOfPart(args, &part), &part.push_result});
        by_shard[shard].back().args.table_incarnation = facts->incarnation;
      }
    }
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      split->calls.push_back(shards_[shard]->StartPushMany(by_shard[shard]));
    }
    return split;
  }

  std::unique_ptr<PendingCall> StartAssignOnce(const AssignArgs& args,
                                               AssignResult* result) {
    *result = AssignResult();
    if (shards_.size() == 1) {
      const absl::StatusOr<Facts> facts = FactsOf(args.table);
      if (!facts.ok()) return Done(facts.status());
      AssignArgs own = args;
      own.table_incarnation = facts->incarnation;
      return shards_[0]->StartAssign(own, result);
    }
    if (absl::Status status = CheckSize(args.table, args.keys.size(), args.dim,
                                        args.embeddings.size());
        !status.ok()) {
      return Done(std::move(status));
    }
    if (absl::Status status =
            CheckFinite(args.table, "embedding", args.keys, args.embeddings);
        !status.ok()) {
      return Done(std::move(status));
    }
    if (args.keys.empty()) return Done(absl::OkStatus());
    const int slot_floats =
        static_cast<int>(args.slots.size() / args.keys.size());
    if (absl::Status status =
            CheckFinite(args.table, "slot", args.keys, args.slots);
        !status.ok()) {
      return Done(std::move(status));
    }
    const absl::StatusOr<Facts> facts = FactsOf(args.table);
    if (!facts.ok()) return Done(facts.status());
    auto assign = std::make_unique<SplitWrite<AssignResult>>(
        SplitByOwner(args.keys, facts->num_virtual_shards, shards_.size()),
        result);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = assign->parts()[i];
      if (part.keys.empty()) continue;
      part.values = GatherRows(part.places, args.dim, args.embeddings.data());
      AssignArgs part_args = args;
      part_args.table_incarnation = facts->incarnation;
      part_args.keys = part.keys;
      part_args.embeddings =
          absl::MakeConstSpan(part.values.get(), part.keys.size() * args.dim);
      if (!args.slots.empty()) {
        part.slots = GatherRows(part.places, slot_floats, args.slots.data());
        part_args.slots = absl::MakeConstSpan(part.slots.get(),
                                              part.keys.size() * slot_floats);
      }
      part.call = shards_[i]->StartAssign(part_args, &part.assign_result);
    }
    return assign;
  }

  // Constant after construction.
  const std::vector<std::unique_ptr<ParameterClient>> shards_;
  const bool tracks_losses_;

  std::atomic<OnLostTables> on_lost_tables_;
  Mutex mutex_;
  std::map<std::string, Known> known_ ABSL_GUARDED_BY(mutex_);
  // By the last StageRestore().
  std::vector<std::string> staged_tables_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards,
    const ShardedClientOptions& options) {
  return std::make_unique<ShardedClient>(std::move(shards), options);
}

}  // namespace tfswitch
