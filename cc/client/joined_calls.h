// Makes one PendingCall of several that run at the same time.

#ifndef TFSWITCH_CC_CLIENT_JOINED_CALLS_H_
#define TFSWITCH_CC_CLIENT_JOINED_CALLS_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Waits for all calls, even if one fails, because they use the caller's buffers
// until they end. Returns the first error. If there is none, calls `join`.
//
// Not thread-safe, as any PendingCall.
class JoinedCalls final : public PendingCall {
 public:
  explicit JoinedCalls(std::vector<std::unique_ptr<PendingCall>> calls,
                       std::function<void()> join = nullptr)
      : calls_(std::move(calls)), join_(std::move(join)) {}

  absl::Status Wait() override {
    absl::Status first;
    for (const auto& call : calls_) first.Update(call->Wait());
    if (first.ok() && join_ != nullptr) join_();
    return first;
  }

 private:
  const std::vector<std::unique_ptr<PendingCall>> calls_;
  const std::function<void()> join_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_JOINED_CALLS_H_
