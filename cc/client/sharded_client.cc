#include "cc/client/sharded_client.h"

#include <cstring>
#include <map>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/client/check_args.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"

namespace tfswitch {
namespace {

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

class ShardedClient : public ParameterClient {
 public:
  explicit ShardedClient(std::vector<std::unique_ptr<ParameterClient>> shards)
      : shards_(std::move(shards)) {}

  GroupClient& groups() override { return shards_[0]->groups(); }

  absl::Status CreateTable(const TableConfig& config) override {
    for (const auto& shard : shards_) {
      TFSWITCH_RETURN_IF_ERROR(shard->CreateTable(config));
    }
    Remember(config);
    return absl::OkStatus();
  }

  absl::Status DropTable(const std::string& table) override {
    // Every shard is asked, also after an error: what can go, goes.
    absl::Status first;
    for (const auto& shard : shards_) first.Update(shard->DropTable(table));
    MutexLock lock(&mutex_);
    virtual_shards_.erase(table);
    return first;
  }

  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const std::string& table) override {
    TFSWITCH_ASSIGN_OR_RETURN(std::vector<TableInfo> infos,
                              shards_[0]->ListTables(table));
    std::map<std::string, TableInfo*> by_name;
    for (TableInfo& info : infos) {
      by_name[info.config.name] = &info;
      Remember(info.config);
    }
    for (size_t i = 1; i < shards_.size(); ++i) {
      TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> others,
                                shards_[i]->ListTables(table));
      for (const TableInfo& other : others) {
        const auto it = by_name.find(other.config.name);
        if (it == by_name.end()) continue;  // Being created just now.
        it->second->num_shards += other.num_shards;
        TableStats& sum = it->second->stats;
        sum.num_rows += other.stats.num_rows;
        sum.index_bytes += other.stats.index_bytes;
        sum.row_bytes += other.stats.row_bytes;
        sum.reserved_bytes += other.stats.reserved_bytes;
        sum.inserted_rows += other.stats.inserted_rows;
        sum.erased_rows += other.stats.erased_rows;
        sum.num_candidates += other.stats.num_candidates;
        sum.admission_bytes += other.stats.admission_bytes;
        sum.change_bytes += other.stats.change_bytes;
      }
    }
    return infos;
  }

  std::unique_ptr<PendingCall> StartPull(
      const PullArgs& args, absl::Span<float> embeddings) override {
    if (shards_.size() == 1) return shards_[0]->StartPull(args, embeddings);
    if (absl::Status status = CheckSize(args.table, args.keys.size(), args.dim,
                                        embeddings.size());
        !status.ok()) {
      return Done(std::move(status));
    }
    absl::StatusOr<uint32_t> num_virtual = NumVirtualShards(args.table);
    if (!num_virtual.ok()) return Done(num_virtual.status());
    auto pull = std::make_unique<SplitPull>(
        SplitByOwner(args.keys, *num_virtual, shards_.size()), args.dim,
        embeddings);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = pull->parts()[i];
      if (part.keys.empty()) continue;
      const size_t num_floats = part.keys.size() * args.dim;
      part.values.reset(new float[num_floats]);
      PullArgs part_args = args;
      part_args.keys = part.keys;
      part.call = shards_[i]->StartPull(
          part_args, absl::MakeSpan(part.values.get(), num_floats));
    }
    return pull;
  }

  std::unique_ptr<PendingCall> StartPush(const PushArgs& args,
                                         PushResult* result) override {
    *result = PushResult();
    if (shards_.size() == 1) return shards_[0]->StartPush(args, result);
    if (absl::Status status = CheckPush(args); !status.ok()) {
      return Done(std::move(status));
    }
    absl::StatusOr<uint32_t> num_virtual = NumVirtualShards(args.table);
    if (!num_virtual.ok()) return Done(num_virtual.status());
    auto push = std::make_unique<SplitWrite<PushResult>>(
        SplitByOwner(args.keys, *num_virtual, shards_.size()), result);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = push->parts()[i];
      if (part.keys.empty()) continue;
      const PushArgs part_args = PushOfPart(args, &part);
      part.call = shards_[i]->StartPush(part_args, &part.push_result);
    }
    return push;
  }

  std::unique_ptr<PendingCall> StartPullMany(
      absl::Span<const PullPart> pulls) override {
    if (shards_.size() == 1) return shards_[0]->StartPullMany(pulls);
    auto split = std::make_unique<SplitPulls>(pulls);
    std::vector<std::vector<PullPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pulls.size(); ++i) {
      const PullArgs& args = pulls[i].args;
      if (absl::Status status = CheckSize(args.table, args.keys.size(),
                                          args.dim, pulls[i].embeddings.size());
          !status.ok()) {
        return Done(std::move(status));
      }
      absl::StatusOr<uint32_t> num_virtual = NumVirtualShards(args.table);
      if (!num_virtual.ok()) return Done(num_virtual.status());
      split->parts(i) = SplitByOwner(args.keys, *num_virtual, shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = split->parts(i)[shard];
        if (part.keys.empty()) continue;
        const size_t num_floats = part.keys.size() * args.dim;
        part.values.reset(new float[num_floats]);
        by_shard[shard].push_back(
            {args, absl::MakeSpan(part.values.get(), num_floats)});
        by_shard[shard].back().args.keys = part.keys;
      }
    }
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      split->calls.push_back(shards_[shard]->StartPullMany(by_shard[shard]));
    }
    return split;
  }

  std::unique_ptr<PendingCall> StartPushMany(
      absl::Span<const PushPart> pushes) override {
    if (shards_.size() == 1) return shards_[0]->StartPushMany(pushes);
    if (absl::Status status = CheckPushes(pushes); !status.ok()) {
      return Done(std::move(status));
    }
    auto split = std::make_unique<SplitPushes>(pushes);
    std::vector<std::vector<PushPart>> by_shard(shards_.size());
    for (size_t i = 0; i < pushes.size(); ++i) {
      const PushArgs& args = pushes[i].args;
      absl::StatusOr<uint32_t> num_virtual = NumVirtualShards(args.table);
      if (!num_virtual.ok()) return Done(num_virtual.status());
      split->parts(i) = SplitByOwner(args.keys, *num_virtual, shards_.size());
      for (size_t shard = 0; shard < shards_.size(); ++shard) {
        Part& part = split->parts(i)[shard];
        if (part.keys.empty()) continue;
        by_shard[shard].push_back({PushOfPart(args, &part), &part.push_result});
      }
    }
    for (size_t shard = 0; shard < shards_.size(); ++shard) {
      if (by_shard[shard].empty()) continue;
      split->calls.push_back(shards_[shard]->StartPushMany(by_shard[shard]));
    }
    return split;
  }

  int num_shards() const override { return static_cast<int>(shards_.size()); }

  std::unique_ptr<PendingCall> StartCommitRound(int shard,
                                                const std::string& group,
                                                const Round& round,
                                                int64_t* committed) override {
    return shards_[static_cast<size_t>(shard)]->StartCommitRound(
        0, group, round, committed);
  }

  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           AssignResult* result) override {
    *result = AssignResult();
    if (shards_.size() == 1) return shards_[0]->StartAssign(args, result);
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
    absl::StatusOr<uint32_t> num_virtual = NumVirtualShards(args.table);
    if (!num_virtual.ok()) return Done(num_virtual.status());
    auto assign = std::make_unique<SplitWrite<AssignResult>>(
        SplitByOwner(args.keys, *num_virtual, shards_.size()), result);
    for (size_t i = 0; i < shards_.size(); ++i) {
      Part& part = assign->parts()[i];
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
      part.call = shards_[i]->StartAssign(part_args, &part.assign_result);
    }
    return assign;
  }

  absl::StatusOr<int64_t> Erase(const std::string& table,
                                absl::Span<const Key> keys) override {
    if (shards_.size() == 1) return shards_[0]->Erase(table, keys);
    TFSWITCH_ASSIGN_OR_RETURN(const uint32_t num_virtual,
                              NumVirtualShards(table));
    int64_t erased = 0;
    const std::vector<Part> parts =
        SplitByOwner(keys, num_virtual, shards_.size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      if (parts[i].keys.empty()) continue;
      TFSWITCH_ASSIGN_OR_RETURN(const int64_t here,
                                shards_[i]->Erase(table, parts[i].keys));
      erased += here;
    }
    return erased;
  }

  std::unique_ptr<PendingCall> StartShrink(const ShrinkArgs& args,
                                           ShrinkReport* report) override {
    auto split = std::make_unique<SplitShrink>(shards_.size(), report);
    for (size_t i = 0; i < shards_.size(); ++i) {
      split->calls.push_back(shards_[i]->StartShrink(args, split->part(i)));
    }
    return split;
  }

  absl::Status ReadUsage(const std::string& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override {
    if (shards_.size() == 1) {
      return shards_[0]->ReadUsage(table, keys, day, usage, states);
    }
    TFSWITCH_ASSIGN_OR_RETURN(const uint32_t num_virtual,
                              NumVirtualShards(table));
    const std::vector<Part> parts =
        SplitByOwner(keys, num_virtual, shards_.size());
    for (size_t i = 0; i < shards_.size(); ++i) {
      const Part& part = parts[i];
      if (part.keys.empty()) continue;
      std::vector<UsageOfRow> part_usage(part.keys.size());
      std::vector<KeyState> part_states(part.keys.size());
      TFSWITCH_RETURN_IF_ERROR(shards_[i]->ReadUsage(
          table, part.keys, day, absl::MakeSpan(part_usage),
          absl::MakeSpan(part_states)));
      for (size_t k = 0; k < part.places.size(); ++k) {
        usage[part.places[k]] = part_usage[k];
        states[part.places[k]] = part_states[k];
      }
    }
    return absl::OkStatus();
  }

  absl::Status Export(
      const std::string& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override {
    for (const auto& shard : shards_) {
      TFSWITCH_RETURN_IF_ERROR(shard->Export(table, with_slots, visit));
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
    std::vector<absl::StatusOr<std::vector<ChangeCursor>>> results(
        shards_.size());
    Mutex visit_mutex;
    const auto run = [&](size_t i) {
      ExportChangesArgs own = args;
      if (!args.since.empty()) own.since = {args.since[i]};
      results[i] =
          shards_[i]->ExportChanges(own, [&](const ChangeChunk& chunk) {
            MutexLock lock(&visit_mutex);
            return visit(chunk);
          });
    };
    std::vector<std::thread> threads;
    for (size_t i = 1; i < shards_.size(); ++i) threads.emplace_back(run, i);
    run(0);
    for (std::thread& thread : threads) thread.join();
    std::vector<ChangeCursor> cursors;
    for (const auto& result : results) {
      TFSWITCH_RETURN_IF_ERROR(result.status());
      cursors.insert(cursors.end(), result->begin(), result->end());
    }
    return cursors;
  }

  absl::Status SettleExport(const std::string& table,
                            const std::string& export_id,
                            bool is_published) override {
    absl::Status first;
    for (const auto& shard : shards_) {
      first.Update(shard->SettleExport(table, export_id, is_published));
    }
    return first;
  }

  absl::StatusOr<std::vector<std::string>> SaveShard(
      const SaveShardArgs& args) override {
    std::vector<std::string> parts;
    for (const auto& shard : shards_) {
      TFSWITCH_ASSIGN_OR_RETURN(std::vector<std::string> more,
                                shard->SaveShard(args));
      for (std::string& part : more) parts.push_back(std::move(part));
    }
    return parts;
  }

  absl::Status CommitCheckpoint(
      const std::string& path, const std::string& save_id,
      const std::vector<std::string>& manifest_parts) override {
    return shards_[0]->CommitCheckpoint(path, save_id, manifest_parts);
  }

  absl::StatusOr<std::vector<std::string>> StageRestore(
      const StageRestoreArgs& args, int64_t* num_rows) override {
    std::vector<std::string> tables;
    for (const auto& shard : shards_) {
      TFSWITCH_ASSIGN_OR_RETURN(tables, shard->StageRestore(args, num_rows));
    }
    return tables;
  }

  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override {
    absl::Status first;
    for (const auto& shard : shards_) {
      first.Update(shard->CommitRestore(restore_id, abort));
    }
    // Restored tables may be cut into another number of virtual shards.
    MutexLock lock(&mutex_);
    virtual_shards_.clear();
    return first;
  }

 private:
  void Remember(const TableConfig& config) {
    MutexLock lock(&mutex_);
    virtual_shards_[config.name] = config.num_virtual_shards;
  }

  absl::StatusOr<uint32_t> NumVirtualShards(const std::string& table) {
    {
      MutexLock lock(&mutex_);
      const auto it = virtual_shards_.find(table);
      if (it != virtual_shards_.end()) return it->second;
    }
    TFSWITCH_ASSIGN_OR_RETURN(const std::vector<TableInfo> infos,
                              shards_[0]->ListTables(table));
    if (infos.size() != 1) {
      return absl::NotFoundError(absl::StrCat("no table '", table, "'"));
    }
    Remember(infos[0].config);
    return infos[0].config.num_virtual_shards;
  }

  // Constant after construction.
  const std::vector<std::unique_ptr<ParameterClient>> shards_;

  Mutex mutex_;
  std::map<std::string, uint32_t> virtual_shards_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<ParameterClient> NewShardedClient(
    std::vector<std::unique_ptr<ParameterClient>> shards) {
  return std::make_unique<ShardedClient>(std::move(shards));
}

}  // namespace tfswitch
