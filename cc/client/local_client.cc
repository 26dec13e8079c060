// A call goes to the shard on the caller's thread, and a call that is started
// has ended when it returns. A pull writes rows to the caller's memory; only
// where places are given, it reads them into a buffer and copies them. All
// pushes of a call go to PushMany() together, so that all are checked before
// one is applied.
//
// Saves and restores ask CheckInterrupt() between their steps, so that the user
// can end them.

#include "cc/client/local_client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "cc/base/interrupt.h"
#include "cc/base/parallel.h"
#include "cc/base/status_macros.h"
#include "cc/client/done_call.h"
#include "cc/client/local_group_client.h"

namespace tfswitch {
namespace {

// Rows per chunk of an export: a few megabytes at common dims.
constexpr int64_t kExportRows = 8192;

class LocalClient : public ParameterClient {
 public:
  explicit LocalClient(std::shared_ptr<Shard> shard)
      : shard_(std::move(shard)), groups_(NewLocalGroupClient(shard_)) {}

  GroupClient& groups() override { return *groups_; }

  absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                     const TableIdentity& identity,
                                     uint64_t replaced_incarnation) override {
    TFSWITCH_ASSIGN_OR_RETURN(
        const Shard::Made made,
        shard_->CreateTable(config, identity, replaced_incarnation));
    return made.incarnation;
  }

  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    return std::vector<uint64_t>{shard_->instance_id()};
  }

  absl::Status DropTable(const std::string& table) override {
    if (shard_->DropTable(table)) return absl::OkStatus();
    return shard_->FindTable(table).status();
  }

  absl::StatusOr<std::shared_ptr<const void>> HoldTable(
      const std::string& table) override {
    TFSWITCH_RETURN_IF_ERROR(shard_->HoldTable(table));
    // It has no object: only its end counts.
    return std::shared_ptr<const void>(
        nullptr,
        [shard = shard_, table](const void*) { shard->ReleaseTable(table); });
  }

  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table) override {
    std::vector<std::shared_ptr<EmbeddingTable>> tables;
    if (table.name.empty()) {
      tables = shard_->Tables();
    } else {
      TFSWITCH_ASSIGN_OR_RETURN(auto found, shard_->FindTable(table));
      tables.push_back(std::move(found));
    }
    std::vector<TableInfo> infos;
    infos.reserve(tables.size());
    for (const auto& each : tables) {
      infos.push_back(DescribeTable(*each));
    }
    return infos;
  }

  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override {
    if (parts.size() == 1) return Done(PullNow(parts[0]));
    std::vector<absl::Status> statuses(parts.size());
    RunRanges(parts.empty() ? nullptr : parts[0].args.threads, parts.size(), 1,
              [&](size_t begin, size_t end) {
                for (size_t i = begin; i < end; ++i) {
                  statuses[i] = PullNow(parts[i]);
                }
              });
    absl::Status first;
    for (const absl::Status& status : statuses) first.Update(status);
    return Done(std::move(first));
  }

  std::unique_ptr<PendingCall> StartPush(
      absl::Span<const PushPart> parts) override {
    return Done(PushNow(parts));
  }

  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           AssignResult* result) override {
    return Done(AssignNow(args, result));
  }

  std::unique_ptr<PendingCall> StartCommitRound(
      int, const std::string& group, const Round& round, int64_t* committed,
      const std::vector<TableRef>& staged) override {
    const absl::StatusOr<int64_t> last =
        shard_->CommitRound(group, round, staged);
    *committed = last.value_or(WorkerGroup::kNoRound);
    return Done(last.status());
  }

  absl::StatusOr<int64_t> Erase(const TableRef& table,
                                absl::Span<const Key> keys) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto found, shard_->FindTable(table));
    return shard_->Erase(*found, keys);
  }

  std::unique_ptr<PendingCall> StartShrink(const ShrinkArgs& args,
                                           ShrinkReport* report) override {
    return Done(ShrinkNow(args, report));
  }

  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto found, shard_->FindTable(table));
    return shard_->ReadUsage(*found, keys, day, usage, states);
  }

  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto found, shard_->FindTable(table));
    return found->ForEachRow(kExportRows, [&](const RowChunk& chunk) {
      RowChunk shown = chunk;
      if (!with_slots) shown.slots = {};
      return visit(shown);
    });
  }

  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override {
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto found,
        shard_->FindTable({args.table, args.table_incarnation}));
    ChangeFilter filter;
    if (!args.since.empty()) filter.since = args.since[0];
    filter.rule = args.rule;
    filter.day = args.day;
    TFSWITCH_ASSIGN_OR_RETURN(
        const ChangeCursor cursor,
        shard_->ExportChanges(found, filter, args.export_id, kExportRows,
                              visit));
    return std::vector<ChangeCursor>{cursor};
  }

  absl::Status SettleExport(const TableRef& table, const std::string& export_id,
                            bool is_published) override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto found, shard_->FindTable(table));
    shard_->SettleExport(*found, export_id, is_published);
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<std::string>> SaveShard(
      const SaveShardArgs& args) override {
    TFSWITCH_ASSIGN_OR_RETURN(std::string part,
                              shard_->SaveShard(args, CheckInterrupt));
    return std::vector<std::string>{std::move(part)};
  }

  absl::StatusOr<int64_t> CommitCheckpoint(
      const CommitCheckpointArgs& args) override {
    return shard_->CommitCheckpoint(args, CheckInterrupt);
  }

  absl::Status AbortSave(const std::string& path,
                         const std::string& save_id) override {
    return shard_->AbortSave(path, save_id);
  }

  absl::StatusOr<StagedRestore> StageRestore(
      const StageRestoreArgs& args) override {
    return shard_->StageRestore(args, CheckInterrupt);
  }

  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override {
    return shard_->CommitRestore(restore_id, abort);
  }

 private:
  absl::Status PullNow(const PullPart& part) {
    const PullArgs& args = part.args;
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto table,
        shard_->FindTable({args.table, args.table_incarnation}));
    TFSWITCH_RETURN_IF_ERROR(Shard::NoteDay(*table, args.day));
    if (part.places.empty()) {
      return shard_->Pull(*table, args.keys, args.insert_missing,
                          part.embeddings, args.threads);
    }
    const size_t dim = static_cast<size_t>(args.dim);
    std::vector<float> rows(part.num_floats());
    TFSWITCH_RETURN_IF_ERROR(shard_->Pull(*table, args.keys,
                                          args.insert_missing,
                                          absl::MakeSpan(rows), args.threads));
    for (size_t i = 0; i < part.places.size(); ++i) {
      std::copy_n(rows.begin() + i * dim, dim,
                  part.embeddings.begin() + part.places[i] * dim);
    }
    return absl::OkStatus();
  }

  absl::Status PushNow(absl::Span<const PushPart> parts) {
    absl::InlinedVector<TablePush, 1> pushes;
    pushes.reserve(parts.size());
    for (const PushPart& part : parts) {
      TFSWITCH_ASSIGN_OR_RETURN(
          auto table,
          shard_->FindTable({part.args.table, part.args.table_incarnation}));
      pushes.push_back({std::move(table), &part.args});
    }
    absl::InlinedVector<PushResult, 1> results(parts.size());
    TFSWITCH_RETURN_IF_ERROR(
        shard_->PushMany(pushes, absl::MakeSpan(results),
                         parts.empty() ? nullptr : parts[0].args.threads));
    for (size_t i = 0; i < parts.size(); ++i) *parts[i].result = results[i];
    return absl::OkStatus();
  }

  absl::Status AssignNow(const AssignArgs& args, AssignResult* result) {
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto table,
        shard_->FindTable({args.table, args.table_incarnation}));
    TFSWITCH_ASSIGN_OR_RETURN(
        const Written written,
        shard_->WriteOnce(
            args.id.client_id, args.id.sequence,
            [&]() -> absl::StatusOr<int64_t> {
              TFSWITCH_RETURN_IF_ERROR(Shard::NoteDay(*table, args.day));
              return shard_->Assign(*table, args.keys, args.embeddings,
                                    args.slots, args.only_missing);
            }));
    *result = {written.count, written.duplicate};
    return absl::OkStatus();
  }

  absl::Status ShrinkNow(const ShrinkArgs& args, ShrinkReport* report) {
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto found,
        shard_->FindTable({args.table, args.table_incarnation}));
    TFSWITCH_ASSIGN_OR_RETURN(
        *report, shard_->Shrink(*found, args.rules, args.day, args.dry_run));
    return absl::OkStatus();
  }

  const std::shared_ptr<Shard> shard_;
  const std::unique_ptr<GroupClient> groups_;
};

}  // namespace

std::unique_ptr<ParameterClient> NewLocalClient(std::shared_ptr<Shard> shard) {
  return std::make_unique<LocalClient>(std::move(shard));
}

}  // namespace tfswitch
