// Checks the PEM files when they are first used, because gRPC's file watcher
// does not. If a file is damaged later, gRPC refuses new connections until the
// file is valid again.

#include "cc/rpc/tls.h"

#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <cstdlib>
#include <ctime>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/access/tokens.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr unsigned int kRefreshSeconds = 2;
constexpr size_t kMaxFileBytes = 16 << 20;

struct FreeOpenSsl {
  void operator()(BIO* bio) const { BIO_free(bio); }
  void operator()(X509* certificate) const { X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
};
template <typename T>
using Owned = std::unique_ptr<T, FreeOpenSsl>;

// The names of the files in messages.
struct Names {
  const char* ca;
  const char* cert;
  const char* key;
};
constexpr Names kServerNames = {"--tls_ca", "--tls_cert", "--tls_key"};
constexpr Names kClientNames = {"`ca` of `tls` (or TFSWITCH_TLS_CA)",
                                "`cert` of `tls` (or TFSWITCH_TLS_CERT)",
                                "`key` of `tls` (or TFSWITCH_TLS_KEY)"};

absl::Status BadFile(absl::string_view name, const std::string& path,
                     absl::string_view why) {
  TFSWITCH_RETURN_IF_ERROR(CheckIsNoToken(name, path));
  return absl::InvalidArgumentError(
      absl::StrCat("TLS: ", name, ": '", path, "' ", why));
}

absl::StatusOr<Owned<BIO>> OpenPem(absl::string_view name,
                                   const std::string& path,
                                   std::string* contents) {
  absl::StatusOr<std::string> read = ReadWholeFile(path, kMaxFileBytes);
  if (!read.ok()) {
    return BadFile(name, path,
                   absl::StrCat("cannot be used (", read.status().message(),
                                "); give a PEM file that this process may "
                                "read"));
  }
  *contents = *std::move(read);
  return Owned<BIO>(
      BIO_new_mem_buf(contents->data(), static_cast<int>(contents->size())));
}

// The first certificate of a file. An error if any certificate of the file
// cannot be read.
absl::StatusOr<Owned<X509>> ReadCertificates(absl::string_view name,
                                             const std::string& path) {
  std::string contents;
  TFSWITCH_ASSIGN_OR_RETURN(const Owned<BIO> bio,
                            OpenPem(name, path, &contents));
  Owned<X509> first;
  for (;;) {
    ERR_clear_error();
    Owned<X509> next(PEM_read_bio_X509(bio.get(), nullptr, nullptr, nullptr));
    if (next == nullptr) break;
    if (first == nullptr) first = std::move(next);
  }
  // At the end of an undamaged file, the only error is that no further
  // certificate begins.
  const bool is_damaged =
      ERR_GET_REASON(ERR_peek_last_error()) != PEM_R_NO_START_LINE;
  ERR_clear_error();
  if (is_damaged) {
    return BadFile(name, path,
                   "has a damaged certificate; write the file again");
  }
  if (first == nullptr) {
    return BadFile(name, path,
                   "has no certificate; give a PEM file with 'BEGIN "
                   "CERTIFICATE'");
  }
  return first;
}

absl::Status CheckKey(absl::string_view name, const std::string& path,
                      X509* certificate, const std::string& cert_path) {
  std::string contents;
  TFSWITCH_ASSIGN_OR_RETURN(const Owned<BIO> bio,
                            OpenPem(name, path, &contents));
  // Without this callback, OpenSSL would ask for a password on the terminal.
  const auto no_password = [](char*, int, int, void*) { return -1; };
  const Owned<EVP_PKEY> key(
      PEM_read_bio_PrivateKey(bio.get(), nullptr, no_password, nullptr));
  const bool fits =
      key != nullptr && X509_check_private_key(certificate, key.get()) == 1;
  ERR_clear_error();
  if (key == nullptr) {
    return BadFile(name, path,
                   "has no private key that can be read; give a PEM file with "
                   "'BEGIN PRIVATE KEY' and without a password");
  }
  if (!fits) {
    return BadFile(
        name, path,
        absl::StrCat("is not the key of the certificate '", cert_path,
                     "'; give the key that the certificate was made with"));
  }
  return absl::OkStatus();
}

absl::Status Check(const TlsFiles& files, const Names& names) {
  if (files.cert.empty() != files.key.empty()) {
    const bool has_cert = files.key.empty();
    return BadFile(has_cert ? names.cert : names.key,
                   has_cert ? files.cert : files.key,
                   absl::StrCat("needs ", has_cert ? names.key : names.cert,
                                "; give both"));
  }
  if (!files.ca.empty()) {
    TFSWITCH_RETURN_IF_ERROR(ReadCertificates(names.ca, files.ca).status());
  }
  if (files.cert.empty()) return absl::OkStatus();
  TFSWITCH_ASSIGN_OR_RETURN(const Owned<X509> certificate,
                            ReadCertificates(names.cert, files.cert));
  return CheckKey(names.key, files.key, certificate.get(), files.cert);
}

std::shared_ptr<grpc::experimental::CertificateProviderInterface> Watch(
    const TlsFiles& files) {
  return std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      files.key, files.cert, files.ca, kRefreshSeconds);
}

}  // namespace

TlsFiles WithAbsolutePaths(TlsFiles files) {
  for (std::string* path : {&files.ca, &files.cert, &files.key}) {
    if (!path->empty()) *path = AbsolutePath(*path);
  }
  return files;
}

TlsFiles WithTlsEnvironment(TlsFiles files) {
  const auto fill = [](std::string* value, const char* variable) {
    const char* text = std::getenv(variable);
    if (value->empty() && text != nullptr) *value = text;
  };
  fill(&files.ca, "TFSWITCH_TLS_CA");
  fill(&files.cert, "TFSWITCH_TLS_CERT");
  fill(&files.key, "TFSWITCH_TLS_KEY");
  fill(&files.server_name, "TFSWITCH_TLS_SERVER_NAME");
  return WithAbsolutePaths(std::move(files));
}

absl::StatusOr<ClientTls> MakeClientTls(const TlsFiles& files) {
  TFSWITCH_RETURN_IF_ERROR(Check(files, kClientNames));
  grpc::experimental::TlsChannelCredentialsOptions options;
  if (!files.ca.empty() || !files.cert.empty()) {
    options.set_certificate_provider(Watch(files));
    if (!files.ca.empty()) options.watch_root_certs();
    if (!files.cert.empty()) options.watch_identity_key_cert_pairs();
  }
  return ClientTls{grpc::experimental::TlsCredentials(options),
                   files.server_name};
}

absl::Status CheckServerTls(const TlsFiles& files) {
  TFSWITCH_RETURN_IF_ERROR(Check(files, kServerNames));
  return files.cert.empty() ? absl::InvalidArgumentError(
                                  "TLS: --tls_ca needs --tls_cert and "
                                  "--tls_key; give all three")
                            : absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerTls(
    const TlsFiles& files) {
  if (files == TlsFiles()) return grpc::InsecureServerCredentials();
  TFSWITCH_RETURN_IF_ERROR(CheckServerTls(files));
  grpc::experimental::TlsServerCredentialsOptions options(Watch(files));
  options.watch_identity_key_cert_pairs();
  if (!files.ca.empty()) {
    options.watch_root_certs();
    options.set_cert_request_type(
        GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  }
  return grpc::experimental::TlsServerCredentials(options);
}

std::optional<absl::Time> CertificateExpiry(const TlsFiles& files) {
  if (files.cert.empty()) return std::nullopt;
  const auto certificate = ReadCertificates("--tls_cert", files.cert);
  tm end = {};
  if (!certificate.ok() ||
      ASN1_TIME_to_tm(X509_get0_notAfter(certificate->get()), &end) != 1) {
    return std::nullopt;
  }
  return absl::FromTM(end, absl::UTCTimeZone());
}

}  // namespace tfswitch
