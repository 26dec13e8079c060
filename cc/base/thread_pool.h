// A few threads that run tasks in the order in which they were scheduled.

#ifndef TFSWITCH_CC_BASE_THREAD_POOL_H_
#define TFSWITCH_CC_BASE_THREAD_POOL_H_

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "cc/base/mutex.h"
#include "cc/base/parallel.h"

namespace tfswitch {

// Thread-safe. The destructor runs all scheduled tasks and joins the threads.
class ThreadPool final : public LentThreads {
 public:
  // `num_threads` may be 0; then Schedule() must not be called.
  explicit ThreadPool(int num_threads);
  ~ThreadPool() override;

  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const override { return static_cast<int>(threads_.size()); }
  void Schedule(std::function<void()> task) const override;

 private:
  void Run();

  mutable Mutex mutex_;
  mutable CondVar changed_;
  mutable std::deque<std::function<void()>> tasks_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;  // Constant after construction.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_THREAD_POOL_H_
