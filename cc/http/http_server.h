// A small HTTP/1.1 server for a page of the cluster, metrics and probes.
//
// One thread does all of its work, so slow clients hold connections but no
// threads. Each request has a deadline, which a client cannot extend by sending
// a little from time to time.

#ifndef TFSWITCH_CC_HTTP_HTTP_SERVER_H_
#define TFSWITCH_CC_HTTP_HTTP_SERVER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/rpc/access_control.h"

namespace tfswitch {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
  std::string content_security_policy =
      "default-src 'none'; frame-ancestors 'none'";
};

struct HttpPage {
  // Called in the server's thread, so it must be quick.
  std::function<HttpAnswer()> answer;
  // Whether callers need no token. Other pages need one that may read, and is
  // not limited to some tables.
  bool is_public = false;
};
// The key is the path.
using HttpPages = std::map<std::string, HttpPage>;

struct HttpServerOptions {
  // "host:port". Port 0 means any free port.
  std::string address = "127.0.0.1:0";
  // The same rules as for gRPC: see AccessControl::Open().
  SecurityOptions security;
  // Pages of these origins, such as "https://ps0:9077", may read the answers in
  // a browser (CORS).
  std::vector<std::string> trusted_origins;
  // Further connections wait in the kernel's queue. An eighth of the files that
  // the process may open, if that is less.
  uint64_t max_connections = 512;
  // A connection is closed if its first request, including the TLS handshake,
  // is not complete after this time, or if the client has not taken an answer
  // after this time.
  absl::Duration request_time = absl::Seconds(10);
  // The same for further requests of a connection, since the last answer.
  absl::Duration idle_time = absl::Seconds(60);
};

// A running server. It answers GET and HEAD, and OPTIONS to trusted origins. It
// reads 16 KiB of headers, 2048 characters of a path and no body.
//
// Thread-safe.
class HttpServer {
 public:
  // Starts to listen. InvalidArgument for a bad address or file, also from
  // AccessControl::Open(); Unavailable if the address cannot be bound. The
  // errors name the flag --http_address.
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(
      const HttpServerOptions& options, HttpPages pages);

  virtual ~HttpServer() = default;  // Closes all connections.

  // The bound address, with the actual port.
  virtual const std::string& address() const = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_HTTP_HTTP_SERVER_H_
