#include "cc/base/awake_clock.h"

#include <gtest/gtest.h>

#include <random>

#include "absl/time/clock.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

TEST(AwakeTimeTest, APauseCountsForOneStep) {
  absl::Time now = absl::UnixEpoch();
  AwakeTime time(now);
  for (int i = 0; i < 50; ++i) time.Tick(now += absl::Milliseconds(100));
  const absl::Time before = time.At(now);
  EXPECT_EQ(before - absl::UnixEpoch(), absl::Seconds(5));

  now += absl::Hours(1);

  EXPECT_EQ(time.At(now) - before, AwakeTime::kLongestStep);
  time.Tick(now);
  EXPECT_EQ(time.At(now) - before, AwakeTime::kLongestStep);
  EXPECT_EQ(time.At(now + absl::Milliseconds(70)) - time.At(now),
            absl::Milliseconds(70));
}

TEST(AwakeTimeTest, NeverGoesBack) {
  std::mt19937 random;
  absl::Time now = absl::UnixEpoch();
  AwakeTime time(now);
  absl::Time last = time.At(now);
  for (int i = 0; i < 100'000; ++i) {
    now += absl::Milliseconds(random() % 8 == 0 ? random() % 5000
                                                : random() % 200);
    if (random() % 2 == 0) time.Tick(now);
    ASSERT_GE(time.At(now), last);
    last = time.At(now);
  }
}

TEST(AwakeNowTest, RunsWithTheProcess) {
  const absl::Time begin = AwakeNow();
  const absl::Time steady = SteadyNow();
  while (SteadyNow() - steady < 3 * AwakeTime::kLongestStep) {
    absl::SleepFor(absl::Milliseconds(50));
  }
  EXPECT_GT(AwakeNow() - begin, AwakeTime::kLongestStep);
}

}  // namespace
}  // namespace tfswitch
