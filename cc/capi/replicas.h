// The groups of this process whose workers step variables of TensorFlow.

#ifndef TFSWITCH_CC_CAPI_REPLICAS_H_
#define TFSWITCH_CC_CAPI_REPLICAS_H_

#include <string>

#include "absl/status/status.h"
#include "cc/sync/replica_coordinator.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Makes the group if it is not there. It lives as long as the process.
ReplicaCoordinator& ReplicasOf(const std::string& group);

// The calls that are seldom. A wait that has not ended yet is an answer, as the
// runtime of TensorFlow would write each error into its log.
absl::Status CallReplicas(const v1::ReplicasRequest& request,
                          v1::ReplicasResponse* response);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_REPLICAS_H_
