// A pull or push of many keys is cut into pieces, so that the server works on
// one while the next is on its way. PackPieces() puts short pieces together in
// one message. A push is cut only if its gradients need not meet on the server.
// All its messages are made before the first one goes, so that an error of
// making one leaves nothing applied.
//
// Rows go from an answer to their places at once. Long gradients whose owner is
// known are sent from where they lie; shorter ones and all keys are copied. All
// calls but pull, push and assignment use messages of protobuf, because they
// are short or rare.

#include "cc/rpc/client/grpc_client.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/client/check_args.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"
#include "cc/rpc/address.h"
#include "cc/rpc/byte_buffers.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/client/connection.h"
#include "cc/rpc/client/grpc_group_client.h"
#include "cc/rpc/process_settings.h"
#include "cc/shard/round_stage.h"
#include "cc/wire/codec.h"
#include "cc/wire/coordination_conversion.h"
#include "cc/wire/report_conversion.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch {
namespace {

absl::Status NoMemory(uint64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for a request of ", bytes, " bytes"));
}

// "table 'a'", or "tables 'a', 'b', 'c' and 5 more".
std::string NameTables(const std::vector<std::string>& tables) {
  constexpr size_t kMaxNamed = 3;
  const std::set<std::string> all(tables.begin(), tables.end());
  const size_t num_named = std::min(all.size(), kMaxNamed);
  std::string text = absl::StrCat(
      all.size() == 1 ? "table '" : "tables '",
      absl::StrJoin(all.begin(), std::next(all.begin(), num_named), "', '"),
      "'");
  if (num_named < all.size()) {
    absl::StrAppend(&text, " and ", all.size() - num_named, " more");
  }
  return text;
}

// "a pull of 3 keys from table 'a'", or "... from table 'a' and 2 more".
template <typename Request>
std::string Describe(const char* call, const char* direction,
                     const Request& first, size_t num_tables) {
  return absl::StrCat(
      call, " ", first.keys.size(), " keys ", direction, " table '",
      first.table, "'",
      num_tables > 1 ? absl::StrCat(" and ", num_tables - 1, " more") : "");
}

// A call for rows of some tables, in flight. `write` names its effect on them,
// such as "The push to "; null: it only reads.
class RowCall final : public PendingCall {
 public:
  using ReadResponse = std::function<absl::Status(MessagePieces)>;

  RowCall(const std::shared_ptr<Connection>& connection, CallKind kind,
          const char* method, const grpc::ByteBuffer& request,
          ReadResponse read_response,
          absl::Duration timeout = absl::InfiniteDuration(),
          const char* write = nullptr, std::vector<std::string> tables = {})
      : write_(write),
        tables_(std::move(tables)),
        read_response_(std::move(read_response)),
        call_(connection, kind, method, request,
              v1::ParameterServer::service_full_name(), timeout) {}

  absl::Status Wait() override {
    grpc::ByteBuffer response;
    if (absl::Status status = call_.Wait(&response); !status.ok()) {
      if (write_ == nullptr) return status;
      return call_.ExplainWrite(status,
                                absl::StrCat(write_, NameTables(tables_)));
    }
    thread_local std::vector<absl::string_view> pieces;
    ListPieces(&response, &pieces);
    return read_response_(pieces);
  }

 private:
  const char* const write_;
  const std::vector<std::string> tables_;
  const ReadResponse read_response_;
  UnaryCall call_;
};

// Messages of pushes in flight, and the results of their pieces.
class PushMessages final : public PendingCall {
 public:
  // `sums[i]` gets the sum of the pieces whose `owners` are i.
  PushMessages(std::vector<size_t> owners, std::vector<PushResult*> sums)
      : owners_(std::move(owners)),
        sums_(std::move(sums)),
        results_(new PushResult[owners_.size()]) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(JoinedCalls(std::move(calls)).Wait());
    for (PushResult* sum : sums_) *sum = PushResult();
    for (size_t i = 0; i < owners_.size(); ++i) {
      sums_[owners_[i]]->Add(results_[i]);
    }
    return absl::OkStatus();
  }

  PushResult* result(size_t piece) { return &results_[piece]; }

 private:
  const std::vector<size_t> owners_;
  const std::vector<PushResult*> sums_;
  const std::unique_ptr<PushResult[]> results_;

 public:
  // Last: calls that nobody has waited for write no results once they are gone.
  std::vector<std::unique_ptr<PendingCall>> calls;
};

// Reads a message that is short, or seldom.
absl::Status ParseProto(const char* name, MessagePieces pieces,
                        google::protobuf::MessageLite* message) {
  std::string bytes;
  for (const absl::string_view piece : pieces) {
    bytes.append(piece.data(), piece.size());
  }
  if (message->ParseFromString(bytes)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, ": malformed"));
}

// How many keys each part of a call has. While one part is on its way, the
// other end works on the part before, which is in its cache still.
size_t KeysPerPart(size_t num_keys, size_t row_bytes, size_t min_part_bytes) {
  const size_t num_parts = std::clamp<size_t>(
      num_keys * row_bytes / min_part_bytes, 1, kMaxPartsPerCall);
  return (num_keys + num_parts - 1) / num_parts;
}

// The size of a piece that goes to the server for one table: a part of a call,
// or a piece of a long one. Bytes are those that it adds to a message of many.
struct PieceSize {
  uint64_t request_bytes;
  uint64_t answer_bytes;
  bool is_cut;
};

PieceSize SizeOfPull(const PullPart& pull, bool is_cut) {
  return {PartBytes(PullRequestBytes(pull.args)),
          PartBytes(PullResponseBytes(pull.num_floats())), is_cut};
}

PieceSize SizeOfPush(const PushArgs& push, bool is_cut) {
  // Two numbers come back, which are fewer bytes than go out.
  return {PartBytes(PushRequestBytes(push)), 0, is_cut};
}

// Pieces [begin, end).
struct MessageOfPieces {
  size_t begin;
  size_t end;
};

// Which pieces go in one message: those of a long part each by itself, others
// together until the message, or its answer, is as long as a part of a long
// call, and no longer than the server takes. A piece that is too long by itself
// is alone; the encoder reports that.
std::vector<MessageOfPieces> PackPieces(absl::Span<const PieceSize> pieces,
                                        uint64_t max_message_bytes) {
  uint64_t total = 0;
  for (const PieceSize& piece : pieces) {
    total += std::max(piece.request_bytes, piece.answer_bytes);
  }
  const uint64_t wanted =
      std::max<uint64_t>(kMinPartBytes, total / kMaxPartsPerCall);
  std::vector<MessageOfPieces> messages;
  size_t begin = 0;
  uint64_t request_bytes = 0;
  uint64_t answer_bytes = 0;
  const auto close = [&](size_t end) {
    if (begin < end) messages.push_back({begin, end});
    begin = end;
    request_bytes = 0;
    answer_bytes = 0;
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PieceSize& piece = pieces[i];
    if (piece.is_cut || i - begin == kMaxPartsPerMessage ||
        request_bytes + piece.request_bytes > max_message_bytes ||
        answer_bytes + piece.answer_bytes > max_message_bytes) {
      close(i);
    }
    request_bytes += piece.request_bytes;
    answer_bytes += piece.answer_bytes;
    if (piece.is_cut || std::max(request_bytes, answer_bytes) >= wanted) {
      close(i + 1);
    }
  }
  close(pieces.size());
  return messages;
}

// The bytes of ReadUsageResponse per key, which are more than the key: a state
// of one byte and five floats. Then its other bytes, or those of the request
// besides the table's name.
constexpr size_t kUsageBytes = 1 + 5 * sizeof(float);
constexpr size_t kMaxUsageHeaders = 64;

// How many keys each part of a ReadUsage has: as those of a pull, and no more
// than the server takes.
size_t KeysPerUsagePart(size_t num_keys, const std::string& table,
                        uint64_t max_message_bytes) {
  const uint64_t headers = kMaxUsageHeaders + table.size();
  const uint64_t room =
      max_message_bytes > headers ? max_message_bytes - headers : 0;
  return std::min<size_t>(KeysPerPart(num_keys, kUsageBytes, kMinPartBytes),
                          std::max<uint64_t>(1, room / kUsageBytes));
}

// Gradients shorter than this are copied into the message: a slice of their
// own costs more.
constexpr size_t kMinSharedBytes = 16 << 10;

// To the server each part of a push is a push of its own. Other writes have one
// part.
PushId IdOfPart(const PushId& id, size_t part) {
  return {id.client_id, id.sequence * kMaxPartsPerCall + part};
}

template <typename Request>
void NameTable(const TableRef& table, Request* request) {
  request->set_table(table.name);
  request->set_table_incarnation(table.incarnation);
}

class GrpcClient final : public ParameterClient {
 public:
  explicit GrpcClient(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)),
        groups_(NewGrpcGroupClient(connection_)) {}

  GroupClient& groups() override { return *groups_; }

  absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                     const TableIdentity& identity,
                                     uint64_t replaced_incarnation) override;
  absl::Status DropTable(const std::string& table) override;
  absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table) override;
  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    TFSWITCH_ASSIGN_OR_RETURN(const uint64_t id, connection_->Handshake());
    return std::vector<uint64_t>{id};
  }
  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override;
  std::unique_ptr<PendingCall> StartPush(
      absl::Span<const PushPart> parts) override;
  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           AssignResult* result) override;
  std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged) override;
  absl::StatusOr<int64_t> Erase(const TableRef& table,
                                absl::Span<const Key> keys) override;
  std::unique_ptr<PendingCall> StartShrink(const ShrinkArgs& args,
                                           ShrinkReport* report) override;
  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override;
  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override;
  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override;
  absl::Status SettleExport(const TableRef& table, const std::string& export_id,
                            bool is_published) override;
  absl::StatusOr<std::vector<std::string>> SaveShard(
      const SaveShardArgs& args) override;
  absl::StatusOr<int64_t> CommitCheckpoint(
      const CommitCheckpointArgs& args) override;
  absl::Status AbortSave(const std::string& path,
                         const std::string& save_id) override;
  absl::StatusOr<StagedRestore> StageRestore(
      const StageRestoreArgs& args) override;
  absl::Status CommitRestore(const std::string& restore_id,
                             bool abort) override;

 private:
  // Reads the stream of messages that start(context) begins, to its end. Only
  // its beginning is repeated, if the server is away.
  template <typename Response, typename Start>
  absl::Status ReadStream(
      const Start& start,
      const std::function<absl::Status(const Response&)>& visit);
  // An identity for a write that has none.
  PushId NextId() {
    return IdOfPart(
        {client_id_, next_sequence_.fetch_add(1, std::memory_order_relaxed)},
        0);
  }
  template <typename Request>
  void SetNextId(Request* request) {
    const PushId id = NextId();
    request->set_client_id(id.client_id);
    request->set_sequence(id.sequence);
  }
  std::unique_ptr<PendingCall> StartPullMessage(
      absl::Span<const PullPart> pulls);
  // One part of a ReadUsage.
  std::unique_ptr<PendingCall> StartReadUsage(const TableRef& table,
                                              absl::Span<const Key> keys,
                                              float day,
                                              absl::Span<UsageOfRow> usage,
                                              absl::Span<KeyState> states,
                                              absl::Duration timeout);
  absl::StatusOr<grpc::ByteBuffer> EncodePushes(
      absl::Span<const PushArgs> pushes) const;

  const std::shared_ptr<Connection> connection_;
  const std::unique_ptr<GroupClient> groups_;
  // Not that of pushes, which would drive other writes out of the server's
  // window.
  const uint64_t client_id_ = DrawId();
  std::atomic<uint64_t> next_sequence_{1};
};

absl::StatusOr<uint64_t> GrpcClient::MakeTable(const TableConfig& config,
                                               const TableIdentity& identity,
                                               uint64_t replaced_incarnation) {
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  v1::CreateTableRequest request;
  request.set_protocol_version(connection_->options().protocol_version);
  *request.mutable_config() = ToProto(config);
  request.set_table_incarnation(identity.incarnation);
  request.mutable_shard_instances()->Add(identity.shard_instances.begin(),
                                         identity.shard_instances.end());
  request.set_replaced_incarnation(replaced_incarnation);
  SetNextId(&request);
  v1::CreateTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(
      CallKind::kIdempotent, "CreateTable", request, &response));
  return response.table_incarnation();
}

absl::Status GrpcClient::DropTable(const std::string& table) {
  v1::DropTableRequest request;
  request.set_table(table);
  SetNextId(&request);
  v1::DropTableResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(
      CallKind::kIdempotent, "DropTable", request, &response,
      v1::ParameterServer::service_full_name(), absl::InfiniteDuration(),
      absl::StrCat("The drop of table '", table, "'")));
  if (response.dropped()) return absl::OkStatus();
  return absl::NotFoundError(absl::StrCat("no table '", table, "' on shard ",
                                          connection_->options().shard_index));
}

absl::StatusOr<std::vector<TableInfo>> GrpcClient::ListTables(
    const TableRef& table) {
  v1::ListTablesRequest request;
  NameTable(table, &request);
  v1::ListTablesResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(CallKind::kIdempotent,
                                             "ListTables", request, &response));
  std::vector<TableInfo> tables;
  for (const v1::TableInfo& info : response.tables()) {
    tables.push_back(FromProto(info));
  }
  return tables;
}

std::unique_ptr<PendingCall> GrpcClient::StartPull(
    absl::Span<const PullPart> parts) {
  std::vector<PullPart> pieces;
  std::vector<PieceSize> sizes;
  for (const PullPart& part : parts) {
    const PullArgs& args = part.args;
    if (absl::Status status = CheckSize(args.table, args.keys.size(), args.dim,
                                        part.target().num_floats());
        !status.ok()) {
      return Done(std::move(status));
    }
    const size_t width = static_cast<size_t>(args.dim);
    const size_t keys_per_piece =
        KeysPerPart(args.keys.size(), width * sizeof(float), kMinPartBytes);
    size_t begin = 0;
    do {
      PullPart piece = part;
      piece.args.keys = args.keys.subspan(begin, keys_per_piece);
      if (part.places.empty()) {
        piece.embeddings =
            part.embeddings.subspan(begin * width, piece.num_floats());
      } else {
        piece.places = part.places.subspan(begin, keys_per_piece);
      }
      sizes.push_back(SizeOfPull(piece, keys_per_piece < args.keys.size()));
      pieces.push_back(std::move(piece));
      begin += keys_per_piece;
    } while (begin < args.keys.size());
  }
  std::vector<std::unique_ptr<PendingCall>> calls;
  for (const MessageOfPieces& message :
       PackPieces(sizes, connection_->max_message_bytes())) {
    calls.push_back(StartPullMessage(absl::MakeConstSpan(pieces).subspan(
        message.begin, message.end - message.begin)));
  }
  if (calls.size() == 1) return std::move(calls[0]);
  return std::make_unique<JoinedCalls>(std::move(calls));
}

std::unique_ptr<PendingCall> GrpcClient::StartPullMessage(
    absl::Span<const PullPart> pulls) {
  if (pulls.empty()) return Done(absl::OkStatus());
  std::vector<uint64_t> lengths;
  std::vector<std::string> tables;
  std::vector<RowTarget> targets;
  uint64_t bytes = 0;
  uint64_t answer_bytes = 0;
  for (const PullPart& pull : pulls) {
    lengths.push_back(PullRequestBytes(pull.args));
    const PieceSize size = SizeOfPull(pull, /*is_cut=*/false);
    bytes += size.request_bytes;
    answer_bytes += size.answer_bytes;
    tables.push_back(pull.args.table);
    targets.push_back(pull.target());
  }
  absl::Status fits = connection_->CheckSize(
      std::max(bytes, answer_bytes),
      Describe("a pull of", "from", pulls[0].args, pulls.size()));
  if (!fits.ok()) return Done(std::move(fits));
  OutgoingMessage message(bytes);
  if (message.data() == nullptr) return Done(NoMemory(bytes));
  char* to = message.data();
  for (size_t i = 0; i < pulls.size(); ++i) {
    to += WritePartHeader(lengths[i], to);
    WritePullRequest(pulls[i].args, to);
    to += lengths[i];
  }
  auto read = [connection = connection_.get(), tables,
               targets](MessagePieces pieces) -> absl::Status {
    std::vector<uint64_t> received;
    TFSWITCH_RETURN_IF_ERROR(
        connection->Blame(ReadPullManyResponse(pieces, targets, &received)));
    if (received.size() != targets.size()) {
      return connection->Blame(absl::InvalidArgumentError(absl::StrCat(
          "expected ", targets.size(), " answers, got ", received.size())));
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      if (received[i] == targets[i].num_floats()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("table '", tables[i], "': expected ",
                       targets[i].num_floats(), " floats, the server sent ",
                       received[i], "; is the table's dim another one?"));
    }
    return absl::OkStatus();
  };
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "PullMany",
      std::move(message).ToByteBuffer(), std::move(read));
}

std::unique_ptr<PendingCall> GrpcClient::StartPush(
    absl::Span<const PushPart> parts) {
  std::vector<PushArgs> pieces;
  std::vector<PieceSize> sizes;
  std::vector<size_t> owners;
  std::vector<PushResult*> sums;
  for (const PushPart& part : parts) {
    const PushArgs& args = part.args;
    const size_t width = static_cast<size_t>(args.dim);
    // The gradients of one key must meet on the server, to be summed, and those
    // of one step, where a round is applied or a step is one of all rows.
    const bool may_be_cut =
        args.keys_are_unique && args.step.group.empty() && !args.is_dense;
    const bool fits_whole =
        PartBytes(PushRequestBytes(args)) <= connection_->max_message_bytes();
    const size_t keys_per_piece =
        may_be_cut ? KeysPerPart(args.keys.size(), width * sizeof(float),
                                 fits_whole ? kMinPushPartBytes : kMinPartBytes)
                   : args.keys.size();
    const bool is_split = keys_per_piece < args.keys.size();
    if ((is_split || parts.size() > 1) && !args.is_checked) {
      if (absl::Status status = CheckPush(args); !status.ok()) {
        return Done(std::move(status));
      }
    }
    size_t begin = 0;
    size_t num_pieces = 0;
    do {
      PushArgs piece = args;
      piece.id = IdOfPart(args.id, num_pieces++);
      if (is_split) {
        piece.keys = args.keys.subspan(begin, keys_per_piece);
        piece.gradients =
            args.gradients.subspan(begin * width, piece.keys.size() * width);
        piece.observations =
            args.observations.subspan(begin, piece.keys.size());
      }
      sizes.push_back(SizeOfPush(piece, is_split));
      pieces.push_back(std::move(piece));
      owners.push_back(sums.size());
      begin += keys_per_piece;
    } while (begin < args.keys.size());
    sums.push_back(part.result);
  }
  if (pieces.empty()) return Done(absl::OkStatus());
  const std::vector<MessageOfPieces> messages =
      PackPieces(sizes, connection_->max_message_bytes());
  // All messages must be there before the first one goes.
  std::vector<grpc::ByteBuffer> requests;
  for (const MessageOfPieces& message : messages) {
    absl::StatusOr<grpc::ByteBuffer> request =
        EncodePushes(absl::MakeConstSpan(pieces).subspan(
            message.begin, message.end - message.begin));
    if (!request.ok()) return Done(std::move(request).status());
    requests.push_back(*std::move(request));
  }
  auto all = std::make_unique<PushMessages>(std::move(owners), std::move(sums));
  for (size_t i = 0; i < messages.size(); ++i) {
    const size_t num_pushes = messages[i].end - messages[i].begin;
    PushResult* const results = all->result(messages[i].begin);
    CallKind kind = CallKind::kIdempotent;
    std::vector<std::string> tables;
    for (size_t k = messages[i].begin; k < messages[i].end; ++k) {
      if (pieces[k].id.client_id == 0) kind = CallKind::kOnce;
      tables.push_back(pieces[k].table);
    }
    const char* const write =
        messages.size() == 1 ? "The push to " : "A part of the push to ";
    all->calls.push_back(std::make_unique<RowCall>(
        connection_, kind, "PushMany", requests[i],
        [connection = connection_.get(), num_pushes,
         results](MessagePieces pieces) -> absl::Status {
          std::vector<PushResult> received;
          TFSWITCH_RETURN_IF_ERROR(
              connection->Blame(ReadPushManyResponse(pieces, &received)));
          if (received.size() != num_pushes) {
            return connection->Blame(absl::InvalidArgumentError(
                absl::StrCat("PushManyResponse: ", received.size(),
                             " results of ", num_pushes, " pushes")));
          }
          std::copy(received.begin(), received.end(), results);
          return absl::OkStatus();
        },
        absl::InfiniteDuration(), write, std::move(tables)));
  }
  return all;
}

absl::StatusOr<grpc::ByteBuffer> GrpcClient::EncodePushes(
    absl::Span<const PushArgs> pushes) const {
  std::vector<uint64_t> lengths;
  uint64_t total = 0;
  for (const PushArgs& push : pushes) {
    lengths.push_back(PushRequestBytes(push));
    total += PartBytes(lengths.back());
  }
  TFSWITCH_RETURN_IF_ERROR(connection_->CheckSize(
      total, Describe("a push of", "to", pushes[0], pushes.size())));
  std::vector<grpc::Slice> slices;
  for (size_t i = 0; i < pushes.size(); ++i) {
    const PushArgs& push = pushes[i];
    const size_t gradient_bytes = push.gradients.size() * sizeof(float);
    const bool is_shared =
        push.gradients_owner != nullptr && gradient_bytes >= kMinSharedBytes;
    const size_t header_bytes = PartBytes(lengths[i]) - lengths[i];
    const uint64_t copied =
        header_bytes + (is_shared ? PushRequestHeadBytes(push) : lengths[i]);
    OutgoingMessage message(copied);
    if (message.data() == nullptr) return NoMemory(copied);
    WritePartHeader(lengths[i], message.data());
    if (is_shared) {
      WritePushRequestHead(push, message.data() + header_bytes);
    } else {
      WritePushRequest(push, message.data() + header_bytes);
    }
    slices.push_back(std::move(message).ToSlice());
    if (!is_shared) continue;
    slices.push_back(ShareBytes(push.gradients.data(), gradient_bytes,
                                push.gradients_owner));
    slices.emplace_back(PushRequestTail(push));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

std::unique_ptr<PendingCall> GrpcClient::StartAssign(const AssignArgs& assign,
                                                     AssignResult* result) {
  AssignArgs args = assign;
  args.id = args.id.client_id == 0 ? NextId() : IdOfPart(args.id, 0);
  const uint64_t bytes = AssignRequestBytes(args);
  absl::Status fits = connection_->CheckSize(
      bytes, absl::StrCat("an assignment of ", args.keys.size(),
                          " keys to table '", args.table, "'"));
  if (!fits.ok()) return Done(std::move(fits));
  OutgoingMessage message(bytes);
  if (message.data() == nullptr) return Done(NoMemory(bytes));
  WriteAssignRequest(args, message.data());
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "Assign",
      std::move(message).ToByteBuffer(),
      [connection = connection_.get(), result](MessagePieces pieces) {
        return connection->Blame(ReadAssignResponse(pieces, result));
      },
      absl::InfiniteDuration(), "The assignment to ", std::vector{args.table});
}

std::unique_ptr<PendingCall> GrpcClient::StartCommitRound(
    int, const std::string& group, const Round& round, int64_t* committed,
    const std::vector<TableRef>& staged) {
  v1::CommitRoundRequest request;
  request.set_group(group);
  *request.mutable_round() = ToProto(round);
  for (const TableRef& table : staged) {
    (*request.mutable_table_incarnations())[table.name] = table.incarnation;
  }
  absl::StatusOr<grpc::ByteBuffer> message =
      connection_->Encode("CommitRound", request);
  if (!message.ok()) return Done(std::move(message).status());
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "CommitRound", *message,
      [connection = connection_.get(),
       committed](MessagePieces pieces) -> absl::Status {
        v1::CommitRoundResponse response;
        TFSWITCH_RETURN_IF_ERROR(connection->Blame(
            ParseProto("CommitRoundResponse", pieces, &response)));
        *committed = response.committed_round();
        absl::Status error(static_cast<absl::StatusCode>(response.error_code()),
                           response.error_message());
        const uint64_t newer = response.newer_group_instance();
        return newer != 0 ? ErrorOfOlderGroup(std::move(error), newer)
                          : ErrorOfAppliedRound(std::move(error));
      });
}

absl::StatusOr<int64_t> GrpcClient::Erase(const TableRef& table,
                                          absl::Span<const Key> keys) {
  v1::EraseRequest request;
  NameTable(table, &request);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  SetNextId(&request);
  v1::EraseResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(
      CallKind::kIdempotent, "Erase", request, &response,
      v1::ParameterServer::service_full_name(), absl::InfiniteDuration(),
      absl::StrCat("The erasure from table '", table.name, "'")));
  return response.erased_rows();
}

std::unique_ptr<PendingCall> GrpcClient::StartShrink(const ShrinkArgs& args,
                                                     ShrinkReport* report) {
  v1::ShrinkRequest request;
  NameTable({args.table, args.table_incarnation}, &request);
  if (args.rules.has_value()) *request.mutable_rules() = ToProto(*args.rules);
  if (args.day >= 0.0f) request.set_day(args.day);
  request.set_dry_run(args.dry_run);
  absl::StatusOr<grpc::ByteBuffer> message =
      connection_->Encode("Shrink", request);
  if (!message.ok()) return Done(std::move(message).status());
  return std::make_unique<RowCall>(
      connection_, CallKind::kBulk, "Shrink", *message,
      [connection = connection_.get(),
       report](MessagePieces pieces) -> absl::Status {
        v1::ShrinkResponse response;
        TFSWITCH_RETURN_IF_ERROR(
            connection->Blame(ParseProto("ShrinkResponse", pieces, &response)));
        *report = FromProto(response);
        return absl::OkStatus();
      },
      absl::InfiniteDuration(), args.dry_run ? nullptr : "The shrink of ",
      std::vector{args.table});
}

std::unique_ptr<PendingCall> GrpcClient::StartReadUsage(
    const TableRef& table, absl::Span<const Key> keys, float day,
    absl::Span<UsageOfRow> usage, absl::Span<KeyState> states,
    absl::Duration timeout) {
  v1::ReadUsageRequest request;
  NameTable(table, &request);
  request.mutable_keys()->Add(keys.begin(), keys.end());
  if (day >= 0.0f) request.set_day(day);
  absl::StatusOr<grpc::ByteBuffer> message =
      connection_->Encode("ReadUsage", request);
  if (!message.ok()) return Done(std::move(message).status());
  return std::make_unique<RowCall>(
      connection_, CallKind::kIdempotent, "ReadUsage", *message,
      [connection = connection_.get(), usage,
       states](MessagePieces pieces) -> absl::Status {
        v1::ReadUsageResponse response;
        TFSWITCH_RETURN_IF_ERROR(connection->Blame(
            ParseProto("ReadUsageResponse", pieces, &response)));
        return connection->Blame(FromProto(response, usage, states));
      },
      timeout);
}

absl::Status GrpcClient::ReadUsage(const TableRef& table,
                                   absl::Span<const Key> keys, float day,
                                   absl::Span<UsageOfRow> usage,
                                   absl::Span<KeyState> states) {
  const absl::Time deadline = absl::Now() + connection_->options().timeout;
  const size_t keys_per_part = KeysPerUsagePart(
      keys.size(), table.name, connection_->max_message_bytes());
  absl::Status first;
  std::deque<std::unique_ptr<PendingCall>> in_flight;
  const auto end_oldest = [&] {
    first.Update(in_flight.front()->Wait());
    in_flight.pop_front();
  };
  size_t begin = 0;
  do {
    if (in_flight.size() == kMaxPartsPerCall) end_oldest();
    if (!first.ok()) break;
    in_flight.push_back(StartReadUsage(
        table, keys.subspan(begin, keys_per_part), day,
        usage.subspan(begin, keys_per_part),
        states.subspan(begin, keys_per_part), deadline - absl::Now()));
    begin += keys_per_part;
  } while (begin < keys.size());
  // They write to the caller's memory.
  while (!in_flight.empty()) end_oldest();
  return first;
}

template <typename Response, typename Start>
absl::Status GrpcClient::ReadStream(
    const Start& start,
    const std::function<absl::Status(const Response&)>& visit) {
  const GrpcClientOptions& options = connection_->options();
  RetryClock clock(options.timeout);
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(ToDeadline(clock.start() + options.bulk_timeout));
    const auto reader = start(&context);
    Response message;
    bool visited = false;
    while (reader->Read(&message)) {
      visited = true;
      absl::Status status = visit(message);
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
    if (!absl::IsUnavailable(error)) return error;
    const std::optional<absl::Time> next = clock.NextTry();
    if (!next.has_value()) return error;
    PollUntil(*next);
  }
}

absl::Status GrpcClient::Export(
    const TableRef& table, bool with_slots,
    const std::function<absl::Status(const RowChunk&)>& visit) {
  v1::ExportRequest request;
  NameTable(table, &request);
  request.set_with_slots(with_slots);
  return ReadStream<v1::ExportResponse>(
      [&](grpc::ClientContext* context) {
        return connection_->stub().Export(context, request);
      },
      [&](const v1::ExportResponse& chunk) {
        return visit(RowChunk{
            absl::MakeConstSpan(chunk.keys().data(), chunk.keys_size()),
            absl::MakeConstSpan(chunk.values().data(), chunk.values_size()),
            absl::MakeConstSpan(chunk.slots().data(), chunk.slots_size())});
      });
}

absl::StatusOr<std::vector<ChangeCursor>> GrpcClient::ExportChanges(
    const ExportChangesArgs& args,
    const std::function<absl::Status(const ChangeChunk&)>& visit) {
  v1::ExportChangesRequest request;
  NameTable({args.table, args.table_incarnation}, &request);
  if (!args.since.empty()) {
    request.mutable_since()->set_log_id(args.since[0].log_id);
    request.mutable_since()->set_epoch(args.since[0].epoch);
  }
  if (args.rule.has_value()) {
    request.mutable_rule()->set_base_threshold(args.rule->base_threshold);
    request.mutable_rule()->set_delta_threshold(args.rule->delta_threshold);
    request.mutable_rule()->set_delta_keep_days(args.rule->delta_keep_days);
    request.set_export_id(args.export_id);
  }
  if (args.day >= 0.0f) request.set_day(args.day);
  std::vector<ChangeCursor> cursors;
  TFSWITCH_RETURN_IF_ERROR(ReadStream<v1::ExportChangesResponse>(
      [&](grpc::ClientContext* context) {
        return connection_->stub().ExportChanges(context, request);
      },
      [&](const v1::ExportChangesResponse& chunk) -> absl::Status {
        if (chunk.has_cursor()) {
          cursors = {{chunk.cursor().log_id(), chunk.cursor().epoch()}};
          return absl::OkStatus();
        }
        return visit(ChangeChunk{
            absl::MakeConstSpan(chunk.keys().data(), chunk.keys_size()),
            absl::MakeConstSpan(chunk.values().data(), chunk.values_size()),
            /*delta_scores=*/{},
            absl::MakeConstSpan(chunk.removed().data(), chunk.removed_size())});
      }));
  if (cursors.empty()) {
    return connection_->Blame(absl::InternalError(
        "ExportChangesResponse: expected a cursor at the end, got none"));
  }
  return cursors;
}

absl::Status GrpcClient::SettleExport(const TableRef& table,
                                      const std::string& export_id,
                                      bool is_published) {
  v1::SettleExportRequest request;
  NameTable(table, &request);
  request.set_export_id(export_id);
  request.set_is_published(is_published);
  v1::SettleExportResponse response;
  return connection_->Call(CallKind::kBulk, "SettleExport", request, &response);
}

absl::StatusOr<std::vector<std::string>> GrpcClient::SaveShard(
    const SaveShardArgs& args) {
  v1::SaveShardRequest request;
  request.set_path(args.path);
  for (const TableRef& table : args.tables) {
    request.add_tables(table.name);
    request.add_table_incarnations(table.incarnation);
  }
  request.set_save_id(args.save_id);
  request.set_all_tables(args.all_tables);
  v1::SaveShardResponse response;
  TFSWITCH_RETURN_IF_ERROR(
      connection_->Call(CallKind::kBulk, "SaveShard", request, &response));
  return std::vector<std::string>{response.manifest_part()};
}

absl::StatusOr<int64_t> GrpcClient::CommitCheckpoint(
    const CommitCheckpointArgs& args) {
  v1::CommitCheckpointRequest request;
  request.set_path(args.path);
  request.set_save_id(args.save_id);
  for (const std::string& part : args.manifest_parts) {
    request.add_manifest_parts(part);
  }
  request.set_keep(static_cast<uint32_t>(args.keep));
  for (const std::string& table : args.dropped_tables) {
    request.add_dropped_tables(table);
  }
  v1::CommitCheckpointResponse response;
  TFSWITCH_RETURN_IF_ERROR(connection_->Call(
      CallKind::kBulk, "CommitCheckpoint", request, &response));
  return response.save();
}

absl::Status GrpcClient::AbortSave(const std::string& path,
                                   const std::string& save_id) {
  v1::AbortSaveRequest request;
  request.set_path(path);
  request.set_save_id(save_id);
  v1::AbortSaveResponse response;
  return connection_->Call(CallKind::kIdempotent, "AbortSave", request,
                           &response);
}

absl::StatusOr<StagedRestore> GrpcClient::StageRestore(
    const StageRestoreArgs& args) {
  v1::StageRestoreRequest request;
  request.set_path(args.path);
  for (const std::string& table : args.tables) request.add_tables(table);
  request.set_restore_id(args.restore_id);
  request.set_save(args.save);
  request.set_newer_than(static_cast<uint32_t>(args.newer_than));
  request.mutable_table_incarnations()->insert(args.incarnations.begin(),
                                               args.incarnations.end());
  request.set_new_incarnation(args.new_incarnation);
  request.mutable_shard_instances()->Add(args.shard_instances.begin(),
                                         args.shard_instances.end());
  v1::StageRestoreResponse response;
  TFSWITCH_RETURN_IF_ERROR(
      connection_->Call(CallKind::kBulk, "StageRestore", request, &response));
  StagedRestore staged;
  staged.tables = {response.tables().begin(), response.tables().end()};
  staged.num_rows = response.num_rows();
  staged.save = response.save();
  return staged;
}

absl::Status GrpcClient::CommitRestore(const std::string& restore_id,
                                       bool abort) {
  v1::CommitRestoreRequest request;
  request.set_restore_id(restore_id);
  request.set_abort(abort);
  v1::CommitRestoreResponse response;
  return connection_->Call(CallKind::kBulk, "CommitRestore", request, &response,
                           v1::ParameterServer::service_full_name(),
                           absl::InfiniteDuration(),
                           abort ? "" : "The restore");
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
      options.bulk_timeout <= absl::ZeroDuration() ||
      options.connect_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "timeouts must be positive, got timeout ",
        absl::FormatDuration(options.timeout), ", bulk_timeout ",
        absl::FormatDuration(options.bulk_timeout), " and connect_timeout ",
        absl::FormatDuration(options.connect_timeout)));
  }
  PrepareProcess();
  GrpcClientOptions canonical = options;
  canonical.address = address.ToString();
  auto connection = std::make_shared<Connection>(canonical);
  TFSWITCH_RETURN_IF_ERROR(
      connection->Handshake(absl::Now() + options.connect_timeout).status());
  return std::make_unique<GrpcClient>(std::move(connection));
}

}  // namespace tfswitch
