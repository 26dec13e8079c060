// Refuses work in a child of fork(). The child's copy of the state is not
// usable: its threads do not exist there, mutexes that such a thread had locked
// stay locked, and the sockets belong to the parent.

#ifndef TFSWITCH_CC_BASE_FORK_GUARD_H_
#define TFSWITCH_CC_BASE_FORK_GUARD_H_

#include <atomic>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

// There is one guard per process. A child that was forked before the first
// Arm() is an ordinary process. A child that was forked later is tripped: it
// may do no work until it ends. Its own children are tripped, too. A program
// that it starts with exec() is not tripped.
//
// Thread-safe. It takes no lock.
class ForkGuard {
 public:
  // Call it before the process makes anything that does not survive a fork,
  // such as threads. `use` completes "The parent has ..." in the error of a
  // child; the `use` of the first call is kept. FailedPrecondition in a tripped
  // process.
  static absl::Status Arm(absl::string_view use);

  // True in a child that must neither use nor free its copy of the state.
  static bool IsTripped() {
    return is_tripped_.load(std::memory_order_relaxed);
  }

  // FailedPrecondition, with the remedy, in a tripped process. In other
  // processes a call costs one load from memory.
  static absl::Status Check() {
    return ABSL_PREDICT_TRUE(!IsTripped()) ? absl::OkStatus() : Refusal();
  }

 private:
  static absl::Status Refusal();
  static void AfterForkInChild();

  static std::atomic<bool> is_tripped_;
  // 0, or the errno of the failed registration, after which forks go unnoticed.
  static const int registration_error_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_FORK_GUARD_H_
