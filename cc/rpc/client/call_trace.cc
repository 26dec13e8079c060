#include "cc/rpc/client/call_trace.h"

#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "cc/rpc/channel_settings.h"

namespace tfswitch {

CallTrace::CallTrace(absl::string_view method, const std::string& address,
                     int shard, uint64_t request_bytes,
                     grpc::ClientContext* context)
    : span_(OpenSpan::Begin(method)) {
  if (!span_.has_value()) return;
  span_->fields.set_address(address);
  span_->fields.set_shard(static_cast<uint32_t>(shard));
  span_->fields.set_request_bytes(request_bytes);
  context->AddMetadata(kTraced, "1");
}

void CallTrace::End(const grpc::Status& status,
                    const grpc::ClientContext& context,
                    uint64_t response_bytes) {
  if (!span_.has_value()) return;
  v1::TraceSpan& span = span_->fields;
  span.set_grpc_code(status.error_code());
  span.set_error(status.error_message());
  span.set_response_bytes(response_bytes);
  const auto& metadata = context.GetServerTrailingMetadata();
  if (const auto found = metadata.find(kServerTimes); found != metadata.end()) {
    const std::vector<absl::string_view> times = absl::StrSplit(
        absl::string_view(found->second.data(), found->second.size()), ' ');
    int64_t begin = 0;
    int64_t work = 0;
    // Without numbers, the answer is not from a tfswitch server.
    if (times.size() == 2 && absl::SimpleAtoi(times[0], &begin) &&
        absl::SimpleAtoi(times[1], &work)) {
      span.set_work_begin_ns(begin);
      span.set_work_ns(work);
    }
  }
  span_->End();
  span_.reset();
}

}  // namespace tfswitch
