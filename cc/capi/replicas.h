// Groups of workers that train variables of TensorFlow, by name, and the JSON
// calls on them of the C API.

#ifndef TFSWITCH_CC_CAPI_REPLICAS_H_
#define TFSWITCH_CC_CAPI_REPLICAS_H_

#include <string>

#include "absl/status/statusor.h"
#include "cc/sync/replica_coordinator.h"

namespace tfswitch {

// The group of this name; lives as long as the process.
ReplicaCoordinator& ReplicasOf(const std::string& group);

// See replicas_call of cc/capi/tfswitch.h. InvalidArgument naming what is
// missing or wrong.
absl::StatusOr<std::string> CallReplicas(const std::string& group,
                                         const std::string& request_json);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_REPLICAS_H_
