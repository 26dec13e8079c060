// The calls of protos/tfswitch/v1/control.proto.

#ifndef TFSWITCH_CC_CAPI_CONTROL_H_
#define TFSWITCH_CC_CAPI_CONTROL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/capi/cluster.h"

namespace tfswitch {

// Runs `method` with a request in JSON, and returns its response in JSON.
// `cluster` may be null for methods that need none. InvalidArgument for an
// unknown method, or for a request that is not of the method's type.
//
// Thread-safe.
absl::StatusOr<std::string> CallControl(Cluster* cluster,
                                        absl::string_view method,
                                        const std::string& request_json);

// This process's worker in the cluster; FailedPrecondition if it has none.
absl::StatusOr<std::shared_ptr<WorkerSession>> FindWorker(
    const Cluster& cluster);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CONTROL_H_
