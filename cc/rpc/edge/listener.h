// Accepts connections for a gRPC server, as many as it may have.
//
// gRPC 1.51 could listen by itself, but it takes every connection there is, and
// when the process has no file descriptor left for one, it stops listening for
// good.

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

// What a listener lets in.
struct ListenerOptions {
  uint64_t max_connections = 0;  // More are closed at once.
  // gRPC lets a connection have so many.
  uint64_t max_streams = 0;
  bool has_tls = false;
};

// Connections over `max_connections`, or over three quarters of the files that
// the process may open, are closed as soon as they are accepted, and a warning
// on stderr says so, at most once a minute. So are those of addresses that the
// edge refuses, which guards the others: see edge.h.
//
// Open() and Start() are called once, by one thread, in this order; Stop() by
// one thread at a time; CutConnections() after it.
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  explicit Listener(const ListenerOptions& options) : options_(options) {}
  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  // Listens on all addresses of the host that can be had; port 0 becomes the
  // one that was bound. The wildcard of IPv4 takes IPv6, too, where there is
  // any. Unavailable, saying why, if none can be had.
  absl::Status Open(Address* address);

  // Hands connections over from now on.
  //
  // REQUIRES: the server has been built.
  void Start(std::unique_ptr<Acceptor> acceptor);

  // Closes the address. Connections stay. Idempotent.
  void Stop();

  // Ends all connections, with what is on its way in them.
  //
  // REQUIRES: Stop() has returned.
  void CutConnections();

 private:
  absl::Status OpenUnix(const std::string& path);
  absl::Status OpenPort(Address* address);
  // 0, or why this one cannot be had (errno).
  int OpenOne(int family, const void* address, size_t size);

  void Run();
  // So as not to spin; ends with the listener.
  void WaitToRetry() const;
  void Accept(int listening);
  // False if there are as many as there may be.
  bool MakeRoom();
  void Warn(absl::string_view text);

  const ListenerOptions options_;
  std::vector<int> listening_;  // Constant while the thread runs.
  int stop_pipe_[2] = {-1, -1};
  std::string unix_path_;
  std::unique_ptr<Acceptor> acceptor_;
  std::thread thread_;

  // Used by the thread only; once it has ended, by CutConnections().
  // The socket that was handed over under each descriptor. gRPC closes it some
  // time; then the descriptor is free, or something else.
  std::unordered_map<int, std::pair<dev_t, ino_t>> connections_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_LISTENER_H_
