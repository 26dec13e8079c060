// TLS between clients and servers. The PEM files may be replaced while they are
// in use.

#ifndef TFSWITCH_CC_RPC_TLS_H_
#define TFSWITCH_CC_RPC_TLS_H_

#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace tfswitch {

// Paths; each may be empty.
struct TlsFiles {
  // A file with the certificate authorities whose certificates peers must have.
  std::string ca;
  // A file with this side's certificate, followed by the intermediate ones.
  std::string cert;
  // The key of `cert`, not encrypted.
  std::string key;
  // For clients: the name that the server's certificate must have. If this is
  // empty, it must have the host name of the address.
  std::string server_name;

  friend bool operator==(const TlsFiles& a, const TlsFiles& b) {
    return std::tie(a.ca, a.cert, a.key, a.server_name) ==
           std::tie(b.ca, b.cert, b.key, b.server_name);
  }
};

// A client's credentials; null: plaintext.
struct ClientTls {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string server_name;
};

// Makes the paths absolute, because the process may later change its current
// folder.
TlsFiles WithAbsolutePaths(TlsFiles files);

// If a path of a client is empty, takes it from the environment
// (TFSWITCH_TLS_CA, _CERT, _KEY, _SERVER_NAME).
TlsFiles WithTlsEnvironment(TlsFiles files);

// The two functions below take absolute paths. They read the files at once and
// then every two seconds. InvalidArgument, naming the flag or setting and the
// file, if a file is missing or cannot be used: gRPC would report that only
// later, and only in its log.
//
// If `ca` is empty, clients trust the certificate authorities of the system.
absl::StatusOr<ClientTls> MakeClientTls(const TlsFiles& files);

// If `ca` is given, clients must present a certificate. If all files are empty,
// traffic is plaintext.
//
// REQUIRES: files.server_name is empty.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerTls(
    const TlsFiles& files);

// The end of the validity of files.cert, as the file is now. Nothing if there
// is no such file, or it has no certificate.
std::optional<absl::Time> CertificateExpiry(const TlsFiles& files);

// The checks of MakeServerTls(), for a server that uses OpenSSL itself.
absl::Status CheckServerTls(const TlsFiles& files);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_TLS_H_
