// One background thread per process that turns memory into huge pages and
// touches it shortly before it is used, so that a request does not wait for the
// kernel to find and clear 2 MiB: 0.2 ms, and about 5 ms in a virtual machine
// whose host has to provide the memory first.
//
// It promises nothing. Memory that it has not come to in time is used in small
// pages, a few microseconds each, and it joins them into huge ones when it has
// nothing else to do.

#ifndef TFSWITCH_CC_BASE_PAGE_TOUCHER_H_
#define TFSWITCH_CC_BASE_PAGE_TOUCHER_H_

#include <cstddef>
#include <deque>

#include "absl/base/thread_annotations.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe.
class PageToucher {
 public:
  // The one of this process. Its thread starts at the first request, sleeps
  // while there is none, and ends with the process.
  static PageToucher& Get();

  PageToucher(const PageToucher&) = delete;
  PageToucher& operator=(const PageToucher&) = delete;

  // Asks for [begin, begin + bytes), whole huge pages. What the memory holds
  // stays as it is, even if others write meanwhile.
  //
  // REQUIRES: the memory stays mapped until touched or until Cancel().
  void Request(char* begin, size_t bytes);

  // Forgets the requests that overlap [begin, begin + bytes), and waits for
  // the one in progress if it does. Call it before unmapping or releasing.
  void Cancel(const char* begin, size_t bytes);

  // Waits until there is nothing left to do. For tests and measurements.
  void WaitUntilIdle();

 private:
  struct Range {
    char* begin = nullptr;
    size_t bytes = 0;
  };

  PageToucher() = default;
  void Run();
  void Serve(const Range& range);

  Mutex mutex_;
  CondVar changed_;
  bool is_started_ ABSL_GUARDED_BY(mutex_) = false;
  Range current_ ABSL_GUARDED_BY(mutex_);  // bytes == 0: none.
  std::deque<Range> pending_ ABSL_GUARDED_BY(mutex_);
  std::deque<Range> to_join_ ABSL_GUARDED_BY(mutex_);  // Single huge pages.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PAGE_TOUCHER_H_
