// Pushes that go on while the program does its next work.

#ifndef TFSWITCH_CC_CLIENT_PUSH_QUEUE_H_
#define TFSWITCH_CC_CLIENT_PUSH_QUEUE_H_

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "cc/base/mutex.h"
#include "cc/base/parallel.h"
#include "cc/base/thread_pool.h"

namespace tfswitch {

// Sends pushes on a thread of its own, one after another, in the order in which
// they were added. The order matters, because most optimizers give other rows
// if two steps change places.
//
// Each push ends within the timeout of its client, and so do the waits here:
// Add() and Finish() wait for no more pushes than are in flight. After a second
// they say on stderr what they wait for. An interrupt ends them with Cancelled.
//
// Thread-safe.
class PushQueue {
 public:
  // Makes the calls of a push, and waits for them. May use `threads`.
  using Send = std::function<absl::Status(const LentThreads* threads)>;

  // The queue lends `num_helpers` threads to each push.
  explicit PushQueue(int num_helpers) : num_helpers_(num_helpers) {}
  // Waits for all pushes, and logs an error that no call has returned.
  ~PushQueue();
  PushQueue(const PushQueue&) = delete;
  PushQueue& operator=(const PushQueue&) = delete;

  // Waits until fewer than `depth` pushes are in flight, and adds one. `name`
  // is for messages, for example "the push of step 7". If an earlier push has
  // failed, returns its error, and does not add the push.
  absl::Status Add(int depth, std::string name, Send send);

  // Waits until no push is in flight. If a push has failed since an error was
  // last returned, returns the first such error.
  absl::Status Finish();

  int num_in_flight() const { return num_in_flight_.load(); }

 private:
  struct Push {
    std::string name;
    Send send;
  };

  absl::Status WaitUntilBelow(int limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeError() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  const int num_helpers_;

  // Changed with the mutex held. Finish() reads them without it.
  std::atomic<int> num_in_flight_{0};
  std::atomic<bool> has_error_{false};

  Mutex mutex_;
  CondVar added_;
  CondVar finished_;
  std::deque<Push> pushes_ ABSL_GUARDED_BY(mutex_);  // The first is being sent.
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<ThreadPool> helpers_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_ ABSL_GUARDED_BY(mutex_);  // Begins with the first push.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_PUSH_QUEUE_H_
