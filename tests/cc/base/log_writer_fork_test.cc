#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

#include "cc/base/log_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// What a program writes to stderr that ends in `run`.
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

}  // namespace
}  // namespace tfswitch
