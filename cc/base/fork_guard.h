// Refuses work in a child of fork() that has a copy of state which it cannot
// use: threads that are not there, mutexes that such a thread had locked, and
// sockets that belong to the parent.

#ifndef TFSWITCH_CC_BASE_FORK_GUARD_H_
#define TFSWITCH_CC_BASE_FORK_GUARD_H_

#include <atomic>

#include "absl/base/optimization.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

// One for the process. A child that was forked before the first Arm() is an
// ordinary process. One that was forked later is tripped for ever, and so are
// its own children; a program that it starts with exec() is not.
//
// Thread-safe. It takes no lock.
class ForkGuard {
 public:
  // Call this before state arises that does not survive a fork. `use` completes
  // "The parent has ..." in the error of a child; the first one is kept.
  // FailedPrecondition in a tripped process.
  static absl::Status Arm(absl::string_view use);

  // True in a child that must neither use nor free its copy of the state.
  static bool IsTripped() {
    return is_tripped_.load(std::memory_order_relaxed);
  }

  // FailedPrecondition in a tripped process, with the remedy. One load from
  // memory if not.
  static absl::Status Check() {
    return ABSL_PREDICT_TRUE(!IsTripped()) ? absl::OkStatus() : Refusal();
  }

 private:
  static absl::Status Refusal();
  static void AfterForkInChild();

  static std::atomic<bool> is_tripped_;
  // 0, or why no fork can be noticed.
  static const int registration_error_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_FORK_GUARD_H_
