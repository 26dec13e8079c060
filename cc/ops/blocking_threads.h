// Threads for calls that wait for a network.

#ifndef TFSWITCH_CC_OPS_BLOCKING_THREADS_H_
#define TFSWITCH_CC_OPS_BLOCKING_THREADS_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace tfswitch {

// Gives a task to an idle thread. If none is idle, starts a thread, up to a
// limit; above the limit tasks wait in a queue. If several threads are
// idle, the one that worked last gets the task, because its caches still have
// the data of a call. The pool keeps all threads that it has started.
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

  std::mutex mutex_;  // Guards all members below, and the tasks of the threads.
  int num_threads_ = 0;
  std::vector<Worker*> idle_;
  std::deque<std::function<void()>> queue_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPS_BLOCKING_THREADS_H_
