// The trace of one attempt of a call to a server. While tracing is off, it does
// nothing.

#ifndef TFSWITCH_CC_RPC_CLIENT_CALL_TRACE_H_
#define TFSWITCH_CC_RPC_CLIENT_CALL_TRACE_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"
#include "cc/client/trace_log.h"

namespace tfswitch {

// Not thread-safe.
class CallTrace {
 public:
  // Begins the span, and asks the server for its times.
  CallTrace(absl::string_view method, const std::string& address, int shard,
            uint64_t request_bytes, grpc::ClientContext* context);

  // Whether tracing was on when the call began.
  bool is_on() const { return span_.has_value(); }

  // Call it when the answer arrives, which may be long before somebody waits
  // for it.
  void NoteArrival() {
    if (span_.has_value()) span_->NoteEnd();
  }
  // Ends the span. Without End() there is no span.
  //
  // REQUIRES: The call has ended.
  void End(const grpc::Status& status, const grpc::ClientContext& context,
           uint64_t response_bytes);

 private:
  std::optional<OpenSpan> span_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_CALL_TRACE_H_
