// Threads that a caller lends to a function, so that several of them work on a
// large batch.

#ifndef TFSWITCH_CC_BASE_PARALLEL_H_
#define TFSWITCH_CC_BASE_PARALLEL_H_

#include <cstddef>
#include <functional>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace tfswitch {

// Thread-safe.
class LentThreads {
 public:
  virtual ~LentThreads() = default;

  // The number of threads besides the calling one, at least 0.
  virtual int num_threads() const = 0;

  // Runs `task` on one of the threads at some time, maybe after the function to
  // which the threads were lent has returned.
  virtual void Schedule(std::function<void()> task) const = 0;
};

// Calls work(begin, end) for ranges that make up [0, size), each of at least
// `min_size` elements unless `size` is smaller, and returns when all calls have
// returned. The calling thread works too, and does all of the work if `threads`
// is null or all of them are busy: it never waits for a thread that has not
// begun. An exception of `work` is thrown here, after all calls have ended.
void RunRanges(const LentThreads* threads, size_t size, size_t min_size,
               absl::FunctionRef<void(size_t begin, size_t end)> work);

// Calls work(i) for each i below `size` in the same way. Returns the first
// error in the order of i.
absl::Status RunEach(const LentThreads* threads, size_t size,
                     absl::FunctionRef<absl::Status(size_t i)> work);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PARALLEL_H_
