// Converts absl::Status to grpc::Status and back. Both libraries use the same
// numbers for the codes by design.

#ifndef TFSWITCH_CC_RPC_STATUS_CONVERSION_H_
#define TFSWITCH_CC_RPC_STATUS_CONVERSION_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace tfswitch {

// Messages over 4 KiB are cut, because they are sent as HTTP/2 trailers, for
// which peers accept 8 KiB in all.
grpc::Status ToGrpcStatus(const absl::Status& status);

// Codes that absl has and gRPC does not, become Unknown.
absl::Status FromGrpcStatus(const grpc::Status& status);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_STATUS_CONVERSION_H_
