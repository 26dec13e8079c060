#include "cc/rpc/edge/frame_guard.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace tfswitch {
namespace {

using ::testing::HasSubstr;

enum Type { kData, kHeaders, kReset = 3, kSettings, kPing = 6, kWindow = 8 };
constexpr int kContinuation = 9;
constexpr int kEndStream = 1;
constexpr int kAcknowledges = 1;
constexpr int kEndHeaders = 4;
constexpr uint64_t kMaxStreams = 300;
constexpr char kPreface[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

std::string Number(uint64_t number, int size) {
  std::string bytes;
  while (--size >= 0) bytes += static_cast<char>(number >> (8 * size));
  return bytes;
}

std::string Frame(int type, int flags, uint32_t stream,
                  const std::string& payload = "") {
  return Number(payload.size(), 3) + Number(type, 1) + Number(flags, 1) +
         Number(stream, 4) + payload;
}

std::string InitialWindow(uint32_t size) {
  return Frame(kSettings, 0, 0, Number(4, 2) + Number(size, 4));
}

absl::Time now;

class FrameGuardTest : public ::testing::Test {
 protected:
  FrameGuardTest() {
    now = absl::UnixEpoch();
    EXPECT_EQ(Received(kPreface), "");
  }

  std::string Received(const std::string& bytes) {
    const char* why = guard_.Received(bytes.data(), bytes.size());
    return why == nullptr ? "" : why;
  }
  std::string Sent(const std::string& bytes) {
    const char* why = guard_.Sent(bytes.data(), bytes.size());
    return why == nullptr ? "" : why;
  }
  std::string Waited() const {
    const char* why = guard_.Waited();
    return why == nullptr ? "" : why;
  }
  void Acknowledge() {
    EXPECT_EQ(Received(Frame(kSettings, kAcknowledges, 0)), "");
  }
  void Open(uint32_t stream) {
    EXPECT_EQ(Received(Frame(kHeaders, kEndHeaders, stream, "h")), "");
  }

  FrameGuard guard_{kMaxStreams, [] { return now; }};
};

// How many times a step can be repeated, up to `most`, and why not once more.
std::pair<int, std::string> Repeat(
    int most, const std::function<std::string(uint32_t stream)>& step) {
  for (int i = 0; i < most; ++i) {
    const std::string why = step(static_cast<uint32_t>(2 * i + 1));
    if (!why.empty()) return {i, why};
  }
  return {most, ""};
}

TEST_F(FrameGuardTest, CallsThatEndMayGoOnForEver) {
  Acknowledge();
  const auto [count, why] = Repeat(100'000, [this](uint32_t stream) {
    Open(stream);
    EXPECT_EQ(Received(Frame(kWindow, 0, 0, Number(5, 4))), "");
    EXPECT_EQ(Received(Frame(kData, kEndStream, stream, "12345")), "");
    EXPECT_EQ(Sent(Frame(kHeaders, kEndHeaders, stream, "h")), "");
    EXPECT_EQ(Sent(Frame(kData, 0, stream, "12345")), "");
    return Sent(Frame(kHeaders, kEndHeaders | kEndStream, stream, "h"));
  });
  EXPECT_EQ(why, "");
  EXPECT_EQ(count, 100'000);
  EXPECT_EQ(Waited(), "");
}

TEST_F(FrameGuardTest, StreamsBeforeTheAcknowledgementAreFew) {
  const auto [count, why] = Repeat(1000, [this](uint32_t stream) {
    std::string why = Received(Frame(kHeaders, kEndHeaders, stream, "h"));
    if (why.empty()) why = Sent(Frame(kHeaders, kEndStream, stream, "h"));
    return why;
  });
  EXPECT_EQ(count, FrameGuard::kMaxEarlyStreams);
  EXPECT_THAT(why, HasSubstr("before it acknowledged SETTINGS"));
}

TEST_F(FrameGuardTest, OpenStreamsAreBoundedWithoutGrpc) {
  Acknowledge();
  const auto [count, why] = Repeat(1000, [this](uint32_t stream) {
    return Received(Frame(kHeaders, kEndHeaders, stream, "h"));
  });
  EXPECT_EQ(count, kMaxStreams + FrameGuard::kSpareStreams);
  EXPECT_THAT(why, HasSubstr("more streams than it may have"));
}

class ControlFramesTest : public FrameGuardTest,
                          public ::testing::WithParamInterface<int> {};

TEST_P(ControlFramesTest, AreBoundedInTime) {
  // Without a payload, so that the reader goes on after a refusal.
  const auto send = [this](uint32_t stream) {
    return Received(Frame(GetParam(), 0, stream));
  };
  auto [count, why] = Repeat(1000, send);
  EXPECT_EQ(count, FrameBudget::kAtOnce);
  EXPECT_THAT(why, HasSubstr("200 resets, pings or settings a second"));
  now += absl::Seconds(1);
  EXPECT_EQ(Repeat(1000, send).first, FrameBudget::kPerSecond);
  now += absl::Hours(1);
  EXPECT_EQ(Repeat(1000, send).first, FrameBudget::kAtOnce);
}

INSTANTIATE_TEST_SUITE_P(Types, ControlFramesTest,
                         ::testing::Values(kReset, kPing, kSettings));

TEST_F(FrameGuardTest, AnswersToTheServersPingsCostNothing) {
  EXPECT_EQ(Repeat(10'000,
                   [this](uint32_t) {
                     return Received(
                         Frame(kPing, kAcknowledges, 0, std::string(8, 'p')));
                   })
                .second,
            "");
}

TEST_F(FrameGuardTest, ResetsOfTheServerAreBounded) {
  Acknowledge();
  const auto reset = [this](uint32_t stream) {
    Open(stream);
    return Sent(Frame(kReset, 0, stream, Number(1, 4)));
  };
  const auto [count, why] = Repeat(1000, reset);
  EXPECT_EQ(count, FrameBudget::kAtOnce);
  EXPECT_THAT(why, HasSubstr("made the server reset more than 200"));
}

TEST_F(FrameGuardTest, ResetsBehindAnAnswerAreNone) {
  Acknowledge();
  EXPECT_EQ(Repeat(10'000,
                   [this](uint32_t stream) {
                     Open(stream);
                     EXPECT_EQ(Sent(Frame(kHeaders, kEndStream, stream)), "");
                     return Sent(Frame(kReset, 0, stream, Number(0, 4)));
                   })
                .second,
            "");
}

TEST_F(FrameGuardTest, WindowUpdatesAreValid) {
  Acknowledge();
  Open(1);
  for (const uint32_t stream : {0, 1, 9}) {
    EXPECT_EQ(Received(Frame(kWindow, 0, stream, Number(1, 4))), "");
    for (const auto& payload :
         {Number(0, 4), Number(1ull << 31, 4), Number(1, 3), Number(1, 5)}) {
      EXPECT_THAT(Received(Frame(kWindow, 0, stream, payload)),
                  HasSubstr("window update of 0 or of a wrong size"));
    }
  }
}

TEST_F(FrameGuardTest, HeaderBlocksAreShort) {
  EXPECT_EQ(Received(Frame(kHeaders, 0, 1, std::string(60'000, 'h'))), "");
  EXPECT_THAT(Received(Frame(kContinuation, 0, 1, std::string(6000, 'h'))),
              HasSubstr("longer than 64 KiB"));
}

TEST_F(FrameGuardTest, EmptyContinuationsCountToo) {
  EXPECT_EQ(Received(Frame(kHeaders, 0, 1, "h")), "");
  EXPECT_LT(
      Repeat(10'000,
             [this](uint32_t) { return Received(Frame(kContinuation, 0, 1)); })
          .first,
      8000);
}

TEST_F(FrameGuardTest, HeaderBlocksEndInTime) {
  EXPECT_EQ(Received(Frame(kHeaders, 0, 1, "h")), "");
  now += absl::Seconds(10);
  EXPECT_EQ(Waited(), "");
  now += absl::Seconds(1);
  EXPECT_THAT(Waited(), HasSubstr("did not end in 10 s"));
  EXPECT_EQ(Received(Frame(kContinuation, kEndHeaders, 1, "h")), "");
  EXPECT_EQ(Waited(), "");
}

TEST_F(FrameGuardTest, AnswersThatNobodyTakesEndTheConnection) {
  Acknowledge();
  EXPECT_EQ(Received(InitialWindow(0)), "");
  Open(1);
  now += absl::Seconds(41);
  EXPECT_THAT(Waited(), HasSubstr("took nothing of an answer for 40 s"));
}

TEST_F(FrameGuardTest, SlowReadersMayGoOn) {
  Acknowledge();
  EXPECT_EQ(Received(InitialWindow(10)), "");
  Open(1);
  EXPECT_EQ(Sent(Frame(kData, 0, 1, "0123456789")), "");
  for (int i = 0; i < 100; ++i) {
    now += absl::Seconds(30);
    EXPECT_EQ(Received(Frame(kWindow, 0, 1, Number(1, 4))), "");
    EXPECT_EQ(Sent(Frame(kData, 0, 1, "d")), "");
    EXPECT_EQ(Waited(), "");
  }
  now += absl::Seconds(41);
  EXPECT_NE(Waited(), "");
  EXPECT_EQ(Received(InitialWindow(1000)), "");
  EXPECT_EQ(Waited(), "");
}

TEST_F(FrameGuardTest, ConnectionsThatNobodyReadsEnd) {
  Acknowledge();
  EXPECT_EQ(Received(InitialWindow(1 << 20)), "");
  Open(1);
  EXPECT_EQ(Sent(Frame(kData, 0, 1, std::string(65535, 'd'))), "");
  now += absl::Seconds(41);
  EXPECT_NE(Waited(), "");
  // Nobody waits if there is no stream.
  EXPECT_EQ(Sent(Frame(kHeaders, kEndStream, 1, "h")), "");
  EXPECT_EQ(Waited(), "");
}

TEST_F(FrameGuardTest, RefusedCallsEndAfterAMebibyte) {
  Acknowledge();
  const auto call = [this](uint32_t stream) {
    EXPECT_EQ(Received(Frame(kHeaders, kEndHeaders, stream,
                             std::string(10'000 - 9, 'h'))),
              "");
    // Messages have a limit of their own.
    EXPECT_EQ(
        Received(Frame(kData, kEndStream, stream, std::string(20000, 'd'))),
        "");
    EXPECT_EQ(Sent(Frame(kHeaders, kEndHeaders | kEndStream, stream, "h")), "");
    return Waited();
  };
  const auto [count, why] = Repeat(1000, call);
  EXPECT_EQ(count, 104);
  EXPECT_THAT(why,
              HasSubstr("more than 1 MiB, and no call of it was accepted"));

  EXPECT_EQ(Sent(Frame(kData, 0, 9999, "d")), "");
  EXPECT_EQ(Waited(), "");
}

// A TLS client that connects to a plaintext port must not be taken for a flood:
// its address would be refused.
TEST(FrameReaderTest, FindsNothingInOtherProtocols) {
  const std::string preface = kPreface;
  const std::string frames = Frame(kHeaders, 0, 1) + Frame(kPing, 0, 0);
  for (size_t wrong = 0; wrong <= preface.size(); ++wrong) {
    for (const size_t piece : {size_t{1}, size_t{100}}) {
      std::string bytes = preface + frames;
      if (wrong < preface.size()) bytes[wrong] ^= 1;
      FrameReader reader(kPreface);
      int num_found = 0;
      for (size_t at = 0; at < bytes.size(); at += piece) {
        const auto* data = reinterpret_cast<const uint8_t*>(bytes.data() + at);
        const uint8_t* const end = data + std::min(piece, bytes.size() - at);
        while (reader.Next(&data, end).has_value()) ++num_found;
      }
      EXPECT_EQ(num_found, wrong < preface.size() ? 0 : 2) << wrong;
    }
  }
}

// Each frame is found, in whichever pieces the bytes come.
TEST(FrameReaderTest, FindsFramesInPieces) {
  std::mt19937 random(1);
  std::string bytes = kPreface;
  std::string expected;
  const auto note = [](const FrameReader::Frame& frame, std::string* to) {
    absl::StrAppend(to, frame.type, ",", frame.flags, ",", frame.stream, ",",
                    frame.length, ",", frame.payload.size(), " ");
  };
  for (int i = 0; i < 2000; ++i) {
    const auto type = static_cast<int>(random() % 12);
    const std::string payload(
        random() % 10 == 0 ? random() % 5000 : random() % 130, 'p');
    const auto stream = static_cast<uint32_t>(random() & 0x7fffffff);
    bytes += Frame(type, i % 256, stream, payload);
    const bool has_payload = (type == kSettings || type == kWindow) &&
                             payload.size() <= FrameReader::kMaxPayload;
    FrameReader::Frame frame;
    frame.type = static_cast<uint8_t>(type);
    frame.flags = static_cast<uint8_t>(i % 256);
    frame.stream = stream;
    frame.length = static_cast<uint32_t>(payload.size());
    if (has_payload) {
      frame.payload = {reinterpret_cast<const uint8_t*>(payload.data()),
                       payload.size()};
    }
    note(frame, &expected);
  }
  for (const size_t longest :
       {size_t{1}, size_t{7}, size_t{300}, bytes.size()}) {
    FrameReader reader(kPreface);
    std::string found;
    for (size_t at = 0; at < bytes.size();) {
      const size_t size =
          std::min<size_t>(1 + random() % longest, bytes.size() - at);
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data() + at);
      const uint8_t* const end = data + size;
      while (const auto frame = reader.Next(&data, end)) note(*frame, &found);
      EXPECT_EQ(data, end);
      at += size;
    }
    EXPECT_EQ(found, expected) << longest;
  }
}

}  // namespace
}  // namespace tfswitch
