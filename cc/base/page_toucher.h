// One background thread per process that touches pages shortly before they are
// used, so that a request does not wait for the kernel to find and clear them:
// 0.2 ms for a huge page, and milliseconds in a virtual machine whose host has
// to provide the memory first.
//
// It is an optimisation and promises nothing: a page not touched in time is
// touched by whoever needs it.

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

  // Asks for [begin, begin + bytes) to be touched. What the memory holds stays
  // as it is, even if others write meanwhile.
  //
  // REQUIRES: the memory stays mapped until touched or until Cancel().
  void Request(char* begin, size_t bytes);

  // Forgets the requests that overlap [begin, begin + bytes), and waits for
  // the one in progress if it does. Call it before unmapping or releasing.
  void Cancel(const char* begin, size_t bytes);

  // Waits until every request made so far has been served. For tests.
  void WaitUntilIdle();

 private:
  struct Range {
    char* begin = nullptr;
    size_t bytes = 0;
  };

  PageToucher() = default;
  void Run();

  Mutex mutex_;
  CondVar changed_;
  bool is_started_ ABSL_GUARDED_BY(mutex_) = false;
  Range current_ ABSL_GUARDED_BY(mutex_);  // bytes == 0: none.
  std::deque<Range> pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PAGE_TOUCHER_H_
