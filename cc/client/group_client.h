// A client of the coordinator of worker groups. The coordinator is in this
// process or on a server.

#ifndef TFSWITCH_CC_CLIENT_GROUP_CLIENT_H_
#define TFSWITCH_CC_CLIENT_GROUP_CLIENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/sync/work_queue.h"
#include "cc/sync/worker_group.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/coordination.pb.h"

namespace tfswitch {

class ParameterClient;

// Has the calls of Coordinator, with the same errors. If the coordinator is on
// a server, a call may also return Unavailable, naming the server. Deadlines
// are times of SteadyNow().
//
// Thread-safe.
class GroupClient {
 public:
  // `server` reaches the coordinator, and must outlive this object.
  explicit GroupClient(ParameterClient* server) : server_(server) {}
  virtual ~GroupClient() = default;

  virtual absl::Status CreateGroup(const std::string& group,
                                   const WorkerGroupOptions& options);
  virtual absl::StatusOr<WorkerGroup::Place> Join(
      const std::string& group, uint32_t worker, uint64_t previous_incarnation,
      uint64_t newer_instance, int64_t first_step, const std::string& job);
  // Waits for the server at most `timeout`, or the client's timeout if that is
  // shorter.
  virtual absl::Status Heartbeat(const GroupMember& member,
                                 absl::Duration timeout);
  virtual absl::StatusOr<int64_t> Arrive(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress);
  // Calls Arrive(), and then waits in the same call, for a time that the
  // implementation chooses. A step that contributes to a round waits until the
  // round has closed. Any other step waits until the worker's next step may
  // begin with `staleness`.
  virtual absl::StatusOr<v1::ArriveResponse> ArriveAndWait(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress, int64_t staleness,
      absl::Time deadline);
  // `timeout` limits the wait as in Heartbeat().
  virtual absl::Status Leave(const GroupMember& member, absl::Duration timeout);

  // These three calls wait for other workers. At the deadline they return
  // DeadlineExceeded, naming the workers that have not come.
  virtual absl::StatusOr<Round> WaitForRound(const GroupMember& member,
                                             int64_t number,
                                             absl::Time deadline);
  virtual absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                                   int64_t staleness, absl::Time deadline);
  virtual absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const GroupMember& member, const std::string& barrier,
      int64_t barrier_generation, absl::Time deadline);

  virtual absl::StatusOr<v1::GetGroupStatsResponse> GroupStats(
      const std::string& group, absl::Duration timeout);

  virtual absl::Status CreateWorkQueue(const std::string& group,
                                       const std::string& queue,
                                       const WorkQueueOptions& options);
  virtual absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const GroupMember& member, const std::string& queue);
  virtual absl::Status FinishWorkItem(const GroupMember& member,
                                      const std::string& queue, int64_t epoch,
                                      int64_t index);
  virtual absl::StatusOr<v1::GetWorkQueueStatsResponse> WorkQueueStats(
      const std::string& group, const std::string& queue);

 private:
  template <typename Response>
  absl::StatusOr<Response> Call(
      const google::protobuf::Message& request,
      absl::Duration timeout = absl::InfiniteDuration());
  // Sends the request again and again until the answer says that the wait is
  // over, or the deadline has come.
  template <typename Request, typename Response>
  absl::StatusOr<Response> Poll(Request request, absl::Time deadline,
                                bool (Response::*is_over)() const);
  // How long the server may delay the answer to the next poll, so that the
  // answer comes within the client's timeout. The server may set a shorter
  // limit.
  int64_t NextPollMs(absl::Time deadline) const;

  ParameterClient* server_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_GROUP_CLIENT_H_
