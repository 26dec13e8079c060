// Refuses work in a child of fork() whose copied state is not usable: threads
// that do not exist there, mutexes that such a thread had locked, and sockets
// of the parent.

#ifndef TFSWITCH_CC_BASE_FORK_GUARD_H_
#define TFSWITCH_CC_BASE_FORK_GUARD_H_

#include <atomic>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

// There is one per process. A child that was forked before the first Arm() is
// an ordinary process. A child that was forked later stays tripped until it
// ends, and so do its own children; a program that it starts with exec() is not
// tripped.
//
// Thread-safe. It takes no lock.
class ForkGuard {
 public:
  // Call it before state arises that does not survive a fork. `use` completes
  // "The parent has ..." in the error of a child; the first one is kept.
  // FailedPrecondition in a tripped process.
  static absl::Status Arm(absl::string_view use);

  // True in a child that must neither use nor free its copy of the state.
  static bool IsTripped() {
    return is_tripped_.load(std::memory_order_relaxed);
  }

  // FailedPrecondition in a tripped process, with the remedy. Otherwise it
  // costs one load from memory.
  static absl::Status Check() {
    return ABSL_PREDICT_TRUE(!IsTripped()) ? absl::OkStatus() : Refusal();
  }

 private:
  static absl::Status Refusal();
  static void AfterForkInChild();

  static std::atomic<bool> is_tripped_;
  // 0, or the errno because of which forks cannot be noticed.
  static const int registration_error_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_FORK_GUARD_H_
