// Replaces the functions that gRPC calls to read, write and close connections.
// Each function does the same as the original one, and shows the bytes to the
// edge (edge.h). In programs and libraries that link gRPC, the linker finds
// these functions before those of libc and OpenSSL. If a library is opened with
// RTLD_DEEPBIND, only this library uses them, and not the rest of the process.

#include <openssl/ssl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>

#include "cc/rpc/edge/edge.h"

namespace tfswitch {
namespace {

int ConnectionIndex() {
  static const int index = SSL_get_ex_new_index(
      0, nullptr, nullptr, nullptr,
      [](void*, void* connection, CRYPTO_EX_DATA*, int, int64_t, void*) {
        delete static_cast<Edge::TlsConnection*>(connection);
      });
  return index;
}

bool PassTls(SSL* ssl, Direction direction, const void* data, size_t size) {
  if (!Edge::Get().is_used() || SSL_is_server(ssl) == 0) return true;
  // The connection is one of the HTTP server: gRPC's objects have no file
  // descriptor.
  if (SSL_get_fd(ssl) >= 0) return true;
  auto* connection = static_cast<Edge::TlsConnection*>(
      SSL_get_ex_data(ssl, ConnectionIndex()));
  if (connection == nullptr) {
    std::array<uint8_t, SSL3_RANDOM_SIZE> random = {};
    SSL_get_client_random(ssl, random.data(), random.size());
    connection = new Edge::TlsConnection(Edge::Get().FindTls(random));
    SSL_set_ex_data(ssl, ConnectionIndex(), connection);
  }
  return Edge::Get().PassTls(direction, *connection, data, size);
}

}  // namespace
}  // namespace tfswitch

#define TFSWITCH_REPLACES extern "C" __attribute__((visibility("default")))

TFSWITCH_REPLACES ssize_t recvmsg(int fd, msghdr* message, int flags) {
  const auto size =
      static_cast<ssize_t>(syscall(SYS_recvmsg, fd, message, flags));
  if (size <= 0 || (flags & MSG_PEEK) != 0 ||
      tfswitch::Edge::Get().Pass(tfswitch::Direction::kReceived, fd,
                                 message->msg_iov, static_cast<size_t>(size))) {
    return size;
  }
  errno = ECONNRESET;
  return -1;
}

TFSWITCH_REPLACES ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  const auto size =
      static_cast<ssize_t>(syscall(SYS_sendmsg, fd, message, flags));
  if (size <= 0 ||
      tfswitch::Edge::Get().Pass(tfswitch::Direction::kSent, fd,
                                 message->msg_iov, static_cast<size_t>(size))) {
    return size;
  }
  errno = EPIPE;
  return -1;
}

TFSWITCH_REPLACES int close(int fd) {
  tfswitch::Edge::Get().Forget(fd);
  return static_cast<int>(syscall(SYS_close, fd));
}

TFSWITCH_REPLACES int SSL_read(SSL* ssl, void* buffer, int size) {
  size_t num_read = 0;
  if (SSL_read_ex(ssl, buffer, static_cast<size_t>(size), &num_read) != 1) {
    return -1;
  }
  return tfswitch::PassTls(ssl, tfswitch::Direction::kReceived, buffer,
                           num_read)
             ? static_cast<int>(num_read)
             : -1;
}

TFSWITCH_REPLACES int SSL_write(SSL* ssl, const void* buffer, int size) {
  size_t written = 0;
  if (SSL_write_ex(ssl, buffer, static_cast<size_t>(size), &written) != 1) {
    return -1;
  }
  return tfswitch::PassTls(ssl, tfswitch::Direction::kSent, buffer, written)
             ? static_cast<int>(written)
             : -1;
}
