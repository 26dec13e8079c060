#include "cc/http/tls_context.h"

#include <openssl/err.h>

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kInterval = absl::Seconds(2);

bool Configure(const TlsFiles& files, SSL_CTX* context) {
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  // Without resumption, each connection shows a certificate that is valid now.
  SSL_CTX_set_options(context, SSL_OP_NO_TICKET | SSL_OP_NO_RENEGOTIATION);
  SSL_CTX_set_num_tickets(context, 0);
  SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
  // Without this callback, OpenSSL would ask for a password on the terminal.
  SSL_CTX_set_default_passwd_cb(context,
                                [](char*, int, int, void*) { return -1; });
  if (!files.ca.empty()) {
    SSL_CTX_set_verify(
        context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    SSL_CTX_set_client_CA_list(context,
                               SSL_load_client_CA_file(files.ca.c_str()));
    if (SSL_CTX_load_verify_locations(context, files.ca.c_str(), nullptr) !=
        1) {
      return false;
    }
  }
  return SSL_CTX_use_certificate_chain_file(context, files.cert.c_str()) == 1 &&
         SSL_CTX_use_PrivateKey_file(context, files.key.c_str(),
                                     SSL_FILETYPE_PEM) == 1 &&
         SSL_CTX_check_private_key(context) == 1;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TlsContext>> TlsContext::Open(
    const TlsFiles& files) {
  auto tls = std::unique_ptr<TlsContext>(new TlsContext(files));
  tls->stamps_ = tls->ReadStamps();
  tls->next_look_ = SteadyNow() + kInterval;
  TFSWITCH_ASSIGN_OR_RETURN(tls->context_, Load(files));
  return tls;
}

absl::StatusOr<TlsContext::Context> TlsContext::Load(const TlsFiles& files) {
  TFSWITCH_RETURN_IF_ERROR(CheckServerTls(files));
  Context context(SSL_CTX_new(TLS_server_method()));
  const bool is_configured =
      context != nullptr && Configure(files, context.get());
  ERR_clear_error();
  if (is_configured) return context;
  return absl::InvalidArgumentError(absl::StrCat(
      "TLS: OpenSSL cannot use --tls_cert '", files.cert, "' with --tls_key '",
      files.key, "'", files.ca.empty() ? "" : " and --tls_ca '", files.ca,
      files.ca.empty() ? "" : "'", "; write the files again"));
}

TlsContext::Stamps TlsContext::ReadStamps() const {
  Stamps stamps;
  for (const auto& [stamp, path] :
       {std::pair(&stamps[0], &files_.ca), std::pair(&stamps[1], &files_.cert),
        std::pair(&stamps[2], &files_.key)}) {
    const auto found = StampOf(*path);
    if (found.ok()) *stamp = *found;
  }
  return stamps;
}

SSL* TlsContext::NewConnection() {
  if (SteadyNow() >= next_look_) {
    next_look_ = SteadyNow() + kInterval;
    if (const Stamps now = ReadStamps(); now != stamps_) {
      stamps_ = now;
      auto loaded = Load(files_);
      if (loaded.ok()) {
        context_ = *std::move(loaded);
      } else {
        LogMessage(LogLevel::kWarning, {"certificate_unreadable"},
                   absl::StrCat(loaded.status().message(),
                                "; the HTTP server uses the former files"));
      }
    }
  }
  return SSL_new(context_.get());
}

}  // namespace tfswitch
