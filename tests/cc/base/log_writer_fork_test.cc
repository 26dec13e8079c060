#include <sys/wait.h>
#include <unistd.h>

#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/json.h"
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

// Bytes of all kinds, some of them too long for a line.
std::string RandomBytes(std::mt19937* random) {
  std::string bytes((*random)() % (PIPE_BUF >> (*random)() % 10) + 1, '\0');
  const bool is_text = (*random)() % 2 == 0;
  for (char& byte : bytes) {
    byte = static_cast<char>(is_text ? 'a' + (*random)() % 26 : (*random)());
  }
  return bytes;
}

uint32_t seed = 0;
constexpr int kNumRandom = 400;

TEST(LogWriterForkTest, LinesOfAJsonLogParseWhateverTheValuesAre) {
  seed = std::random_device()();
  SCOPED_TRACE(testing::Message() << "seed " << seed);
  const std::vector<std::string> lines = absl::StrSplit(
      StderrOf([] {
        UseJsonLog();
        ShowServerEvents();
        std::mt19937 random(seed);
        for (int i = 0; i < kNumRandom; ++i) {
          const std::string path = RandomBytes(&random);
          const std::string why = RandomBytes(&random);
          LogWriter::Get().WriteInOrder(
              {"any", 1e9, 1e9}, EventLine(LogLevel::kError, "saved",
                                           {{"rows", i},
                                            {"loss", std::nan("")},
                                            {"seconds", LogNumber{"0.520"}},
                                            {"empty", ""},
                                            {"path", path},
                                            {"why", why}}));
        }
        LogMessage(LogLevel::kWarning, {"disk", 1, 1e-9}, "it's 'full'");
        LogMessage(LogLevel::kError, {"disk", 1, 1e-9}, "left out");
        LogNotStarted("tfswitch-server", "no \"flag\"");
        std::exit(0);
      }),
      '\n');

  ASSERT_GE(lines.size(), kNumRandom + 3u);
  std::mt19937 random(seed);
  for (int i = 0; i < kNumRandom + 3; ++i) {
    ASSERT_LT(lines[i].size(), PIPE_BUF);
    const absl::StatusOr<Json> parsed = ParseJson(lines[i]);
    ASSERT_TRUE(parsed.ok()) << lines[i];
    const Json& json = *parsed;
    absl::Time time;
    std::string error;
    EXPECT_TRUE(absl::ParseTime(
        absl::RFC3339_full, json.at("time").get<std::string>(), &time, &error))
        << error;
    if (i >= kNumRandom) continue;
    EXPECT_EQ(json.at("level"), "error");
    EXPECT_EQ(json.at("event"), "saved");
    EXPECT_EQ(json.at("rows"), i);
    EXPECT_EQ(json.at("loss"), "nan");
    EXPECT_EQ(json.at("seconds"), 0.52);
    EXPECT_FALSE(json.contains("empty"));
    // As the text on its way to the reader of a JSON file.
    const auto expected = [&random] {
      return ParseJson(DumpJson(Json(RandomBytes(&random))))
          ->get<std::string>();
    };
    const std::string path = json.at("path");
    const std::string whole_path = expected(), whole_why = expected();
    if (json.contains("why") && json.at("why") == whole_why) {
      EXPECT_EQ(path, whole_path);
    } else if (path != whole_path) {
      // Almost nothing more would have found room.
      EXPECT_GT(lines[i].size(), PIPE_BUF - 50u);
      EXPECT_THAT(path, testing::EndsWith("..."));
      EXPECT_EQ(path.substr(0, 8), whole_path.substr(0, 8));
    }
  }
  EXPECT_EQ(ParseJson(lines[kNumRandom])->at("message"), "it's 'full'");
  const Json refused = *ParseJson(lines[kNumRandom + 1]);
  EXPECT_EQ(refused.at("event"), "not_started");
  EXPECT_EQ(refused.at("message"), "no \"flag\"");
  EXPECT_EQ(ParseJson(lines[kNumRandom + 2])->at("event"), "lines_left_out");
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
