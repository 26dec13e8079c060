// Decides which calls of a caller a gRPC server accepts, and logs important
// calls.

#ifndef TFSWITCH_CC_RPC_ACCESS_CONTROL_H_
#define TFSWITCH_CC_RPC_ACCESS_CONTROL_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/access/token_list.h"
#include "cc/rpc/address.h"
#include "cc/rpc/call_metrics.h"
#include "cc/rpc/tls.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/access.pb.h"

namespace tfswitch {

// Which callers may call a method; see access.proto.
struct MethodRule {
  const char* method;
  // Unspecified: nobody may call it.
  v1::Role least_role = v1::ROLE_UNSPECIFIED;
  bool needs_all_tables = false;
};

// The rule of the method whose request has this type; the .proto file contains
// the rules.
template <typename Request>
const MethodRule& RuleFor() {
  static const MethodRule rule = [] {
    const auto* file = Request::descriptor()->file();
    for (int s = 0; s < file->service_count(); ++s) {
      for (int m = 0; m < file->service(s)->method_count(); ++m) {
        const auto* method = file->service(s)->method(m);
        if (method->input_type() != Request::descriptor()) continue;
        const v1::AccessRule& access =
            method->options().GetExtension(v1::access);
        return MethodRule{method->name().c_str(), access.least_role(),
                          access.needs_all_tables()};
      }
    }
    return MethodRule{Request::descriptor()->name().c_str()};
  }();
  return rule;
}

// The index of a method in its service. Both are declared in the same file as
// Request.
template <typename Request>
int IndexOf(const char* service, const char* method) {
  const auto* file = Request::descriptor()->file();
  return file->FindServiceByName(service)->FindMethodByName(method)->index();
}

// The tables that a request names.
std::vector<std::string> TablesIn(const google::protobuf::Message& request);

// The folder that the request names; "" if it names none.
std::string PathIn(const google::protobuf::Message& request);

// One call and its caller, from the check of the caller's rights until the call
// is answered.
//
// Not thread-safe.
class Caller {
 public:
  Caller() = default;  // No caller is admitted.
  Caller(Caller&& other) noexcept
      : is_in_(std::exchange(other.is_in_, false)),
        begin_(other.begin_),
        token_(std::move(other.token_)),
        bytes_(other.bytes_) {}
  Caller& operator=(Caller&& other) noexcept {
    std::swap(is_in_, other.is_in_);
    std::swap(begin_, other.begin_);
    std::swap(token_, other.token_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Caller() {
    if (is_in_ && token_ != nullptr) token_->use->Leave(bytes_);
  }

  // Whether the caller may use methods of this role. False before the call is
  // admitted; after that, true for all roles if the server has no tokens.
  bool May(v1::Role role) const;
  bool MayUse(absl::string_view table) const;

  // Removes the list of existing tables from an error, if the caller may not
  // use all tables.
  absl::Status WithoutNames(const absl::Status& status) const;

  // PermissionDenied, naming the caller and the table.
  absl::Status CheckTable(absl::string_view table) const;
  // PermissionDenied unless the caller has this role. The error names the
  // caller, `what` and the role.
  absl::Status CheckRole(v1::Role role, absl::string_view what) const;
  // Adds the bytes of a request or an answer to those of the token's calls in
  // progress. Call AddAnswer() before the call changes anything.
  // ResourceExhausted if the bytes exceed a limit of the token. If they exceed
  // it only because of other calls in progress, kRetryPushback tells the client
  // to try again.
  absl::Status AddRequest(grpc::ServerContext* context, uint64_t bytes);
  absl::Status AddAnswer(grpc::ServerContext* context, uint64_t bytes);
  // Calls AddRequest(), then parses `bytes` and clears them. Counts first,
  // because a parsed message may take many times as much memory.
  // InvalidArgument if the bytes are not a message of this type.
  absl::Status ParseRequest(grpc::ServerContext* context,
                            grpc::ByteBuffer* bytes,
                            google::protobuf::Message* request);

  // The caller's token, even if the call was refused. Null if the server has no
  // tokens, or does not know this one.
  const KnownToken* token() const { return token_.get(); }
  // A number for the caller, never 0. All calls with one token have the same
  // number; if the server has no tokens, all calls from one address have.
  uint64_t CallerId(const grpc::ServerContext& context) const;

 private:
  friend class AccessControl;

  bool is_in_ = false;
  // The begin of Admit().
  absl::Time begin_ = absl::InfiniteFuture();
  std::shared_ptr<const KnownToken> token_;
  uint64_t bytes_ = 0;
};

// Settings that protect a server from other machines and users.
struct SecurityOptions {
  // If all files are empty, traffic is plaintext.
  TlsFiles tls;
  // An absolute path; if it is empty, callers need no token.
  std::string token_file;
  // Allows other machines to reach the server without TLS, or without a token
  // or certificate.
  bool is_insecure = false;
};

// Where a call comes from, for the log.
struct CallOrigin {
  std::string authorization;  // The header; may be empty.
  std::string certificate;    // The name in the caller's; may be empty.
  std::string peer;           // As of gRPC: "ipv4:127.0.0.1:7077".
};

// Thread-safe.
class AccessControl {
 public:
  // Makes the access control of a server at `address`. InvalidArgument, naming
  // the file, if the token file cannot be used. If other machines could reach
  // the address without TLS, or without a token or certificate:
  // InvalidArgument, naming the flags, or with `is_insecure` a warning on
  // stderr.
  //
  // Logs each call of role admin and each refused call, unless only this
  // machine can reach the server and callers need neither a token nor a
  // certificate.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Open(
      const Address& address, const SecurityOptions& options);

  // Admits a call. Unauthenticated without a valid token, PermissionDenied if
  // the token's role may not call the method, ResourceExhausted (with
  // kRetryPushback) if the token has too many calls in progress.
  absl::Status Admit(grpc::ServerContext* context, const MethodRule& rule,
                     Caller* caller);
  // The same for a request of HTTP, with the header of this name.
  absl::Status Admit(absl::string_view authorization, const MethodRule& rule,
                     Caller* caller);

  // Counts a call of gRPC, and logs it if needed. Call it at the end of each
  // call, with the results of TablesIn() and PathIn().
  void NoteEnd(const grpc::ServerContext& context, const Caller& caller,
               const MethodRule& rule, const std::vector<std::string>& tables,
               const std::string& path, const absl::Status& status);
  void NoteEnd(const CallOrigin& origin, const Caller& caller,
               const MethodRule& rule, const std::vector<std::string>& tables,
               const std::string& path, const absl::Status& status);

  const CallMetrics& calls() const { return calls_; }
  CallMetrics& calls() { return calls_; }

 private:
  explicit AccessControl(bool is_audited) : is_audited_(is_audited) {}

  // Whether NoteEnd() writes a line.
  bool IsNoted(const MethodRule& rule, const absl::Status& status) const;

  const bool is_audited_;
  CallMetrics calls_;
  std::unique_ptr<TokenList> tokens_;  // Null: callers need none.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_ACCESS_CONTROL_H_
