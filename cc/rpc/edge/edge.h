// Protects the servers of this process from connections that flood gRPC with
// data for which it has no limit: see frame_guard.h.
//
// edge_calls.cc replaces the functions by which gRPC reads and writes. The new
// functions show the bytes to the edge (this class). If bytes exceed a limit,
// the functions fail before gRPC sees them. In a program where the functions
// could not be replaced, nothing is checked.

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

// The first bytes of a TLS ClientHello, up to the end of its random: headers of
// record and message (5 and 4 bytes), version (2), random (32). See RFC 8446,
// 4.1.2 and 5.1.
struct ClientHello {
  static constexpr size_t kRandomAt = 11;

  std::array<uint8_t, kRandomAt + 32> bytes = {};
  size_t size = 0;
};

// Thread-safe.
class Edge {
 public:
  // After the edge has ended a connection because it broke a limit, it refuses
  // new connections from the same address for this long.
  static constexpr absl::Duration kRefusal = absl::Seconds(10);

  // The one of the process. Never deleted.
  static Edge& Get();

  // Starts to watch the connection `fd`, whose peer has this address.
  void Watch(int fd, const sockaddr_storage& address, bool has_tls,
             uint64_t max_streams);
  // The descriptor is about to be closed.
  void Forget(int fd);

  // Checks the next `size` bytes of a connection. If the connection breaks a
  // limit, shuts it down and returns false. This happens only once per
  // connection.
  bool Pass(Direction direction, int fd, const iovec* parts, size_t size);

  // A TLS connection, whose bytes are encrypted, so that Pass() cannot check
  // them.
  struct TlsConnection {
    int fd = -1;
    std::shared_ptr<FrameGuard> guard;
  };

  // Whether connections are watched in this process.
  bool is_used() const { return is_used_; }
  // Finds the connection whose ClientHello had this random. A connection is
  // found only once. If none is found, the guard is null.
  TlsConnection FindTls(absl::Span<const uint8_t> client_random);
  // Pass() for decrypted bytes. Returns false if the connection has no guard.
  bool PassTls(Direction direction, const TlsConnection& connection,
               const void* data, size_t size);

  bool Refuses(const sockaddr_storage& address) ABSL_LOCKS_EXCLUDED(mutex_);

  // Ends connections that have been stuck for too long, and releases memory
  // after a flood. Call it each second.
  void Tidy() ABSL_LOCKS_EXCLUDED(mutex_);

  // Open connections.
  size_t num_connections();
  // Connections ended so far.
  int64_t num_ended() const { return num_ended_; }

 private:
  struct Connection {
    sockaddr_storage address = {};
    uint64_t max_streams = 0;
    // Set by FindTls() if the connection has TLS.
    std::shared_ptr<FrameGuard> guard;
    // The first bytes received, if the connection has TLS.
    std::optional<ClientHello> hello;
  };

  // The connections of some of the descriptors. Each part has its own mutex, so
  // that threads seldom wait for each other.
  struct Part {
    Mutex mutex;
    std::unordered_map<int, Connection> connections ABSL_GUARDED_BY(mutex);
  };

  Edge() = default;

  Part& PartOf(int fd) { return parts_[static_cast<size_t>(fd) % kNumParts]; }
  // Shuts the connection down and logs the reason, unless the descriptor
  // belongs to another connection by now. With `refuses`, refuses the peer's
  // address for a while.
  void End(int fd, const FrameGuard* guard, const char* why, bool refuses);
  void RecordClosed(const sockaddr_storage& address, const char* why,
                    bool refuses) ABSL_LOCKS_EXCLUDED(mutex_);

  static constexpr size_t kNumParts = 64;
  std::array<Part, kNumParts> parts_;
  // Lets processes without servers skip the locks.
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
