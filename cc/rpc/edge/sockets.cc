#include "cc/rpc/edge/sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace tfswitch {
namespace {

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

// Adds a listening socket to `*listening`. Returns 0, or the errno if the
// address cannot be bound.
int OpenOne(int family, const void* address, size_t size,
            std::vector<int>* listening) {
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
  listening->push_back(fd);
  return 0;
}

absl::Status OpenUnix(const std::string& path, std::vector<int>* listening) {
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, sizeof(address.sun_path) - 1);
  const Address named{true, "", 0, path};
  if (SomeoneAnswersOn(address)) {
    return CannotListen(named, "another server is running there");
  }
  RemoveSocket(path);
  if (const int error =
          OpenOne(AF_UNIX, &address, sizeof(address), listening)) {
    return CannotListen(named, std::strerror(error));
  }
  return absl::OkStatus();
}

absl::Status OpenPort(Address* address, std::vector<int>* listening) {
  absl::string_view host = address->host;
  if (absl::ConsumePrefix(&host, "[")) absl::ConsumeSuffix(&host, "]");
  if (host == "0.0.0.0") {
    sockaddr_in6 any = {};
    any.sin6_family = AF_INET6;
    any.sin6_port = htons(static_cast<uint16_t>(address->port));
    OpenOne(AF_INET6, &any, sizeof(any), listening);
  }
  if (listening->empty()) {
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
      if (!listening->empty()) {
        // All addresses of a host get the same port. The port of IPv4 has the
        // same offset as that of IPv6.
        reinterpret_cast<sockaddr_in6*>(at->ai_addr)->sin6_port =
            htons(static_cast<uint16_t>(PortOf(listening->front())));
      }
      if (const int why =
              OpenOne(at->ai_family, at->ai_addr, at->ai_addrlen, listening)) {
        error = why;
      }
    }
    freeaddrinfo(found);
    if (listening->empty()) {
      return CannotListen(*address,
                          error == EADDRINUSE
                              ? "another server is running there; stop it or "
                                "take another port"
                              : std::strerror(error));
    }
  }
  address->port = PortOf(listening->front());
  return absl::OkStatus();
}

}  // namespace

void SetOption(int fd, int level, int name, int value) {
  // A connection also works without the option.
  (void)setsockopt(fd, level, name, &value, sizeof(value));
}

absl::StatusOr<std::vector<int>> OpenSockets(Address* address) {
  std::vector<int> listening;
  const absl::Status opened = address->is_unix
                                  ? OpenUnix(address->path, &listening)
                                  : OpenPort(address, &listening);
  if (!opened.ok()) return opened;
  return listening;
}

void RemoveSocket(const std::string& path) {
  struct stat there = {};
  if (stat(path.c_str(), &there) == 0 && S_ISSOCK(there.st_mode)) {
    unlink(path.c_str());
  }
}

SocketId IdOf(int fd) {
  struct stat now = {};
  // Another thread may have closed the socket and opened a file with the same
  // number; the caller then sees another id. ThreadSanitizer would call that a
  // race of fstat().
  return fstatat(fd, "", &now, AT_EMPTY_PATH) == 0
             ? SocketId(now.st_dev, now.st_ino)
             : SocketId();
}

uint64_t MaxFiles() {
  rlimit files = {};
  return getrlimit(RLIMIT_NOFILE, &files) == 0 ? files.rlim_cur : 1024;
}

}  // namespace tfswitch
