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
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iterator>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cc/base/log_writer.h"
#include "cc/rpc/channel_settings.h"
#include "cc/rpc/edge/edge.h"

namespace tfswitch {
namespace {

// How long the listener waits when the process has no free descriptor.
constexpr int kRetryMs = 100;
constexpr int kTidyMs = 1000;
// If the peer's host vanishes while no call is in progress, the kernel notices
// it after this time plus kKeepaliveTimeoutMs.
constexpr int kIdleProbeSeconds = 60;
constexpr int kProbeIntervalSeconds = 5;

void SetOption(int fd, int level, int name, int value) {
  // A connection also works without the option.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

void SetConnectionOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, kKeepaliveTimeoutMs);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kIdleProbeSeconds);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kProbeIntervalSeconds);
}

// Whether the descriptor still is this socket. gRPC may have closed it, and the
// number may have been used again.
bool IsSocket(int fd, const std::pair<dev_t, ino_t>& socket) {
  struct stat now = {};
  return fstat(fd, &now) == 0 && socket == std::pair(now.st_dev, now.st_ino);
}

uint64_t MaxFiles() {
  rlimit files = {};
  return getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur : 1024;
}

bool IsLoopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    return ntohl(v4->sin_addr.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr);
}

// A socket at this path is in use only if a process answers on it. A killed
// server leaves its socket behind.
bool SomeoneAnswersOn(const sockaddr_un& address) {
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return false;
  const bool answered = connect(fd, reinterpret_cast<const sockaddr*>(&address),
                                sizeof(address)) == 0;
  close(fd);
  return answered;
}

void RemoveSocket(const std::string& path) {
  struct stat there = {};
  if (stat(path.c_str(), &there) == 0 && S_ISSOCK(there.st_mode)) {
    unlink(path.c_str());
  }
}

absl::Status CannotListen(const Address& address, absl::string_view why) {
  return absl::UnavailableError(
      absl::StrCat("cannot listen on ", address.ToString(), ": ", why));
}

int PortOf(int fd) {
  // This reads the port of an IPv4 address as well: `sin_port` and `sin6_port`
  // have the same offset.
  sockaddr_in6 bound = {};
  socklen_t size = sizeof(bound);
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &size) != 0) {
    return 0;
  }
  return ntohs(bound.sin6_port);
}

}  // namespace

absl::Status Listener::Open(Address* address) {
  if (pipe2(stop_pipe_, O_CLOEXEC) != 0) {
    return CannotListen(*address, std::strerror(errno));
  }
  return address->is_unix ? OpenUnix(address->path) : OpenPort(address);
}

int Listener::OpenOne(int family, const void* address, size_t size) {
  const int fd = socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
  if (fd < 0) return errno;
  // Not SO_REUSEPORT: with it, a second server could bind the same port and
  // would get a part of the connections.
  if (family != AF_UNIX) SetOption(fd, SOL_SOCKET, SO_REUSEADDR, 1);
  if (family == AF_INET6) SetOption(fd, IPPROTO_IPV6, IPV6_V6ONLY, 0);
  if (bind(fd, static_cast<const sockaddr*>(address),
           static_cast<socklen_t>(size)) != 0 ||
      listen(fd, SOMAXCONN) != 0) {
    const int error = errno;
    close(fd);
    return error;
  }
  listening_.push_back(fd);
  return 0;
}

absl::Status Listener::OpenUnix(const std::string& path) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const Address named{true, "", 0, path};
  if (SomeoneAnswersOn(address)) {
    return CannotListen(named, "another server is running there");
  }
  RemoveSocket(path);
  if (const int error = OpenOne(AF_UNIX, &address, sizeof(address))) {
    return CannotListen(named, std::strerror(error));
  }
  unix_path_ = path;
  return absl::OkStatus();
}

absl::Status Listener::OpenPort(Address* address) {
  absl::string_view host = address->host;
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  if (host == "0.0.0.0") {
    sockaddr_in6 any = {};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(address->port));
    OpenOne(AF_INET6, &any, sizeof(any));
  }
  if (listening_.empty()) {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
    addrinfo* found = nullptr;
    const int failure =
        getaddrinfo(std::string(host).c_str(),
                    absl::StrCat(address->port).c_str(), &hints, &found);
    if (failure != 0) return CannotListen(*address, gai_strerror(failure));
    int error = 0;
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      // "localhost" is whatever the machine's files say.
      if (IsLocal(*address) && !IsLoopback(at->ai_addr)) {
        error = EADDRNOTAVAIL;
        continue;
      }
      if (!listening_.empty()) {
        // All addresses of a host get the same port. The port of IPv4 has the
        // same offset as that of IPv6.
        reinterpret_cast<sockaddr_in6*>(at->ai_addr)->sin6_port =
            htons(static_cast<uint16_t>(PortOf(listening_[0])));
      }
      if (const int why = OpenOne(at->ai_family, at->ai_addr, at->ai_addrlen)) {
        error = why;
      }
    }
    freeaddrinfo(found);
    if (listening_.empty()) {
      return CannotListen(*address,
                          error == EADDRINUSE
                              ? "another server is running there; stop it or "
                                "take another port"
                              : std::strerror(error));
    }
  }
  address->port = PortOf(listening_[0]);
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
    if (!IsSocket(fd, socket)) continue;
    // Makes a copy of the descriptor, because gRPC may close the original
    // meanwhile. The copy remains the same socket.
    const int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    if (copy >= 0 && IsSocket(copy, socket)) shutdown(copy, SHUT_RDWR);
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
    it = IsSocket(it->first, it->second) ? std::next(it)
                                         : connections_.erase(it);
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
