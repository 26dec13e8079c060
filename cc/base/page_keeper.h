// One background thread per process that does the work on memory for which a
// request would wait for the kernel:
//
//   - It turns memory into huge pages and touches it shortly before it is used.
//     Finding and clearing 2 MiB takes 0.2 ms, and about 5 ms in a virtual
//     machine whose host has to provide the memory first.
//   - It gives memory back that is no longer used: up to 10 ms where the host
//     has to hear of it.
//
// It guarantees no time. If it does not reach memory in time, the memory is
// used in small pages, at a few microseconds each. The thread joins these into
// huge pages when it has nothing else to do.

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
  // The one of this process. Its thread starts at the first request, sleeps
  // while there is none, and ends with the process.
  static PageKeeper& Get();

  PageKeeper(const PageKeeper&) = delete;
  PageKeeper& operator=(const PageKeeper&) = delete;

  // The memory of all requests must stay mapped until they are served or
  // cancelled.

  // Asks for [begin, begin + bytes), whole huge pages. The memory's contents
  // stay as they are, even if others write meanwhile.
  void Touch(char* begin, size_t bytes);

  // Gives bytes [begin, end) of `span` back, as MemorySpan::Release() does.
  void Release(const MemorySpan& span, size_t begin, size_t end);

  // Gives all of `span` back, as MemorySpan::Reset() does, instead of serving
  // its pending requests. It may be used again when IsBusy() is false.
  void Reset(const MemorySpan& span);

  // Whether anything remains to be done to a part of `span`, apart from joining
  // pages, which does no harm.
  bool IsBusy(const MemorySpan& span);

  // Drops the requests for parts of `span`, and waits for a running one. Call
  // it before unmapping.
  void Cancel(const MemorySpan& span);

  // Waits until there is nothing left to do. For tests and measurements.
  void WaitUntilIdle();

 private:
  enum class Kind { kTouch, kRelease, kReset, kJoin };
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
  std::deque<Request> to_join_ ABSL_GUARDED_BY(mutex_);  // When idle.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PAGE_KEEPER_H_
