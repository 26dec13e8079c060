#include "cc/base/parallel.h"

#include <atomic>
#include <cstddef>
#include <functional>
#include <new>
#include <utility>
#include <vector>

#include "cc/base/thread_pool.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// Threads that are busy with something else: what they are given to do is done
// when the test says so.
class BusyThreads final : public LentThreads {
 public:
  int num_threads() const override { return 3; }
  void Schedule(std::function<void()> task) const override {
    tasks_.push_back(std::move(task));
  }
  size_t num_tasks() const { return tasks_.size(); }
  void RunAll() const {
    for (const auto& task : tasks_) task();
  }

 private:
  mutable std::vector<std::function<void()>> tasks_;
};

// How often each of `size` items was in a range.
std::vector<int> CountItems(const LentThreads* threads, size_t size,
                            size_t min_size) {
  std::vector<std::atomic<int>> counts(size);
  RunRanges(threads, size, min_size, [&](size_t begin, size_t end) {
    if (size >= min_size) {
      EXPECT_GE(end - begin, min_size);
    }
    for (size_t i = begin; i < end; ++i) ++counts[i];
  });
  return {counts.begin(), counts.end()};
}

TEST(RunRangesTest, EveryItemIsInOneRange) {
  const ThreadPool pool(3);
  for (const size_t size : {0u, 1u, 9u, 10u, 11u, 100u, 12345u}) {
    for (const LentThreads* threads :
         {static_cast<const LentThreads*>(nullptr),
          static_cast<const LentThreads*>(&pool)}) {
      EXPECT_THAT(CountItems(threads, size, 10),
                  testing::AllOf(testing::SizeIs(size), testing::Each(1)));
    }
  }
}

TEST(RunRangesTest, DoesNotWaitForThreadsThatAreBusy) {
  const BusyThreads busy;
  {
    const std::vector<int> counts = CountItems(&busy, 1000, 10);
    EXPECT_THAT(counts, testing::Each(1));
  }
  // They come when the work, and what it refers to, is gone.
  EXPECT_GT(busy.num_tasks(), 0u);
  busy.RunAll();
}

TEST(RunRangesTest, SmallWorkStaysInTheCallingThread) {
  const BusyThreads busy;
  EXPECT_THAT(CountItems(&busy, 19, 10), testing::Each(1));
  EXPECT_EQ(busy.num_tasks(), 0u);
}

TEST(RunRangesTest, ManyCallersShareThePool) {
  const ThreadPool pool(2);
  std::atomic<int> num_right{0};
  {
    const ThreadPool calling(4);
    for (int i = 0; i < 200; ++i) {
      calling.Schedule([&] {
        std::atomic<size_t> sum{0};
        RunRanges(&pool, 1000, 10, [&](size_t begin, size_t end) {
          for (size_t item = begin; item < end; ++item) sum += item;
        });
        num_right += sum == 499500 ? 1 : 0;
      });
    }
  }
  EXPECT_EQ(num_right, 200);
}

TEST(RunRangesTest, WhatIsThrownComesOutWhenAllHaveEnded) {
  const ThreadPool pool(3);
  for (int i = 0; i < 50; ++i) {
    std::atomic<int> num_begun{0};
    std::atomic<int> num_ended{0};
    EXPECT_THROW(RunRanges(&pool, 1000, 10,
                           [&](size_t begin, size_t) {
                             ++num_begun;
                             ++num_ended;
                             if (begin % 3 == 0) throw std::bad_alloc();
                           }),
                 std::bad_alloc);
    EXPECT_EQ(num_begun, num_ended);
  }
}

TEST(ThreadPoolTest, RunsWhatIsScheduledBeforeItEnds) {
  std::atomic<int> num_run{0};
  {
    const ThreadPool pool(2);
    for (int i = 0; i < 1000; ++i) pool.Schedule([&] { ++num_run; });
  }
  EXPECT_EQ(num_run, 1000);
}

}  // namespace
}  // namespace tfswitch
