// Accepts connections for a gRPC server, up to a limit.
//
// gRPC 1.51 could listen by itself, but it accepts every connection, and when
// the process has no file descriptor left for one, it stops listening for good.

#ifndef TFSWITCH_CC_RPC_EDGE_LISTENER_H_
#define TFSWITCH_CC_RPC_EDGE_LISTENER_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/rpc/address.h"

namespace tfswitch {

// The limits of a listener.
struct ListenerOptions {
  uint64_t max_connections = 0;  // More are closed at once.
  // gRPC's limit for a connection.
  uint64_t max_streams = 0;
  bool has_tls = false;
};

// Connections over `max_connections`, or over three quarters of the files that
// the process may open, are closed as soon as they are accepted. A warning on
// stderr says so, at most once a minute. Connections from addresses that the
// edge refuses are closed, too. The edge guards all others: see edge.h.
//
// Call Open() and Start() once, from one thread, in this order; Stop() from one
// thread at a time; CutConnections() after it.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  explicit Listener(const ListenerOptions& options) : options_(options) {}
  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Listens on all addresses of the host that can be bound; port 0 becomes the
  // bound one. The wildcard of IPv4 also accepts IPv6, if the machine has it.
  // Unavailable, with the reason, if none can be bound.
  absl::Status Open(Address* address);

  // From now on hands connections over.
  //
  // REQUIRES: the server has been built.
  void Start(std::unique_ptr<Acceptor> acceptor);

  // Closes the address. Connections stay. Idempotent.
  void Stop();

  // Ends all connections, and drops data that is on its way in them.
  //
  // REQUIRES: Stop() has returned.
  void CutConnections();

 private:
  absl::Status OpenUnix(const std::string& path);
  absl::Status OpenPort(Address* address);
  // Returns 0, or the errno if the address cannot be bound.
  int OpenOne(int family, const void* address, size_t size);

  void Run();
  // Avoids spinning; ends with the listener.
  void WaitToRetry() const;
  void Accept(int listening);
  // False if the limit is reached.
  bool MakeRoom();
  void Warn(absl::string_view text);

  const ListenerOptions options_;
  std::vector<int> listening_;  // Constant while the thread runs.
  int stop_pipe_[2] = {-1, -1};
  std::string unix_path_;
  std::unique_ptr<Acceptor> acceptor_;
  std::thread thread_;

  // Used by the thread only; after its end, by CutConnections(). The socket
  // that was handed over under each descriptor. When gRPC has closed it, the
  // descriptor is free, or something else.
  std::unordered_map<int, std::pair<dev_t, ino_t>> connections_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_LISTENER_H_
