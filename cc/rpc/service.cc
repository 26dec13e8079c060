#include "cc/rpc/service.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/rpc/round_conversion.h"
#include "cc/rpc/status_conversion.h"
#include "cc/rpc/table_config_conversion.h"
#include "cc/rpc/usage_conversion.h"
#include "cc/shard/round_stage.h"

namespace tfswitch {
namespace {

// Large enough to stream at full speed, small enough for any peer's limit.
constexpr int64_t kExportChunkBytes = 1 << 20;

template <typename T>
std::vector<std::string> ToVector(const T& repeated) {
  return std::vector<std::string>(repeated.begin(), repeated.end());
}

TableInfo Describe(const EmbeddingTable& table) {
  return TableInfo{table.config(), table.stats(), table.slot_floats()};
}

}  // namespace

Service::Service(const ServiceIdentity& identity, std::shared_ptr<Shard> shard,
                 CallGate* gate, const LentThreads* helpers)
    : identity_(identity),
      shard_(std::move(shard)),
      gate_(gate),
      helpers_(helpers) {}

absl::Status Service::CheckVersion(uint32_t client_version) const {
  if (client_version == identity_.protocol_version) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the client speaks protocol version ", client_version,
                   ", this server speaks ", identity_.protocol_version,
                   "; install the same version of tfswitch on both sides"));
}

grpc::Status Service::Handshake(grpc::ServerContext* context,
                                const v1::HandshakeRequest* request,
                                v1::HandshakeResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  response->set_protocol_version(identity_.protocol_version);
  response->set_shard_index(shard_->shard_index());
  response->set_num_shards(shard_->num_shards());
  response->set_instance_id(identity_.instance_id);
  response->set_max_message_bytes(identity_.max_message_bytes);
  return ToGrpcStatus(CheckVersion(request->protocol_version()));
}

grpc::Status Service::CreateTable(grpc::ServerContext* context,
                                  const v1::CreateTableRequest* request,
                                  v1::CreateTableResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  if (absl::Status bad = CheckVersion(request->protocol_version()); !bad.ok()) {
    return ToGrpcStatus(bad);
  }
  absl::StatusOr<bool> created =
      shard_->CreateTable(FromProto(request->config()));
  if (!created.ok()) return ToGrpcStatus(created.status());
  response->set_created(*created);
  return grpc::Status::OK;
}

grpc::Status Service::DropTable(grpc::ServerContext* context,
                                const v1::DropTableRequest* request,
                                v1::DropTableResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  response->set_dropped(shard_->DropTable(request->table()));
  return grpc::Status::OK;
}

grpc::Status Service::ListTables(grpc::ServerContext* context,
                                 const v1::ListTablesRequest* request,
                                 v1::ListTablesResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  if (request->table().empty()) {
    for (const std::shared_ptr<EmbeddingTable>& table : shard_->Tables()) {
      *response->add_tables() = ToProto(Describe(*table));
    }
    return grpc::Status::OK;
  }
  auto table = shard_->FindTable(request->table());
  if (!table.ok()) return ToGrpcStatus(table.status());
  *response->add_tables() = ToProto(Describe(**table));
  return grpc::Status::OK;
}

grpc::Status Service::CommitRound(grpc::ServerContext* context,
                                  const v1::CommitRoundRequest* request,
                                  v1::CommitRoundResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  const absl::StatusOr<int64_t> committed = shard_->CommitRound(
      request->group(), FromProto(request->round()), helpers_);
  if (IsErrorOfAppliedRound(committed.status())) {
    response->set_committed_round(request->round().number());
    response->set_error_code(committed.status().raw_code());
    response->set_error_message(std::string(committed.status().message()));
    return grpc::Status::OK;
  }
  if (const uint64_t newer = NewerInstanceOf(committed.status()); newer != 0) {
    response->set_committed_round(WorkerGroup::kNoRound);
    response->set_error_code(committed.status().raw_code());
    response->set_error_message(std::string(committed.status().message()));
    response->set_newer_group_instance(newer);
    return grpc::Status::OK;
  }
  if (!committed.ok()) return ToGrpcStatus(committed.status());
  response->set_committed_round(*committed);
  return grpc::Status::OK;
}

grpc::Status Service::Erase(grpc::ServerContext* context,
                            const v1::EraseRequest* request,
                            v1::EraseResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  auto table = shard_->FindTable(request->table());
  if (!table.ok()) return ToGrpcStatus(table.status());
  absl::StatusOr<int64_t> erased = shard_->Erase(
      **table,
      absl::MakeConstSpan(request->keys().data(), request->keys().size()));
  if (!erased.ok()) return ToGrpcStatus(erased.status());
  response->set_erased_rows(*erased);
  return grpc::Status::OK;
}

grpc::Status Service::Shrink(grpc::ServerContext* context,
                             const v1::ShrinkRequest* request,
                             v1::ShrinkResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  auto table = shard_->FindTable(request->table());
  if (!table.ok()) return ToGrpcStatus(table.status());
  std::optional<EvictionConfig> rules;
  if (request->has_rules()) rules = FromProto(request->rules());
  const absl::StatusOr<ShrinkReport> report = shard_->Shrink(
      **table, rules, request->has_day() ? request->day() : kServersDay,
      request->dry_run());
  if (!report.ok()) return ToGrpcStatus(report.status());
  *response = ToProto(*report);
  return grpc::Status::OK;
}

grpc::Status Service::ReadUsage(grpc::ServerContext* context,
                                const v1::ReadUsageRequest* request,
                                v1::ReadUsageResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  auto table = shard_->FindTable(request->table());
  if (!table.ok()) return ToGrpcStatus(table.status());
  const absl::Span<const Key> keys(request->keys().data(),
                                   request->keys().size());
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  const absl::Status status = shard_->ReadUsage(
      **table, keys, request->has_day() ? request->day() : kServersDay,
      absl::MakeSpan(usage), absl::MakeSpan(states));
  if (!status.ok()) return ToGrpcStatus(status);
  *response = ToProto(usage, states);
  return grpc::Status::OK;
}

absl::Status Service::ExportRows(
    const v1::ExportRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportResponse>* writer) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(request.table()));
  const int64_t row_bytes =
      sizeof(Key) +
      sizeof(float) *
          (table->dim() + (request.with_slots() ? table->slot_floats() : 0));
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  v1::ExportResponse response;
  return table->ForEachRow(
      std::max<int64_t>(1, chunk_bytes / row_bytes),
      [&](const RowChunk& chunk) -> absl::Status {
        response.Clear();
        response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
        response.mutable_values()->Add(chunk.embeddings.begin(),
                                       chunk.embeddings.end());
        if (request.with_slots()) {
          response.mutable_slots()->Add(chunk.slots.begin(), chunk.slots.end());
        }
        if (context.IsCancelled() || !writer->Write(response)) {
          return absl::CancelledError("the client has gone");
        }
        return absl::OkStatus();
      });
}

grpc::Status Service::Export(grpc::ServerContext* context,
                             const v1::ExportRequest* request,
                             grpc::ServerWriter<v1::ExportResponse>* writer) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  return ToGrpcStatus(ExportRows(*request, *context, writer));
}

absl::Status Service::WriteChanges(
    const v1::ExportChangesRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportChangesResponse>* writer) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(request.table()));
  ChangeFilter filter;
  if (request.has_since()) {
    filter.since = {request.since().log_id(), request.since().epoch()};
    if (filter.since.log_id == 0) {
      return absl::InvalidArgumentError("since: a log_id is never 0");
    }
  }
  if (request.has_rule()) {
    filter.rule = ScoreRule{request.rule().base_threshold(),
                            request.rule().delta_threshold(),
                            request.rule().delta_keep_days()};
  }
  if (request.has_day()) filter.day = request.day();
  const int64_t row_bytes =
      static_cast<int64_t>(sizeof(Key) + sizeof(float) * table->dim());
  const int64_t chunk_bytes =
      std::min<int64_t>(kExportChunkBytes, identity_.max_message_bytes / 2);
  v1::ExportChangesResponse response;
  const auto write = [&]() -> absl::Status {
    if (context.IsCancelled() || !writer->Write(response)) {
      return absl::CancelledError("the client has gone");
    }
    return absl::OkStatus();
  };
  TFSWITCH_ASSIGN_OR_RETURN(
      const ChangeCursor cursor,
      shard_->ExportChanges(
          table, filter, request.export_id(),
          std::max<int64_t>(1, chunk_bytes / row_bytes),
          [&](const ChangeChunk& chunk) -> absl::Status {
            response.Clear();
            response.mutable_keys()->Add(chunk.keys.begin(), chunk.keys.end());
            response.mutable_values()->Add(chunk.embeddings.begin(),
                                           chunk.embeddings.end());
            response.mutable_removed()->Add(chunk.removed.begin(),
                                            chunk.removed.end());
            return write();
          }));
  response.Clear();
  response.mutable_cursor()->set_log_id(cursor.log_id);
  response.mutable_cursor()->set_epoch(cursor.epoch);
  return write();
}

grpc::Status Service::ExportChanges(
    grpc::ServerContext* context, const v1::ExportChangesRequest* request,
    grpc::ServerWriter<v1::ExportChangesResponse>* writer) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  return ToGrpcStatus(WriteChanges(*request, *context, writer));
}

grpc::Status Service::SettleExport(grpc::ServerContext* context,
                                   const v1::SettleExportRequest* request,
                                   v1::SettleExportResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  auto table = shard_->FindTable(request->table());
  if (!table.ok()) return ToGrpcStatus(table.status());
  shard_->SettleExport(**table, request->export_id(), request->is_published());
  return grpc::Status::OK;
}

grpc::Status Service::SaveShard(grpc::ServerContext* context,
                                const v1::SaveShardRequest* request,
                                v1::SaveShardResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  absl::StatusOr<std::string> part = shard_->SaveShard(
      request->path(), ToVector(request->tables()), request->save_id());
  if (!part.ok()) return ToGrpcStatus(part.status());
  response->set_manifest_part(*std::move(part));
  return grpc::Status::OK;
}

grpc::Status Service::CommitCheckpoint(
    grpc::ServerContext* context, const v1::CommitCheckpointRequest* request,
    v1::CommitCheckpointResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  return ToGrpcStatus(
      shard_->CommitCheckpoint(request->path(), request->save_id(),
                               ToVector(request->manifest_parts())));
}

grpc::Status Service::StageRestore(grpc::ServerContext* context,
                                   const v1::StageRestoreRequest* request,
                                   v1::StageRestoreResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  absl::StatusOr<Shard::Staged> staged = shard_->StageRestore(
      request->path(), ToVector(request->tables()), request->restore_id());
  if (!staged.ok()) return ToGrpcStatus(staged.status());
  for (const std::string& table : staged->tables) response->add_tables(table);
  response->set_num_rows(staged->num_rows);
  return grpc::Status::OK;
}

grpc::Status Service::CommitRestore(grpc::ServerContext* context,
                                    const v1::CommitRestoreRequest* request,
                                    v1::CommitRestoreResponse* response) {
  const GatePass pass(gate_);
  if (!pass.status().ok()) return ToGrpcStatus(pass.status());
  return ToGrpcStatus(
      shard_->CommitRestore(request->restore_id(), request->abort()));
}

}  // namespace tfswitch
