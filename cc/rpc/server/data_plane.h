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

// One completion queue per thread, one thread per queue, and the work is done
// on the thread that polls: each hand-over to another thread would cost 20 to
// 40 us, as much as the rest of a small call.
//
//   new call -> ask for the next one -> read bytes -> Shard -> answer in one
//   slice -> wait for it to go out
//
// A queue requests kCallsPerQueue calls of each method. More calls wait in
// gRPC, where its quota bounds them. Unread answers are bounded in number, and
// by `max_answer_bytes`: the oldest ones end with CANCELLED.
//
// Start, StopAsking and Shutdown are called once, by one thread, in this order.
class DataPlane {
 public:
  static constexpr int kCallsPerQueue = 16;

  // Adds `num_threads` queues to the builder. `helpers` work on a large request
  // together with its thread. `door` and `helpers` must outlive this object.
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

  // Requests no more calls. If a call is requested at the moment of its
  // shutdown, gRPC forgets it, and this object would wait for it.
  //
  // REQUIRES: Start has returned.
  void StopAsking();

  // Ends the threads. Needed also if Start was never called.
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
  // The table, if the caller of `call` may use it. PermissionDenied if the call
  // changes rows and the caller may only read.
  absl::StatusOr<std::shared_ptr<EmbeddingTable>> FindFor(const Call& call,
                                                          const TableRef& table,
                                                          bool changes) const;
  // Counts an answer to a pull until it was sent. ResourceExhausted if that is
  // too much; unread answers are then cancelled to make room.
  absl::Status ReserveAnswer(Call* call, Queue* queue, uint64_t bytes);
  // One part of the answer to a PullMany, with its header if it has one.
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
