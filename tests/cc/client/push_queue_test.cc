#include "cc/client/push_queue.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

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

absl::Status Add(PushQueue* queue, int depth, const char* name,
                 PushQueue::Send send) {
  const absl::Status status = queue->WaitForRoom(depth);
  if (status.ok()) queue->Add(name, std::move(send));
  return status;
}

TEST(PushQueueTest, SendsInOrderAndNeverMoreThanDepth) {
  PushQueue queue(/*num_helpers=*/1);
  std::vector<int> sent;
  int most = 0;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(Add(&queue, 3, "a push", [&, i](const LentThreads*) {
                  sent.push_back(i);
                  return absl::OkStatus();
                }).ok());
    most = std::max(most, queue.num_in_flight());
  }
  ASSERT_TRUE(queue.Finish().ok());
  EXPECT_LE(most, 3);
  ASSERT_EQ(sent.size(), 1000);
  for (int i = 0; i < 1000; ++i) EXPECT_EQ(sent[i], i);
}

TEST(PushQueueTest, ReturnsTheFirstErrorOnceAndSendsLaterPushes) {
  PushQueue queue(0);
  Gate gate;
  queue.Add("push 1", gate.Push(absl::DataLossError("one")));
  queue.Add("push 2", gate.Push(absl::AbortedError("two")));
  bool is_sent = false;
  queue.Add("push 3", [&](const LentThreads*) {
    is_sent = true;
    return absl::OkStatus();
  });
  gate.Open();
  queue.Wait();
  EXPECT_EQ(queue.WaitForRoom(5), absl::DataLossError("push 1: one"));
  EXPECT_TRUE(is_sent);
  EXPECT_TRUE(queue.Finish().ok());
}

TEST(PushQueueTest, NobodyWaitsForReadsAndTheirOrderIsKept) {
  PushQueue queue(0);
  Gate first;
  Gate second;
  std::atomic<bool> is_read{false};
  queue.Add("push 1", first.Push());
  queue.AddRead([&] {
    EXPECT_TRUE(second.Push()(nullptr).ok());
    is_read = true;
  });
  first.Open();
  EXPECT_TRUE(queue.Finish().ok());
  EXPECT_FALSE(is_read);
  queue.Add("push 2", [&](const LentThreads*) {
    EXPECT_TRUE(is_read);
    return absl::OkStatus();
  });
  second.Open();
  EXPECT_TRUE(queue.Finish().ok());
}

TEST(PushQueueTest, SendsAllBeforeItIsDestroyed) {
  int sent = 0;
  {
    PushQueue queue(0);
    for (int i = 0; i < 10; ++i) {
      queue.Add("a push", [&](const LentThreads*) {
        ++sent;
        return absl::OkStatus();
      });
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
        EXPECT_TRUE(Add(&queue, 2, "a push", [&](const LentThreads*) {
                      ++sent;
                      return absl::OkStatus();
                    }).ok());
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
