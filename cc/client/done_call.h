// A PendingCall whose result is known from the start.

#ifndef TFSWITCH_CC_CLIENT_DONE_CALL_H_
#define TFSWITCH_CC_CLIENT_DONE_CALL_H_

#include <memory>
#include <utility>

#include "cc/client/parameter_client.h"

namespace tfswitch {

// Not thread-safe, as any PendingCall.
class DoneCall : public PendingCall {
 public:
  explicit DoneCall(absl::Status status) : status_(std::move(status)) {}
  absl::Status Wait() override { return status_; }

 private:
  const absl::Status status_;
};

inline std::unique_ptr<PendingCall> Done(absl::Status status) {
  return std::make_unique<DoneCall>(std::move(status));
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_DONE_CALL_H_
