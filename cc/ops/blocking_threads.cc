#include "cc/ops/blocking_threads.h"

#include <pthread.h>

#include <thread>
#include <utility>

namespace tfswitch {
namespace {

// The most calls that wait at the same time. Their threads use little CPU: they
// wait for servers or, in TensorFlow's first parameter server, for the other
// workers of a step.
constexpr int kMaxThreads = 1024;

}  // namespace

BlockingThreads& BlockingThreads::Get() {
  // The object is never freed, because a call may still wait for a server while
  // the process exits. A forked child gets a new object: the threads exist only
  // in the parent, and one of them may have locked the mutex before the fork.
  static BlockingThreads* threads = [] {
    pthread_atfork(nullptr, nullptr, [] { threads = new BlockingThreads(); });
    return new BlockingThreads();
  }();
  return *threads;
}

void BlockingThreads::Schedule(std::function<void()> task) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!idle_.empty()) {
    Worker* const worker = idle_.back();
    idle_.pop_back();
    worker->task = std::move(task);
    worker->has_task.notify_one();
  } else if (num_threads_ < kMaxThreads) {
    ++num_threads_;
    auto* const worker = new Worker();
    worker->task = std::move(task);
    std::thread([this, worker] { Run(worker); }).detach();
  } else {
    queue_.push_back(std::move(task));
  }
}

void BlockingThreads::Run(Worker* worker) {
  pthread_setname_np(pthread_self(), "tfswitch_rpc");
  for (;;) {
    std::function<void()> task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      if (worker->task == nullptr && !queue_.empty()) {
        worker->task = std::move(queue_.front());
        queue_.pop_front();
      }
      if (worker->task == nullptr) {
        idle_.push_back(worker);
        worker->has_task.wait(lock,
                              [worker] { return worker->task != nullptr; });
      }
      task = std::move(worker->task);
      worker->task = nullptr;
    }
    task();
  }
}

}  // namespace tfswitch
