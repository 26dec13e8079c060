// Answers Pull, Push, PullMany, PushMany and Assign: the calls that move rows.

#ifndef TFSWITCH_CC_RPC_SERVER_DATA_PLANE_H_
#define TFSWITCH_CC_RPC_SERVER_DATA_PLANE_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/parallel.h"
#include "cc/rpc/server/gated.h"
#include "cc/rpc/server/service.h"
#include "cc/shard/shard.h"

namespace tfswitch {

// There is one thread per completion queue. The thread that polls the queue
// also does the work, because handing a call to another thread would cost 20 to
// 40 us, as much as the rest of a small call.
//
//   new call -> ask for the next one -> read bytes -> Shard -> answer in one
//   slice -> wait for it to go out
//
// A queue requests kCallsPerQueue calls of each method from gRPC. More calls
// wait in gRPC, whose memory quota limits them. The answers that peers have not
// read are limited in number, and to `max_answer_bytes`. Beyond a limit the
// oldest of these calls end with CANCELLED.
//
// Call Start, StopAsking and Shutdown once each, from one thread, in this
// order.
class DataPlane {
 public:
  static constexpr int kCallsPerQueue = 16;

  // Adds `num_threads` queues to the builder. `helpers` help the thread of a
  // large request. They and all of `call_context` must outlive this object.
  DataPlane(int num_threads, uint64_t max_message_bytes,
            uint64_t max_answer_bytes, Service* service,
            std::shared_ptr<Shard> shard, const CallContext& call_context,
            const LentThreads* helpers, grpc::ServerBuilder* builder);

  // REQUIRES: Shutdown has returned.
  ~DataPlane();
  DataPlane(const DataPlane&) = delete;
  DataPlane& operator=(const DataPlane&) = delete;

  // REQUIRES: the server has been built.
  void Start();

  // Requests no more calls from gRPC. Call it before the shutdown of the
  // server: gRPC never returns a call that was requested during the shutdown,
  // so Shutdown() would wait for it without end.
  //
  // REQUIRES: Start has returned.
  void StopAsking();

  // Ends the threads. Call it even if Start was never called.
  //
  // REQUIRES: the server, if built, has been shut down, after StopAsking.
  void Shutdown();

 private:
  struct Method;
  class Call;
  struct Queue;

  void Run(Queue* queue);
  absl::Status Answer(Call* call, Queue* queue);
  absl::Status AnswerPull(Call* call, Queue* queue);
  absl::Status AnswerPush(Call* call, Queue* queue);
  absl::Status AnswerAssign(Call* call, Queue* queue);
  // Finds a table that the caller of `call` may use. PermissionDenied if the
  // call `changes` rows and the caller may only read.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindFor(const Call& call,
                                                          const TableRef& table,
                                                          bool changes) const;
  // Counts the memory of a pull's answer until the answer has been sent. If all
  // answers exceed the limit, returns ResourceExhausted, and cancels unread
  // answers to make room for later calls.
  absl::Status ReserveAnswer(Call* call, Queue* queue, uint64_t bytes,
                             uint64_t scratch);
  // Makes the answer to one pull. If `has_header`, the pull is a part of a
  // PullMany, and the part's header comes first.
  absl::Status AnswerPart(const Call& call, const PullRequest& pull,
                          EmbeddingTable& table, bool has_header,
                          grpc::Slice* answer) const;

  // Constant after construction.
  const uint64_t max_message_bytes_;
  const uint64_t max_answer_bytes_;
  Service* const service_;
  const std::shared_ptr<Shard> shard_;
  const CallContext call_context_;
  const LentThreads* const helpers_;
  std::vector<std::unique_ptr<Queue>> queues_;

  // All answers that are not sent yet.
  std::atomic<uint64_t> answer_bytes_{0};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_DATA_PLANE_H_
