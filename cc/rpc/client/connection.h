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
  // Takes time that grows with the table, so it has the bulk timeout. Repeated
  // while the server is away, but no longer than kIdempotent from when it is
  // waited for.
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

  // Asks for the identity of the server, until the deadline or the client's
  // timeout, and checks that it is the one meant.
  absl::StatusOr<v1::HandshakeResponse> Handshake(
      absl::Time deadline = absl::InfiniteFuture());

  // Shows the token to the server, if there is one. Returns it.
  std::string AddToken(grpc::ClientContext* context) const;
  // Whether the token's file has another one by now.
  bool HasOtherToken(const std::string& former) const;

  // Longest message that the server takes and sends, as it said last.
  uint64_t max_message_bytes() const {
    return max_message_bytes_.load(std::memory_order_relaxed);
  }

  // ResourceExhausted, with advice, if the message that `what` describes is
  // longer than the server takes.
  absl::Status CheckSize(uint64_t bytes, absl::string_view what) const;

  // The bytes of a control call; the error of CheckSize if they are too many.
  absl::StatusOr<grpc::ByteBuffer> Encode(
      const std::string& method,
      const google::protobuf::MessageLite& request) const;
  // The message in an answer; Internal, naming the server, if it is none.
  absl::Status Decode(const std::string& method, grpc::ByteBuffer* bytes,
                      google::protobuf::MessageLite* response) const;

  // Turns a status of gRPC into an error that names the server.
  absl::Status Explain(const grpc::Status& status,
                       absl::Duration timeout) const;

  // Says on stderr, once until a call succeeds, that there is no connection.
  void SayThatItWaits();
  void NoteSuccess() {
    if (has_said_that_it_waits_) has_said_that_it_waits_ = false;
  }

  // The way to one address of the server.
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
  // To where the server is now.
  std::shared_ptr<Link> link() const;

  // To be called after a call that found no connection, or lost it: says on
  // stderr if another run of the server has answered, with rows of a save. The
  // error is that of an interrupt.
  absl::Status NoteReturn();

  // The same for a call that had a connection and is not repeated.
  absl::Status ExplainLoss(const grpc::Status& status,
                           absl::Duration timeout) const;

  // The error of a response that cannot be read: the server's fault.
  absl::Status Blame(const absl::Status& malformed) const;

 private:
  // "shard 1 (127.0.0.1:7078)"
  std::string name() const;

  const GrpcClientOptions options_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<Link> link_ ABSL_GUARDED_BY(mutex_);
  mutable uint64_t places_version_ ABSL_GUARDED_BY(mutex_) = 0;

  std::atomic<uint64_t> max_message_bytes_;  // As of the last handshake.
  std::atomic<uint64_t> instance_id_{0};     // 0: there was none.
  std::atomic<bool> has_said_that_it_waits_{false};
};

// When to try again after a failure, and until when.
//
// Not thread-safe.
class RetryClock {
 public:
  explicit RetryClock(absl::Duration timeout);

  absl::Time start() const { return start_; }

  // The time of the next try; nullopt if it would be past the timeout. Grows
  // from 10 ms to 1 s, with some randomness so that clients do not come back in
  // step.
  std::optional<absl::Time> NextTry();

 private:
  const absl::Time start_;
  const absl::Time end_;
  absl::Duration pause_;
};

// One unary call with its retries. The thread that starts it must be the one
// that waits: it polls for its own answer, which saves a hand-over.
//
// A call that is destroyed before Wait is cancelled.
//
// Not thread-safe.
class UnaryCall {
 public:
  // Sends the first attempt. Ends within `timeout` if that is less than the
  // time of `kind`.
  UnaryCall(std::shared_ptr<Connection> connection, CallKind kind,
            const char* method, const grpc::ByteBuffer& request,
            const char* service = v1::ParameterServer::service_full_name(),
            absl::Duration timeout = absl::InfiniteDuration());

  UnaryCall(const UnaryCall&) = delete;
  UnaryCall& operator=(const UnaryCall&) = delete;

  // After a second without a connection it says so on stderr. Cancelled if
  // CheckInterrupt() is.
  absl::Status Wait(grpc::ByteBuffer* response);

  // `error` of Wait(). If there was no answer, it also says whether the write,
  // such as "The push to table 'user'", may have been applied. Empty: none.
  absl::Status ExplainWrite(const absl::Status& error,
                            absl::string_view write) const;

 private:
  friend void PollUntil(absl::Time time);
  struct Attempt;
  class ThreadQueue;
  // Cancels an attempt that has not ended, and leaves it to its queue.
  struct Abandon {
    void operator()(Attempt* attempt) const;
  };

  // When it ends at the latest.
  absl::Time deadline() const { return start_ + timeout_; }
  void StartAttempt();
  // Does the periodic work of a wait that began at `begin`.
  absl::Status Watch(absl::Time begin);

  const std::shared_ptr<Connection> connection_;
  const absl::Time start_ = SteadyNow();
  const CallKind kind_;
  const absl::Duration timeout_;        // For the call.
  const absl::Duration retry_timeout_;  // For a server to come back.
  const std::string method_;
  const grpc::ByteBuffer request_;
  std::unique_ptr<Attempt, Abandon> attempt_;
  std::string token_;          // As the attempt has shown it.
  grpc::Status last_failure_;  // From an earlier attempt; OK if there was none.
  bool was_away_ = false;      // An attempt began without a connection.
  bool may_have_arrived_ = false;  // At the server, without an answer.
};

// Others of this token's calls are under way; the server has not begun this
// one.
bool IsTooBusy(const grpc::Status& status, const grpc::ClientContext& context);

// Waits without using the CPU, while calls of this thread go on.
void PollUntil(absl::Time time);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_CONNECTION_H_
