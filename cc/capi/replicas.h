// The groups of this process whose workers take steps on TensorFlow's
// variables.

#ifndef TFSWITCH_CC_CAPI_REPLICAS_H_
#define TFSWITCH_CC_CAPI_REPLICAS_H_

#include <string>

#include "absl/status/status.h"
#include "cc/sync/replica_coordinator.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Returns the group of this name. If it does not exist, makes it. A group lives
// as long as the process.
ReplicaCoordinator& ReplicasOf(const std::string& group);

// Makes the calls of a group that are not made in each step. If the time for
// waiting is over, the response says so. This is not an error, because
// TensorFlow's runtime would log each error.
absl::Status CallReplicas(const v1::ReplicasRequest& request,
                          v1::ReplicasResponse* response);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_REPLICAS_H_
