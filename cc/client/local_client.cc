// A call of the shard runs on the caller's thread, and ends before the
// Start...() function returns. A pull writes rows directly to the caller's
// memory. If `places` are given, it reads rows into a buffer and copies them.
// All pushes of a call are passed to PushChecked() together. It finds the
// errors that only the shard can find before it applies any of them.
//
// Control calls run the same functions as on a server, with the same messages.
// Saves and restores call CheckInterrupt() between their steps, so that the
// user can end them.

#include "cc/client/local_client.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "cc/base/interrupt.h"
#include "cc/base/key_batch.h"
#include "cc/base/parallel.h"
#include "cc/base/status_macros.h"
#include "cc/client/done_call.h"
#include "cc/shard/control_calls.h"
#include "cc/shard/row_work.h"

namespace tfswitch {
namespace {

// Rows per chunk of an export: a few megabytes for usual dims.
constexpr int64_t kExportRows = 8192;

class LocalClient : public ParameterClient {
 public:
  explicit LocalClient(std::shared_ptr<Shard> shard)
      : shard_(std::move(shard)) {}

  std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response,
      absl::Duration /*timeout*/) override {
    ShardCall call{*shard_, CheckInterrupt};
    if (request.GetDescriptor() == v1::AbortSaveRequest::descriptor()) {
      // This call removes a save that the user has interrupted, so the same
      // interrupt must not end the call, too.
      call.interrupt = [] { return absl::OkStatus(); };
    }
    return Done(RunAny(call, request, response));
  }

  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    return std::vector<uint64_t>{shard_->instance_id()};
  }

  // The table itself is asked, and nobody else pushes to it.
  RowChanges ChangesOf(const std::string& table) const override {
    const auto found = shard_->FindTable(table);
    if (!found.ok()) return {};
    return {static_cast<int64_t>((*found)->generation()), 0};
  }

  absl::Status SetMaxMemory(int64_t bytes) override {
    shard_->set_max_memory(bytes);
    return absl::OkStatus();
  }

  absl::Status SetColdDir(const std::string& path) override {
    return shard_->tables().OpenColdFolder(path);
  }

  absl::StatusOr<std::shared_ptr<const void>> HoldTable(
      const std::string& table) override {
    TFSWITCH_RETURN_IF_ERROR(shard_->tables().Hold(table));
    // The pointer is null: only its deleter, which releases the table, matters.
    return std::shared_ptr<const void>(nullptr,
                                       [shard = shard_, table](const void*) {
                                         shard->tables().Release(table);
                                       });
  }

  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override {
    return Done(RunEach(parts.empty() ? nullptr : parts[0].args.threads,
                        parts.size(),
                        [&](size_t i) { return PullNow(parts[i]); }));
  }

  std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) override {
    return Done(PushNow(parts));
  }

  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           WriteResult* result) override {
    absl::StatusOr<WriteResult> written = shard_->AssignOnce(args);
    *result = written.value_or(WriteResult());
    return Done(std::move(written).status());
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

  // Saves and restores are called directly, not as messages, because they
  // report their progress.
  absl::StatusOr<v1::SaveShardResponse> SaveShard(
      const v1::SaveShardRequest& request, Progress* progress) override {
    v1::SaveShardResponse response;
    TFSWITCH_ASSIGN_OR_RETURN(
        *response.add_manifest_parts(),
        shard_->saves().Write(request, CheckInterrupt, progress));
    return response;
  }
  absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress) override {
    return shard_->restores().Stage(request, CheckInterrupt, progress);
  }

 private:
  absl::Status PullNow(const PullPart& part) {
    const PullArgs& args = part.args;
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto table,
        shard_->FindTable({args.table, args.table_incarnation}));
    TFSWITCH_RETURN_IF_ERROR(NoteDay(*table, args.day));
    if (part.places.empty()) {
      return shard_->Pull(*table, args.keys, args.if_missing(), part.embeddings,
                          args.threads);
    }
    std::vector<float> rows(part.num_floats());
    TFSWITCH_RETURN_IF_ERROR(shard_->Pull(*table, args.keys, args.if_missing(),
                                          absl::MakeSpan(rows), args.threads));
    PlaceRows(part.places, args.dim, reinterpret_cast<const char*>(rows.data()),
              part.embeddings.data());
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
    absl::InlinedVector<WriteResult, 1> results(parts.size());
    TFSWITCH_RETURN_IF_ERROR(
        shard_->PushChecked(pushes, absl::MakeSpan(results),
                            parts.empty() ? nullptr : parts[0].args.threads));
    for (size_t i = 0; i < parts.size(); ++i) *parts[i].result = results[i];
    return absl::OkStatus();
  }

  const std::shared_ptr<Shard> shard_;
};

}  // namespace

std::unique_ptr<ParameterClient> NewLocalClient(std::shared_ptr<Shard> shard) {
  return std::make_unique<LocalClient>(std::move(shard));
}

}  // namespace tfswitch
