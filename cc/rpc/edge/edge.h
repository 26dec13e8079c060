// Guards the connections of the servers of this process against floods that
// gRPC does not bound: see frame_guard.h.
//
// edge_calls.cc defines the functions by which gRPC reads and writes. They tell
// the edge what is read and written, and fail before gRPC sees bytes that break
// a bound. In a program whose functions are not replaced, nothing is guarded.

#ifndef TFSWITCH_CC_RPC_EDGE_EDGE_H_
#define TFSWITCH_CC_RPC_EDGE_EDGE_H_

#include <sys/socket.h>
#include <sys/uio.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"
#include "cc/rpc/edge/frame_guard.h"

namespace tfswitch {

enum class Direction : uint8_t { kReceived, kSent };

// The beginning of a ClientHello up to its random: headers of record and
// message (5 and 4 bytes), version (2), random (32). See RFC 8446, 4.1.2 and
// 5.1.
struct ClientHello {
  static constexpr size_t kRandomAt = 11;

  std::array<uint8_t, kRandomAt + 32> bytes = {};
  size_t size = 0;
};

// Thread-safe.
class Edge {
 public:
  // How long the address of an ended connection is refused.
  static constexpr absl::Duration kRefusal = absl::Seconds(10);

  // The one of the process. Never deleted.
  static Edge& Get();

  // Starts watching a connection. `address` may be of any family; a Unix socket
  // is never refused.
  void Watch(int fd, const sockaddr_storage& address, bool has_tls,
             uint64_t max_streams);
  // The descriptor is about to be closed.
  void Forget(int fd);

  // Whether the connection may continue after `size` bytes of the parts.
  // Returns false once for each that may not, after shutting it down.
  bool Pass(Direction direction, int fd, const iovec* parts, size_t size);

  // A connection with TLS, whose bytes Pass() cannot read.
  struct TlsConnection {
    int fd = -1;
    std::shared_ptr<FrameGuard> guard;
  };

  // Whether connections are watched in this process.
  bool is_used() const { return is_used_; }
  // The connection whose ClientHello had this random; each is found once.
  // Without one the guard is null.
  TlsConnection FindTls(absl::Span<const uint8_t> client_random);
  // Pass() for decrypted bytes. A connection without a guard must end.
  bool PassTls(Direction direction, const TlsConnection& connection,
               const void* data, size_t size);

  bool Refuses(const sockaddr_storage& address) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends connections whose time is over, and releases memory after a flood.
  // Call it each second.
  void Tidy() ABSL_LOCKS_EXCLUDED(mutex_);

  // Connections ended so far.
  int64_t num_ended() const { return num_ended_; }

 private:
  struct Connection {
    sockaddr_storage address = {};
    uint64_t max_streams = 0;
    std::shared_ptr<FrameGuard> guard;  // With TLS: set by FindTls().
    // With TLS: the first bytes received.
    std::optional<ClientHello> hello;
  };

  // The connections of some descriptors, so that threads seldom meet.
  struct Part {
    Mutex mutex;
    std::unordered_map<int, Connection> connections ABSL_GUARDED_BY(mutex);
  };

  Edge() = default;

  Part& PartOf(int fd) { return parts_[static_cast<size_t>(fd) % kNumParts]; }
  // If the connection has this guard, shuts it down, logs why, and may refuse
  // its address for a while.
  void End(int fd, const FrameGuard* guard, const char* why, bool refuses);
  void RecordClosed(const sockaddr_storage& address, const char* why,
                    bool refuses) ABSL_LOCKS_EXCLUDED(mutex_);

  static constexpr size_t kNumParts = 64;
  std::array<Part, kNumParts> parts_;
  // So that processes without servers take no lock.
  std::atomic<bool> is_used_{false};
  std::atomic<int64_t> num_ended_{0};

  Mutex mutex_;
  // The key is AddressKey() of edge.cc.
  std::unordered_map<std::string, absl::Time> refused_until_
      ABSL_GUARDED_BY(mutex_);
  int num_trims_left_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time next_trim_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_EDGE_H_
