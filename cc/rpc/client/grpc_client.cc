// A pull or push of many keys is sent in pieces, so that the server works on
// one piece while the next one is on its way. PackPieces() packs short pieces
// into one message. A push is divided only if the server does not need all its
// gradients together. All messages of a push are made before the first one is
// sent, so that an error while making one leaves nothing applied.
//
// Rows are copied directly from an answer to their final places. A long array
// of float32 gradients is sent without a copy if its owner is known; other
// gradients and all keys are copied. Control calls are protobuf messages,
// because they are short or rare. The type of a request determines the method
// and its service.

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
#include "absl/strings/strip.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"
#include "cc/rpc/address.h"
#include "cc/rpc/byte_buffers.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/client/call_trace.h"
#include "cc/rpc/client/connection.h"
#include "cc/rpc/client/seen_rows.h"
#include "cc/rpc/deadlines.h"
#include "cc/rpc/process_settings.h"
#include "cc/wire/codec.h"
#include "cc/wire/report_conversion.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {
namespace {

absl::Status NoMemory(uint64_t bytes) {
  return absl::ResourceExhaustedError(
      absl::StrCat("no memory for a request of ", bytes, " bytes"));
}

// Names tables, for example "table 'a'", or "tables 'a', 'b', 'c' and 5 more".
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

// Describes a call, for example "a pull of 3 keys from table 'a'"; for a call
// with more tables, adds for example " and 2 more".
template <typename Request>
std::string Describe(const char* call, const char* direction,
                     const Request& first, size_t num_tables) {
  return absl::StrCat(
      call, " ", first.keys.size(), " keys ", direction, " table '",
      first.table, "'",
      num_tables > 1 ? absl::StrCat(" and ", num_tables - 1, " more") : "");
}

// Describes what a call does to tables. If the server does not answer, the
// error contains this text.
struct Write {
  // A text such as "The push to ", after which the tables are named. Without
  // tables, the whole text. Null if the call writes nothing that the user would
  // miss.
  const char* effect = nullptr;
  std::vector<std::string> tables;
};

// A call in flight.
class ServerCall final : public PendingCall {
 public:
  using ReadResponse = std::function<absl::Status(grpc::ByteBuffer*)>;

  // `call` are the arguments of UnaryCall.
  template <typename... Call>
  ServerCall(Write write, ReadResponse read_response, Call&&... call)
      : write_(std::move(write)),
        read_response_(std::move(read_response)),
        call_(std::forward<Call>(call)...) {}

  absl::Status Wait() override {
    grpc::ByteBuffer response;
    absl::Status status = call_.Wait(&response);
    if (status.ok()) return read_response_(&response);
    if (write_.effect == nullptr) return status;
    const std::string tables =
        write_.tables.empty() ? "" : NameTables(write_.tables);
    return call_.ExplainWrite(status, absl::StrCat(write_.effect, tables));
  }

 private:
  const Write write_;
  const ReadResponse read_response_;
  UnaryCall call_;
};

// Lists the pieces of a message. The list is valid until this thread calls the
// function again.
MessagePieces PiecesOf(grpc::ByteBuffer* response) {
  thread_local std::vector<absl::string_view> pieces;
  ListPieces(response, &pieces);
  return pieces;
}

// Whether the time of a call grows with the table.
bool IsBulk(absl::string_view method) {
  static constexpr absl::string_view kBulk[] = {
      "Shrink",           "CommitExport", "SaveShard",
      "CommitCheckpoint", "StageRestore", "CommitRestore"};
  return std::find(std::begin(kBulk), std::end(kBulk), method) !=
         std::end(kBulk);
}

Write WriteOf(const google::protobuf::Message& any) {
  using google::protobuf::DynamicCastToGenerated;
  if (const auto* erase = DynamicCastToGenerated<v1::EraseRequest>(&any)) {
    return {"The erasure from ", {erase->table()}};
  }
  if (const auto* drop = DynamicCastToGenerated<v1::DropTableRequest>(&any)) {
    return {"The drop of ", {drop->table()}};
  }
  const auto* shrink = DynamicCastToGenerated<v1::ShrinkRequest>(&any);
  if (shrink != nullptr && !shrink->dry_run()) {
    return {"The shrink of ", {shrink->table()}};
  }
  const auto* restore = DynamicCastToGenerated<v1::CommitRestoreRequest>(&any);
  if (restore != nullptr && !restore->abort()) return {"The restore", {}};
  return {};
}

// The messages of pushes that are being sent, and the results of their pieces.
class PushMessages final : public PendingCall {
 public:
  // Piece i belongs to push owners[i]. The results of a push's pieces are added
  // up in the push's element of `sums`.
  PushMessages(std::vector<size_t> owners, std::vector<WriteResult*> sums)
      : owners_(std::move(owners)),
        sums_(std::move(sums)),
        results_(new WriteResult[owners_.size()]) {}

  absl::Status Wait() override {
    TFSWITCH_RETURN_IF_ERROR(JoinedCalls(std::move(calls)).Wait());
    for (WriteResult* sum : sums_) *sum = WriteResult();
    for (size_t i = 0; i < owners_.size(); ++i) {
      sums_[owners_[i]]->Add(results_[i]);
    }
    return absl::OkStatus();
  }

  WriteResult* result(size_t piece) { return &results_[piece]; }

 private:
  const std::vector<size_t> owners_;
  const std::vector<WriteResult*> sums_;
  const std::unique_ptr<WriteResult[]> results_;

 public:
  // Declared last, so that it is destroyed first: calls that nobody waits for
  // must end before their results are destroyed.
  std::vector<std::unique_ptr<PendingCall>> calls;
};

// How many keys each part of a call has. Several parts save time: while the
// sender still sends one part, the receiver works on the one before, which is
// still in the receiver's cache.
size_t KeysPerPart(size_t num_keys, size_t row_bytes, size_t min_part_bytes) {
  const size_t num_parts = std::clamp<size_t>(
      num_keys * row_bytes / min_part_bytes, 1, kMaxPartsPerCall);
  return (num_keys + num_parts - 1) / num_parts;
}

// The size of a piece: of a whole call for one table, or of one part of a long
// call. It is the number of bytes that the piece takes in a message of several
// pieces.
struct PieceSize {
  uint64_t request_bytes;
  uint64_t answer_bytes;
  bool is_cut;
};

PieceSize SizeOfPull(const PullPart& pull, bool is_cut) {
  return {PartBytes(PullRequestBytes(pull.args)),
          PartBytes(PullResponseBytes(pull.num_floats(), pull.args.wire_dtype)),
          is_cut};
}

PieceSize SizeOfPush(const PushArgs& push, bool is_cut) {
  // Ignores the answer: its two numbers have fewer bytes than the request.
  return {PartBytes(PushRequestBytes(push)), 0, is_cut};
}

// Groups pieces into messages. A part of a long call is sent alone. Other
// pieces share a message until the message, or its answer, is as long as a part
// of a long call. No message is longer than the server accepts. If a single
// piece is too long, the encoder reports an error.
template <typename Piece>
std::vector<absl::Span<const Piece>> PackPieces(
    const std::vector<Piece>& pieces, const std::vector<PieceSize>& sizes,
    uint64_t max_message_bytes) {
  uint64_t total = 0;
  for (const PieceSize& size : sizes) {
    total += std::max(size.request_bytes, size.answer_bytes);
  }
  const uint64_t wanted =
      std::max<uint64_t>(kMinPartBytes, total / kMaxPartsPerCall);
  std::vector<absl::Span<const Piece>> messages;
  size_t begin = 0;
  uint64_t request_bytes = 0;
  uint64_t answer_bytes = 0;
  const auto close = [&](size_t end) {
    if (begin < end) messages.emplace_back(&pieces[begin], end - begin);
    begin = end;
    request_bytes = 0;
    answer_bytes = 0;
  };
  for (size_t i = 0; i < pieces.size(); ++i) {
    const PieceSize& size = sizes[i];
    if (size.is_cut || i - begin == kMaxPartsPerMessage ||
        request_bytes + size.request_bytes > max_message_bytes ||
        answer_bytes + size.answer_bytes > max_message_bytes) {
      close(i);
    }
    request_bytes += size.request_bytes;
    answer_bytes += size.answer_bytes;
    if (size.is_cut || std::max(request_bytes, answer_bytes) >= wanted) {
      close(i + 1);
    }
  }
  close(pieces.size());
  return messages;
}

// The bytes that a key takes in a ReadUsageResponse: a state of one byte, and
// five floats. In the request a key takes fewer. The rest of either message,
// without the table's name, has at most kMaxUsageHeaders bytes.
constexpr size_t kUsageBytes = 1 + 5 * sizeof(float);
constexpr size_t kMaxUsageHeaders = 64;

// How many keys each part of a ReadUsage call has: as many as in a part of a
// pull, but no more than fit in a message that the server accepts.
size_t KeysPerUsagePart(size_t num_keys, const std::string& table,
                        uint64_t max_message_bytes) {
  const uint64_t headers = kMaxUsageHeaders + table.size();
  const uint64_t room =
      max_message_bytes > headers ? max_message_bytes - headers : 0;
  return std::min<size_t>(KeysPerPart(num_keys, kUsageBytes, kMinPartBytes),
                          std::max<uint64_t>(1, room / kUsageBytes));
}

// Arrays of gradients with fewer bytes are copied into the message: to pass one
// as a separate slice would cost more than the copy.
constexpr size_t kMinSharedBytes = 16 << 10;

// The server treats each part of a push as a separate push, so each part needs
// an id of its own. Other writes are sent as one part.
PushId IdOfPart(const PushId& id, size_t part) {
  return {id.client_id, id.sequence * kMaxPartsPerCall + part};
}

// Appends the pieces of a push. Each piece fits in a message of
// `max_message_bytes`.
void CutPush(const PushArgs& args, uint64_t max_message_bytes,
             std::vector<PushArgs>* pieces, std::vector<PieceSize>* sizes) {
  const auto width = static_cast<size_t>(args.dim);
  // A push is not divided in two cases: if keys repeat, because the server sums
  // the gradients of a key; and if the server needs all gradients of a step
  // together, because it applies whole rounds or because each step moves all
  // rows.
  const bool may_be_cut =
      args.keys_are_unique && args.step.group.empty() && !args.is_dense;
  const bool fits_whole =
      PartBytes(PushRequestBytes(args)) <= max_message_bytes;
  const size_t keys_per_piece =
      may_be_cut
          ? KeysPerPart(args.keys.size(), WireBytes(width, args.wire_dtype),
                        fits_whole ? kMinPushPartBytes : kMinPartBytes)
          : args.keys.size();
  const bool is_split = keys_per_piece < args.keys.size();
  size_t begin = 0;
  size_t num_pieces = 0;
  do {
    PushArgs piece = args;
    piece.id = IdOfPart(args.id, num_pieces++);
    if (is_split) {
      piece.keys = args.keys.subspan(begin, keys_per_piece);
      piece.gradients =
          args.gradients.subspan(begin * width, piece.keys.size() * width);
      piece.observations = args.observations.subspan(begin, piece.keys.size());
    }
    sizes->push_back(SizeOfPush(piece, is_split));
    pieces->push_back(std::move(piece));
    begin += keys_per_piece;
  } while (begin < args.keys.size());
}

class GrpcClient final : public ParameterClient {
 public:
  explicit GrpcClient(std::shared_ptr<Connection> connection)
      : connection_(std::move(connection)) {}

  std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) override;
  absl::Duration timeout() const override {
    return connection_->options().timeout;
  }
  absl::Status AsServerFault(const absl::Status& malformed) const override {
    return connection_->AsServerFault(malformed);
  }
  PushId NextWriteId() override {
    return IdOfPart(
        {client_id_, next_sequence_.fetch_add(1, std::memory_order_relaxed)},
        0);
  }
  absl::StatusOr<std::vector<uint64_t>> ShardInstances() override {
    TFSWITCH_ASSIGN_OR_RETURN(const auto server, connection_->Handshake());
    return std::vector<uint64_t>{server.instance_id()};
  }
  absl::StatusOr<std::vector<v1::HandshakeResponse>> AskServers() override {
    TFSWITCH_ASSIGN_OR_RETURN(auto server, connection_->Handshake());
    return std::vector<v1::HandshakeResponse>{std::move(server)};
  }
  RowChanges ChangesOf(const std::string& table) const override {
    return seen_->ChangesOf(table);
  }
  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override;
  std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) override;
  std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                           WriteResult* result) override;
  absl::Status ReadUsage(const TableRef& table, absl::Span<const Key> keys,
                         float day, absl::Span<UsageOfRow> usage,
                         absl::Span<KeyState> states) override;
  absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) override;
  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override;

 private:
  // Opens a stream of a method and reads all its messages. If the connection is
  // lost after the first message, the stream is not opened again.
  template <typename Request, typename Response>
  absl::Status ReadStream(
      const char* method,
      std::unique_ptr<grpc::ClientReader<Response>> (
          v1::ParameterServer::Stub::*start)(grpc::ClientContext*,
                                             const Request&),
      const Request& request,
      const std::function<absl::Status(const Response&)>& visit);
  std::unique_ptr<PendingCall> StartPullMessage(
      absl::Span<const PullPart> pulls);
  absl::StatusOr<grpc::ByteBuffer> EncodePushes(
      absl::Span<const PushArgs> pushes) const;

  const std::shared_ptr<Connection> connection_;
  const std::shared_ptr<SeenRows> seen_ = std::make_shared<SeenRows>();
  // The client id of control writes. It is not that of pushes: the server
  // remembers a limited number of writes per client, and pushes would displace
  // control writes.
  const uint64_t client_id_ = DrawId();
  std::atomic<uint64_t> next_sequence_{1};
};

std::unique_ptr<PendingCall> GrpcClient::StartCall(
    const google::protobuf::Message& request,
    google::protobuf::Message* response, absl::Duration timeout) {
  const google::protobuf::Descriptor* const type = request.GetDescriptor();
  // "Erase" of "EraseRequest".
  const std::string method(absl::StripSuffix(type->name(), "Request"));
  absl::StatusOr<grpc::ByteBuffer> message =
      connection_->Encode(method, request);
  if (!message.ok()) return Done(std::move(message).status());
  return std::make_unique<ServerCall>(
      WriteOf(request),
      [connection = connection_.get(), method,
       response](grpc::ByteBuffer* bytes) {
        return connection->Decode(method, bytes, response);
      },
      connection_, IsBulk(method) ? CallKind::kBulk : CallKind::kIdempotent,
      method.c_str(), *message, type->file()->service(0)->full_name().c_str(),
      timeout);
}

std::unique_ptr<PendingCall> GrpcClient::StartPull(
    absl::Span<const PullPart> parts) {
  std::vector<PullPart> pieces;
  std::vector<PieceSize> sizes;
  for (const PullPart& part : parts) {
    const PullArgs& args = part.args;
    if (absl::Status status =
            CheckSize(args.table, "embedding", args.keys.size(), args.dim,
                      part.target().num_floats());
        !status.ok()) {
      return Done(std::move(status));
    }
    const size_t width = static_cast<size_t>(args.dim);
    const size_t keys_per_piece = KeysPerPart(
        args.keys.size(), WireBytes(width, args.wire_dtype), kMinPartBytes);
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
  for (const absl::Span<const PullPart> message :
       PackPieces(pieces, sizes, connection_->max_message_bytes())) {
    calls.push_back(StartPullMessage(message));
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
  auto read = [connection = connection_.get(), seen = seen_, tables,
               targets](grpc::ByteBuffer* response) -> absl::Status {
    std::vector<uint64_t> received;
    std::vector<RowsVersion> versions;
    TFSWITCH_RETURN_IF_ERROR(connection->AsServerFault(ReadPullManyResponse(
        PiecesOf(response), targets, &received, &versions)));
    if (received.size() != targets.size()) {
      return connection->AsServerFault(absl::InvalidArgumentError(absl::StrCat(
          "expected ", targets.size(), " answers, got ", received.size())));
    }
    for (size_t i = 0; i < targets.size(); ++i) {
      if (received[i] == targets[i].num_floats()) {
        seen->Note(tables[i], versions[i], /*own_pushes=*/0);
        continue;
      }
      return absl::InvalidArgumentError(
          absl::StrCat("table '", tables[i], "': expected ",
                       targets[i].num_floats(), " floats, the server sent ",
                       received[i], "; is the table's dim another one?"));
    }
    return absl::OkStatus();
  };
  return std::make_unique<ServerCall>(Write(), std::move(read), connection_,
                                      CallKind::kIdempotent, "PullMany",
                                      std::move(message).ToByteBuffer());
}

std::unique_ptr<PendingCall> GrpcClient::StartCheckedPush(
    absl::Span<const PushPart> parts) {
  std::vector<PushArgs> pieces;
  std::vector<PieceSize> sizes;
  std::vector<size_t> owners;
  std::vector<WriteResult*> sums;
  for (const PushPart& part : parts) {
    CutPush(part.args, connection_->max_message_bytes(), &pieces, &sizes);
    owners.resize(pieces.size(), sums.size());
    sums.push_back(part.result);
  }
  if (pieces.empty()) return Done(absl::OkStatus());
  const std::vector<absl::Span<const PushArgs>> messages =
      PackPieces(pieces, sizes, connection_->max_message_bytes());
  std::vector<grpc::ByteBuffer> requests;
  for (const absl::Span<const PushArgs> message : messages) {
    absl::StatusOr<grpc::ByteBuffer> request = EncodePushes(message);
    if (!request.ok()) return Done(std::move(request).status());
    requests.push_back(*std::move(request));
  }
  auto all = std::make_unique<PushMessages>(std::move(owners), std::move(sums));
  for (size_t i = 0; i < messages.size(); ++i) {
    WriteResult* const results =
        all->result(static_cast<size_t>(messages[i].data() - pieces.data()));
    CallKind kind = CallKind::kIdempotent;
    std::vector<std::string> tables;
    for (const PushArgs& push : messages[i]) {
      if (push.id.client_id == 0) kind = CallKind::kOnce;
      tables.push_back(push.table);
    }
    const char* const effect =
        messages.size() == 1 ? "The push to " : "A part of the push to ";
    all->calls.push_back(std::make_unique<ServerCall>(
        Write{effect, tables},
        [connection = connection_.get(), seen = seen_, tables,
         results](grpc::ByteBuffer* response) -> absl::Status {
          std::vector<WriteResult> received;
          TFSWITCH_RETURN_IF_ERROR(connection->AsServerFault(
              ReadPushManyResponse(PiecesOf(response), &received)));
          if (received.size() != tables.size()) {
            return connection->AsServerFault(absl::InvalidArgumentError(
                absl::StrCat("PushManyResponse: ", received.size(),
                             " results of ", tables.size(), " pushes")));
          }
          for (size_t k = 0; k < tables.size(); ++k) {
            seen->Note(tables[k], received[k].version, /*own_pushes=*/1);
          }
          std::copy(received.begin(), received.end(), results);
          return absl::OkStatus();
        },
        connection_, kind, "PushMany", requests[i]));
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
    const bool is_shared = push.wire_dtype == FloatType::kFloat32 &&
                           push.gradients_owner != nullptr &&
                           gradient_bytes >= kMinSharedBytes;
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
                                                     WriteResult* result) {
  AssignArgs args = assign;
  args.id = args.id.client_id == 0 ? NextWriteId() : IdOfPart(args.id, 0);
  const uint64_t bytes = AssignRequestBytes(args);
  absl::Status fits = connection_->CheckSize(
      bytes, absl::StrCat("an assignment of ", args.keys.size(),
                          " keys to table '", args.table, "'"));
  if (!fits.ok()) return Done(std::move(fits));
  OutgoingMessage message(bytes);
  if (message.data() == nullptr) return Done(NoMemory(bytes));
  WriteAssignRequest(args, message.data());
  return std::make_unique<ServerCall>(
      Write{"The assignment to ", {args.table}},
      [connection = connection_.get(), result](grpc::ByteBuffer* response) {
        return connection->AsServerFault(
            ReadWriteResponse("AssignResponse", PiecesOf(response), result));
      },
      connection_, CallKind::kIdempotent, "Assign",
      std::move(message).ToByteBuffer());
}

absl::Status GrpcClient::ReadUsage(const TableRef& table,
                                   absl::Span<const Key> keys, float day,
                                   absl::Span<UsageOfRow> usage,
                                   absl::Span<KeyState> states) {
  const absl::Time deadline = SteadyNow() + connection_->options().timeout;
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
        states.subspan(begin, keys_per_part), deadline - SteadyNow()));
    begin += keys_per_part;
  } while (begin < keys.size());
  // They write to the caller's memory.
  while (!in_flight.empty()) end_oldest();
  return first;
}

template <typename Request, typename Response>
absl::Status GrpcClient::ReadStream(
    const char* method,
    std::unique_ptr<grpc::ClientReader<Response>> (
        v1::ParameterServer::Stub::*start)(grpc::ClientContext*,
                                           const Request&),
    const Request& request,
    const std::function<absl::Status(const Response&)>& visit) {
  const GrpcClientOptions& options = connection_->options();
  RetryClock clock(options.timeout);
  for (;;) {
    grpc::ClientContext context;
    context.set_deadline(ToDeadline(clock.start() + options.bulk_timeout));
    const std::string token = connection_->AddToken(&context);
    const auto link = connection_->link();
    CallTrace trace(PathOf(method), link->address, options.shard_index,
                    request.ByteSizeLong(), &context);
    const auto reader = ((*link->stub).*start)(&context, request);
    Response message;
    uint64_t bytes = 0;
    bool visited = false;
    while (reader->Read(&message)) {
      visited = true;
      if (trace.is_on()) bytes += message.ByteSizeLong();
      absl::Status status = visit(message);
      if (!status.ok()) {
        context.TryCancel();
        reader->Finish();
        return status;
      }
    }
    const grpc::Status status = reader->Finish();
    trace.End(status, context, bytes);
    if (status.ok()) return absl::OkStatus();
    // Opens the stream again only if nothing has been read from it: after that
    // some rows have been visited, and no row may be visited twice.
    if (visited) return connection_->ExplainLoss(status, options.bulk_timeout);
    absl::Status error = connection_->Explain(
        status, status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED
                    ? options.bulk_timeout
                    : options.timeout);
    if (absl::IsUnauthenticated(error) && connection_->HasOtherToken(token)) {
      continue;
    }
    if (!absl::IsUnavailable(error) && !IsTooBusy(status, context)) {
      return error;
    }
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
  return ReadStream<v1::ExportRequest, v1::ExportResponse>(
      "Export", &v1::ParameterServer::Stub::Export, request,
      [&](const v1::ExportResponse& chunk) {
        return visit(RowChunk{chunk.keys(), chunk.values(), chunk.slots()});
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
  TFSWITCH_RETURN_IF_ERROR(
      (ReadStream<v1::ExportChangesRequest, v1::ExportChangesResponse>(
          "ExportChanges", &v1::ParameterServer::Stub::ExportChanges, request,
          [&](const v1::ExportChangesResponse& chunk) -> absl::Status {
            if (chunk.has_cursor()) {
              cursors = {{chunk.cursor().log_id(), chunk.cursor().epoch()}};
              return absl::OkStatus();
            }
            return visit(ChangeChunk{chunk.keys(), chunk.values(),
                                     /*delta_scores=*/{}, chunk.removed()});
          })));
  if (cursors.empty()) {
    return connection_->AsServerFault(absl::InternalError(
        "ExportChangesResponse: expected a cursor at the end, got none"));
  }
  return cursors;
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
      connection->Handshake(SteadyNow() + options.connect_timeout).status());
  return std::make_unique<GrpcClient>(std::move(connection));
}

}  // namespace tfswitch
