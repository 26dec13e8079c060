#include "cc/client/parameter_client.h"

#include <utility>

#include "cc/base/status_macros.h"
#include "cc/client/check_args.h"
#include "cc/client/done_call.h"
#include "cc/client/joined_calls.h"

namespace tfswitch {

TableInfo DescribeTable(const EmbeddingTable& table) {
  TableInfo info;
  info.config = table.config();
  info.stats = table.stats();
  info.slot_floats = table.slot_floats();
  info.identity = table.identity();
  return info;
}

std::unique_ptr<PendingCall> ParameterClient::StartPullMany(
    absl::Span<const PullPart> parts) {
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(parts.size());
  for (const PullPart& part : parts) {
    calls.push_back(StartPull(part.args, part.embeddings));
  }
  return std::make_unique<JoinedCalls>(std::move(calls));
}

std::unique_ptr<PendingCall> ParameterClient::StartPushMany(
    absl::Span<const PushPart> parts) {
  if (parts.size() > 1) {
    if (absl::Status status = CheckPushes(parts); !status.ok()) {
      return Done(std::move(status));
    }
  }
  std::vector<std::unique_ptr<PendingCall>> calls;
  calls.reserve(parts.size());
  for (const PushPart& part : parts) {
    calls.push_back(StartPush(part.args, part.result));
  }
  return std::make_unique<JoinedCalls>(std::move(calls));
}

absl::StatusOr<PushResult> ParameterClient::Push(const PushArgs& args) {
  PushResult result;
  TFSWITCH_RETURN_IF_ERROR(StartPush(args, &result)->Wait());
  return result;
}

absl::StatusOr<AssignResult> ParameterClient::Assign(const AssignArgs& args) {
  AssignResult result;
  TFSWITCH_RETURN_IF_ERROR(StartAssign(args, &result)->Wait());
  return result;
}

absl::StatusOr<ShrinkReport> ParameterClient::Shrink(const ShrinkArgs& args) {
  ShrinkReport report;
  TFSWITCH_RETURN_IF_ERROR(StartShrink(args, &report)->Wait());
  return report;
}

}  // namespace tfswitch
