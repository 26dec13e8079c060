#include "cc/client/parameter_client.h"

#include "cc/base/status_macros.h"

namespace tfswitch {

absl::StatusOr<PushResult> ParameterClient::Push(const PushArgs& args) {
  PushResult result;
  TFSWITCH_RETURN_IF_ERROR(StartPush(args, &result)->Wait());
  return result;
}

}  // namespace tfswitch
