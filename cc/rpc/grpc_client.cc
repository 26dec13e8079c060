#include "cc/rpc/grpc_client.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"
#include "cc/client/check_args.h"
#include "cc/client/done_call.h"
#include "cc/rpc/address.h"
#include "cc/rpc/byte_buffers.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/codec.h"
#include "cc/rpc/connection.h"
#include "cc/rpc/grpc_group_client.h"
#include "cc/rpc/process_settings.h"
#include "cc/rpc/round_conversion.h"
#include "cc/rpc/table_config_conversion.h"
#include "cc/rpc/usage_conversion.h"
#include "cc/shard/round_stage.h"

namespace tfswitch {
namespace {

absl::Status NoMemory(uint64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for a request of ", bytes, " bytes"));
}

// A Pull, Push or Assign in flight.
class RowCall final : public PendingCall {
 public:
  using ReadResponse = std::function<absl::Status(MessagePieces)>;

  RowCall(const std::shared_ptr<Connection>& connection, CallKind kind,
          const char* method, const std::string& table,
          const grpc::ByteBuffer& request, ReadResponse read_response)
      : connection_(connection),
        table_(table),
        read_response_(std::move(read_response)),
        call_(connection, kind, method, request) {}

  absl::Status Wait() override {
    grpc::ByteBuffer response;
    absl::Status status = call_.Wait(&response);
    if (absl::IsNotFound(status) && connection_->CreateAgain(table_)) {
      call_.Restart();
      status = call_.Wait(&response);
    }
    TFSWITCH_RETURN_IF_ERROR(status);
    thread_local std::vector<absl::string_view> pieces;
    ListPieces(&response, &pieces);
    return read_response_(pieces);
  }

 private:
  const std::shared_ptr<Connection> connection_;
  const std::string table_;
  const ReadResponse read_response_;
  UnaryCall call_;
};

// The parts of a long call, all in flight together.
class PartCalls final : public PendingCall {
 public:
  explicit PartCalls(std::vector<std::unique_ptr<PendingCall>> parts)
      : parts_(std::move(parts)) {}

  absl::Status Wait() override {
    absl::Status first;
    for (const auto& part : parts_) first.Update(part->Wait());
    return first;
  }

 private:
  const std::vector<std::unique_ptr<PendingCall>> parts_;
};

// The parts of a push, and where they say what they have done.
class PartPushes final : public PendingCall {
 public:
  PartPushes(std::vector<std::unique_ptr<PendingCall>> parts,
             std::unique_ptr<PushResult[]> results, PushResult* sum)
      : num_parts_(parts.size()),
        results_(std::move(results)),
        calls_(std::move(parts)),
        sum_(sum) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(calls_.Wait());
    for (size_t i = 0; i < num_parts_; ++i) sum_->Add(results_[i]);
    return absl::OkStatus();
  }

 private:
  const size_t num_parts_;
  const std::unique_ptr<PushResult[]> results_;  // Outlives the calls.
  PartCalls calls_;
  PushResult* const sum_;
};

// How many keys each part of a call has. While one part is on its way, the
// other end works on the part before, which is in its cache still.
size_t KeysPerPart(size_t num_keys, int dim) {
  const size_t row_bytes = static_cast<size_t>(dim) * sizeof(float);
  const size_t num_parts = std::clamp<size_t>(
      num_keys * row_bytes / kMinPartBytes, 1, kMaxPartsPerCall);
  return (num_keys + num_parts - 1) / num_parts;
}

// To the server each part of a push is a push of its own.
PushId IdOfPart(const PushId& id, size_t part) {
  return {id.client_id, id.sequence * kMaxPartsPerCall + part};
}

class GrpcClient final : public ParameterClient {
 public:
  explicit GrpcClient(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)),
        groups_(NewGrpcGroupClient(connection_)) {}

  GroupClient& groups() override { return *groups_; }

  absl::Status CreateTable(const TableConfig& config) override;
  absl::Status DropTable(const std::string& table) override;
  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const std::string& table) override;
  std::unique_ptr<PendingCall> StartPull(const PullArgs& args,
                                         absl::Span<float> embeddings) override;
  std::unique_ptr<PendingCall> StartPush(const PushArgs& args,
                                         PushResult* result) override;
  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           AssignResult* result) override;
  std::unique_ptr<PendingCall> StartCommitRound(int shard,
                                                const std::string& group,
                                                const Round& round,
                                                int64_t* committed) override;
  absl::StatusOr<int64_t> Erase(const std::string& table,
                                absl::Span<const Key> keys) override;
  absl::StatusOr<ShrinkReport> Shrink(const ShrinkArgs& args) override;
  absl::Status ReadUsage(const std::string& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override;
  absl::Status Export(
      const std::string& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override;
  absl::StatusOr<std::vector<std::string>> SaveShard(
      const SaveShardArgs& args) override;
  absl::Status CommitCheckpoint(
      const std::string& path, const std::string& save_id,
      const std::vector<std::string>& manifest_parts) override;
  absl::StatusOr<std::vector<std::string>> StageRestore(
      const StageRestoreArgs& args, int64_t* num_rows) override;
  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override;

 private:
  std::unique_ptr<PendingCall> StartPullOfPart(const PullArgs& args,
                                               absl::Span<float> embeddings);
  absl::StatusOr<grpc::ByteBuffer> EncodePush(const PushArgs& args) const;

  const std::shared_ptr<Connection> connection_;
  const std::unique_ptr<GroupClient> groups_;
};

absl::Status GrpcClient::CreateTable(const TableConfig& config) {
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  // Tells which run of the server gets the table; see Connection::CreateAgain.
  TFSWITCH_RETURN_IF_ERROR(connection_->Handshake());
  v1::CreateTableRequest request;
  request.set_protocol_version(connection_->options().protocol_version);
  *request.mutable_config() = ToProto(config);
  v1::CreateTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(
      CallKind::kIdempotent, "CreateTable", request, &response));
  connection_->Remember(config);
  return absl::OkStatus();
}

absl::Status GrpcClient::DropTable(const std::string& table) {
  connection_->Forget(table);
  v1::DropTableRequest request;
  request.set_table(table);
  v1::DropTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(CallKind::kIdempotent, "DropTable",
                                             request, &response));
  if (response.dropped()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no table '", table, "' on shard ",
                                          connection_->options().shard_index));
}

absl::StatusOr<std::vector<TableInfo>> GrpcClient::ListTables(
    const std::string& table) {
  v1::ListTablesRequest request;
  request.set_table(table);
  v1::ListTablesResponse response;
  absl::Status status = connection_->Call(CallKind::kIdempotent, "ListTables",
                                          request, &response);
  if (absl::IsNotFound(status) && connection_->CreateAgain(table)) {
    status = connection_->Call(CallKind::kIdempotent, "ListTables", request,
                               &response);
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  std::vector<TableInfo> tables;
  for (const v1::TableInfo& info : response.tables()) {
    tables.push_back(FromProto(info));
    connection_->Remember(tables.back().config);
  }
  return tables;
}

std::unique_ptr<PendingCall> GrpcClient::StartPull(
    const PullArgs& args, absl::Span<float> embeddings) {
  if (absl::Status status =
          CheckSize(args.table, args.keys.size(), args.dim, embeddings.size());
      !status.ok()) {
    return Done(std::move(status));
  }
  const size_t width = static_cast<size_t>(args.dim);
  const size_t keys_per_part = KeysPerPart(args.keys.size(), args.dim);
  if (keys_per_part == args.keys.size()) {
    return StartPullOfPart(args, embeddings);
  }
  std::vector<std::unique_ptr<PendingCall>> parts;
  for (size_t i = 0; i < args.keys.size(); i += keys_per_part) {
    PullArgs part = args;
    part.keys = args.keys.subspan(i, keys_per_part);
    parts.push_back(StartPullOfPart(
        part, embeddings.subspan(i * width, part.keys.size() * width)));
  }
  return std::make_unique<PartCalls>(std::move(parts));
}

std::unique_ptr<PendingCall> GrpcClient::StartPullOfPart(
    const PullArgs& args, absl::Span<float> embeddings) {
  const uint64_t bytes = PullRequestBytes(args);
  const uint64_t answer_bytes =
      embeddings.size() * sizeof(float) + kMaxPullResponseHeader;
  absl::Status fits = connection_->CheckSize(
      std::max(bytes, answer_bytes),
      absl::StrCat("a pull of ", args.keys.size(), " keys from table '",
                   args.table, "'"));
  if (!fits.ok()) return Done(std::move(fits));
  OutgoingMessage message(bytes);
  if (message.data() == nullptr) return Done(NoMemory(bytes));
  WritePullRequest(args, message.data());
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "Pull", args.table,
      std::move(message).ToByteBuffer(),
      [connection = connection_.get(), table = args.table, dim = args.dim,
       num_keys = args.keys.size(),
       embeddings](MessagePieces pieces) -> absl::Status {
        uint64_t received = 0;
        TFSWITCH_RETURN_IF_ERROR(
            connection->Blame(ReadPullResponse(pieces, embeddings, &received)));
        if (received == embeddings.size()) return absl::OkStatus();
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", table, "': expected ", embeddings.size(), " floats (",
            num_keys, " keys x dim ", dim, "), the server sent ", received,
            "; is the table's dim another one?"));
      });
}

std::unique_ptr<PendingCall> GrpcClient::StartPush(const PushArgs& args,
                                                   PushResult* result) {
  const size_t width = static_cast<size_t>(args.dim);
  // The gradients of one key must meet on the server, to be summed, and those
  // of one step, where a round is applied.
  const size_t keys_per_part = args.keys_are_unique && args.step.group.empty()
                                   ? KeysPerPart(args.keys.size(), args.dim)
                                   : args.keys.size();
  const bool is_split = keys_per_part < args.keys.size();
  if (is_split && !args.is_checked) {
    if (absl::Status status = CheckPush(args); !status.ok()) {
      return Done(std::move(status));
    }
  }
  // All parts must be there before the first one goes.
  std::vector<grpc::ByteBuffer> requests;
  size_t begin = 0;
  do {
    PushArgs part = args;
    part.id = IdOfPart(args.id, requests.size());
    if (is_split) {
      part.keys = args.keys.subspan(begin, keys_per_part);
      part.gradients =
          args.gradients.subspan(begin * width, part.keys.size() * width);
      part.observations = args.observations.subspan(begin, part.keys.size());
    }
    absl::StatusOr<grpc::ByteBuffer> request = EncodePush(part);
    if (!request.ok()) return Done(std::move(request).status());
    requests.push_back(*std::move(request));
    begin += keys_per_part;
  } while (begin < args.keys.size());

  const auto start = [&](const grpc::ByteBuffer& request, PushResult* to) {
    return std::make_unique<RowCall>(
        connection_,
        args.id.client_id == 0 ? CallKind::kOnce : CallKind::kIdempotent,
        "Push", args.table, request,
        [connection = connection_.get(), to](MessagePieces pieces) {
          return connection->Blame(ReadPushResponse(pieces, to));
        });
  };
  if (!is_split) return start(requests[0], result);
  *result = PushResult();
  std::unique_ptr<PushResult[]> results(new PushResult[requests.size()]);
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(requests.size());
  for (const grpc::ByteBuffer& request : requests) {
    calls.push_back(start(request, &results[calls.size()]));
  }
  return std::make_unique<PartPushes>(std::move(calls), std::move(results),
                                      result);
}

absl::StatusOr<grpc::ByteBuffer> GrpcClient::EncodePush(
    const PushArgs& args) const {
  const uint64_t bytes = PushRequestBytes(args);
  TFSWITCH_RETURN_IF_ERROR(connection_->CheckSize(
      bytes, absl::StrCat("a push of ", args.keys.size(), " keys to table '",
                          args.table, "'")));
  if (args.gradients_owner == nullptr || args.gradients.empty()) {
    OutgoingMessage message(bytes);
    if (message.data() == nullptr) return NoMemory(bytes);
    WritePushRequest(args, message.data());
    return std::move(message).ToByteBuffer();
  }
  const uint64_t head_bytes = PushRequestHeadBytes(args);
  OutgoingMessage head(head_bytes);
  if (head.data() == nullptr) return NoMemory(head_bytes);
  WritePushRequestHead(args, head.data());
  const grpc::Slice slices[] = {
      std::move(head).ToSlice(),
      ShareBytes(args.gradients.data(), args.gradients.size() * sizeof(float),
                 args.gradients_owner),
      grpc::Slice(PushRequestTail(args))};
  return grpc::ByteBuffer(slices, 3);
}

std::unique_ptr<PendingCall> GrpcClient::StartAssign(const AssignArgs& args,
                                                     AssignResult* result) {
  const uint64_t bytes = AssignRequestBytes(args);
  absl::Status fits = connection_->CheckSize(
      bytes, absl::StrCat("an assignment of ", args.keys.size(),
                          " keys to table '", args.table, "'"));
  if (!fits.ok()) return Done(std::move(fits));
  OutgoingMessage message(bytes);
  if (message.data() == nullptr) return Done(NoMemory(bytes));
  WriteAssignRequest(args, message.data());
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "Assign", args.table,
      std::move(message).ToByteBuffer(),
      [connection = connection_.get(), result](MessagePieces pieces) {
        return connection->Blame(ReadAssignResponse(pieces, result));
      });
}

std::unique_ptr<PendingCall> GrpcClient::StartCommitRound(
    int, const std::string& group, const Round& round, int64_t* committed) {
  v1::CommitRoundRequest request;
  request.set_group(group);
  *request.mutable_round() = ToProto(round);
  OutgoingMessage message(request.ByteSizeLong());
  if (message.data() == nullptr) return Done(NoMemory(request.ByteSizeLong()));
  request.SerializeWithCachedSizesToArray(
      reinterpret_cast<uint8_t*>(message.data()));
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "CommitRound", /*table=*/"",
      std::move(message).ToByteBuffer(),
      [connection = connection_.get(),
       committed](MessagePieces pieces) -> absl::Status {
        std::string bytes;
        for (const absl::string_view piece : pieces) {
          bytes.append(piece.data(), piece.size());
        }
        v1::CommitRoundResponse response;
        if (!response.ParseFromString(bytes)) {
          return connection->Blame(
              absl::InvalidArgumentError("CommitRoundResponse: malformed"));
        }
        *committed = response.committed_round();
        return ErrorOfAppliedRound(
            absl::Status(static_cast<absl::StatusCode>(response.error_code()),
                         response.error_message()));
      });
}

absl::StatusOr<int64_t> GrpcClient::Erase(const std::string& table,
                                          absl::Span<const Key> keys) {
  v1::EraseRequest request;
  request.set_table(table);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  v1::EraseResponse response;
  absl::Status status =
      connection_->Call(CallKind::kIdempotent, "Erase", request, &response);
  if (absl::IsNotFound(status) && connection_->CreateAgain(table)) {
    status =
        connection_->Call(CallKind::kIdempotent, "Erase", request, &response);
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  return response.erased_rows();
}

absl::StatusOr<ShrinkReport> GrpcClient::Shrink(const ShrinkArgs& args) {
  v1::ShrinkRequest request;
  request.set_table(args.table);
  if (args.rules.has_value()) *request.mutable_rules() = ToProto(*args.rules);
  if (args.day >= 0.0f) request.set_day(args.day);
  request.set_dry_run(args.dry_run);
  v1::ShrinkResponse response;
  absl::Status status =
      connection_->Call(CallKind::kBulk, "Shrink", request, &response);
  if (absl::IsNotFound(status) && connection_->CreateAgain(args.table)) {
    status = connection_->Call(CallKind::kBulk, "Shrink", request, &response);
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  return FromProto(response);
}

absl::Status GrpcClient::ReadUsage(const std::string& table,
                                   absl::Span<const Key> keys, float day,
                                   absl::Span<UsageOfRow> usage,
                                   absl::Span<KeyState> states) {
  v1::ReadUsageRequest request;
  request.set_table(table);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  if (day >= 0.0f) request.set_day(day);
  v1::ReadUsageResponse response;
  absl::Status status =
      connection_->Call(CallKind::kIdempotent, "ReadUsage", request, &response);
  if (absl::IsNotFound(status) && connection_->CreateAgain(table)) {
    status = connection_->Call(CallKind::kIdempotent, "ReadUsage", request,
                               &response);
  }
  TFSWITCH_RETURN_IF_ERROR(status);
  return connection_->Blame(FromProto(response, usage, states));
}

absl::Status GrpcClient::Export(
    const std::string& table, bool with_slots,
    const std::function<absl::Status(const RowChunk&)>& visit) {
  const GrpcClientOptions& options = connection_->options();
  v1::ExportRequest request;
  request.set_table(table);
  request.set_with_slots(with_slots);
  RetryClock clock(options.timeout);
  bool may_create = true;
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(ToDeadline(clock.start() + options.bulk_timeout));
    const auto reader = connection_->stub().Export(&context, request);
    v1::ExportResponse chunk;
    bool visited = false;
    while (reader->Read(&chunk)) {
      visited = true;
      absl::Status status = visit(RowChunk{
          absl::MakeConstSpan(chunk.keys().data(), chunk.keys_size()),
          absl::MakeConstSpan(chunk.values().data(), chunk.values_size()),
          absl::MakeConstSpan(chunk.slots().data(), chunk.slots_size())});
      if (!status.ok()) {
        context.TryCancel();
        reader->Finish();
        return status;
      }
    }
    const grpc::Status status = reader->Finish();
    if (status.ok()) return absl::OkStatus();
    // A row must not be visited twice, so only the start can be repeated.
    if (visited) return connection_->ExplainLoss(status, options.bulk_timeout);
    absl::Status error = connection_->Explain(
        status, status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED
                    ? options.bulk_timeout
                    : options.timeout);
    if (absl::IsNotFound(error) && may_create &&
        connection_->CreateAgain(table)) {
      may_create = false;
      continue;
    }
    if (!absl::IsUnavailable(error)) return error;
    const std::optional<absl::Time> next = clock.NextTry();
    if (!next.has_value()) return error;
    PollUntil(*next);
  }
}

absl::StatusOr<std::vector<std::string>> GrpcClient::SaveShard(
    const SaveShardArgs& args) {
  v1::SaveShardRequest request;
  request.set_path(args.path);
  for (const std::string& table : args.tables) request.add_tables(table);
  request.set_save_id(args.save_id);
  v1::SaveShardResponse response;
  TFSWITCH_RETURN_IF_ERROR(
      connection_->Call(CallKind::kBulk, "SaveShard", request, &response));
  return std::vector<std::string>{response.manifest_part()};
}

absl::Status GrpcClient::CommitCheckpoint(
    const std::string& path, const std::string& save_id,
    const std::vector<std::string>& manifest_parts) {
  v1::CommitCheckpointRequest request;
  request.set_path(path);
  request.set_save_id(save_id);
  for (const std::string& part : manifest_parts) {
    request.add_manifest_parts(part);
  }
  v1::CommitCheckpointResponse response;
  return connection_->Call(CallKind::kBulk, "CommitCheckpoint", request,
                           &response);
}

absl::StatusOr<std::vector<std::string>> GrpcClient::StageRestore(
    const StageRestoreArgs& args, int64_t* num_rows) {
  v1::StageRestoreRequest request;
  request.set_path(args.path);
  for (const std::string& table : args.tables) request.add_tables(table);
  request.set_restore_id(args.restore_id);
  v1::StageRestoreResponse response;
  TFSWITCH_RETURN_IF_ERROR(
      connection_->Call(CallKind::kBulk, "StageRestore", request, &response));
  *num_rows += response.num_rows();
  return std::vector<std::string>(response.tables().begin(),
                                  response.tables().end());
}

absl::Status GrpcClient::CommitRestore(const std::string& restore_id,
                                       bool abort) {
  v1::CommitRestoreRequest request;
  request.set_restore_id(restore_id);
  request.set_abort(abort);
  v1::CommitRestoreResponse response;
  return connection_->Call(CallKind::kBulk, "CommitRestore", request,
                           &response);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ParameterClient>> NewGrpcClient(
    const GrpcClientOptions& options) {
  TFSWITCH_ASSIGN_OR_RETURN(const Address address,
                            ParseAddress(options.address));
  if (!address.is_unix && address.port == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("address '", options.address,
                     "': port 0 cannot be connected to; use the port that the "
                     "server printed"));
  }
  if (options.timeout <= absl::ZeroDuration() ||
      options.bulk_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeouts must be positive, got timeout ",
        absl::FormatDuration(options.timeout), " and bulk_timeout ",
        absl::FormatDuration(options.bulk_timeout)));
  }
  PrepareProcess();
  GrpcClientOptions canonical = options;
  canonical.address = address.ToString();
  auto connection = std::make_shared<Connection>(canonical);
  TFSWITCH_RETURN_IF_ERROR(connection->Handshake());
  return std::make_unique<GrpcClient>(std::move(connection));
}

}  // namespace tfswitch
