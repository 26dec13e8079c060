#include "cc/base/log_writer.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <climits>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::Gt;
using testing::HasSubstr;
using testing::SizeIs;

constexpr absl::Duration kLong = absl::Minutes(1);
constexpr LogKind kUnlimited = {"anything", 1e9, 1e9};

class LogWriterTest : public testing::Test {
 protected:
  LogWriterTest() {
    EXPECT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
    // Its thread uses it for as long as the process lives.
    writer_ = new LogWriter(pipe_[1]);
  }
  ~LogWriterTest() override { CloseReader(); }

  void CloseReader() {
    if (pipe_[0] >= 0) close(pipe_[0]);
    pipe_[0] = -1;
  }

  // Lines up to one that holds `end`.
  std::vector<std::string> ReadUntil(const std::string& end) {
    std::vector<std::string> lines;
    while (lines.empty() || !absl::StrContains(lines.back(), end)) {
      const size_t size = unread_.find('\n');
      if (size != std::string::npos) {
        lines.push_back(unread_.substr(0, size));
        unread_.erase(0, size + 1);
        continue;
      }
      char buffer[4096];
      const ssize_t bytes = read(pipe_[0], buffer, sizeof(buffer));
      if (bytes <= 0) break;
      unread_.append(buffer, bytes);
    }
    return lines;
  }

  std::string unread_;
  int pipe_[2] = {-1, -1};
  LogWriter* writer_;
};

TEST_F(LogWriterTest, LinesComeInTheirOrderAndEachIsOne) {
  writer_->Write(kUnlimited, "first\nsecond\x1b[31m\x7f");
  writer_->Write(kUnlimited, "größer\t");
  writer_->WriteInOrder(kUnlimited, std::string(2 * PIPE_BUF, 'x'));

  const std::vector<std::string> lines = ReadUntil("...");

  ASSERT_THAT(lines, SizeIs(3));
  EXPECT_EQ(lines[0], "first\\nsecond\\x1b[31m\\x7f");
  EXPECT_EQ(lines[1], "größer\\t");
  EXPECT_THAT(lines[2], SizeIs(PIPE_BUF - 1));
}

TEST_F(LogWriterTest, AReaderThatDoesNotReadHoldsUpNothing) {
  // Many times what the pipe and the queue have room for.
  const std::string text(1000, 'x');
  for (int i = 0; i < 3000; ++i) writer_->Write(kUnlimited, text);
  EXPECT_FALSE(writer_->Flush(absl::Milliseconds(1)));
  // It has been in vain, so that no such line waits now.
  for (int i = 0; i < 3000; ++i) writer_->WriteInOrder(kUnlimited, text);

  // When somebody reads, the rest comes, and how many there were.
  std::thread flusher([&] {
    while (!writer_->Flush(kLong)) {
    }
  });
  size_t num_written = 0, num_left_out = 0;
  while (num_written + num_left_out < 6000) {
    for (const std::string& line : ReadUntil("left out")) {
      if (line == text) {
        ++num_written;
      } else {
        EXPECT_THAT(line, HasSubstr(" more lines about anything were left"));
        num_left_out += std::strtoul(
            line.c_str() + std::string("tfswitch: warning: ").size(), nullptr,
            10);
      }
    }
  }
  flusher.join();
  EXPECT_EQ(num_written + num_left_out, 6000u);
  EXPECT_THAT(num_left_out, Gt(5000u));
}

TEST_F(LogWriterTest, AReaderThatHasGoneEndsNoProcess) {
  ASSERT_EQ(signal(SIGPIPE, SIG_DFL), SIG_DFL);
  CloseReader();
  for (int i = 0; i < 10; ++i) writer_->WriteInOrder(kUnlimited, "line");

  EXPECT_TRUE(writer_->Flush(kLong));
}

TEST_F(LogWriterTest, NoPeerAndNoKindHidesAnother) {
  constexpr LogKind kNoisy = {"noise", 3, 1e-9};
  for (int i = 0; i < 10; ++i) {
    writer_->Write(kNoisy, absl::StrCat("a", i), "stranger");
  }
  writer_->Write(kNoisy, "b", "friend");
  writer_->Write({"music"}, "c", "stranger");
  ASSERT_TRUE(writer_->Flush(kLong));

  EXPECT_THAT(
      ReadUntil("left out"),
      ElementsAre("a0", "a1", "a2", "b", "c",
                  "tfswitch: warning: 7 more lines about noise were left out"));
}

TEST_F(LogWriterTest, ManyPeersHaveTogetherTenTimesAsMany) {
  constexpr LogKind kNoisy = {"noise", 3, 1e-9};
  for (int i = 0; i < 100; ++i) writer_->Write(kNoisy, "a", absl::StrCat(i));
  ASSERT_TRUE(writer_->Flush(kLong));

  EXPECT_THAT(ReadUntil("70 more lines about noise"), SizeIs(31));
}

TEST_F(LogWriterTest, ThereAreMoreAsTimeGoesBy) {
  constexpr LogKind kQuick = {"quick", 1, 1000};
  int num_written = 0;
  while (num_written < 3) {
    writer_->Write(kQuick, "line");
    ASSERT_TRUE(writer_->Flush(kLong));
    writer_->Write(kUnlimited, "end");
    for (const std::string& line : ReadUntil("end")) {
      num_written += line == "line" ? 1 : 0;
    }
  }
}

}  // namespace
}  // namespace tfswitch
