// Decides which calls a gRPC server accepts from a caller, and logs important
// ones.

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
#include "cc/access/token_list.h"
#include "cc/rpc/address.h"
#include "cc/rpc/tls.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/access.pb.h"

namespace tfswitch {

// The rule for callers of a method; see access.proto.
struct MethodRule {
  const char* method;
  // Unspecified: nobody may call it.
  v1::Role least_role = v1::ROLE_UNSPECIFIED;
  bool needs_all_tables = false;
};

// The rule of the method that takes this request, from its .proto file.
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

// The name of a method in its service, whose messages are in Request's file.
template <typename Request>
int IndexOf(const char* service, const char* method) {
  const auto* file = Request::descriptor()->file();
  return file->FindServiceByName(service)->FindMethodByName(method)->index();
}

// The tables that a request names.
std::vector<std::string> TablesIn(const google::protobuf::Message& request);

// The folder that the request names; "" if it names none.
std::string PathIn(const google::protobuf::Message& request);

// One call of a caller, from its admission to its answer.
//
// Not thread-safe.
class Caller {
 public:
  Caller() = default;  // No caller is admitted.
  Caller(Caller&& other) noexcept
      : is_in_(std::exchange(other.is_in_, false)),
        token_(std::move(other.token_)),
        bytes_(other.bytes_) {}
  Caller& operator=(Caller&& other) noexcept {
    std::swap(is_in_, other.is_in_);
    std::swap(token_, other.token_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Caller() {
    if (is_in_ && token_ != nullptr) token_->use->Leave(bytes_);
  }

  // False before a caller is admitted; true for all roles on a server without
  // tokens.
  bool May(v1::Role role) const;
  bool MayUse(absl::string_view table) const;

  // An error for the caller: without the list of present names, if the caller
  // may not use all of them.
  absl::Status WithoutNames(const absl::Status& status) const;

  // PermissionDenied, naming the caller and the table.
  absl::Status CheckTable(absl::string_view table) const;
  // PermissionDenied, naming the caller, `what` and the role that it needs.
  absl::Status CheckRole(v1::Role role, absl::string_view what) const;
  // Counts bytes of the request, or of the answer before anything has been
  // changed. ResourceExhausted if they are too many. If that is so because of
  // other calls, the answer says that a retry helps (kRetryPushback).
  absl::Status AddRequest(grpc::ServerContext* context, uint64_t bytes);
  absl::Status AddAnswer(grpc::ServerContext* context, uint64_t bytes);
  // Calls AddRequest(), and then parses and clears `bytes`: once parsed, they
  // may take many times as much memory. InvalidArgument if they are no such
  // message.
  absl::Status ParseRequest(grpc::ServerContext* context,
                            grpc::ByteBuffer* bytes,
                            google::protobuf::Message* request);

  // The token, also of a caller that was refused. Null: the server has no
  // tokens, or does not know the one that was shown.
  const KnownToken* token() const { return token_.get(); }
  // Equal for all calls with one token, or from one address if the server has
  // no tokens. Never 0.
  uint64_t CallerId(const grpc::ServerContext& context) const;

 private:
  friend class AccessControl;

  bool is_in_ = false;
  std::shared_ptr<const KnownToken> token_;
  uint64_t bytes_ = 0;
};

// The settings by which a server keeps others out.
struct SecurityOptions {
  TlsFiles tls;            // Without any, traffic is plaintext.
  std::string token_file;  // Absolute. Empty: callers need no token.
  // Allows other machines to reach the server without TLS, or without a token
  // or certificate.
  bool is_insecure = false;
};

// Thread-safe.
class AccessControl {
 public:
  // For a server at `address`. InvalidArgument, naming the file, if the token
  // file cannot be used. InvalidArgument, naming the flags, if other machines
  // could reach the address without TLS, or without a token or certificate, and
  // `is_insecure` is not set. If it is set, a warning on stderr says so.
  //
  // If anybody else may call, each call of role admin, and each refused call,
  // gets a line on stderr.
  static absl::StatusOr<std::unique_ptr<AccessControl>> Open(
      const Address& address, const SecurityOptions& options);

  // Admits a call. Unauthenticated without a valid token, PermissionDenied for
  // a method that its role may not call, ResourceExhausted for a call too many,
  // as in AddRequest().
  absl::Status Admit(grpc::ServerContext* context, const MethodRule& rule,
                     Caller* caller);

  // Call it at the end of each call, with the results of TablesIn() and
  // PathIn().
  void NoteEnd(const grpc::ServerContext& context, const Caller& caller,
               const MethodRule& rule, const std::vector<std::string>& tables,
               const std::string& path, const absl::Status& status);

 private:
  explicit AccessControl(bool is_audited) : is_audited_(is_audited) {}

  const bool is_audited_;
  std::unique_ptr<TokenList> tokens_;  // Null: callers need none.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_ACCESS_CONTROL_H_
