// One server as a client sees it: a channel, calls with retry, and errors that
// name the server.

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
  // Ends within the client's timeout and is repeated while the server is away.
  kIdempotent,
  // Waits for a connection, then is sent once: a repetition might be applied
  // twice.
  kOnce,
  // Takes time that grows with the table, so it has the bulk timeout. If the
  // server is away, it is repeated for the timeout of kIdempotent, counted from
  // the beginning of the wait.
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

  // Asks the server for its identity, until the deadline or the client's
  // timeout, and checks that it is the expected one.
  absl::StatusOr<v1::HandshakeResponse> Handshake(
      absl::Time deadline = absl::InfiniteFuture());

  // Adds the token, if there is one, to the call. Returns it.
  std::string AddToken(grpc::ClientContext* context) const;
  // Whether the token's file has another token by now.
  bool HasOtherToken(const std::string& former) const;

  // Longest message that the server accepts and sends, by its last handshake.
  uint64_t max_message_bytes() const {
    return max_message_bytes_.load(std::memory_order_relaxed);
  }

  // ResourceExhausted, with advice, if the message that `what` describes is
  // longer than the server accepts.
  absl::Status CheckSize(uint64_t bytes, absl::string_view what) const;

  // The bytes of a control call; an error of CheckSize if they are too many.
  absl::StatusOr<grpc::ByteBuffer> Encode(
      const std::string& method,
      const google::protobuf::MessageLite& request) const;
  // Parses an answer; Internal, naming the server, if it is malformed.
  absl::Status Decode(const std::string& method, grpc::ByteBuffer* bytes,
                      google::protobuf::MessageLite* response) const;

  // Converts a status of gRPC to an error that names the server.
  absl::Status Explain(const grpc::Status& status,
                       absl::Duration timeout) const;

  // Reports on stderr that there is no connection, once until a call succeeds.
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

  // Called after a call that found no connection, or lost it. If another run of
  // the server has answered, with rows of a save, it says so on stderr. The
  // error is that of an interrupt.
  absl::Status OnReconnect();

  // The same for a call that had a connection and is not repeated.
  absl::Status ExplainLoss(const grpc::Status& status,
                           absl::Duration timeout) const;

  // The error for a malformed response, which is the server's fault.
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

// The times of retries after a failure, and their end.
//
// Not thread-safe.
class RetryClock {
 public:
  explicit RetryClock(absl::Duration timeout);

  absl::Time start() const { return start_; }

  // The time of the next attempt; nullopt if it would be after the timeout. The
  // pause grows from 10 ms to 1 s, with some randomness so that clients do not
  // return at the same time.
  std::optional<absl::Time> NextTry();

 private:
  const absl::Time start_;
  const absl::Time end_;
  absl::Duration pause_;
};

// One unary call with its retries. The thread that starts it must also wait for
// it: it polls for its own answer, which saves a switch of threads.
//
// A call that is destroyed before Wait is cancelled.
//
// Not thread-safe.
class UnaryCall {
 public:
  // Sends the first attempt. The call ends within `timeout` if that is less
  // than the time of `kind`.
  UnaryCall(std::shared_ptr<Connection> connection, CallKind kind,
            const char* method, const grpc::ByteBuffer& request,
            const char* service = v1::ParameterServer::service_full_name(),
            absl::Duration timeout = absl::InfiniteDuration());

  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  // After a second without a connection it says so on stderr. Cancelled if
  // CheckInterrupt() is.
  absl::Status Wait(grpc::ByteBuffer* response);

  // The `error` of Wait(). If there was no answer, also says whether the write,
  // such as "The push to table 'user'", may have been applied. Empty: no write.
  absl::Status ExplainWrite(const absl::Status& error,
                            absl::string_view write) const;

 private:
  friend void PollUntil(absl::Time time);
  struct Attempt;
  class ThreadQueue;
  // Cancels a running attempt, and leaves it to its queue.
  struct Abandon {
    void operator()(Attempt* attempt) const;
  };

  // The latest end of the call.
  absl::Time deadline() const { return start_ + timeout_; }
  void StartAttempt();
  // Does the periodic work of a wait that began at `begin`.
  absl::Status Watch(absl::Time begin);

  const std::shared_ptr<Connection> connection_;
  const absl::Time start_ = SteadyNow();
  const CallKind kind_;
  const absl::Duration timeout_;  // For the call.
  // How long to wait for a server to come back.
  const absl::Duration retry_timeout_;
  const std::string method_;
  const grpc::ByteBuffer request_;
  std::unique_ptr<Attempt, Abandon> attempt_;
  std::string token_;          // The token that the attempt has shown.
  grpc::Status last_failure_;  // From an earlier attempt; OK if there was none.
  bool was_away_ = false;      // An attempt began without a connection.
  // The server may have got it, and has not answered.
  bool may_have_arrived_ = false;
};

// Whether the server has not begun this call because others with its token are
// running.
bool IsTooBusy(const grpc::Status& status, const grpc::ClientContext& context);

// Waits without using the CPU; calls of this thread continue.
void PollUntil(absl::Time time);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_CONNECTION_H_
