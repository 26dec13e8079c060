// Threads for calls that wait for a network.

#ifndef TFSWITCH_CC_OPS_BLOCKING_THREADS_H_
#define TFSWITCH_CC_OPS_BLOCKING_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace tfswitch {

// Starts a thread when a task comes and none is idle, up to a limit; beyond it
// tasks queue. The idle thread that was busy last gets the task: the data of a
// call (its completion queue, buffers, heap) is still in its caches, and the
// pool is as large as the most calls that ever waited at once.
//
// Thread-safe. Lives until the process ends; a child of fork() has its own.
class BlockingThreads {
 public:
  static BlockingThreads& Get();

  void Schedule(std::function<void()> task);

 private:
  struct Worker {
    std::function<void()> task;
    std::condition_variable has_task;
  };

  BlockingThreads() = default;
  void Run(Worker* worker);

  std::mutex mutex_;  // Guards everything below, and the tasks of workers.
  int num_threads_ = 0;
  std::vector<Worker*> idle_;
  std::deque<std::function<void()>> queue_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_BLOCKING_THREADS_H_
