#include "cc/base/process_identity.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(ProcessIdentityTest, AnotherProcessRunsUntilItHasEnded) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const pid_t child = fork();
  if (child == 0) {
    const std::string own = ProcessIdentity(getpid());
    if (write(ends[1], own.data(), own.size()) > 0) pause();
    _exit(1);
  }
  char buffer[256];
  const ssize_t size = read(ends[0], buffer, sizeof(buffer));
  ASSERT_GT(size, 0);
  const std::string identity(buffer, static_cast<size_t>(size));

  EXPECT_EQ(RunningProcess(identity), child);
  // A later process with the same number is another one.
  EXPECT_EQ(RunningProcess(identity + "0"), 0);

  kill(child, SIGKILL);
  siginfo_t info;
  waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOWAIT);
  EXPECT_EQ(RunningProcess(identity), 0) << "a zombie";
  waitpid(child, nullptr, 0);
  EXPECT_EQ(RunningProcess(identity), 0);
  close(ends[0]);
  close(ends[1]);
}

TEST(ProcessIdentityTest, OnlyOthersOfThisMachineCount) {
  const std::string own = ProcessIdentity(getpid());
  EXPECT_EQ(own, ProcessIdentity(getpid()));
  EXPECT_EQ(RunningProcess(own), 0);
  for (const std::string& other :
       {std::string(), std::string("///"), std::string("a/b/c/d"),
        absl::StrCat("boot/pid:[1]/", getppid(), "/1"),
        absl::StrCat(own, "/")}) {
    EXPECT_EQ(RunningProcess(other), 0) << other;
  }
}

}  // namespace
}  // namespace tfswitch
