// The rules for calls that depend on what the server has.

#ifndef TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_
#define TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_

#include "absl/status/status.h"
#include "cc/rpc/access_control.h"
#include "cc/shard/shard.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// ResourceExhausted if the tables of this server that the caller may use have
// as many rows as its token allows. They are counted ten times a second.
absl::Status CheckRowQuota(const Visit& visit, const Shard& shard);

// For what the role of a method does not say.
inline absl::Status CheckCall(const Visit&, const Shard&,
                              const google::protobuf::Message&) {
  return absl::OkStatus();
}
// Who reads opens a table that is there. ResourceExhausted if it is made, and
// there are as many as the caller's token allows.
absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateTableRequest& request);
// Who trains opens a work queue that is there.
absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateWorkQueueRequest& request);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_
