// TLS of an HTTP server, by the same rules as gRPC's: TLS 1.2 or later, and the
// PEM files may be replaced while they are in use.

#ifndef TFSWITCH_CC_HTTP_TLS_CONTEXT_H_
#define TFSWITCH_CC_HTTP_TLS_CONTEXT_H_

#include <openssl/ssl.h>

#include <array>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/rpc/tls.h"

namespace tfswitch {

// Not thread-safe.
class TlsContext {
 public:
  // The paths must be absolute. InvalidArgument as MakeServerTls().
  static absl::StatusOr<std::unique_ptr<TlsContext>> Open(
      const TlsFiles& files);

  // A new connection, which the caller frees; null if there is no memory. Reads
  // the files again if they have changed, at most every two seconds. While they
  // cannot be used, the former ones count, and a warning is logged.
  SSL* NewConnection();

 private:
  struct Free {
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
  };
  using Context = std::unique_ptr<SSL_CTX, Free>;
  using Stamps = std::array<FileStamp, 3>;

  explicit TlsContext(const TlsFiles& files) : files_(files) {}

  static absl::StatusOr<Context> Load(const TlsFiles& files);
  // A missing file has an empty stamp.
  Stamps ReadStamps() const;

  const TlsFiles files_;
  Context context_;
  // The stamps of the files that were read last.
  Stamps stamps_;
  absl::Time next_look_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_HTTP_TLS_CONTEXT_H_
