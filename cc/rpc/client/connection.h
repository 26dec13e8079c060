// One server as a client sees it. Contains the channel, calls with retries, and
// errors that name the server.

#ifndef TFSWITCH_CC_RPC_CLIENT_CONNECTION_H_
#define TFSWITCH_CC_RPC_CLIENT_CONNECTION_H_

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/client/grpc_client.h"
#include "tfswitch/v1/parameter_server.grpc.pb.h"

namespace tfswitch {

enum class CallKind {
  // Ends after the client's timeout. Is sent again while the server is away.
  kIdempotent,
  // Waits for a connection, and is sent only once: the server might apply a
  // second copy, too.
  kOnce,
  // Ends after the bulk timeout, which is longer because the call's time grows
  // with the table. While the server is away, the call is sent again and again,
  // but only until the timeout of kIdempotent has passed since the wait began.
  kBulk,
};

// Thread-safe.
class Connection {
 public:
  // Does not wait for the server.
  //
  // REQUIRES: options.address parses.
  explicit Connection(const GrpcClientOptions& options);
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  const GrpcClientOptions& options() const { return options_; }

  // Asks the server for its identity and checks that it is the expected server.
  // Waits until the deadline or the end of the client's timeout.
  absl::StatusOr<v1::HandshakeResponse> Handshake(
      absl::Time deadline = absl::InfiniteFuture());

  // Adds the token, if there is one, to a call. Returns the token.
  std::string AddToken(grpc::ClientContext* context) const;
  // Whether the token file now contains another token than `former`.
  bool HasOtherToken(const std::string& former) const;

  // The longest message that the server accepts and sends, as the server's
  // answer to the last handshake says.
  uint64_t max_message_bytes() const {
    return max_message_bytes_.load(std::memory_order_relaxed);
  }

  // ResourceExhausted, with advice, if a message is longer than the server
  // accepts. `what` describes the message.
  absl::Status CheckSize(uint64_t bytes, absl::string_view what) const;

  // Serialises the message of a control call; returns the error of CheckSize()
  // if it is too long.
  absl::StatusOr<grpc::ByteBuffer> Encode(
      const std::string& method,
      const google::protobuf::MessageLite& request) const;
  // Parses an answer; Internal, naming the server, if it is malformed.
  absl::Status Decode(const std::string& method, grpc::ByteBuffer* bytes,
                      google::protobuf::MessageLite* response) const;

  // Converts a status of gRPC to an error that names the server.
  absl::Status Explain(const grpc::Status& status,
                       absl::Duration timeout) const;

  // Logs that the client waits for a connection; only the first time since the
  // last call that succeeded.
  void LogWaiting();
  void NoteSuccess() {
    if (has_said_that_it_waits_) has_said_that_it_waits_ = false;
  }

  // The channel to one address of the server.
  struct Link {
    Link(const GrpcClientOptions& options, const std::string& to);

    bool is_connected() const {
      return channel->GetState(/*try_to_connect=*/false) == GRPC_CHANNEL_READY;
    }

    // Constant after construction; channels and stubs have their own locks.
    const std::string address;
    const std::shared_ptr<grpc::Channel> channel;
    grpc::GenericStub generic_stub;
    const std::unique_ptr<v1::ParameterServer::Stub> stub;
  };
  // The channel to the server's present address.
  std::shared_ptr<Link> link() const;

  // Call it after a call that found no connection, or lost it. If the server
  // has meanwhile restarted from saved rows, logs that on stderr. The only
  // error that it returns is an interrupt.
  absl::Status OnReconnect();

  // Like Explain(), for a kOnce call that lost its connection (no retries).
  absl::Status ExplainLoss(const grpc::Status& status,
                           absl::Duration timeout) const;

  // The error for a malformed response, which means that the server is faulty.
  absl::Status AsServerFault(const absl::Status& malformed) const;

 private:
  // For example "shard 1 (127.0.0.1:7078)".
  std::string name() const;

  const GrpcClientOptions options_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<Link> link_ ABSL_GUARDED_BY(mutex_);
  mutable uint64_t places_version_ ABSL_GUARDED_BY(mutex_) = 0;

  std::atomic<uint64_t> max_message_bytes_;  // Set by the last handshake.
  std::atomic<uint64_t> instance_id_{0};     // 0: no handshake yet.
  std::atomic<bool> has_said_that_it_waits_{false};
};

// Computes the times of retries after a failure.
//
// Not thread-safe.
class RetryClock {
 public:
  explicit RetryClock(absl::Duration timeout);

  absl::Time start() const { return start_; }

  // The time of the next attempt; nullopt if it would be after the timeout. The
  // pauses grow from 10 ms to 1 s and are partly random, so that many clients
  // do not try again at the same moment.
  std::optional<absl::Time> NextTry();

 private:
  const absl::Time start_;
  const absl::Time end_;
  absl::Duration pause_;
};

// One unary call with its retries. The thread that starts the call must also
// wait for it: the thread itself polls for the answer, which saves a switch of
// threads.
//
// The destructor cancels a call that nobody has waited for.
//
// Not thread-safe.
class UnaryCall {
 public:
  // Sends the first attempt. The call ends after `timeout`, or after the
  // timeout of its kind if that is shorter.
  UnaryCall(std::shared_ptr<Connection> connection, CallKind kind,
            const char* method, const grpc::ByteBuffer& request,
            const char* service = v1::ParameterServer::service_full_name(),
            absl::Duration timeout = absl::InfiniteDuration());

  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  // Waits for the answer. If there has been no connection for a second, logs
  // that the client waits. If CheckInterrupt() returns Cancelled, ends the call
  // and returns that.
  absl::Status Wait(grpc::ByteBuffer* response);

  // Completes the text of an error that Wait() has returned. If the server did
  // not answer, adds that the write may have been applied, or that it was not.
  // `write` names the write, such as "The push to table 'user'"; empty if the
  // call writes nothing.
  absl::Status ExplainWrite(const absl::Status& error,
                            absl::string_view write) const;

 private:
  friend void PollUntil(absl::Time time);
  struct Attempt;
  class ThreadQueue;
  // Cancels an attempt in progress, which its completion queue deletes later.
  struct Abandon {
    void operator()(Attempt* attempt) const;
  };

  // The latest end of the call.
  absl::Time deadline() const { return start_ + timeout_; }
  void StartAttempt();
  // Logs a long wait, and returns an error if the user interrupts it. Call it
  // regularly during a wait; `begin` is the time when the wait began.
  absl::Status Watch(absl::Time begin);

  const std::shared_ptr<Connection> connection_;
  const absl::Time start_ = SteadyNow();
  const CallKind kind_;
  // The timeout of the call.
  const absl::Duration timeout_;
  // For how long the call is sent again while the server is away.
  const absl::Duration retry_timeout_;
  const std::string method_;
  const grpc::ByteBuffer request_;
  std::unique_ptr<Attempt, Abandon> attempt_;
  // The token that the attempt has shown.
  std::string token_;
  // The failure of the last attempt that has failed; OK if there was none.
  grpc::Status last_failure_;
  // An attempt began without a connection.
  bool was_away_ = false;
  // True if the server may have received the call, but has not answered.
  bool may_have_arrived_ = false;
};

// The path of a method, such as "/tfswitch.v1.ParameterServer/Pull".
std::string PathOf(
    absl::string_view method,
    absl::string_view service = v1::ParameterServer::service_full_name());

// Whether the server has refused the call because too many calls with the same
// token are in progress.
bool IsTooBusy(const grpc::Status& status, const grpc::ClientContext& context);

// Sleeps without using the CPU; calls that this thread has started continue.
void PollUntil(absl::Time time);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_CONNECTION_H_
