#include "cc/base/fork_guard.h"

#include <sys/wait.h>
#include <unistd.h>

#include "absl/functional/function_ref.h"
#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// Whether `holds` does in a child of a fork.
bool HoldsInFork(absl::FunctionRef<bool()> holds) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    _exit(holds() ? 0 : 1);
  }
  int status = -1;
  return waitpid(child, &status, 0) == child && status == 0;
}

bool Refuses(const absl::Status& status) {
  return absl::IsFailedPrecondition(status) &&
         absl::StrContains(status.message(), "get_context('spawn')") &&
         absl::EndsWith(status.message(),
                        "The parent has taken the first step");
}

// The guard is one for the process, so this is one test.
TEST(ForkGuardTest, OnlyForksOfAProcessThatHasArmedItAreTripped) {
  EXPECT_TRUE(HoldsInFork([] {
    return ForkGuard::Check().ok() && ForkGuard::Arm("begun by itself").ok() &&
           ForkGuard::Check().ok();
  }));

  ASSERT_TRUE(ForkGuard::Arm("taken the first step").ok());
  ASSERT_TRUE(ForkGuard::Arm("taken another").ok());

  EXPECT_TRUE(HoldsInFork([] {
    return ForkGuard::IsTripped() && Refuses(ForkGuard::Check()) &&
           Refuses(ForkGuard::Arm("taken a step of its own")) &&
           HoldsInFork([] { return Refuses(ForkGuard::Check()); });
  }));
  EXPECT_FALSE(ForkGuard::IsTripped());
  EXPECT_TRUE(ForkGuard::Check().ok());
}

}  // namespace
}  // namespace tfswitch
