#include "cc/base/forked_work.h"

#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/memory_region.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

absl::Status Never() { return absl::OkStatus(); }
void Ignore(int64_t amount) { static_cast<void>(amount); }

class ForkedWorkTest : public testing::Test {
 protected:
  void SetUp() override {
    if (!kCanForkWork) GTEST_SKIP() << "of sanitizers";
  }
};

TEST_F(ForkedWorkTest, TheChildWorksOnTheMemoryOfTheMoment) {
  std::vector<int> numbers(1000, 1);
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [&](const ForkedWork::Report&) -> absl::StatusOr<std::string> {
        int64_t sum = 0;
        for (const int number : numbers) sum += number;
        return absl::StrCat(sum);
      });
  ASSERT_TRUE(work.ok()) << work.status();
  numbers.assign(1000, 2);
  EXPECT_EQ((*work)->Wait(Ignore, Never).value(), "1000");
}

TEST_F(ForkedWorkTest, ReportsAndLongResultsComeWhole) {
  const std::string result(1 << 20, 'x');
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [&](const ForkedWork::Report& report) -> absl::StatusOr<std::string> {
        for (int i = 1; i <= 1000; ++i) report(i);
        return result;
      });
  ASSERT_TRUE(work.ok()) << work.status();
  int64_t sum = 0;
  EXPECT_EQ(
      (*work)->Wait([&](int64_t amount) { sum += amount; }, Never).value(),
      result);
  EXPECT_EQ(sum, 500'500);
}

TEST_F(ForkedWorkTest, AnErrorComesWithItsCode) {
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [](const ForkedWork::Report&) -> absl::StatusOr<std::string> {
        return absl::ResourceExhaustedError("the disk is full");
      });
  ASSERT_TRUE(work.ok()) << work.status();
  EXPECT_EQ((*work)->Wait(Ignore, Never).status(),
            absl::ResourceExhaustedError("the disk is full"));
}

TEST_F(ForkedWorkTest, AChildThatIsKilledIsAnError) {
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [](const ForkedWork::Report& report) -> absl::StatusOr<std::string> {
        report(1);
        raise(SIGKILL);
        return "";
      });
  ASSERT_TRUE(work.ok()) << work.status();
  const absl::Status status = (*work)->Wait(Ignore, Never).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(status.message()), HasSubstr("signal 9"));
}

TEST_F(ForkedWorkTest, AnErrorOfThePollEndsTheChild) {
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [](const ForkedWork::Report&) -> absl::StatusOr<std::string> {
        for (;;) pause();
      });
  ASSERT_TRUE(work.ok()) << work.status();
  int polls = 0;
  EXPECT_EQ((*work)
                ->Wait(Ignore,
                       [&]() -> absl::Status {
                         if (++polls < 3) return absl::OkStatus();
                         return absl::CancelledError("enough");
                       })
                .status(),
            absl::CancelledError("enough"));
}

TEST_F(ForkedWorkTest, CountsTheMemoryThatIsWrittenToMeanwhile) {
  constexpr size_t kBytes = size_t{16} << 20;
  std::vector<char> memory(kBytes, 1);
  auto work = ForkedWork::Start(
      /*niceness=*/0,
      [](const ForkedWork::Report&) -> absl::StatusOr<std::string> {
        for (;;) pause();
      });
  ASSERT_TRUE(work.ok()) << work.status();
  for (size_t i = 0; i < kBytes; i += kSmallPageBytes) memory[i] = 2;
  EXPECT_GE((*work)->copied_bytes(), kBytes / 2);
}

}  // namespace
}  // namespace tfswitch
