// The rules for calls that depend on what the server has.

#ifndef TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_
#define TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/rpc/access_control.h"
#include "cc/shard/shard.h"
#include "cc/table/embedding_table.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// Keys that a call makes rows for, where they have none.
struct Insertion {
  const EmbeddingTable* table;
  absl::Span<const Key> keys;
};

// ResourceExhausted if the tables of this server that the caller may use would
// have more rows, with the ids that wait for admission, than its token allows
// after all `insertions` of a call. Calls at the same moment may add some more.
absl::Status CheckRowQuota(const Visit& visit, const Shard& shard,
                           absl::Span<const Insertion> insertions);

// ResourceExhausted if there are as many tables as the caller's token allows.
absl::Status CheckTableQuota(const Visit& visit, const Shard& shard);

// For what the role of a method does not say.
inline absl::Status CheckCall(const Visit&, const Shard&,
                              const google::protobuf::Message&) {
  return absl::OkStatus();
}
// Who reads opens a table that is there.
absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateTableRequest& request);
// Who trains opens a work queue that is there.
absl::Status CheckCall(const Visit& visit, const Shard& shard,
                       const v1::CreateWorkQueueRequest& request);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_
