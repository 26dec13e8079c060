// Each function turns its message into arguments, calls the shard or its
// coordinator, and puts the result into the response. CreateTable, DropTable
// and Erase run inside WriteOnce(), so that a repeated call is applied only
// once.
//
// Two errors of a round go into the response of CommitRound, which then returns
// OK: the round is over in spite of an error, or another instance of the group
// is known. So the client can tell them from errors of the call itself.

#include "cc/shard/control_calls.h"

#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/shard/gradient_accumulator.h"
#include "cc/wire/report_conversion.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

// Bound the memory of an answer, which has whole rows.
constexpr int kMaxReadRows = 4096;
constexpr int64_t kMaxReadFloats = int64_t{4} << 20;

template <typename Request>
PushId IdOf(const ShardCall& call, const Request& request) {
  return {request.client_id(), request.sequence(), call.caller};
}

template <typename Request>
float DayOf(const Request& request) {
  return request.has_day() ? request.day() : kServersDay;
}

}  // namespace

absl::Status CheckVersion(const ShardCall& call, uint32_t client_version) {
  if (client_version == call.protocol_version) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("the client speaks protocol version ", client_version,
                   ", this server speaks ", call.protocol_version,
                   "; install the same version of tfswitch on both sides"));
}

absl::Status Run(const ShardCall& call, const v1::CreateTableRequest& request,
                 v1::CreateTableResponse* response) {
  TFSWITCH_RETURN_IF_ERROR(CheckVersion(call, request.protocol_version()));
  TFSWITCH_RETURN_IF_ERROR(CheckKnown(request.config()));
  TableConfig config = FromProto(request.config());
  config.wire_dtype = {};  // It belongs to the client.
  if (call.only_reads) {
    TFSWITCH_ASSIGN_OR_RETURN(const TableCatalogue::Handle there,
                              call.shard.tables().Open(config));
    response->set_table_incarnation(there.incarnation);
    return absl::OkStatus();
  }
  // A replay repeats what was allowed, even if there is less memory now.
  if (!call.is_replay) {
    TFSWITCH_RETURN_IF_ERROR(call.shard.tables().CheckCapacity(config));
  }
  uint64_t incarnation = request.table_incarnation();
  // Draws the incarnation before the call is logged, so that the record
  // contains it.
  if (incarnation == 0) incarnation = DrawId();
  const auto log = [&]() -> absl::StatusOr<uint64_t> {
    if (call.check_new_table && !call.shard.FindTable(config.name).ok()) {
      TFSWITCH_RETURN_IF_ERROR(call.check_new_table());
    }
    v1::CreateTableRequest named = request;
    named.set_table_incarnation(incarnation);
    named.mutable_config()->clear_wire_dtype();
    return call.shard.journal().Log(RecordType::kCreateTable, named);
  };
  const absl::StatusOr<WriteResult> written = call.shard.journal().WriteOnce(
      IdOf(call, request), log,
      [&]() -> absl::StatusOr<int64_t> {
        TFSWITCH_ASSIGN_OR_RETURN(
            const TableCatalogue::Handle made,
            call.shard.tables().Create(config,
                                       {incarnation,
                                        {request.shard_instances().begin(),
                                         request.shard_instances().end()}},
                                       request.replaced_incarnation()));
        incarnation = made.incarnation;
        return made.created;
      },
      /*is_alone=*/true);
  if (absl::IsResourceExhausted(written.status()) &&
      request.replaced_incarnation() == 0) {
    // The shard could not log or make the table, for example because the disk
    // is full. A table that exists can still be opened.
    const auto there = call.shard.tables().Open(config);
    TFSWITCH_RETURN_IF_ERROR(there.ok() ? absl::OkStatus() : written.status());
    response->set_table_incarnation(there->incarnation);
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(written.status());
  call.shard.ReserveCapacity(config.name);
  if (written->duplicate) {
    const auto table = call.shard.FindTable(config.name);
    if (table.ok()) incarnation = (*table)->incarnation();
  }
  response->set_created(written->num_rows != 0);
  response->set_duplicate(written->duplicate);
  response->set_table_incarnation(incarnation);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::DropTableRequest& request,
                 v1::DropTableResponse* response) {
  // Remembers the call even if there is no such table. Otherwise a repetition
  // could drop a table that was created between the two calls.
  TFSWITCH_ASSIGN_OR_RETURN(
      const WriteResult written,
      call.shard.journal().WriteOnce(
          IdOf(call, request),
          [&] {
            return call.shard.journal().Log(RecordType::kDropTable, request);
          },
          [&]() -> absl::StatusOr<int64_t> {
            return call.shard.tables().Drop(request.table());
          },
          /*is_alone=*/true));
  response->set_dropped(written.num_rows != 0);
  response->set_duplicate(written.duplicate);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::ListTablesRequest& request,
                 v1::ListTablesResponse* response) {
  if (request.table().empty()) {
    for (const std::shared_ptr<EmbeddingTable>& table :
         call.shard.tables().All()) {
      if (call.may_see && !call.may_see(table->config().name)) continue;
      *response->add_tables() = ToProto(DescribeTable(*table));
    }
    return absl::OkStatus();
  }
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            call.shard.FindTable(TableOf(request)));
  *response->add_tables() = ToProto(DescribeTable(*table));
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::CommitRoundRequest& request,
                 v1::CommitRoundResponse* response) {
  // A coordinator draws only lower numbers, and no newer instance could follow
  // this one.
  if (request.round().group_instance() >= Coordinator::kMaxInstance) {
    return absl::InvalidArgumentError(
        absl::StrCat("group '", request.group(),
                     "': group_instance must be below 2^62. Received: ",
                     request.round().group_instance()));
  }
  std::vector<TableRef> staged;
  for (const auto& [table, incarnation] : request.table_incarnations()) {
    staged.emplace_back(table, incarnation);
  }
  const absl::StatusOr<int64_t> committed = call.shard.rounds().Commit(
      request.group(), request.round(), staged, call.threads, call.interrupt);
  const bool is_over = IsErrorOfAppliedRound(committed.status());
  const uint64_t newer = is_over ? 0 : NewerInstanceOf(committed.status());
  if (is_over || newer != 0) {
    response->set_committed_round(is_over ? request.round().number()
                                          : WorkerGroup::kNoRound);
    response->set_error_code(committed.status().raw_code());
    response->set_error_message(std::string(committed.status().message()));
    response->set_newer_group_instance(newer);
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(committed.status());
  response->set_committed_round(*committed);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::EraseRequest& request,
                 v1::EraseResponse* response) {
  TFSWITCH_RETURN_IF_ERROR(call.shard.FindTable(TableOf(request)).status());
  TFSWITCH_ASSIGN_OR_RETURN(
      const WriteResult written,
      call.shard.journal().WriteOnce(
          IdOf(call, request),
          [&] { return call.shard.journal().Log(RecordType::kErase, request); },
          [&]() -> absl::StatusOr<int64_t> {
            // Finds the table again, because it may have been replaced while
            // the call waited.
            TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                                      call.shard.FindTable(TableOf(request)));
            return call.shard.Erase(*table,
                                    absl::MakeConstSpan(request.keys().data(),
                                                        request.keys().size()));
          }));
  response->set_erased_rows(written.num_rows);
  response->set_duplicate(written.duplicate);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::ShrinkRequest& request,
                 v1::ShrinkResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            call.shard.FindTable(TableOf(request)));
  std::optional<EvictionConfig> rules;
  if (request.has_rules()) {
    TFSWITCH_RETURN_IF_ERROR(CheckKnown(request.rules()));
    rules = FromProto(request.rules());
  }
  TFSWITCH_ASSIGN_OR_RETURN(
      const ShrinkReport report,
      call.shard.Shrink(*table, rules, DayOf(request), request.dry_run()));
  *response = ToProto(report);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::ReadUsageRequest& request,
                 v1::ReadUsageResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            call.shard.FindTable(TableOf(request)));
  const absl::Span<const Key> keys(request.keys().data(),
                                   request.keys().size());
  std::vector<UsageOfRow> usage(keys.size());
  std::vector<KeyState> states(keys.size());
  TFSWITCH_RETURN_IF_ERROR(call.shard.ReadUsage(*table, keys, DayOf(request),
                                                absl::MakeSpan(usage),
                                                absl::MakeSpan(states)));
  *response = ToProto(usage, states);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::ReadRowsRequest& request,
                 v1::ReadRowsResponse* response) {
  if (request.keys().size() > kMaxReadRows) {
    return absl::InvalidArgumentError(
        absl::StrCat("ReadRows: expected at most ", kMaxReadRows, " keys, got ",
                     request.keys().size()));
  }
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            call.shard.FindTable(TableOf(request)));
  const int64_t row_floats = table->dim() + table->slot_floats();
  if (request.keys().size() * row_floats > kMaxReadFloats) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ReadRows: a row of table '", table->config().name, "' has ",
        row_floats, " floats; ask for at most ", kMaxReadFloats / row_floats,
        " keys at a time, got ", request.keys().size()));
  }
  return table->ReadRows(
      absl::MakeConstSpan(request.keys().data(), request.keys().size()),
      [response](const RowChunk& rows) {
        response->mutable_keys()->Add(rows.keys.begin(), rows.keys.end());
        response->mutable_values()->Add(rows.embeddings.begin(),
                                        rows.embeddings.end());
        response->mutable_slots()->Add(rows.slots.begin(), rows.slots.end());
        return absl::OkStatus();
      });
}

absl::Status Run(const ShardCall& call, const v1::CommitExportRequest& request,
                 v1::CommitExportResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto table,
                            call.shard.FindTable(TableOf(request)));
  return call.shard.CommitExport(*table, request.export_id(), request.commit());
}

absl::Status Run(const ShardCall& call, const v1::PauseRoundsRequest& request,
                 v1::PauseRoundsResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response, call.shard.rounds().Pause(request));
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call,
                 const v1::ChooseSnapshotRoundRequest& request,
                 v1::ChooseSnapshotRoundResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response,
                            call.shard.rounds().ChooseSnapshotRound(request));
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::SaveShardRequest& request,
                 v1::SaveShardResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(*response->add_manifest_parts(),
                            call.shard.saves().Write(request, call.interrupt));
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call,
                 const v1::CommitCheckpointRequest& request,
                 v1::CommitCheckpointResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const int64_t number,
                            call.shard.saves().Commit(request, call.interrupt));
  response->set_save(number);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::AbortSaveRequest& request,
                 v1::AbortSaveResponse* response) {
  return call.shard.saves().Abort(request.path(), request.save_id(),
                                  call.interrupt);
}

absl::Status Run(const ShardCall& call, const v1::StageRestoreRequest& request,
                 v1::StageRestoreResponse* response) {
  TFSWITCH_ASSIGN_OR_RETURN(
      *response, call.shard.restores().Stage(request, call.interrupt));
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::CommitRestoreRequest& request,
                 v1::CommitRestoreResponse* response) {
  return call.shard.CommitRestore(request.restore_id(), request.abort(),
                                  call.interrupt);
}

absl::Status Run(const ShardCall& call, const v1::GetProgressRequest& request,
                 v1::GetProgressResponse* response) {
  call.shard.saves().AddProgressTo(request.id(), response);
  call.shard.restores().AddProgressTo(request.id(), response);
  return absl::OkStatus();
}

absl::Status Run(const ShardCall& call, const v1::GetMetricsRequest&,
                 v1::GetMetricsResponse* response) {
  call.shard.Describe(response->add_servers());
  return absl::OkStatus();
}

absl::Status RunAny(const ShardCall& call,
                    const google::protobuf::Message& request,
                    google::protobuf::Message* response) {
  using Runner =
      absl::Status (*)(const ShardCall&, const google::protobuf::Message&,
                       google::protobuf::Message*);
#define TFSWITCH_RUNNER(name)                                          \
  {v1::name##Request::descriptor(),                                    \
   [](const ShardCall& any_call, const google::protobuf::Message& any, \
      google::protobuf::Message* answer) {                             \
     return Run(any_call, static_cast<const v1::name##Request&>(any),  \
                static_cast<v1::name##Response*>(answer));             \
   }},
  static const auto* const runners =
      new std::unordered_map<const google::protobuf::Descriptor*, Runner>{
          TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_RUNNER)
              TFSWITCH_COORDINATION_CALLS(TFSWITCH_RUNNER)};
#undef TFSWITCH_RUNNER
  return runners->at(request.GetDescriptor())(call, request, response);
}

}  // namespace tfswitch
