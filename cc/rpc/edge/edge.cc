// gRPC itself moves the bytes of TLS connections, so OpenSSL's objects have no
// file descriptor. The random bytes of the ClientHello tell which object
// belongs to which descriptor: they are in the bytes that the descriptor
// receives, and in OpenSSL's object.

#include "cc/rpc/edge/edge.h"

#include <arpa/inet.h>
#include <malloc.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc/base/log_writer.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kTrimInterval = absl::Seconds(2);
// Releases the memory of malloc several times, because gRPC frees the memory of
// a closed connection some moments later.
constexpr int kNumTrims = 4;
// When so many addresses are refused, entries whose time is over are removed.
constexpr size_t kManyRefusals = 1024;
constexpr size_t kMaxRefusals = 65536;

// Addresses with the same key are refused together: one IPv4 address, or a
// network of IPv6 addresses. Addresses that are never refused have the key "".
std::string AddressKey(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) {
    const auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
    return std::string(reinterpret_cast<const char*>(&v4.sin_addr), 4);
  }
  if (address.ss_family != AF_INET6) return "";
  const auto* bytes = reinterpret_cast<const char*>(
      &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  const bool is_v4 = IN6_IS_ADDR_V4MAPPED(
      &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  return is_v4 ? std::string(bytes + 12, 4) : std::string(bytes, 8);
}

const char* Check(Direction direction, FrameGuard* guard, const void* data,
                  size_t size) {
  return direction == Direction::kReceived ? guard->Received(data, size)
                                           : guard->Sent(data, size);
}

std::string NameOf(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  const bool is_v4 = address.ss_family == AF_INET;
  if (address.ss_family == AF_UNIX) return "a Unix socket";
  if (!is_v4 && address.ss_family != AF_INET6) return "an unknown peer";
  const void* const bytes =
      is_v4 ? static_cast<const void*>(
                  &reinterpret_cast<const sockaddr_in&>(address).sin_addr)
            : static_cast<const void*>(
                  &reinterpret_cast<const sockaddr_in6&>(address).sin6_addr);
  inet_ntop(address.ss_family, bytes, text, sizeof(text));
  return text;
}

}  // namespace

Edge& Edge::Get() {
  static Edge* const edge = new Edge;
  return *edge;
}

void Edge::Watch(int fd, const sockaddr_storage& address, bool has_tls,
                 uint64_t max_streams) {
  is_used_ = true;
  Connection connection;
  connection.address = address;
  connection.max_streams = max_streams;
  if (has_tls) {
    connection.hello.emplace();
  } else {
    connection.guard = std::make_shared<FrameGuard>(max_streams);
  }
  Part& part = PartOf(fd);
  MutexLock lock(&part.mutex);
  part.connections[fd] = std::move(connection);
}

void Edge::Forget(int fd) {
  if (!is_used_ || fd < 0) return;
  Part& part = PartOf(fd);
  MutexLock lock(&part.mutex);
  part.connections.erase(fd);
}

bool Edge::Pass(Direction direction, int fd, const iovec* parts, size_t size) {
  if (!is_used_ || fd < 0) return true;
  std::shared_ptr<FrameGuard> guard;
  {
    Part& part = PartOf(fd);
    MutexLock lock(&part.mutex);
    const auto found = part.connections.find(fd);
    if (found == part.connections.end()) return true;
    if (auto& hello = found->second.hello) {
      if (direction == Direction::kSent) return true;
      for (; size > 0 && hello->size < hello->bytes.size(); ++parts) {
        const size_t length = std::min(size, parts->iov_len);
        const size_t taken =
            std::min(length, hello->bytes.size() - hello->size);
        std::memcpy(&hello->bytes[hello->size], parts->iov_base, taken);
        hello->size += taken;
        size -= length;
      }
      return true;
    }
    guard = found->second.guard;
  }
  for (; size > 0; ++parts) {
    const size_t length = std::min(size, parts->iov_len);
    if (const char* why =
            Check(direction, guard.get(), parts->iov_base, length)) {
      End(fd, guard.get(), why, /*refuses=*/true);
      return false;
    }
    size -= length;
  }
  return true;
}

Edge::TlsConnection Edge::FindTls(absl::Span<const uint8_t> client_random) {
  for (Part& part : parts_) {
    MutexLock lock(&part.mutex);
    for (auto& [fd, connection] : part.connections) {
      const auto& hello = connection.hello;
      if (hello.has_value() && hello->size == hello->bytes.size() &&
          connection.guard == nullptr &&
          std::equal(client_random.begin(), client_random.end(),
                     hello->bytes.begin() + ClientHello::kRandomAt,
                     hello->bytes.end())) {
        connection.guard = std::make_shared<FrameGuard>(connection.max_streams);
        return {fd, connection.guard};
      }
    }
  }
  return {};
}

bool Edge::PassTls(Direction direction, const TlsConnection& connection,
                   const void* data, size_t size) {
  if (connection.guard == nullptr) {
    RecordClosed({}, "its TLS began with an unusual ClientHello",
                 /*refuses=*/false);
    return false;
  }
  const char* const why = Check(direction, connection.guard.get(), data, size);
  if (why == nullptr) return true;
  End(connection.fd, connection.guard.get(), why, /*refuses=*/true);
  return false;
}

void Edge::End(int fd, const FrameGuard* guard, const char* why, bool refuses) {
  Part& part = PartOf(fd);
  MutexLock lock(&part.mutex);
  const auto found = part.connections.find(fd);
  if (found == part.connections.end() || found->second.guard.get() != guard) {
    return;  // The connection has ended meanwhile.
  }
  // Refuses the address before it closes the connection; otherwise the peer
  // could reconnect in between.
  RecordClosed(found->second.address, why, refuses);
  part.connections.erase(found);
  shutdown(fd, SHUT_RDWR);
}

size_t Edge::num_connections() {
  size_t sum = 0;
  for (Part& part : parts_) {
    MutexLock lock(&part.mutex);
    sum += part.connections.size();
  }
  return sum;
}

bool Edge::Refuses(const sockaddr_storage& address) {
  const std::string key = AddressKey(address);
  MutexLock lock(&mutex_);
  const auto found = refused_until_.find(key);
  return found != refused_until_.end() && SteadyNow() < found->second;
}

void Edge::RecordClosed(const sockaddr_storage& address, const char* why,
                        bool refuses) {
  const int64_t num_ended = ++num_ended_;
  const std::string key = AddressKey(address);
  const absl::Time now = SteadyNow();
  MutexLock lock(&mutex_);
  if (refused_until_.size() >= kManyRefusals) {
    for (auto it = refused_until_.begin(); it != refused_until_.end();) {
      it = it->second <= now ? refused_until_.erase(it) : std::next(it);
    }
    if (refused_until_.size() >= kMaxRefusals) refused_until_.clear();
  }
  refuses &= !key.empty();
  if (refuses) refused_until_[key] = now + kRefusal;
  num_trims_left_ = kNumTrims;
  next_trim_ = now + kTrimInterval;
  const std::string peer = NameOf(address);
  LogMessage(LogLevel::kWarning, {"connection_closed"},
             absl::StrCat("closed a connection of ", peer,
                          refuses ? ", and refuses the address for 10 s" : "",
                          ": ", why, " (", num_ended, " closed so far)"),
             peer);
}

void Edge::Tidy() {
  for (Part& part : parts_) {
    std::vector<std::pair<int, std::shared_ptr<FrameGuard>>> guards;
    {
      MutexLock lock(&part.mutex);
      for (const auto& [fd, connection] : part.connections) {
        if (connection.guard != nullptr)
          guards.emplace_back(fd, connection.guard);
      }
    }
    for (const auto& [fd, guard] : guards) {
      if (const char* why = guard->Waited()) {
        End(fd, guard.get(), why, /*refuses=*/false);
      }
    }
  }
  {
    MutexLock lock(&mutex_);
    if (num_trims_left_ == 0 || SteadyNow() < next_trim_) return;
    --num_trims_left_;
    next_trim_ = SteadyNow() + kTrimInterval;
  }
  // malloc itself would keep the memory that a flood has used, because of its
  // high trim threshold: see malloc_tuning.h.
  malloc_trim(0);
}

}  // namespace tfswitch
