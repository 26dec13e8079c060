// Converts deadlines for gRPC to the steady clock, because changes of the
// system time do not affect that clock. gRPC waits by the clock in which it
// gets a deadline. A gRPC server gives the deadlines of calls in the steady
// clock.

#ifndef TFSWITCH_CC_RPC_DEADLINES_H_
#define TFSWITCH_CC_RPC_DEADLINES_H_

#include <grpc/support/time.h>
#include <grpcpp/server_context.h>

#include <algorithm>

#include "absl/time/time.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// Converts a time of SteadyNow() for gRPC.
inline gpr_timespec ToDeadline(absl::Time time) {
  // An infinite future would overflow.
  const absl::Duration left =
      std::min<absl::Duration>(time - SteadyNow(), absl::Hours(24 * 365));
  return gpr_time_add(
      gpr_now(GPR_CLOCK_MONOTONIC),
      gpr_time_from_nanos(absl::ToInt64Nanoseconds(left), GPR_TIMESPAN));
}

// The time until the call's deadline: negative after it, infinite if the call
// has none.
inline absl::Duration TimeLeft(const grpc::ServerContextBase& context) {
  const gpr_timespec deadline = context.raw_deadline();
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0) {
    return absl::InfiniteDuration();
  }
  const gpr_timespec left =
      gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  return absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_DEADLINES_H_
