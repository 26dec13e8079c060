#include "cc/client/parameter_client.h"

#include "cc/base/status_macros.h"

namespace tfswitch {

absl::StatusOr<PushResult> ParameterClient::Push(const PushArgs& args) {
  PushResult result;
  TFSWITCH_RETURN_IF_ERROR(StartPush({{args, &result}})->Wait());
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
