// One thread polls the listening sockets and a pipe; Stop() writes a byte to
// the pipe to wake it. gRPC does not tell the listener when it closes a
// connection. So the listener remembers the descriptor and the inode of each
// connection. When the limit is reached, MakeRoom() checks which of the
// descriptors still are the same sockets.
//
// If the process has no free descriptor, the thread waits, and new connections
// stay in the kernel's queue. Stop() removes the path of a Unix socket before
// it closes the socket, because afterwards another server may use the path.

#include "cc/rpc/edge/listener.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/edge/edge.h"
#include "cc/rpc/edge/sockets.h"

namespace tfswitch {
namespace {

// How long the listener waits when the process has no free descriptor.
constexpr int kRetryMs = 100;
constexpr int kTidyMs = 1000;
// If the peer's host vanishes while no call is in progress, the kernel notices
// it after this time plus kKeepaliveTimeoutMs.
constexpr int kIdleProbeSeconds = 60;
constexpr int kProbeIntervalSeconds = 5;

void SetConnectionOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kKeepaliveTimeoutMs);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleProbeSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeIntervalSeconds);
}

}  // namespace

absl::Status Listener::Open(Address* address) {
  if (pipe2(stop_pipe_, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "cannot listen on ", address->ToString(), ": ", std::strerror(errno)));
  }
  TFSWITCH_ASSIGN_OR_RETURN(listening_, OpenSockets(address));
  unix_path_ = address->path;
  return absl::OkStatus();
}

void Listener::Start(std::unique_ptr<Acceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  thread_ = std::thread(&Listener::Run, this);
}

void Listener::Stop() {
  // Calls shutdown() before close(), because a forked child that still runs
  // keeps the descriptors open.
  if (thread_.joinable()) {
    while (write(stop_pipe_[1], "", 1) < 0 && errno == EINTR) {
    }
    thread_.join();
  }
  for (int& fd : stop_pipe_) {
    if (fd >= 0) close(fd);
    fd = -1;
  }
  if (!unix_path_.empty()) RemoveSocket(unix_path_);
  unix_path_.clear();
  for (const int fd : listening_) {
    shutdown(fd, SHUT_RDWR);
    close(fd);
  }
  listening_.clear();
}

void Listener::CutConnections() {
  for (const auto& [fd, socket] : connections_) {
    if (IdOf(fd) != socket) continue;
    // Makes a copy of the descriptor, because gRPC may close the original
    // meanwhile. The copy remains the same socket.
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy >= 0 && IdOf(copy) == socket) shutdown(copy, SHUT_RDWR);
    if (copy >= 0) close(copy);
  }
}

void Listener::Run() {
  std::vector<pollfd> polled;
  for (const int fd : listening_) polled.push_back({fd, POLLIN, 0});
  polled.push_back({stop_pipe_[0], POLLIN, 0});
  for (;;) {
    const int num_ready = poll(polled.data(), polled.size(), kTidyMs);
    if (num_ready < 0) {
      if (errno != EINTR) WaitToRetry();
      continue;
    }
    Edge::Get().Tidy();
    if (polled.back().revents != 0) return;
    for (const pollfd& each : polled) {
      if (each.revents != 0) Accept(each.fd);
    }
  }
}

void Listener::WaitToRetry() const {
  pollfd stop = {stop_pipe_[0], POLLIN, 0};
  poll(&stop, 1, kRetryMs);
}

void Listener::Accept(int listening) {
  sockaddr_storage peer = {};
  socklen_t size = sizeof(peer);
  const int fd = accept4(listening, reinterpret_cast<sockaddr*>(&peer), &size,
                         SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd < 0) {
    if (errno == EMFILE || errno == ENFILE || errno == ENOMEM ||
        errno == ENOBUFS) {
      Warn(absl::StrCat("cannot accept a connection: ", std::strerror(errno)));
      WaitToRetry();  // It stays in the queue.
    }
    return;  // Or the peer has gone.
  }
  if (Edge::Get().Refuses(peer)) {
    // Makes close() reset the connection, so that the kernel forgets it.
    const linger at_once = {1, 0};
    (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    close(fd);
    return;
  }
  struct stat socket = {};
  if (fstat(fd, &socket) != 0 || !MakeRoom()) {
    close(fd);
    return;
  }
  if (unix_path_.empty()) SetConnectionOptions(fd);
  connections_[fd] = {socket.st_dev, socket.st_ino};
  Edge::Get().Watch(fd, peer, options_.has_tls, options_.max_streams);
  Acceptor::NewConnectionParameters parameters;
  parameters.listener_fd = listening;
  parameters.fd = fd;
  acceptor_->HandleNewConnection(&parameters);
}

bool Listener::MakeRoom() {
  const uint64_t by_files = MaxFiles() / 4 * 3;
  const uint64_t limit = std::min(options_.max_connections, by_files);
  if (connections_.size() < limit) return true;
  for (auto it = connections_.begin(); it != connections_.end();) {
    it = IdOf(it->first) == it->second ? std::next(it) : connections_.erase(it);
  }
  if (connections_.size() < limit) return true;
  Warn(absl::StrCat(
      limit, " connections are open, and another one was closed: ",
      limit == options_.max_connections
          ? "raise --max_connections"
          : "that is three quarters of the files that this process may open; "
            "raise `ulimit -n`"));
  return false;
}

void Listener::Warn(absl::string_view text) {
  LogMessage(LogLevel::kWarning,
             {"connection_refused", /*burst=*/1, /*per_second=*/1.0 / 60},
             text);
}

}  // namespace tfswitch
