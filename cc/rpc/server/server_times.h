// Tells a client that traces a call when the work on it began, and how long it
// took.

#ifndef TFSWITCH_CC_RPC_SERVER_SERVER_TIMES_H_
#define TFSWITCH_CC_RPC_SERVER_SERVER_TIMES_H_

#include <grpcpp/server_context.h>

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/steady_clock.h"
#include "cc/rpc/channel_settings.h"

namespace tfswitch {

// Not thread-safe.
class ServerTimes {
 public:
  explicit ServerTimes(const grpc::ServerContext& context)
      : is_traced_(context.client_metadata().count(kTraced) != 0) {
    Begin();
  }

  // Call it when the whole message has arrived.
  void Begin() {
    if (!is_traced_) return;
    begin_ns_ = absl::GetCurrentTimeNanos();
    begin_ = SteadyNow();
  }

  // Call it when the work has ended, before the status is sent.
  void Tell(grpc::ServerContext* context) const {
    if (!is_traced_) return;
    context->AddTrailingMetadata(
        kServerTimes,
        absl::StrCat(begin_ns_, " ",
                     absl::ToInt64Nanoseconds(SteadyNow() - begin_)));
  }

 private:
  const bool is_traced_;
  int64_t begin_ns_ = 0;
  absl::Time begin_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_SERVER_TIMES_H_
