#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// Returns the stderr of a program that calls `run` last.
std::string StderrOf(void (*run)()) {
  int ends[2];
  EXPECT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    dup2(ends[1], STDERR_FILENO);
    close(ends[0]);
    close(ends[1]);
    run();
    std::_Exit(3);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t bytes; (bytes = read(ends[0], buffer, sizeof(buffer))) > 0;) {
    text.append(buffer, bytes);
  }
  close(ends[0]);
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status)) << status;
  return text;
}

TEST(LogWriterForkTest, AForkHasAThreadOfItsOwnAndTheLastLinesComeOut) {
  testing::internal::CaptureStderr();
  LogWriter::Get().Write({"forks"}, "of the parent");
  ASSERT_TRUE(LogWriter::Get().Flush(absl::Minutes(1)));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "of the parent\n");

  // A sanitizer may say more at the end of the child.
  EXPECT_THAT(StderrOf([] {
                LogWriter::Get().Write({"forks"}, "of the child");
                std::exit(0);
              }),
              testing::StartsWith("of the child\n"));
}

void WriteEvents() {
  LogServerEvent(LogLevel::kInfo, "saved",
                 {{"path", "/a b/\"c'\xc3\xa9\n"},
                  {"rows", 7},
                  {"nothing", ""},
                  {"kind", "x=y"},
                  {"folder", "/data/8"}});
  LogMessage(LogLevel::kWarning, {"disk", 1, 1e-9}, "it is 'full'");
  LogMessage(LogLevel::kError, {"disk", 1, 1e-9}, "left out");
  std::exit(0);
}

TEST(LogWriterForkTest, AServerProgramShowsEventsInOneFormWithTimesInUtc) {
  const absl::Time before = absl::Now() - absl::Seconds(1);
  std::vector<std::string> lines =
      absl::StrSplit(StderrOf([] {
                       setenv("TZ", "Asia/Kathmandu", /*overwrite=*/1);
                       ShowServerEvents();
                       WriteEvents();
                     }),
                     '\n');

  ASSERT_GE(lines.size(), 3u);
  lines.resize(3);  // A sanitizer may say more at the end of the child.
  for (const std::string& line : lines) {
    ASSERT_GT(line.size(), 25u) << line;
    EXPECT_EQ(line[19], '.');
    EXPECT_EQ(line.substr(23, 2), "Z ");
    absl::Time time;
    std::string error;
    ASSERT_TRUE(
        absl::ParseTime(absl::RFC3339_full, line.substr(0, 24), &time, &error))
        << error;
    EXPECT_GT(time, before);
    EXPECT_LE(time, absl::Now());
  }
  EXPECT_EQ(lines[0].substr(25),
            R"(info saved path="/a b/\"c'\303\251\n" rows=7 kind="x=y" )"
            "folder=/data/8");
  EXPECT_EQ(lines[1].substr(25), "warning disk message=\"it is 'full'\"");
  EXPECT_EQ(
      lines[2].substr(25),
      "warning lines_left_out message=\"1 more lines about disk were left "
      "out\"");
}

TEST(LogWriterForkTest, ElsewhereEventsAreSilentAndMessagesPlain) {
  EXPECT_THAT(
      StderrOf(&WriteEvents),
      testing::StartsWith(
          "tfswitch: warning: it is 'full'\n"
          "tfswitch: warning: 1 more lines about disk were left out\n"));
}

}  // namespace
}  // namespace tfswitch
