// Work on the memory of this process as it is at one moment, in a child of
// fork(). The parent goes on at once: the kernel copies each page that either
// of them writes to afterwards.

#ifndef TFSWITCH_CC_BASE_FORKED_WORK_H_
#define TFSWITCH_CC_BASE_FORKED_WORK_H_

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace tfswitch {

// Whether a child of a process with several threads can allocate memory. With
// GCC's sanitizers it may wait for ever for a thread of the parent.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kCanForkWork = false;
#else
inline constexpr bool kCanForkWork = true;
#endif

// Thread-compatible. It ends with the thread that has started it.
class ForkedWork {
 public:
  // Tells the parent how much has been done.
  using Report = std::function<void(int64_t amount)>;
  // Runs in the child, where there is no other thread: whoever had locked a
  // mutex will not unlock it. It must not use what has threads or locks that it
  // does not know, such as gRPC, protobuf's reflection, or logging.
  using Work = absl::FunctionRef<absl::StatusOr<std::string>(const Report&)>;

  // Returns in the parent. `niceness` is added to that of this process.
  // ResourceExhausted if the system has no child.
  static absl::StatusOr<std::unique_ptr<ForkedWork>> Start(int niceness,
                                                           Work work);

  // Ends the child, if it is still at work.
  ~ForkedWork();
  ForkedWork(const ForkedWork&) = delete;
  ForkedWork& operator=(const ForkedWork&) = delete;

  // Waits for the result of the work. Meanwhile it calls `report` in place of
  // the child, and `poll` at short intervals: an error of that ends the child,
  // and the wait with it. Internal if the child has ended without a result.
  absl::StatusOr<std::string> Wait(absl::FunctionRef<void(int64_t)> report,
                                   absl::FunctionRef<absl::Status()> poll);

  // At most so many bytes of memory have been copied because this process has
  // written to them since the start.
  uint64_t copied_bytes() const;

  // Processor time that the child has taken. 0 before the end of Wait().
  double cpu_seconds() const { return cpu_seconds_; }

 private:
  ForkedWork(pid_t child, int result, int64_t faults)
      : child_(child), result_(result), faults_(faults) {}
  // "ended with status 1" and the like.
  std::string Reap();

  pid_t child_;  // -1: it has ended.
  const int result_;
  const int64_t faults_;  // Of pages, at the start.
  double cpu_seconds_ = 0.0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_FORKED_WORK_H_
