// The control calls of a server: one function for each pair of request and
// response. Clients of tables in this process and servers use the same
// functions.

#ifndef TFSWITCH_CC_SHARD_CONTROL_CALLS_H_
#define TFSWITCH_CC_SHARD_CONTROL_CALLS_H_

#include <cstdint>
#include <functional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/base/parallel.h"
#include "cc/base/status_macros.h"
#include "cc/shard/shard.h"
#include "cc/sync/coordinator.h"
#include "cc/wire/codec.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/coordination.pb.h"
#include "tfswitch/v1/parameter_server.pb.h"

// Lists the calls. V(Name) stands for the messages v1::NameRequest and
// v1::NameResponse. A macro is needed because a gRPC class has one method for
// each call.
//
// These are the calls of ParameterServer, except streams and the calls for
// rows.
#define TFSWITCH_PARAMETER_SERVER_CALLS(V) \
  V(CreateTable)                           \
  V(DropTable)                             \
  V(ListTables)                            \
  V(CommitRound)                           \
  V(Erase)                                 \
  V(Shrink)                                \
  V(ReadUsage)                             \
  V(ReadRows)                              \
  V(CommitExport)                          \
  V(PauseRounds)                           \
  V(ChooseSnapshotRound)                   \
  V(SaveShard)                             \
  V(CommitCheckpoint)                      \
  V(AbortSave)                             \
  V(StageRestore)                          \
  V(CommitRestore)                         \
  V(GetProgress)                           \
  V(GetMetrics)

// These are the calls of Coordination, which shard 0 answers.
#define TFSWITCH_COORDINATION_CALLS(V) \
  V(CreateGroup)                       \
  V(Join)                              \
  V(Heartbeat)                         \
  V(Arrive)                            \
  V(Leave)                             \
  V(WaitForRound)                      \
  V(WaitForTurn)                       \
  V(WaitAtBarrier)                     \
  V(GetGroupStats)                     \
  V(CreateWorkQueue)                   \
  V(TakeWorkItem)                      \
  V(FinishWorkItem)                    \
  V(GetWorkQueueStats)

namespace tfswitch {

// The context of a call: all that it needs besides its messages.
struct ShardCall {
  Shard& shard;
  // Called at intervals by calls that may take long; its error ends the call.
  Shard::Interrupt interrupt;
  // They help to apply a round.
  const LentThreads* threads = nullptr;
  // The version of this side.
  uint32_t protocol_version = kProtocolVersion;
  // Whether the caller may know of a table. If null, it may know of all tables.
  std::function<bool(absl::string_view table)> may_see = nullptr;
  // See PushId.
  uint64_t caller = 0;
  // Whether the caller only opens existing tables, and changes nothing.
  bool only_reads = false;
  // Whether the call comes from the log of an earlier process.
  bool is_replay = false;
  // OK if the caller may make one more table. If null, it may.
  std::function<absl::Status()> check_new_table = nullptr;
};

// OK if the client uses the protocol version of this side.
absl::Status CheckVersion(const ShardCall& call, uint32_t client_version);

// Each Run() makes its call, and returns the errors of Shard or Coordinator.
#define TFSWITCH_DECLARE(name)                                              \
  absl::Status Run(const ShardCall& call, const v1::name##Request& request, \
                   v1::name##Response* response);
TFSWITCH_PARAMETER_SERVER_CALLS(TFSWITCH_DECLARE)
#undef TFSWITCH_DECLARE
#define TFSWITCH_DECLARE(name)                                                 \
  absl::Status Run(Coordinator& coordinator, const v1::name##Request& request, \
                   v1::name##Response* response);
TFSWITCH_COORDINATION_CALLS(TFSWITCH_DECLARE)
#undef TFSWITCH_DECLARE

// Makes a call of Coordination. FailedPrecondition if the shard is not shard 0,
// which has the coordinator.
template <typename Request, typename Response>
absl::Status Run(const ShardCall& call, const Request& request,
                 Response* response) {
  TFSWITCH_ASSIGN_OR_RETURN(const auto coordinator,
                            call.shard.FindCoordinator());
  return Run(*coordinator, request, response);
}

// Calls the Run() for the type of the request. REQUIRES: `request` is one of
// the requests above, and `response` has its response type.
absl::Status RunAny(const ShardCall& call,
                    const google::protobuf::Message& request,
                    google::protobuf::Message* response);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_CONTROL_CALLS_H_
