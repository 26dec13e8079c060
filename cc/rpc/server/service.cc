// Each method runs inside Gated(), turns its message into arguments, calls the
// shard, and turns the result into the response. CreateTable, DropTable and
// Erase run inside WriteOnce(), so that a repeated call is applied once.
//
// CommitRound answers OK with the error in the response where the round is over
// nevertheless, or another instance of the group is known, because the client
// has to tell these from a call that failed. Streams send one message for each
// chunk and end when the client has gone.

#include "cc/rpc/server/service.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/rpc/server/gated.h"
#include "cc/shard/round_stage.h"
#include "cc/wire/coordination_conversion.h"
#include "cc/wire/report_conversion.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

// Large enough to stream at full speed, small enough for any peer's limit.
constexpr int64_t kExportChunkBytes = 1 << 20;

template <typename T>
std::vector<std::string> ToVector(const T& repeated) {
  return std::vector<std::string>(repeated.begin(), repeated.end());
}

template <typename Request>
TableRef TableOf(const Request& request) {
  return {request.table(), request.table_incarnation()};
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
  return Gated(gate_, [&]() -> absl::Status {
    response->set_protocol_version(identity_.protocol_version);
    response->set_shard_index(shard_->shard_index());
    response->set_num_shards(shard_->num_shards());
    response->set_instance_id(shard_->instance_id());
    response->set_max_message_bytes(identity_.max_message_bytes);
    return CheckVersion(request->protocol_version());
  });
}

grpc::Status Service::CreateTable(grpc::ServerContext* context,
                                  const v1::CreateTableRequest* request,
                                  v1::CreateTableResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    TFSWITCH_RETURN_IF_ERROR(CheckVersion(request->protocol_version()));
    TFSWITCH_RETURN_IF_ERROR(CheckKnown(request->config()));
    const TableConfig config = FromProto(request->config());
    uint64_t incarnation = request->table_incarnation();
    TFSWITCH_ASSIGN_OR_RETURN(
        const Written written,
        shard_->WriteOnce(request->client_id(), request->sequence(),
                          [&]() -> absl::StatusOr<int64_t> {
                            TFSWITCH_ASSIGN_OR_RETURN(
                                const Shard::Made made,
                                shard_->CreateTable(
                                    config,
                                    {incarnation,
                                     {request->shard_instances().begin(),
                                      request->shard_instances().end()}},
                                    request->replaced_incarnation()));
                            incarnation = made.incarnation;
                            return made.created;
                          }));
    if (written.duplicate) {
      const auto table = shard_->FindTable(config.name);
      if (table.ok()) incarnation = (*table)->incarnation();
    }
    response->set_created(written.count != 0);
    response->set_duplicate(written.duplicate);
    response->set_table_incarnation(incarnation);
    return absl::OkStatus();
  });
}

grpc::Status Service::DropTable(grpc::ServerContext* context,
                                const v1::DropTableRequest* request,
                                v1::DropTableResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    // Also if there is no such table: a repetition must not drop one that has
    // been created meanwhile.
    TFSWITCH_ASSIGN_OR_RETURN(
        const Written written,
        shard_->WriteOnce(request->client_id(), request->sequence(),
                          [&]() -> absl::StatusOr<int64_t> {
                            return shard_->DropTable(request->table());
                          }));
    response->set_dropped(written.count != 0);
    response->set_duplicate(written.duplicate);
    return absl::OkStatus();
  });
}

grpc::Status Service::ListTables(grpc::ServerContext* context,
                                 const v1::ListTablesRequest* request,
                                 v1::ListTablesResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    if (request->table().empty()) {
      for (const std::shared_ptr<EmbeddingTable>& table : shard_->Tables()) {
        *response->add_tables() = ToProto(DescribeTable(*table));
      }
      return absl::OkStatus();
    }
    TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                              shard_->FindTable(TableOf(*request)));
    *response->add_tables() = ToProto(DescribeTable(*table));
    return absl::OkStatus();
  });
}

grpc::Status Service::CommitRound(grpc::ServerContext* context,
                                  const v1::CommitRoundRequest* request,
                                  v1::CommitRoundResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    std::vector<TableRef> staged;
    for (const auto& [table, incarnation] : request->table_incarnations()) {
      staged.emplace_back(table, incarnation);
    }
    const absl::StatusOr<int64_t> committed = shard_->CommitRound(
        request->group(), FromProto(request->round()), staged, helpers_);
    if (IsErrorOfAppliedRound(committed.status())) {
      response->set_committed_round(request->round().number());
      response->set_error_code(committed.status().raw_code());
      response->set_error_message(std::string(committed.status().message()));
      return absl::OkStatus();
    }
    if (const uint64_t newer = NewerInstanceOf(committed.status());
        newer != 0) {
      response->set_committed_round(WorkerGroup::kNoRound);
      response->set_error_code(committed.status().raw_code());
      response->set_error_message(std::string(committed.status().message()));
      response->set_newer_group_instance(newer);
      return absl::OkStatus();
    }
    TFSWITCH_RETURN_IF_ERROR(committed.status());
    response->set_committed_round(*committed);
    return absl::OkStatus();
  });
}

grpc::Status Service::Erase(grpc::ServerContext* context,
                            const v1::EraseRequest* request,
                            v1::EraseResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                              shard_->FindTable(TableOf(*request)));
    TFSWITCH_ASSIGN_OR_RETURN(
        const Written written,
        shard_->WriteOnce(request->client_id(), request->sequence(), [&] {
          return shard_->Erase(*table,
                               absl::MakeConstSpan(request->keys().data(),
                                                   request->keys().size()));
        }));
    response->set_erased_rows(written.count);
    response->set_duplicate(written.duplicate);
    return absl::OkStatus();
  });
}

grpc::Status Service::Shrink(grpc::ServerContext* context,
                             const v1::ShrinkRequest* request,
                             v1::ShrinkResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                              shard_->FindTable(TableOf(*request)));
    std::optional<EvictionConfig> rules;
    if (request->has_rules()) {
      TFSWITCH_RETURN_IF_ERROR(CheckKnown(request->rules()));
      rules = FromProto(request->rules());
    }
    TFSWITCH_ASSIGN_OR_RETURN(
        const ShrinkReport report,
        shard_->Shrink(*table, rules,
                       request->has_day() ? request->day() : kServersDay,
                       request->dry_run()));
    *response = ToProto(report);
    return absl::OkStatus();
  });
}

grpc::Status Service::ReadUsage(grpc::ServerContext* context,
                                const v1::ReadUsageRequest* request,
                                v1::ReadUsageResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                              shard_->FindTable(TableOf(*request)));
    const absl::Span<const Key> keys(request->keys().data(),
                                     request->keys().size());
    std::vector<UsageOfRow> usage(keys.size());
    std::vector<KeyState> states(keys.size());
    TFSWITCH_RETURN_IF_ERROR(shard_->ReadUsage(
        *table, keys, request->has_day() ? request->day() : kServersDay,
        absl::MakeSpan(usage), absl::MakeSpan(states)));
    *response = ToProto(usage, states);
    return absl::OkStatus();
  });
}

absl::Status Service::ExportRows(
    const v1::ExportRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportResponse>* writer) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(TableOf(request)));
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
  return Gated(gate_, [&]() -> absl::Status {
    return ExportRows(*request, *context, writer);
  });
}

absl::Status Service::WriteChanges(
    const v1::ExportChangesRequest& request, const grpc::ServerContext& context,
    grpc::ServerWriter<v1::ExportChangesResponse>* writer) const {
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<EmbeddingTable> table,
                            shard_->FindTable(TableOf(request)));
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
  return Gated(gate_, [&]() -> absl::Status {
    return WriteChanges(*request, *context, writer);
  });
}

grpc::Status Service::SettleExport(grpc::ServerContext* context,
                                   const v1::SettleExportRequest* request,
                                   v1::SettleExportResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                              shard_->FindTable(TableOf(*request)));
    shard_->SettleExport(*table, request->export_id(), request->is_published());
    return absl::OkStatus();
  });
}

Shard::Interrupt Service::InterruptOf(
    const grpc::ServerContext& context) const {
  return [this, &context]() -> absl::Status {
    if (gate_->is_closed()) {
      return absl::UnavailableError("the server is stopping");
    }
    if (context.IsCancelled()) {
      return absl::CancelledError("the client has gone");
    }
    return absl::OkStatus();
  };
}

grpc::Status Service::SaveShard(grpc::ServerContext* context,
                                const v1::SaveShardRequest* request,
                                v1::SaveShardResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    SaveShardArgs args;
    args.path = request->path();
    args.save_id = request->save_id();
    args.all_tables = request->all_tables();
    for (int i = 0; i < request->tables_size(); ++i) {
      args.tables.emplace_back(request->tables(i),
                               i < request->table_incarnations_size()
                                   ? request->table_incarnations(i)
                                   : 0);
    }
    TFSWITCH_ASSIGN_OR_RETURN(std::string part,
                              shard_->SaveShard(args, InterruptOf(*context)));
    response->set_manifest_part(std::move(part));
    return absl::OkStatus();
  });
}

grpc::Status Service::CommitCheckpoint(
    grpc::ServerContext* context, const v1::CommitCheckpointRequest* request,
    v1::CommitCheckpointResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    CommitCheckpointArgs args;
    args.path = request->path();
    args.save_id = request->save_id();
    args.manifest_parts = ToVector(request->manifest_parts());
    if (request->keep() != 0) {
      args.keep =
          static_cast<int>(std::min<uint32_t>(request->keep(), INT32_MAX));
    }
    args.dropped_tables = ToVector(request->dropped_tables());
    TFSWITCH_ASSIGN_OR_RETURN(
        const int64_t number,
        shard_->CommitCheckpoint(args, InterruptOf(*context)));
    response->set_save(number);
    return absl::OkStatus();
  });
}

grpc::Status Service::AbortSave(grpc::ServerContext* context,
                                const v1::AbortSaveRequest* request,
                                v1::AbortSaveResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    return shard_->AbortSave(request->path(), request->save_id(),
                             InterruptOf(*context));
  });
}

grpc::Status Service::StageRestore(grpc::ServerContext* context,
                                   const v1::StageRestoreRequest* request,
                                   v1::StageRestoreResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    StageRestoreArgs args;
    args.path = request->path();
    args.tables = ToVector(request->tables());
    args.restore_id = request->restore_id();
    args.save = request->save();
    args.newer_than =
        static_cast<int>(std::min<uint32_t>(request->newer_than(), INT32_MAX));
    args.incarnations = {request->table_incarnations().begin(),
                         request->table_incarnations().end()};
    args.new_incarnation = request->new_incarnation();
    args.shard_instances = {request->shard_instances().begin(),
                            request->shard_instances().end()};
    TFSWITCH_ASSIGN_OR_RETURN(
        const StagedRestore staged,
        shard_->StageRestore(args, InterruptOf(*context)));
    for (const std::string& table : staged.tables) response->add_tables(table);
    response->set_num_rows(staged.num_rows);
    response->set_save(staged.save);
    return absl::OkStatus();
  });
}

grpc::Status Service::CommitRestore(grpc::ServerContext* context,
                                    const v1::CommitRestoreRequest* request,
                                    v1::CommitRestoreResponse* response) {
  return Gated(gate_, [&]() -> absl::Status {
    return shard_->CommitRestore(request->restore_id(), request->abort());
  });
}

}  // namespace tfswitch
