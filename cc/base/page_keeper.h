// One background thread per process that does slow work on memory, so that a
// call need not wait for the kernel:
//
// - It turns memory into huge pages and touches it shortly before it is used.
//   Finding and clearing a page of 2 MiB takes 0.2 ms, and about 5 ms in a
//   virtual machine whose host has to provide the memory first.
// - It gives unused memory back to the system. In a virtual machine that tells
//   its host, this takes up to 10 ms.
//
// The thread may be too late. Memory that a table uses before the thread has
// reached it gets small pages, at a few microseconds each. The thread joins
// them into huge pages when it has nothing else to do.

#ifndef TFSWITCH_CC_BASE_PAGE_KEEPER_H_
#define TFSWITCH_CC_BASE_PAGE_KEEPER_H_

#include <cstddef>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe.
class PageKeeper {
 public:
  // The keeper of this process. Its thread starts at the first request, sleeps
  // while there are no requests, and ends with the process.
  static PageKeeper& Get();

  PageKeeper(const PageKeeper&) = delete;
  PageKeeper& operator=(const PageKeeper&) = delete;

  // The memory of a request must stay mapped until the request is served or
  // cancelled.

  // Asks for [begin, begin + bytes), which are whole huge pages, to be touched.
  // The contents do not change, even if other threads write to them meanwhile.
  void Touch(char* begin, size_t bytes);
  // The same, after all requests of the other functions. Does nothing if less
  // than an eighth of the memory is available then.
  void TouchWhenIdle(char* begin, size_t bytes);
  // Touches whole huge pages in the calling thread.
  static void TouchNow(char* begin, size_t bytes);

  // Gives bytes [begin, end) of `span` back, as MemorySpan::Release() does.
  void Release(const MemorySpan& span, size_t begin, size_t end);

  // Gives all of `span` back, as MemorySpan::Reset() does, and drops its
  // pending requests. The span may be used again when IsBusy() is false.
  void Reset(const MemorySpan& span);

  // Whether requests for a part of `span` are still pending or in progress.
  // Joining small pages into huge ones does not count, nor TouchWhenIdle():
  // they do no harm.
  bool IsBusy(const MemorySpan& span);

  // Drops the requests for parts of `span`. If the thread is working on one,
  // waits until it has finished. Call it before unmapping the span.
  void Cancel(const MemorySpan& span);

  // Waits until there is nothing left to do. For tests and measurements.
  void WaitUntilIdle();

 private:
  enum class Kind { kTouch, kTouchWhenIdle, kRelease, kReset, kJoin };
  struct Request {
    Kind kind = Kind::kTouch;
    char* begin = nullptr;
    size_t bytes = 0;  // 0: none.
    MemorySpan span;   // kRelease, kReset.

    bool Overlaps(const MemorySpan& other) const {
      return bytes != 0 && begin < other.data() + other.capacity() &&
             other.data() < begin + bytes;
    }
  };

  PageKeeper() = default;
  void Add(const Request& request);
  void Forget(const MemorySpan& span) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void StartThread() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();
  void Serve(const Request& request);
  void TouchPages(char* begin, size_t bytes);

  Mutex mutex_;
  CondVar changed_;
  bool is_started_ ABSL_GUARDED_BY(mutex_) = false;
  Request current_ ABSL_GUARDED_BY(mutex_);
  std::deque<Request> pending_ ABSL_GUARDED_BY(mutex_);
  // For when there is nothing in pending_.
  std::deque<Request> idle_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PAGE_KEEPER_H_
