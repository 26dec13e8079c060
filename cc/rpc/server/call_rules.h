// Rules about calls that depend on the state of the server.

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

// A call inserts rows for those of these keys that have none.
struct Insertion {
  const EmbeddingTable* table;
  absl::Span<const Key> keys;
};

// ResourceExhausted if a call would give the tables that its caller may use
// more rows than the caller's token allows. `insertions` are all insertions of
// the call. Ids that wait for admission count as rows. Several calls at the
// same time may exceed the limit a little.
absl::Status CheckRowQuota(const Caller& caller, const Shard& shard,
                           absl::Span<const Insertion> insertions);

// ResourceExhausted if the server already has as many tables that the caller
// may use as the caller's token allows.
absl::Status CheckTableQuota(const Caller& caller, const Shard& shard);

// For requests without an overload below: the rule in the .proto file is
// enough.
inline absl::Status CheckCall(const Caller&, const Shard&,
                              const google::protobuf::Message&) {
  return absl::OkStatus();
}
// A caller of role read may not create a table, only open an existing one.
absl::Status CheckCall(const Caller& caller, const Shard& shard,
                       const v1::CreateTableRequest& request);
// A caller of role train may not create a work queue, only open an existing
// one.
absl::Status CheckCall(const Caller& caller, const Shard& shard,
                       const v1::CreateWorkQueueRequest& request);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_CALL_RULES_H_
