// Watches the HTTP/2 frames of one connection of a server.
//
// gRPC 1.51 uses unbounded memory for some frames, applies its limit of streams
// only after the peer has acknowledged its SETTINGS, and keeps an answer in
// memory until the peer's flow-control window allows sending it. The guard
// reads the headers of frames, and the few bytes of frames that set windows
// (RFC 9113, 4.1 and 6). It says when the connection has to end.

#ifndef TFSWITCH_CC_RPC_EDGE_FRAME_GUARD_H_
#define TFSWITCH_CC_RPC_EDGE_FRAME_GUARD_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// A limit of events: kAtOnce at once, and then kPerSecond per second.
//
// Thread-compatible.
class FrameBudget {
 public:
  static constexpr double kPerSecond = 200;
  static constexpr double kAtOnce = 2 * kPerSecond;

  // False if too many have come.
  bool Take(absl::Time (*now)());

 private:
  double left_ = kAtOnce;
  absl::Time since_ = absl::InfinitePast();
};

// Finds HTTP/2 frames in bytes that arrive in pieces.
//
// Thread-compatible.
class FrameReader {
 public:
  // There are fewer settings than this.
  static constexpr size_t kMaxPayload = 128;

  struct Frame {
    uint32_t length = 0;
    uint8_t type = 0;
    uint8_t flags = 0;
    uint32_t stream = 0;
    // The payload of a SETTINGS or WINDOW_UPDATE frame with at most kMaxPayload
    // bytes. Empty for all other frames.
    absl::Span<const uint8_t> payload;
  };

  // The bytes must begin with `preface`; if they do not, no frames are found.
  explicit FrameReader(absl::string_view preface) : preface_(preface) {}

  // Returns the next frame, or nothing if the bytes end before it does. Moves
  // `*data` behind the bytes that it has read. The payload is valid until the
  // next call.
  std::optional<Frame> Next(const uint8_t** data, const uint8_t* end);

 private:
  static constexpr size_t kHeaderSize = 9;

  // The part of the preface that has not arrived yet.
  absl::string_view preface_;
  bool is_other_protocol_ = false;
  size_t skip_ = 0;
  size_t want_ = kHeaderSize;
  size_t have_ = 0;
  uint8_t bytes_[kHeaderSize + kMaxPayload] = {};
};

// Thread-safe.
class FrameGuard {
 public:
  // How many streams a peer may open before it has acknowledged SETTINGS.
  static constexpr int kMaxEarlyStreams = 100;
  // How many streams a peer may open beyond gRPC's limit. It may do so because
  // the resets that end other streams may still be on their way.
  static constexpr uint64_t kSpareStreams = 100;
  static constexpr size_t kMaxHeaderBlock = 64 << 10;
  static constexpr absl::Duration kHeaderBlockTime = absl::Seconds(10);
  // How many bytes, not counting messages, a peer may send before the server
  // answers one of its calls with a message. An answer without a message, such
  // as a refusal, does not count.
  static constexpr uint64_t kMaxUnansweredBytes = 1 << 20;
  // A connection that is stuck for this long is ended. gRPC drops a peer that
  // does not answer keepalives after the same time.
  static constexpr absl::Duration kStuckTime = absl::Seconds(40);

  explicit FrameGuard(uint64_t max_streams, absl::Time (*now)() = &SteadyNow)
      : max_streams_(max_streams + kSpareStreams), now_(now) {}

  // Checks bytes that the server has read, or is about to write. Returns why
  // the connection has to end; null if it may continue.
  const char* Received(const void* data, size_t size)
      ABSL_LOCKS_EXCLUDED(mutex_);
  const char* Sent(const void* data, size_t size) ABSL_LOCKS_EXCLUDED(mutex_);

  // Checks the time limits, and returns the same as Received(). If the
  // connection has broken one, other connections from its address need not be
  // refused.
  const char* Waited() const ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // How many bytes the peer still accepts. The window is stuck while it is 0.
  struct Window {
    void Add(int64_t bytes, absl::Time (*now)());

    int64_t left = 65535;
    absl::Time stuck_since = absl::InfiniteFuture();
  };

  const char* TakeReceived(const FrameReader::Frame& frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const char* TakeHeaders(const FrameReader::Frame& frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  const char* TakeSent(const FrameReader::Frame& frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void TakeSettings(const FrameReader::Frame& frame)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The window of a stream; null if the stream is not open. Number 0 gives the
  // window of the whole connection.
  Window* Find(uint32_t stream) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const uint64_t max_streams_;
  absl::Time (*const now_)();

  mutable Mutex mutex_;
  // The bytes with which an HTTP/2 connection begins. gRPC itself closes one
  // that begins otherwise, e.g. with TLS or HTTP/1.
  FrameReader received_ ABSL_GUARDED_BY(mutex_){
      "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"};
  FrameReader sent_ ABSL_GUARDED_BY(mutex_){""};
  bool has_answered_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t num_unanswered_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  bool has_acknowledged_ ABSL_GUARDED_BY(mutex_) = false;
  int num_early_streams_ ABSL_GUARDED_BY(mutex_) = 0;
  uint32_t last_stream_ ABSL_GUARDED_BY(mutex_) = 0;
  // The open streams: the server has not ended its answer, and neither side has
  // reset the stream.
  absl::flat_hash_map<uint32_t, Window> streams_ ABSL_GUARDED_BY(mutex_);
  Window connection_ ABSL_GUARDED_BY(mutex_);
  int64_t initial_window_ ABSL_GUARDED_BY(mutex_) = 65535;
  // Bytes of the present header block.
  size_t header_block_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time header_block_since_ ABSL_GUARDED_BY(mutex_);
  FrameBudget control_frames_ ABSL_GUARDED_BY(mutex_);
  FrameBudget server_resets_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_EDGE_FRAME_GUARD_H_
