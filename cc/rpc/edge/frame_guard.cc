#include "cc/rpc/edge/frame_guard.h"

#include <algorithm>
#include <cstring>

namespace tfswitch {
namespace {

enum FrameType : uint8_t {
  kData = 0,
  kHeaders = 1,
  kResetStream = 3,
  kSettings = 4,
  kPing = 6,
  kWindowUpdate = 8,
  kContinuation = 9,
};

// Flags of frames. Bit 0 means "acknowledges" in SETTINGS and PING frames, and
// "ends the stream" in others.
constexpr uint8_t kAcknowledges = 0x1;
constexpr uint8_t kEndStream = 0x1;
constexpr uint8_t kEndHeaders = 0x4;

constexpr size_t kSettingSize = 6;
constexpr uint32_t kInitialWindowSize = 0x4;
constexpr uint32_t kMaxWindow = 0x7fffffff;

// A big-endian number of `count` bytes.
uint32_t NumberAt(const uint8_t* bytes, int count) {
  uint32_t number = 0;
  for (int i = 0; i < count; ++i) number = number << 8 | bytes[i];
  return number;
}

}  // namespace

bool FrameBudget::Take(absl::Time (*now)()) {
  if (left_ < 1) {
    const absl::Time time = now();
    if (since_ != absl::InfinitePast()) {
      left_ += absl::ToDoubleSeconds(time - since_) * kPerSecond;
    }
    left_ = std::min(left_, kAtOnce);
    since_ = time;
    if (left_ < 1) return false;
  } else if (since_ == absl::InfinitePast()) {
    since_ = now();
  }
  --left_;
  return true;
}

std::optional<FrameReader::Frame> FrameReader::Next(const uint8_t** data,
                                                    const uint8_t* end) {
  while (*data < end && !is_other_protocol_) {
    const auto size = static_cast<size_t>(end - *data);
    if (!preface_.empty()) {
      const size_t length = std::min(preface_.size(), size);
      is_other_protocol_ = std::memcmp(preface_.data(), *data, length) != 0;
      preface_.remove_prefix(length);
      *data += length;
      continue;
    }
    if (skip_ > 0) {
      const size_t skipped = std::min(skip_, size);
      skip_ -= skipped;
      *data += skipped;
      continue;
    }
    const size_t taken = std::min(want_ - have_, size);
    std::memcpy(bytes_ + have_, *data, taken);
    have_ += taken;
    *data += taken;
    if (have_ < want_) return std::nullopt;
    Frame frame;
    frame.length = NumberAt(bytes_, 3);
    frame.type = bytes_[3];
    frame.flags = bytes_[4];
    frame.stream = NumberAt(bytes_ + 5, 4) & 0x7fffffff;
    const bool has_payload =
        (frame.type == kSettings || frame.type == kWindowUpdate) &&
        frame.length <= kMaxPayload;
    if (has_payload && want_ < kHeaderSize + frame.length) {
      want_ = kHeaderSize + frame.length;
      continue;
    }
    if (has_payload) frame.payload = {bytes_ + kHeaderSize, frame.length};
    skip_ = has_payload ? 0 : frame.length;
    want_ = kHeaderSize;
    have_ = 0;
    return frame;
  }
  return std::nullopt;
}

void FrameGuard::Window::Add(int64_t bytes, absl::Time (*now)()) {
  // Counts how long a window stays at 0. A peer that reads slowly is not stuck.
  const bool has_moved = bytes > 0 || left > 0;
  left += bytes;
  if (left > 0) {
    stuck_since = absl::InfiniteFuture();
  } else if (has_moved) {
    stuck_since = now();
  }
}

const char* FrameGuard::Received(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const uint8_t* const end = bytes + size;
  MutexLock lock(&mutex_);
  while (const auto frame = received_.Next(&bytes, end)) {
    if (const char* why = TakeReceived(*frame)) return why;
  }
  return nullptr;
}

const char* FrameGuard::Sent(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  const uint8_t* const end = bytes + size;
  MutexLock lock(&mutex_);
  while (const auto frame = sent_.Next(&bytes, end)) {
    if (const char* why = TakeSent(*frame)) return why;
  }
  return nullptr;
}

const char* FrameGuard::Waited() const {
  MutexLock lock(&mutex_);
  const absl::Time now = now_();
  if (header_block_ > 0 && now - header_block_since_ > kHeaderBlockTime) {
    return "a header block did not end in 10 s";
  }
  if (num_unanswered_bytes_ > kMaxUnansweredBytes && !has_answered_) {
    return "it sent more than 1 MiB, and no call of it was accepted";
  }
  const auto is_stuck = [now](const Window& window) {
    return now - window.stuck_since > kStuckTime;
  };
  bool has_stuck = !streams_.empty() && is_stuck(connection_);
  for (const auto& [number, window] : streams_) has_stuck |= is_stuck(window);
  return has_stuck ? "it took nothing of an answer for 40 s" : nullptr;
}

FrameGuard::Window* FrameGuard::Find(uint32_t stream) {
  if (stream == 0) return &connection_;
  const auto found = streams_.find(stream);
  return found == streams_.end() ? nullptr : &found->second;
}

const char* FrameGuard::TakeReceived(const FrameReader::Frame& frame) {
  if (frame.type != kData && !has_answered_) {
    num_unanswered_bytes_ += uint64_t{frame.length} + 9;
  }
  switch (frame.type) {
    case kHeaders:
    case kContinuation:
      return TakeHeaders(frame);
    case kWindowUpdate: {
      const uint32_t bytes =
          frame.payload.size() == 4
              ? NumberAt(frame.payload.data(), 4) & kMaxWindow
              : 0;
      // gRPC would end the connection, and the peer could connect again at
      // once. Each new connection costs the server 0.7 ms of CPU.
      if (bytes == 0) return "it sent a window update of 0 or of a wrong size";
      if (Window* window = Find(frame.stream)) window->Add(bytes, now_);
      return nullptr;
    }
    case kSettings:
    case kPing:
      if ((frame.flags & kAcknowledges) != 0) {
        has_acknowledged_ |= frame.type == kSettings;
        return nullptr;
      }
      if (frame.type == kSettings) TakeSettings(frame);
      break;
    case kResetStream:
      streams_.erase(frame.stream);
      break;
    default:
      return nullptr;
  }
  return control_frames_.Take(now_)
             ? nullptr
             : "it sent more than 200 resets, pings or settings a second";
}

const char* FrameGuard::TakeHeaders(const FrameReader::Frame& frame) {
  if (frame.type == kHeaders) {
    header_block_ = 0;
    // A HEADERS frame for a stream that was opened before contains its
    // trailers.
    if (frame.stream > last_stream_) {
      last_stream_ = frame.stream;
      Window& window = streams_[frame.stream];
      window.Add(initial_window_ - window.left, now_);
      if (!has_acknowledged_ && ++num_early_streams_ > kMaxEarlyStreams) {
        return "it opened more than 100 streams before it acknowledged "
               "SETTINGS";
      }
      if (streams_.size() > max_streams_) {
        return "it opened more streams than it may have";
      }
    }
  }
  if (header_block_ == 0) header_block_since_ = now_();
  header_block_ += size_t{frame.length} + 9;
  if (header_block_ > kMaxHeaderBlock) {
    return "a header block was longer than 64 KiB";
  }
  if ((frame.flags & kEndHeaders) != 0) header_block_ = 0;
  return nullptr;
}

void FrameGuard::TakeSettings(const FrameReader::Frame& frame) {
  for (size_t at = 0; at + kSettingSize <= frame.payload.size();
       at += kSettingSize) {
    const uint8_t* const setting = frame.payload.data() + at;
    if (NumberAt(setting, 2) != kInitialWindowSize) continue;
    const int64_t size = NumberAt(setting + 2, 4);
    for (auto& [number, window] : streams_) {
      window.Add(size - initial_window_, now_);
    }
    initial_window_ = size;
  }
}

const char* FrameGuard::TakeSent(const FrameReader::Frame& frame) {
  if (frame.type == kData) {
    has_answered_ = true;
    connection_.Add(-int64_t{frame.length}, now_);
    if (Window* window = Find(frame.stream)) {
      window->Add(-int64_t{frame.length}, now_);
    }
  }
  const bool ends = (frame.type == kHeaders || frame.type == kData) &&
                    (frame.flags & kEndStream) != 0;
  if (!ends && frame.type != kResetStream) return nullptr;
  const bool was_open = streams_.erase(frame.stream) > 0;
  // After an answer the server may send a reset that tells the peer to stop
  // sending. The guard does not count this reset.
  return ends || !was_open || server_resets_.Take(now_)
             ? nullptr
             : "it made the server reset more than 200 streams a second";
}

}  // namespace tfswitch
