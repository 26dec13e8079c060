#include "tests/cc/rpc/tcp_proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "cc/rpc/address.h"

namespace tfswitch {
namespace {

int PortOf(const std::string& address) { return ParseAddress(address)->port; }

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

bool SendAll(int fd, const char* data, size_t size) {
  while (size > 0) {
    const ssize_t sent = send(fd, data, size, MSG_NOSIGNAL);
    if (sent <= 0) return false;
    data += sent;
    size -= sent;
  }
  return true;
}

// A frame of HTTP/2, RFC 9113 section 4.1: three bytes of length, one of type.
constexpr size_t kFrameHeader = 9;
constexpr size_t kFrameType = 3;

bool TakeFrame(std::string* bytes, std::string* frame) {
  if (bytes->size() < kFrameHeader) return false;
  size_t size = 0;
  for (size_t i = 0; i < kFrameType; ++i) {
    size = size << 8 | static_cast<uint8_t>((*bytes)[i]);
  }
  size += kFrameHeader;
  if (bytes->size() < size) return false;
  *frame = bytes->substr(0, size);
  bytes->erase(0, size);
  return true;
}

// Frames of the connection are passed on. Otherwise a long request would wait
// for the permission to send its rest.
bool IsOfAnswer(const std::string& frame) {
  constexpr char kSettings = 4;
  constexpr char kPing = 6;
  constexpr char kWindowUpdate = 8;
  const char type = frame[kFrameType];
  return type != kSettings && type != kPing && type != kWindowUpdate;
}

}  // namespace

TcpProxy::TcpProxy(const std::string& target) : target_port_(PortOf(target)) {
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  const bool listening =
      bind(listener_, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
      listen(listener_, 16) == 0 &&
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) ==
          0 &&
      pipe(wake_pipe_) == 0;
  if (!listening) std::abort();
  address_ = absl::StrCat("127.0.0.1:", ntohs(address.sin_port));
  thread_ = std::thread(&TcpProxy::Run, this);
}

TcpProxy::~TcpProxy() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  Wake();
  thread_.join();
  {
    MutexLock lock(&mutex_);
    for (const Pair& pair : pairs_) Close(pair);
  }
  close(listener_);
  close(wake_pipe_[0]);
  close(wake_pipe_[1]);
}

void TcpProxy::SetTarget(const std::string& target) {
  MutexLock lock(&mutex_);
  target_port_ = PortOf(target);
}

void TcpProxy::HoldAnswers(bool hold) {
  {
    MutexLock lock(&mutex_);
    hold_ = hold;
  }
  Wake();
}

void TcpProxy::Freeze(bool freeze) {
  {
    MutexLock lock(&mutex_);
    freeze_ = freeze;
  }
  Wake();
}

void TcpProxy::CutConnections() {
  MutexLock lock(&mutex_);
  for (const Pair& pair : pairs_) Close(pair);
  pairs_.clear();
}

int TcpProxy::num_accepted() {
  MutexLock lock(&mutex_);
  return num_accepted_;
}

void TcpProxy::Wake() {
  const char byte = 0;
  if (write(wake_pipe_[1], &byte, 1) != 1) std::abort();
}

void TcpProxy::Close(const Pair& pair) {
  close(pair.client);
  close(pair.target);
}

void TcpProxy::Accept() {
  Pair pair;
  pair.client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (pair.client < 0) return;
  ++num_accepted_;
  pair.target = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const sockaddr_in address = Loopback(target_port_);
  if (connect(pair.target, reinterpret_cast<const sockaddr*>(&address),
              sizeof(address)) != 0) {
    Close(pair);
    return;
  }
  pairs_.push_back(pair);
}

bool TcpProxy::Forward(Pair* pair) {
  char buffer[1 << 16];
  ssize_t size = recv(pair->client, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (size == 0 || (size < 0 && errno != EAGAIN)) return false;
  if (size > 0 && !SendAll(pair->target, buffer, size)) return false;
  size = recv(pair->target, buffer, sizeof(buffer), MSG_DONTWAIT);
  if (size == 0 || (size < 0 && errno != EAGAIN)) return false;
  if (size > 0) pair->arrived.append(buffer, size);
  std::string to_client;
  if (!hold_) to_client.swap(pair->held);
  for (std::string frame; TakeFrame(&pair->arrived, &frame);) {
    (hold_ && IsOfAnswer(frame) ? pair->held : to_client) += frame;
  }
  return SendAll(pair->client, to_client.data(), to_client.size());
}

void TcpProxy::Run() {
  for (;;) {
    std::vector<pollfd> ready = {{listener_, POLLIN, 0},
                                 {wake_pipe_[0], POLLIN, 0}};
    {
      MutexLock lock(&mutex_);
      if (stop_) return;
      if (!freeze_) {
        for (const Pair& pair : pairs_) {
          ready.push_back({pair.client, POLLIN, 0});
          ready.push_back({pair.target, POLLIN, 0});
        }
      }
    }
    // Descriptors may be closed meanwhile by CutConnections; the timeout bounds
    // how long such a change can go unseen.
    poll(ready.data(), ready.size(), 20);
    char drained[64];
    if (ready[1].revents != 0 && read(wake_pipe_[0], drained, 64) < 0) return;
    MutexLock lock(&mutex_);
    if (ready[0].revents != 0) Accept();
    if (freeze_) continue;
    std::vector<Pair> alive;
    for (Pair& pair : pairs_) {
      if (Forward(&pair)) {
        alive.push_back(std::move(pair));
      } else {
        Close(pair);
      }
    }
    pairs_ = std::move(alive);
  }
}

}  // namespace tfswitch
