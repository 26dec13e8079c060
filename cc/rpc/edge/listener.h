// Accepts connections for a gRPC server, up to a maximal number.
//
// gRPC 1.51 can listen itself, but it accepts any number of connections, and
// when the process has no free file descriptor for a new one, it never listens
// again.

#ifndef TFSWITCH_CC_RPC_EDGE_LISTENER_H_
#define TFSWITCH_CC_RPC_EDGE_LISTENER_H_

#include <grpcpp/server_builder.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/rpc/address.h"
#include "cc/rpc/edge/sockets.h"

namespace tfswitch {

// The limits of a listener.
struct ListenerOptions {
  // Further connections are closed at once.
  uint64_t max_connections = 0;
  // gRPC's limit for each connection.
  uint64_t max_streams = 0;
  bool has_tls = false;
};

// Connections beyond `max_connections`, or beyond three quarters of the files
// that the process may open, are closed as soon as they are accepted. A warning
// is logged, at most once a minute. Connections from addresses that the edge
// refuses are closed, too. The edge watches all others: see edge.h.
//
// Call Open() and then Start() once each, from one thread. Call Stop() from one
// thread at a time, and CutConnections() after it.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  explicit Listener(const ListenerOptions& options) : options_(options) {}
  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Listens; see OpenSockets() of sockets.h.
  absl::Status Open(Address* address);

  // Hands over each connection that arrives after this call.
  //
  // REQUIRES: the server has been built.
  void Start(std::unique_ptr<Acceptor> acceptor);

  // Closes the address. Connections stay. Idempotent.
  void Stop();

  // Ends all connections, and drops data that has not been sent yet.
  //
  // REQUIRES: Stop() has returned.
  void CutConnections();

 private:
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

  // For each descriptor, the socket that was handed to gRPC under this number.
  // If gRPC has closed the socket, the number is free or belongs to something
  // else. Only the listening thread uses the map; after the thread has ended,
  // CutConnections() does.
  std::unordered_map<int, SocketId> connections_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_LISTENER_H_
