#include "cc/capi/replicas.h"

#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/fork_guard.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

// Never destroyed, like the registry in cc/capi/cluster.cc.
struct GroupRegistry {
  Mutex mutex;
  std::map<std::string, std::unique_ptr<ReplicaCoordinator>> groups
      ABSL_GUARDED_BY(mutex);
};

absl::Status Answer(const absl::Status& status,
                    v1::ReplicasResponse* response) {
  if (!absl::IsDeadlineExceeded(status)) return status;
  response->set_waits_for(std::string(status.message()));
  return absl::OkStatus();
}

}  // namespace

ReplicaCoordinator& ReplicasOf(const std::string& group) {
  static GroupRegistry* const registry = new GroupRegistry;
  MutexLock lock(&registry->mutex);
  std::unique_ptr<ReplicaCoordinator>& found = registry->groups[group];
  if (found == nullptr) found = std::make_unique<ReplicaCoordinator>(group);
  return *found;
}

absl::Status CallReplicas(const v1::ReplicasRequest& request,
                          v1::ReplicasResponse* response) {
  TFSWITCH_RETURN_IF_ERROR(ForkGuard::Arm(absl::StrCat(
      "coordinated the workers of group '", request.group(), "'")));
  ReplicaCoordinator& replicas = ReplicasOf(request.group());
  const absl::Time deadline = SteadyNow() + absl::Seconds(request.wait_secs());
  const uint64_t incarnation = request.place().incarnation();
  switch (request.call()) {
    case v1::ReplicasRequest::STATS:
      *response->mutable_stats() = replicas.stats();
      return absl::OkStatus();
    case v1::ReplicasRequest::BEGIN_APPLYING: {
      TFSWITCH_ASSIGN_OR_RETURN(
          const uint64_t applier,
          replicas.BeginApplying(FromProto(request.options())));
      response->set_applier(applier);
      return absl::OkStatus();
    }
    case v1::ReplicasRequest::JOIN: {
      *response->mutable_place() = request.place();
      return Answer(
          replicas.Join(FromProto(request.options()), request.worker(),
                        request.previous(), request.applier(), deadline,
                        response->mutable_place(), request.process()),
          response);
    }
    case v1::ReplicasRequest::WAIT_AT_BARRIER: {
      auto place = replicas.WaitAtBarrier(
          request.worker(), incarnation, request.barrier(),
          request.barrier_generation(), deadline);
      if (place.ok()) *response->mutable_place() = *place;
      return Answer(place.status(), response);
    }
    case v1::ReplicasRequest::LEAVE_TOGETHER:
      return Answer(replicas.LeaveTogether(
                        request.worker(), incarnation, request.applier(),
                        request.barrier_generation(), deadline),
                    response);
    case v1::ReplicasRequest::LEAVE:
      replicas.Leave(request.worker(), incarnation, request.applier());
      return absl::OkStatus();
    case v1::ReplicasRequest::FAIL_APPLYING:
      replicas.FailApplying(request.applier(), request.why());
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "Replicas: unknown call ", static_cast<int>(request.call())));
  }
}

}  // namespace tfswitch
