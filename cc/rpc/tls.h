// TLS between clients and servers, from PEM files that may be replaced while
// they are used.

#ifndef TFSWITCH_CC_RPC_TLS_H_
#define TFSWITCH_CC_RPC_TLS_H_

#include <memory>
#include <string>
#include <tuple>

#include "absl/status/statusor.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace tfswitch {

// Paths; each may be empty.
struct TlsFiles {
  std::string ca;  // The authorities that sign the peer's certificate.
  // The own certificate, followed by those between it and the authority.
  std::string cert;
  std::string key;  // The key of `cert`, not encrypted.
  // For clients: the name that the server's certificate must have. Empty: the
  // host of the address.
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

// Makes paths absolute, because the process may change its folder later.
TlsFiles WithAbsolutePaths(TlsFiles files);

// Replaces a client's empty files by those of the environment (TFSWITCH_TLS_CA,
// _CERT, _KEY, _SERVER_NAME).
TlsFiles WithTlsEnvironment(TlsFiles files);

// Both functions take absolute paths, and read the files at once and then every
// two seconds. InvalidArgument, naming the flag or the setting and the file, if
// one is missing or cannot be used: gRPC itself would report that late, and
// only in its log.
//
// Without `ca`, clients trust the authorities of the system.
absl::StatusOr<ClientTls> MakeClientTls(const TlsFiles& files);

// With `ca`, clients must show a certificate. Without any file: plaintext.
//
// REQUIRES: files.server_name is empty.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerTls(
    const TlsFiles& files);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_TLS_H_
