#include "cc/client/push_queue.h"

#include <atomic>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

// A push that ends with `status` when Open() is called.
class Gate {
 public:
  PushQueue::Send Push(absl::Status status = absl::OkStatus()) {
    return [this, status](const LentThreads*) {
      MutexLock lock(&mutex_);
      while (!is_open_) changed_.Wait(&mutex_);
      return status;
    };
  }
  void Open() {
    MutexLock lock(&mutex_);
    is_open_ = true;
    changed_.NotifyAll();
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool is_open_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(PushQueueTest, SendsInOrderAndNeverMoreThanDepth) {
  PushQueue queue(/*num_helpers=*/1);
  std::vector<int> sent;
  std::atomic<int> most{0};
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(queue
                    .Add(3, "a push",
                         [&, i](const LentThreads*) {
                           sent.push_back(i);
                           return absl::OkStatus();
                         })
                    .ok());
    most = std::max(most.load(), queue.num_in_flight());
  }
  ASSERT_TRUE(queue.Finish().ok());
  EXPECT_LE(most, 3);
  ASSERT_EQ(sent.size(), 1000);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(sent[i], i);
}

TEST(PushQueueTest, ReturnsTheFirstErrorOnceAndSendsLaterPushes) {
  PushQueue queue(0);
  Gate gate;
  ASSERT_TRUE(
      queue.Add(3, "push 1", gate.Push(absl::DataLossError("one"))).ok());
  ASSERT_TRUE(
      queue.Add(3, "push 2", gate.Push(absl::AbortedError("two"))).ok());
  bool is_sent = false;
  ASSERT_TRUE(queue
                  .Add(3, "push 3",
                       [&](const LentThreads*) {
                         is_sent = true;
                         return absl::OkStatus();
                       })
                  .ok());
  gate.Open();
  EXPECT_EQ(queue.Finish(), absl::DataLossError("push 1: one"));
  EXPECT_TRUE(is_sent);
  EXPECT_TRUE(queue.Finish().ok());
}

TEST(PushQueueTest, DoesNotAddAPushAfterAnError) {
  PushQueue queue(0);
  Gate gate;
  gate.Open();
  ASSERT_TRUE(
      queue.Add(1, "push 1", gate.Push(absl::DataLossError("one"))).ok());
  bool is_sent = false;
  EXPECT_EQ(queue.Add(1, "push 2",
                      [&](const LentThreads*) {
                        is_sent = true;
                        return absl::OkStatus();
                      }),
            absl::DataLossError("push 1: one"));
  EXPECT_TRUE(queue.Finish().ok());
  EXPECT_FALSE(is_sent);
}

TEST(PushQueueTest, SendsAllBeforeItIsDestroyed) {
  int sent = 0;
  {
    PushQueue queue(0);
    for (int i = 0; i < 10; ++i) {
      ASSERT_TRUE(queue
                      .Add(10, "a push",
                           [&](const LentThreads*) {
                             ++sent;
                             return absl::OkStatus();
                           })
                      .ok());
    }
  }
  EXPECT_EQ(sent, 10);
}

TEST(PushQueueTest, SeveralThreadsMayAddAndFinish) {
  PushQueue queue(0);
  std::atomic<int> sent{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 200; ++i) {
        EXPECT_TRUE(queue
                        .Add(2, "a push",
                             [&](const LentThreads*) {
                               ++sent;
                               return absl::OkStatus();
                             })
                        .ok());
        if (i % 10 == 0) EXPECT_TRUE(queue.Finish().ok());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_TRUE(queue.Finish().ok());
  EXPECT_EQ(sent, 800);
}

}  // namespace
}  // namespace tfswitch
