#include "cc/rpc/access_control.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include <algorithm>

#include "absl/hash/hash.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/channel_settings.h"

namespace tfswitch {
namespace {

using google::protobuf::FieldDescriptor;

// The pause that kRetryPushback asks for, in milliseconds. The client waits
// longer each time the server refuses the same call again.
constexpr char kPause[] = "10";

absl::string_view ViewOf(const grpc::string_ref& text) {
  return {text.data(), text.size()};
}

// The header kTokenHeader; empty if the call does not have it.
absl::string_view AuthorizationOf(const grpc::ServerContext& context) {
  const auto& metadata = context.client_metadata();
  const auto found = metadata.find(kTokenHeader);
  return found == metadata.end() ? absl::string_view() : ViewOf(found->second);
}

// The token in "Bearer TOKEN"; empty if the header has another form.
absl::string_view PresentedToken(absl::string_view value) {
  constexpr absl::string_view kScheme = "Bearer ";
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return "";
  value.remove_prefix(kScheme.size());
  return absl::StripAsciiWhitespace(value);
}

// Returns the name in the client's certificate. gRPC has verified the
// certificate in the TLS handshake.
std::string CertificateName(const grpc::ServerContext& context) {
  const auto auth = context.auth_context();
  if (auth == nullptr) return "";
  const auto names = auth->FindPropertyValues("x509_common_name");
  return names.empty() ? "" : std::string(ViewOf(names[0]));
}

// Shortens text that a caller has sent, for a log line.
std::string Shortened(absl::string_view text) {
  constexpr size_t kLongest = 200;
  return absl::StrCat(text.substr(0, kLongest),
                      text.size() > kLongest ? "..." : "");
}

// A null token means that the server has no tokens.
bool HasRole(const KnownToken* token, v1::Role role) {
  return role != v1::ROLE_UNSPECIFIED &&
         (token == nullptr || role <= token->record.role);
}

absl::Status CheckRoleOf(const KnownToken* token, v1::Role role,
                         absl::string_view what) {
  if (HasRole(token, role)) return absl::OkStatus();
  if (role == v1::ROLE_UNSPECIFIED || token == nullptr) {
    return absl::PermissionDeniedError(
        absl::StrCat(what, " is allowed to nobody"));
  }
  return absl::PermissionDeniedError(
      absl::StrCat("token ", token->record.id, " has the role ",
                   RoleName(token->record.role), ", and ", what, " needs ",
                   RoleName(role), "; use a token with that role"));
}

absl::Status CheckRule(const KnownToken* token, const MethodRule& rule) {
  TFSWITCH_RETURN_IF_ERROR(CheckRoleOf(token, rule.least_role, rule.method));
  if (!rule.needs_all_tables || token == nullptr || token->record.MayUseAll()) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "token ", token->record.id, " is for the tables '",
      absl::StrJoin(token->record.tables, "', '"), "', and ", rule.method,
      " is about all of them; use a token without --tables"));
}

bool IsRefusal(const absl::Status& status) {
  return absl::IsUnauthenticated(status) || absl::IsPermissionDenied(status);
}

// Names the caller for a log line: "token" and the token's id, or "claims" and
// the id if the token's secret is not valid.
std::pair<const char*, std::string> CallerName(absl::string_view authorization,
                                               const Caller& caller) {
  if (caller.token() != nullptr) return {"token", caller.token()->record.id};
  const auto claimed = TokenId(PresentedToken(authorization));
  if (claimed.ok()) return {"claims", std::string(*claimed)};
  return {"token", "none"};
}

}  // namespace

std::vector<std::string> TablesIn(const google::protobuf::Message& request) {
  std::vector<std::string> tables;
  const auto* type = request.GetDescriptor();
  const auto* reflection = request.GetReflection();
  if (const FieldDescriptor* field = type->FindFieldByName("table")) {
    tables.push_back(reflection->GetString(request, field));
  }
  if (const FieldDescriptor* field = type->FindFieldByName("config")) {
    const auto& config = reflection->GetMessage(request, field);
    tables.push_back(config.GetReflection()->GetString(
        config, config.GetDescriptor()->FindFieldByName("name")));
  }
  // An empty name means all tables (ListTables); no table has an empty name.
  tables.erase(std::remove(tables.begin(), tables.end(), ""), tables.end());
  return tables;
}

std::string PathIn(const google::protobuf::Message& request) {
  const FieldDescriptor* field =
      request.GetDescriptor()->FindFieldByName("path");
  return field == nullptr ? ""
                          : request.GetReflection()->GetString(request, field);
}

bool Caller::May(v1::Role role) const {
  return is_in_ && HasRole(token_.get(), role);
}

bool Caller::MayUse(absl::string_view table) const {
  return is_in_ && (token_ == nullptr || token_->record.MayUse(table));
}

absl::Status Caller::WithoutNames(const absl::Status& status) const {
  if (token_ == nullptr || token_->record.MayUseAll()) return status;
  // Removes the list of tables, which follows this text in the errors of
  // Shard::FindTable() and the predictor.
  const absl::string_view message = status.message();
  const size_t end = message.find("; it has: ");
  return end == message.npos
             ? status
             : absl::Status(status.code(), message.substr(0, end));
}

absl::Status Caller::CheckTable(absl::string_view table) const {
  if (MayUse(table)) return absl::OkStatus();
  const TokenRecord* record = token_ != nullptr ? &token_->record : nullptr;
  return absl::PermissionDeniedError(absl::StrCat(
      "token ", record != nullptr ? record->id : "", " is for the tables '",
      record != nullptr ? absl::StrJoin(record->tables, "', '") : "",
      "', and not for '", absl::CHexEscape(table.substr(0, 200)),
      "'; use a token with another --tables"));
}

absl::Status Caller::CheckRole(v1::Role role, absl::string_view what) const {
  return CheckRoleOf(token_.get(), is_in_ ? role : v1::ROLE_UNSPECIFIED, what);
}

absl::Status Caller::AddRequest(grpc::ServerContext* context, uint64_t bytes) {
  if (token_ == nullptr) return absl::OkStatus();
  const uint64_t limit = token_->record.quota.max_request_bytes;
  if (bytes > limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("token ", token_->record.id, ": a message of ", bytes,
                     " bytes is over its max_request_bytes of ", limit,
                     "; use smaller batches"));
  }
  return AddAnswer(context, bytes);
}

absl::Status Caller::AddAnswer(grpc::ServerContext* context, uint64_t bytes) {
  if (token_ == nullptr) return absl::OkStatus();
  const TokenRecord& record = token_->record;
  bytes_ += bytes;
  absl::Status added = token_->use->Add(record, bytes);
  if (bytes_ > record.quota.max_bytes_in_flight) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "token ", record.id, ": a call of ", bytes_,
        " bytes is over its max_bytes_in_flight of ",
        record.quota.max_bytes_in_flight, "; use smaller batches"));
  }
  if (!added.ok()) context->AddTrailingMetadata(kRetryPushback, kPause);
  return added;
}

absl::Status Caller::ParseRequest(grpc::ServerContext* context,
                                  grpc::ByteBuffer* bytes,
                                  google::protobuf::Message* request) {
  TFSWITCH_RETURN_IF_ERROR(AddRequest(context, bytes->Length()));
  grpc::ProtoBufferReader reader(bytes);
  if (!request->ParseFromZeroCopyStream(&reader)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the message is not a ", request->GetDescriptor()->full_name()));
  }
  bytes->Clear();
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<AccessControl>> AccessControl::Open(
    const Address& address, const SecurityOptions& options) {
  const bool has_tls = !(options.tls == TlsFiles());
  const bool has_tokens = !options.token_file.empty();
  const bool is_local = IsLocal(address);
  if (!is_local && has_tokens && !has_tls) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--token_file with the address '", address.ToString(),
        "' needs --tls_cert and --tls_key: tokens never go over plaintext to "
        "other machines"));
  }
  if (!is_local && !options.is_insecure &&
      !(has_tls && (has_tokens || !options.tls.ca.empty()))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "other machines can reach the address '", address.ToString(),
        "', and could use all that is there. Give ",
        has_tls ? "" : "--tls_cert and --tls_key, and ",
        "--token_file (tokens) or --tls_ca (client certificates); or say "
        "--insecure, if the network lets nobody else through"));
  }
  if (options.is_insecure) {
    LogMessage(LogLevel::kWarning, {"insecure"},
               absl::StrCat("--insecure: ", address.ToString(), " ",
                            is_local || (has_tls && (has_tokens ||
                                                     !options.tls.ca.empty()))
                                ? "would be safe without it"
                                : "is open to all who can reach it"));
  }
  auto access = std::unique_ptr<AccessControl>(
      new AccessControl(!is_local || has_tokens || !options.tls.ca.empty()));
  if (has_tokens) {
    TFSWITCH_ASSIGN_OR_RETURN(access->tokens_,
                              TokenList::Open(options.token_file));
  }
  return access;
}

uint64_t Caller::CallerId(const grpc::ServerContext& context) const {
  if (token_ != nullptr) return absl::HashOf(token_->record.id) | 1;
  const std::string peer = context.peer();  // "ipv4:127.0.0.1:7077".
  return absl::HashOf(absl::string_view(peer).substr(0, peer.rfind(':'))) | 1;
}

absl::Status AccessControl::Admit(grpc::ServerContext* context,
                                  const MethodRule& rule, Caller* caller) {
  absl::Status status = Admit(AuthorizationOf(*context), rule, caller);
  if (absl::IsResourceExhausted(status)) {
    context->AddTrailingMetadata(kRetryPushback, kPause);
  }
  return status;
}

absl::Status AccessControl::Admit(absl::string_view authorization,
                                  const MethodRule& rule, Caller* caller) {
  caller->begin_ = SteadyNow();
  if (tokens_ != nullptr) {
    const absl::string_view presented = PresentedToken(authorization);
    if (presented.empty()) {
      return absl::UnauthenticatedError(
          "the server asks for a token, and the call has none; give one in "
          "`token` of tfswitch.connect, TFSWITCH_TOKEN or TFSWITCH_TOKEN_FILE, "
          "or as the metadata 'authorization: Bearer TOKEN'");
    }
    TFSWITCH_ASSIGN_OR_RETURN(caller->token_, tokens_->Find(presented));
  }
  // Checks the role before the token's limits, so that a caller without the
  // role always gets the error about the role.
  TFSWITCH_RETURN_IF_ERROR(CheckRule(caller->token_.get(), rule));
  if (caller->token_ != nullptr) {
    TFSWITCH_RETURN_IF_ERROR(
        caller->token_->use->Enter(caller->token_->record));
  }
  caller->is_in_ = true;
  return absl::OkStatus();
}

bool AccessControl::IsNoted(const MethodRule& rule,
                            const absl::Status& status) const {
  return is_audited_ &&
         (IsRefusal(status) || rule.least_role == v1::ROLE_ADMIN);
}

void AccessControl::NoteEnd(const grpc::ServerContext& context,
                            const Caller& caller, const MethodRule& rule,
                            const std::vector<std::string>& tables,
                            const std::string& path,
                            const absl::Status& status) {
  calls_.Record(rule.method, status.code(), SteadyNow() - caller.begin_);
  if (!IsNoted(rule, status)) return;
  NoteEnd(CallOrigin{std::string(AuthorizationOf(context)),
                     CertificateName(context), context.peer()},
          caller, rule, tables, path, status);
}

void AccessControl::NoteEnd(const CallOrigin& origin, const Caller& caller,
                            const MethodRule& rule,
                            const std::vector<std::string>& tables,
                            const std::string& path,
                            const absl::Status& status) {
  if (!IsNoted(rule, status)) return;
  // Log lines about refused calls have a limit of their own, so that a flood of
  // them does not displace lines about other calls.
  const bool is_done = caller.is_in_ && !IsRefusal(status);
  const LogKind kind =
      is_done ? LogKind{"admin_called", 200, 10} : LogKind{"caller_refused"};
  const auto [token_kind, token] = CallerName(origin.authorization, caller);
  // Does not call LogServerEvent(), which writes nothing in a Python process
  // that contains a server.
  LogWriter::Get().Write(
      kind,
      EventLine(is_done ? LogLevel::kInfo : LogLevel::kWarning, kind.name,
                {{"call", rule.method},
                 {token_kind, token},
                 {"cert", Shortened(origin.certificate)},
                 {"from", origin.peer},
                 {"tables", Shortened(absl::StrJoin(tables, ","))},
                 {"path", Shortened(path)},
                 {"result", absl::StatusCodeToString(status.code())},
                 {"why", Shortened(status.message())}}),
      // The address without the port.
      origin.peer.substr(0, origin.peer.rfind(':')));
}

}  // namespace tfswitch
