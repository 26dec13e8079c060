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
  std::string ca;    // The authorities that sign the peer's certificate.
  std::string cert;  // The own certificate, followed by those between it and
                     // the authority.
  std::string key;   // Of the own certificate, not encrypted.
  // Of clients: the name that the server's certificate must have. Empty: the
  // host of the address.
  std::string server_name;

  friend bool operator==(const TlsFiles& a, const TlsFiles& b) {
    return std::tie(a.ca, a.cert, a.key, a.server_name) ==
           std::tie(b.ca, b.cert, b.key, b.server_name);
  }
};

// A client's credentials; null: it speaks plaintext.
struct ClientTls {
  std::shared_ptr<grpc::ChannelCredentials> credentials;
  std::string server_name;
};

// The process may change its folder before the files are read.
TlsFiles WithAbsolutePaths(TlsFiles files);

// A client's files, with those of the environment (TFSWITCH_TLS_CA, _CERT,
// _KEY, _SERVER_NAME) in place of empty ones.
TlsFiles WithTlsEnvironment(TlsFiles files);

// Both take absolute paths, read the files at once, and again every two
// seconds. InvalidArgument, naming the flag or the setting and the file, if one
// is missing or cannot be used: gRPC itself would say so late, and to its log
// only.
//
// Without `ca`, clients trust the authorities of the system.
absl::StatusOr<ClientTls> MakeClientTls(const TlsFiles& files);

// With `ca`, clients must show a certificate. Without any file, plaintext.
//
// REQUIRES: files.server_name is empty.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerTls(
    const TlsFiles& files);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_TLS_H_
