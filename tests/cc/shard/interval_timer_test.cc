#include "cc/shard/interval_timer.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(IntervalTimerTest, ShrinksEachTableAgainAndAgainUntilItIsTakenOut) {
  Mutex mutex;
  CondVar changed;
  std::map<std::string, int> counts;
  IntervalTimer timer([&](const std::string& table) {
    MutexLock lock(&mutex);
    ++counts[table];
    changed.NotifyAll();
  });
  timer.Set("never", absl::ZeroDuration());
  timer.Set("late", absl::Hours(1));
  timer.Set("a", absl::Milliseconds(1));
  timer.Set("b", absl::Milliseconds(2));
  {
    MutexLock lock(&mutex);
    while (counts["a"] < 3 || counts["b"] < 3) changed.Wait(&mutex);
  }
  timer.Set("a", absl::ZeroDuration());
  int now;
  {
    MutexLock lock(&mutex);
    // A call that had begun may end.
    now = counts["a"] + 1;
    const int b = counts["b"];
    while (counts["b"] < b + 5) changed.Wait(&mutex);
    EXPECT_LE(counts["a"], now);
    EXPECT_EQ(counts.count("never"), 0u);
    EXPECT_EQ(counts.count("late"), 0u);
  }
}

TEST(IntervalTimerTest, EndsWithoutWaitingForTheNextTime) {
  IntervalTimer timer([](const std::string&) {});
  timer.Set("late", absl::Hours(1));
}

}  // namespace
}  // namespace tfswitch
