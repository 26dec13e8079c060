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
// they wait for no more pushes than are in flight. After a second they say on
// stderr what they wait for. An interrupt ends them with Cancelled.
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

  // Waits until fewer than `depth` pushes are in flight. If a push has failed
  // since an error was last returned, returns the first such error.
  absl::Status WaitForRoom(int depth);
  // The same, until no push is in flight.
  absl::Status Finish() { return WaitForRoom(1); }
  // Waits until no push is in flight, and leaves errors to others. An interrupt
  // ends the calls of the push, and so this wait.
  void Wait();

  // Adds a push. `name` is for messages, for example "the push of step 7".
  void Add(std::string name, Send send);
  // Adds work that other calls do not wait for, after the pushes so far.
  void AddRead(std::function<void()> read);

  int num_in_flight() const { return num_in_flight_.load(); }

 private:
  struct Task {
    std::string name;
    Send send;
    bool is_push;
  };

  absl::Status WaitUntilBelow(int limit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AddTask(Task task);
  void Run();

  const int num_helpers_;

  // Changed with the mutex held. Waits that need not wait read them without it.
  std::atomic<int> num_in_flight_{0};
  std::atomic<bool> has_error_{false};

  Mutex mutex_;
  CondVar added_;
  CondVar finished_;
  std::deque<Task> tasks_ ABSL_GUARDED_BY(mutex_);  // The first is being done.
  absl::Status error_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::unique_ptr<ThreadPool> helpers_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_ ABSL_GUARDED_BY(mutex_);  // Begins with the first task.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_PUSH_QUEUE_H_
