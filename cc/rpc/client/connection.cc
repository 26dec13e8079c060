// Each thread sends its calls on its own completion queue, and waits there for
// their answers. UnaryCall::Wait() waits in slices of kInterruptInterval, so
// that it notices an interrupt. If nobody waits for an attempt any more, it is
// cancelled and marked as abandoned. It is not deleted at once, because gRPC
// may still use it; Settle() does that when the queue returns it.
//
// A kOnce call waits for a connection and is sent once. Calls of other kinds
// are sent again while the server is away, after growing pauses.
// may_have_arrived_ covers all attempts of a call, because the error of a write
// says whether the write may have been applied.

#include "cc/rpc/client/connection.h"

#include <grpcpp/support/channel_arguments.h>
#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cc/base/fork_guard.h"
#include "cc/base/interrupt.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/rpc/byte_buffers.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/client/call_trace.h"
#include "cc/rpc/deadlines.h"
#include "cc/rpc/status_conversion.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(10);
constexpr absl::Duration kLongestPause = absl::Seconds(1);
// How long the caller waits for a call after its deadline. gRPC normally ends a
// call at its deadline, but it may be late in two cases. If the socket does not
// accept the request, the call ends only when the write fails, which takes
// kKeepaliveTimeoutMs on a dead connection. If the system time was set back,
// gRPC's timers, which use it, are late.
constexpr absl::Duration kDeadlineSlack = absl::Milliseconds(100);
// If a call waits longer than this for a connection, the client logs it.
constexpr absl::Duration kSilence = absl::Seconds(1);
// How long one attempt to connect may take. Without this limit, a host that
// drops packets would hold a call of kind kBulk for its whole timeout.
constexpr int kConnectTimeoutMs = 5'000;

std::shared_ptr<grpc::Channel> MakeChannel(const GrpcClientOptions& options,
                                           const std::string& address) {
  grpc::ChannelArguments arguments;
  // The server limits its own messages, so the client needs no limit.
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetMaxSendMessageSize(-1);
  // Refuses compressed answers, because a short one could inflate to a very
  // long one. With the first setting alone, gRPC would still inflate an answer
  // that arrives together with the end of the call, and only then refuse it.
  // The second setting prevents that.
  arguments.SetInt(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET,
                   1 << GRPC_COMPRESS_NONE);
  arguments.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  for (const auto& [name, value] : kChannelArguments) {
    arguments.SetInt(name, value);
  }
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  // Each client has a connection of its own, even in the same process.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // The pauses between attempts to connect are short, so that the client soon
  // notices that a server is back.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 50);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1'000);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);
  // The client itself retries, because it knows which calls may be repeated.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
  // Ignores the proxy of the environment, which is meant for the web and not
  // for the cluster.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  const ClientTls& tls = options.tls;
  if (!tls.server_name.empty()) {
    arguments.SetSslTargetNameOverride(tls.server_name);
  }
  return grpc::CreateCustomChannel(address,
                                   tls.credentials != nullptr
                                       ? tls.credentials
                                       : grpc::InsecureChannelCredentials(),
                                   arguments);
}

// Whether the server cannot be reached, or is stopping: a stopping server
// cancels the calls in progress.
bool IsServerAway(const grpc::Status& status) {
  return status.error_code() == grpc::StatusCode::UNAVAILABLE ||
         status.error_code() == grpc::StatusCode::CANCELLED;
}

// True if the server may have received the call although it has not answered.
// Two errors of gRPC mean that there was no connection. After any other error
// the call may have arrived.
bool MayHaveArrived(const grpc::Status& status) {
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) return true;
  const std::string text = status.error_message();
  return IsServerAway(status) &&
         !absl::StartsWith(text, "failed to connect to all addresses") &&
         !absl::StartsWith(text, "DNS resolution failed");
}

// Returns the part of gRPC's error text that helps a user.
std::string Reason(const grpc::Status& status) {
  const std::string text = status.error_message();
  absl::string_view reason = text;
  const size_t last = reason.rfind("last error: ");
  if (last != reason.npos) reason.remove_prefix(last + 12);
  absl::ConsumePrefix(&reason, "UNKNOWN: ");
  absl::ConsumePrefix(&reason, "UNAVAILABLE: ");
  if (absl::StrContains(reason, "Connection refused")) {
    return "connection refused";
  }
  return std::string(reason);
}

bool HasHungUp(absl::string_view reason) {
  return absl::StrContains(reason, "Socket closed") ||
         absl::StrContains(reason, "Connection reset") ||
         absl::StrContains(reason, "Secure read failed");
}

// Why a TLS connection has failed, and the remedy; empty for other errors.
std::string TlsReason(absl::string_view reason) {
  constexpr std::pair<const char*, const char*> kCauses[] = {
      {"certificate verify failed",
       "the server's certificate has expired, or no authority of `ca` has "
       "signed it; give its authority (`ca` of tfswitch.Tls, or "
       "TFSWITCH_TLS_CA)"},
      {"Hostname Verification",
       "the server's certificate is for another name; connect to a name that "
       "it has, or say which one it should have (`server_name` of "
       "tfswitch.Tls, or TFSWITCH_TLS_SERVER_NAME)"},
      {"wrong version number",
       "the server speaks plaintext; connect to grpc://, or start it with "
       "--tls_cert and --tls_key"},
      {"andshake failed", "look at the server's log for its reason"},
  };
  for (const auto& [sign, text] : kCauses) {
    if (absl::StrContains(reason, sign)) {
      return absl::StrCat("the TLS handshake failed (", reason, "): ", text);
    }
  }
  // When the server checks the client's certificate, the handshake is already
  // complete for the client. So the client only sees that the connection is
  // closed.
  return HasHungUp(reason)
             ? absl::StrCat(
                   reason,
                   "; perhaps the TLS handshake failed, because the server "
                   "wants a client certificate of an authority that it knows "
                   "(`cert` and `key` of tfswitch.Tls, or TFSWITCH_TLS_CERT "
                   "and TFSWITCH_TLS_KEY). Else, is the server running, and "
                   "has it room for a connection (--max_connections)?")
             : "";
}

}  // namespace

std::string PathOf(absl::string_view method, absl::string_view service) {
  return absl::StrCat("/", service, "/", method);
}

bool IsTooBusy(const grpc::Status& status, const grpc::ClientContext& context) {
  return status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED &&
         context.GetServerTrailingMetadata().count(kRetryPushback) != 0;
}

// One attempt of a call. The attempt must live until its completion queue
// returns it, because gRPC has a pointer to it.
struct UnaryCall::Attempt {
  bool done = false;
  bool abandoned = false;
  std::shared_ptr<Connection::Link> link;
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  grpc::Status status;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  std::optional<CallTrace> trace;
};

// The completion queue of one thread. Its tags are pointers to attempts.
class UnaryCall::ThreadQueue {
 public:
  static ThreadQueue& Get() {
    thread_local ThreadQueue queue;
    return queue;
  }

  // Ends the remaining abandoned attempts.
  ~ThreadQueue() {
    if (ForkGuard::IsTripped()) {
      // In a forked child, Shutdown() would wait for threads that only the
      // parent has.
      (void)queue_.release();
      return;
    }
    queue_->Shutdown();
    void* tag;
    bool ok;
    while (queue_->Next(&tag, &ok)) Settle(tag);
  }

  grpc::CompletionQueue* get() { return queue_.get(); }

  // Waits until an attempt sets `done`. Returns false if `time` comes first.
  bool WaitFor(const bool& done, absl::Time time) {
    const gpr_timespec deadline = ToDeadline(time);
    void* tag;
    bool ok;
    while (!done) {
      if (queue_->AsyncNext(&tag, &ok, deadline) !=
          grpc::CompletionQueue::GOT_EVENT) {
        return false;
      }
      Settle(tag);
    }
    return true;
  }

  void WaitUntil(absl::Time time) { WaitFor(/*done=*/false, time); }

 private:
  ThreadQueue() = default;

  static void Settle(void* tag) {
    Attempt* attempt = static_cast<Attempt*>(tag);
    attempt->done = true;
    attempt->trace->NoteArrival();
    if (attempt->abandoned) delete attempt;
  }

  std::unique_ptr<grpc::CompletionQueue> queue_ =
      std::make_unique<grpc::CompletionQueue>();
};

void UnaryCall::Abandon::operator()(Attempt* attempt) const {
  if (attempt->done) {
    delete attempt;
    return;
  }
  attempt->context.TryCancel();
  attempt->abandoned = true;
}

void PollUntil(absl::Time time) {
  UnaryCall::ThreadQueue::Get().WaitUntil(time);
}

Connection::Link::Link(const GrpcClientOptions& options, const std::string& to)
    : address(to),
      channel(MakeChannel(options, to)),
      generic_stub(channel),
      stub(v1::ParameterServer::NewStub(channel)) {}

Connection::Connection(const GrpcClientOptions& options)
    : options_(options),
      link_(std::make_shared<Link>(options, options.address)),
      max_message_bytes_(kLargestMessageLimit) {}

std::shared_ptr<Connection::Link> Connection::link() const {
  MutexLock lock(&mutex_);
  const ServerPlaces* const places = options_.places.get();
  if (places != nullptr && places->version() != places_version_) {
    // Reads the version before the addresses. If the addresses change in
    // between, the next call notices the new version and reads them again.
    places_version_ = places->version();
    const std::string address = places->addresses()[options_.shard_index];
    if (address != link_->address) {
      link_ = std::make_shared<Link>(options_, address);
    }
  }
  return link_;
}

std::string Connection::name() const {
  if (options_.any_shard) return absl::StrCat("server ", link()->address);
  return absl::StrCat("shard ", options_.shard_index, " (", link()->address,
                      ")");
}

absl::StatusOr<v1::HandshakeResponse> Connection::Handshake(
    absl::Time deadline) {
  v1::HandshakeRequest request;
  request.set_protocol_version(options_.protocol_version);
  v1::HandshakeResponse response;
  TFSWITCH_ASSIGN_OR_RETURN(const grpc::ByteBuffer message,
                            Encode("Handshake", request));
  // A pointer that does not own the connection is enough, because the call ends
  // before this function does.
  const std::shared_ptr<Connection> unowned(std::shared_ptr<void>(), this);
  UnaryCall call(unowned, CallKind::kIdempotent, "Handshake", message,
                 v1::ParameterServer::service_full_name(),
                 deadline - SteadyNow());
  grpc::ByteBuffer bytes;
  TFSWITCH_RETURN_IF_ERROR(call.Wait(&bytes));
  TFSWITCH_RETURN_IF_ERROR(Decode("Handshake", &bytes, &response));
  if (response.protocol_version() != options_.protocol_version) {
    return absl::FailedPreconditionError(absl::StrCat(
        name(), " speaks protocol version ", response.protocol_version(),
        ", this client speaks ", options_.protocol_version,
        "; install the same version of tfswitch on both sides"));
  }
  if (!options_.any_shard && (response.shard_index() != options_.shard_index ||
                              response.num_shards() != options_.num_shards)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the server at ", link()->address, " is shard ", response.shard_index(),
        " of ", response.num_shards(), ", and stands as shard ",
        options_.shard_index, " of ", options_.num_shards,
        " in the address of the cluster; ",
        response.num_shards() > 1 &&
                response.num_shards() != options_.num_shards
            ? absl::StrCat("list all ", response.num_shards(),
                           " servers there, in the order of their shards")
            : absl::StrCat("start it with --shard_index ", options_.shard_index,
                           " --num_shards ", options_.num_shards,
                           ", or list the servers in the order of their "
                           "shards")));
  }
  max_message_bytes_ = response.max_message_bytes();
  const uint64_t former = instance_id_.exchange(response.instance_id());
  if (former != 0 && former != response.instance_id() &&
      response.has_recovery()) {
    const v1::Recovery& recovery = response.recovery();
    std::string text = absl::StrCat(name(), " was started again");
    if (recovery.lost_writes() == 0 && !recovery.are_at_least()) {
      absl::StrAppend(&text, ", and no write is lost");
    } else {
      absl::StrAppend(
          &text, " and has gone back to its rows",
          recovery.saved_at_ms() == 0
              ? ""
              : absl::FormatTime(" of %Y-%m-%d %H:%M:%S UTC",
                                 absl::FromUnixMillis(recovery.saved_at_ms()),
                                 absl::UTCTimeZone()),
          ": ", recovery.are_at_least() ? "at least " : "",
          recovery.lost_writes(), " writes since then are lost");
    }
    LogMessageInOrder(LogLevel::kWarning, {"server_restarted"}, text);
  }
  return response;
}

std::string Connection::AddToken(grpc::ClientContext* context) const {
  if (options_.token == nullptr) return "";
  std::string token = options_.token->Get();
  context->AddMetadata(kTokenHeader, absl::StrCat("Bearer ", token));
  return token;
}

bool Connection::HasOtherToken(const std::string& former) const {
  return options_.token != nullptr &&
         options_.token->Get(/*now=*/true) != former;
}

absl::Status Connection::OnReconnect() {
  if (instance_id_ == 0) return absl::OkStatus();
  const absl::Status status = Handshake().status();
  // Returns only interrupts. The next calls report other errors in detail.
  return absl::IsCancelled(status) ? status : absl::OkStatus();
}

void Connection::LogWaiting() {
  if (link()->is_connected() || has_said_that_it_waits_.exchange(true)) return;
  LogMessageInOrder(
      LogLevel::kInfo, {"server_awaited"},
      absl::StrCat("waiting for ", name(), " to answer, for up to ",
                   absl::FormatDuration(options_.timeout)));
}

absl::Status Connection::CheckSize(uint64_t bytes,
                                   absl::string_view what) const {
  const uint64_t limit = max_message_bytes();
  if (bytes <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat(name(), ": ", what, " is a message of ", bytes,
                   " bytes, over the server's limit of ", limit,
                   "; use smaller batches or start the server with a larger "
                   "--max_message_bytes"));
}

absl::StatusOr<grpc::ByteBuffer> Connection::Encode(
    const std::string& method,
    const google::protobuf::MessageLite& request) const {
  const size_t size = request.ByteSizeLong();
  TFSWITCH_RETURN_IF_ERROR(CheckSize(size, absl::StrCat("a call of ", method)));
  OutgoingMessage message(size);
  if (message.data() == nullptr ||
      !request.SerializeToArray(message.data(), static_cast<int>(size))) {
    return absl::InternalError(
        absl::StrCat("cannot serialise a call of ", method));
  }
  return std::move(message).ToByteBuffer();
}

absl::Status Connection::Decode(const std::string& method,
                                grpc::ByteBuffer* bytes,
                                google::protobuf::MessageLite* response) const {
  response->Clear();
  if (bytes->Length() == 0) return absl::OkStatus();
  grpc::ProtoBufferReader reader(bytes);
  if (response->ParseFromZeroCopyStream(&reader)) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat(name(), " answered ", method, " with malformed bytes"));
}

absl::Status Connection::Explain(const grpc::Status& status,
                                 absl::Duration timeout) const {
  // Rounds up the timeout that the text names: the time that was left for the
  // call is slightly shorter.
  const std::string silence = absl::StrCat(
      name(), " did not answer within ",
      absl::FormatDuration(absl::Ceil(timeout, absl::Milliseconds(1))));
  if (IsServerAway(status)) {
    const std::string reason = Reason(status);
    if (options_.tls.credentials != nullptr) {
      const std::string tls_reason = TlsReason(reason);
      if (!tls_reason.empty()) {
        return absl::UnavailableError(absl::StrCat(silence, ": ", tls_reason));
      }
    }
    return absl::UnavailableError(absl::StrCat(
        silence, ": ", reason, "; is the server running",
        HasHungUp(reason)
            ? ", has it room for a connection (--max_connections), and does it "
              "take plaintext (if its line at the start says TLS, the TLS "
              "handshake failed: connect to grpcs://)?"
            : "?"));
  }
  absl::Status error = FromGrpcStatus(status);
  switch (error.code()) {
    case absl::StatusCode::kDeadlineExceeded:
      return absl::DeadlineExceededError(absl::StrCat(
          silence, "; is the server reachable, or is it overloaded?"));
    case absl::StatusCode::kUnimplemented:
      return absl::UnimplementedError(absl::StrCat(
          name(), ": ", error.message(), "; is that a tfswitch server?"));
    case absl::StatusCode::kResourceExhausted:
      // If the peer's memory for messages is used up, gRPC ends the call with
      // this HTTP/2 error code.
      if (absl::StrContains(error.message(), "RST_STREAM with error code 11")) {
        return absl::ResourceExhaustedError(absl::StrCat(
            name(),
            " has no memory left for messages that arrive; use smaller "
            "batches or start the server with a larger --max_buffer_bytes"));
      }
      break;
    // These errors come from the shard. They stay unchanged, so that their
    // texts are the same as with embedded tables.
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kAlreadyExists:
    case absl::StatusCode::kDataLoss:
      return error;
    default:
      break;
  }
  return absl::Status(error.code(),
                      absl::StrCat(name(), ": ", error.message()));
}

absl::Status Connection::ExplainLoss(const grpc::Status& status,
                                     absl::Duration timeout) const {
  if (!IsServerAway(status)) return Explain(status, timeout);
  return absl::UnavailableError(absl::StrCat(
      name(), ": the connection was lost during the call: ", Reason(status)));
}

absl::Status Connection::AsServerFault(const absl::Status& malformed) const {
  if (malformed.ok()) return malformed;
  return absl::InternalError(
      absl::StrCat(name(), " answered with ", malformed.message()));
}

RetryClock::RetryClock(absl::Duration timeout)
    : start_(SteadyNow()), end_(start_ + timeout), pause_(kFirstPause) {}

std::optional<absl::Time> RetryClock::NextTry() {
  thread_local std::minstd_rand random{std::random_device()()};
  const double spread =
      std::uniform_real_distribution<double>(0.75, 1.25)(random);
  const absl::Time next = SteadyNow() + pause_ * spread;
  pause_ = std::min(pause_ * 2, kLongestPause);
  if (next >= end_) return std::nullopt;
  return next;
}

UnaryCall::UnaryCall(std::shared_ptr<Connection> connection, CallKind kind,
                     const char* method, const grpc::ByteBuffer& request,
                     const char* service, absl::Duration timeout)
    : connection_(std::move(connection)),
      kind_(kind),
      timeout_(std::min(timeout, kind == CallKind::kBulk
                                     ? connection_->options().bulk_timeout
                                     : connection_->options().timeout)),
      retry_timeout_(std::min(timeout_, connection_->options().timeout)),
      method_(PathOf(method, service)),
      request_(request) {
  StartAttempt();
}

void UnaryCall::StartAttempt() {
  attempt_.reset(new Attempt);
  attempt_->link = connection_->link();
  if (!attempt_->link->is_connected()) was_away_ = true;
  attempt_->context.set_deadline(ToDeadline(deadline()));
  attempt_->context.set_wait_for_ready(kind_ == CallKind::kOnce);
  token_ = connection_->AddToken(&attempt_->context);
  attempt_->trace.emplace(method_, attempt_->link->address,
                          connection_->options().shard_index, request_.Length(),
                          &attempt_->context);
  attempt_->reader = attempt_->link->generic_stub.PrepareUnaryCall(
      &attempt_->context, method_, request_, ThreadQueue::Get().get());
  attempt_->reader->StartCall();
  attempt_->reader->Finish(&attempt_->response, &attempt_->status,
                           attempt_.get());
}

absl::Status UnaryCall::ExplainWrite(const absl::Status& error,
                                     absl::string_view write) const {
  if (write.empty() ||
      !(absl::IsUnavailable(error) || absl::IsDeadlineExceeded(error))) {
    return error;
  }
  std::string text = absl::StrCat(
      error.message(), absl::EndsWith(error.message(), "?") ? " " : ". ", write,
      may_have_arrived_ ? " may have been" : " was not", " applied on shard ",
      connection_->options().shard_index);
  if (may_have_arrived_) {
    absl::StrAppend(&text, ". Repeat it only if applying it twice does no harm",
                    kind_ == CallKind::kBulk
                        ? ""
                        : ", or raise `timeout_secs` in tfswitch.connect");
  }
  return absl::Status(error.code(), text);
}

absl::Status UnaryCall::Wait(grpc::ByteBuffer* response) {
  ThreadQueue& queue = ThreadQueue::Get();
  // The time for retries begins with this wait, not with the start of the call:
  // the call may have failed long ago, while this thread waited for an earlier
  // call.
  const absl::Time begin = SteadyNow();
  RetryClock clock(std::min(retry_timeout_, deadline() - begin));
  for (;;) {
    const std::unique_ptr<Attempt, Abandon> attempt = std::move(attempt_);
    const absl::Time end = deadline() + kDeadlineSlack;
    bool ended = false;
    for (absl::Time now = SteadyNow(); !ended && now < end; now = SteadyNow()) {
      ended =
          queue.WaitFor(attempt->done, std::min(end, now + kInterruptInterval));
      if (ended) break;
      TFSWITCH_RETURN_IF_ERROR(Watch(begin));
      // The server has moved, so the attempt at its former address would get no
      // answer.
      if (kind_ != CallKind::kOnce && attempt->link != connection_->link()) {
        attempt->context.TryCancel();
      }
    }
    const grpc::Status status =
        ended ? attempt->status
              : grpc::Status(grpc::StatusCode::DEADLINE_EXCEEDED, "");
    if (ended) {
      attempt->trace->End(status, attempt->context, attempt->response.Length());
    }
    if (status.ok()) {
      response->Swap(&attempt->response);
      connection_->NoteSuccess();
      const bool was_away = was_away_ || !last_failure_.ok();
      return was_away && !absl::EndsWith(method_, "/Handshake")
                 ? connection_->OnReconnect()
                 : absl::OkStatus();
    }
    may_have_arrived_ = may_have_arrived_ || MayHaveArrived(status);
    if (status.error_code() == grpc::StatusCode::UNAUTHENTICATED &&
        connection_->HasOtherToken(token_)) {
      StartAttempt();
      continue;
    }
    const bool is_too_busy = ended && IsTooBusy(status, attempt->context);
    if (kind_ == CallKind::kOnce && !is_too_busy) {
      return connection_->ExplainLoss(status, timeout_);
    }
    if (!IsServerAway(status) && !is_too_busy) {
      // Reports the earlier failure, because "Connection refused" tells more
      // than the deadline that ended the retries.
      const bool was_away =
          status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED &&
          !last_failure_.ok();
      return connection_->Explain(was_away ? last_failure_ : status, timeout_);
    }
    last_failure_ = status;
    const std::optional<absl::Time> next = clock.NextTry();
    if (!next.has_value()) {
      return connection_->Explain(last_failure_, retry_timeout_);
    }
    for (absl::Time now = SteadyNow(); now < *next; now = SteadyNow()) {
      queue.WaitUntil(std::min(*next, now + kInterruptInterval));
      TFSWITCH_RETURN_IF_ERROR(Watch(begin));
    }
    StartAttempt();
  }
}

absl::Status UnaryCall::Watch(absl::Time begin) {
  if (SteadyNow() - begin >= kSilence) connection_->LogWaiting();
  return CheckInterrupt();
}

}  // namespace tfswitch
