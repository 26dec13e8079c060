// Several calls in flight together, as one.

#ifndef TFSWITCH_CC_CLIENT_JOINED_CALLS_H_
#define TFSWITCH_CC_CLIENT_JOINED_CALLS_H_

#include <memory>
#include <utility>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Waits for all, whatever happens, because they refer to their caller's
// buffers; gives the first error.
//
// Not thread-safe, as any PendingCall.
class JoinedCalls final : public PendingCall {
 public:
  explicit JoinedCalls(std::vector<std::unique_ptr<PendingCall>> calls)
      : calls_(std::move(calls)) {}

  absl::Status Wait() override {
    absl::Status first;
    for (const auto& call : calls_) first.Update(call->Wait());
    return first;
  }

 private:
  const std::vector<std::unique_ptr<PendingCall>> calls_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_JOINED_CALLS_H_
