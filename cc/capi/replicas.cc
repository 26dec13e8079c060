#include "cc/capi/replicas.h"

#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/fork_guard.h"
#include "cc/base/json.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/capi/json_reports.h"

namespace tfswitch {
namespace {

// Never destroyed, as what is open in cc/capi/cluster.cc.
struct GroupRegistry {
  Mutex mutex;
  std::map<std::string, std::unique_ptr<ReplicaCoordinator>> groups
      ABSL_GUARDED_BY(mutex);
};

// Fields of a request; the first that is missing or wrong is remembered.
class Request {
 public:
  explicit Request(const std::string& json)
      : text_(json), json_(ParseJson(json).value_or(Json())) {
    if (!json_.is_object()) Refuse("expected a JSON object");
  }

  template <typename Number>
  Number NumberOf(const char* field) {
    const Json* const found = Find(field);
    if (found != nullptr && found->is_number()) return found->get<Number>();
    Refuse(absl::StrCat("'", field, "' must be a number"));
    return Number{};
  }

  std::string TextOf(const char* field) {
    const Json* const found = Find(field);
    if (found != nullptr && found->is_string()) {
      return found->get<std::string>();
    }
    Refuse(absl::StrCat("'", field, "' must be a string"));
    return "";
  }

  WorkerGroupOptions Options() {
    const Json* const found = Find("options");
    if (found == nullptr) {
      Refuse("'options' are missing");
      return {};
    }
    const auto options = WorkerOptionsFromJson(found->dump());
    status_.Update(options.status());
    return options.ok() ? options->group_options : WorkerGroupOptions{};
  }

  absl::Time Deadline() {
    return SteadyNow() + absl::Seconds(NumberOf<double>("wait_s"));
  }

  ReplicaPlace Place() {
    ReplicaPlace place;
    place.incarnation = NumberOf<uint64_t>("incarnation");
    place.clock = NumberOf<int64_t>("clock");
    place.round = NumberOf<int64_t>("round");
    return place;
  }

  const absl::Status& status() const { return status_; }
  void Refuse(const std::string& why) {
    status_.Update(absl::InvalidArgumentError(
        absl::StrCat("call of replicas: ", why, ". Received: ", text_)));
  }

 private:
  const Json* Find(const char* field) const {
    if (!json_.is_object()) return nullptr;
    const auto it = json_.find(field);
    return it == json_.end() ? nullptr : &*it;
  }

  const std::string text_;
  const Json json_;
  absl::Status status_;
};

Json ToJson(const ReplicaPlace& place) {
  return {{"incarnation", place.incarnation},
          {"clock", place.clock},
          {"round", place.round}};
}

// A wait that has not ended yet is an answer: the runtime would write each
// error into the server's log.
absl::StatusOr<std::string> Answer(const absl::Status& status, Json answer) {
  if (absl::IsDeadlineExceeded(status)) {
    answer["waits_for"] = std::string(status.message());
  } else if (!status.ok()) {
    return status;
  }
  return answer.dump();
}

}  // namespace

ReplicaCoordinator& ReplicasOf(const std::string& group) {
  static GroupRegistry* const registry = new GroupRegistry;
  MutexLock lock(&registry->mutex);
  std::unique_ptr<ReplicaCoordinator>& found = registry->groups[group];
  if (found == nullptr) found = std::make_unique<ReplicaCoordinator>(group);
  return *found;
}

absl::StatusOr<std::string> CallReplicas(const std::string& group,
                                         const std::string& request_json) {
  Request request(request_json);
  TFSWITCH_RETURN_IF_ERROR(ForkGuard::Arm(
      absl::StrCat("coordinated the workers of group '", group, "'")));
  ReplicaCoordinator& replicas = ReplicasOf(group);
  const std::string call = request.TextOf("call");
  TFSWITCH_RETURN_IF_ERROR(request.status());
  if (call == "stats") return GroupStatsToJson(replicas.stats());
  if (call == "begin_applying") {
    const WorkerGroupOptions options = request.Options();
    TFSWITCH_RETURN_IF_ERROR(request.status());
    TFSWITCH_ASSIGN_OR_RETURN(const uint64_t applier,
                              replicas.BeginApplying(options));
    return Json({{"applier", applier}}).dump();
  }
  if (call == "fail_applying") {
    const auto applier = request.NumberOf<uint64_t>("applier");
    const std::string why = request.TextOf("why");
    TFSWITCH_RETURN_IF_ERROR(request.status());
    replicas.FailApplying(applier, why);
    return "{}";
  }
  const auto worker = request.NumberOf<uint32_t>("worker");
  if (call == "join") {
    const WorkerGroupOptions options = request.Options();
    const auto previous = request.NumberOf<uint64_t>("previous");
    const auto applier = request.NumberOf<uint64_t>("applier");
    ReplicaPlace place = request.Place();
    const absl::Time deadline = request.Deadline();
    TFSWITCH_RETURN_IF_ERROR(request.status());
    const absl::Status joined =
        replicas.Join(options, worker, previous, applier, deadline, &place);
    return Answer(joined, ToJson(place));
  }
  const auto incarnation = request.NumberOf<uint64_t>("incarnation");
  if (call == "leave") {
    const auto applier = request.NumberOf<uint64_t>("applier");
    TFSWITCH_RETURN_IF_ERROR(request.status());
    replicas.Leave(worker, incarnation, applier);
    return "{}";
  }
  const auto visit = request.NumberOf<int64_t>("visit");
  const absl::Time deadline = request.Deadline();
  if (call == "wait_at_barrier") {
    const std::string barrier = request.TextOf("barrier");
    TFSWITCH_RETURN_IF_ERROR(request.status());
    const auto place =
        replicas.WaitAtBarrier(worker, incarnation, barrier, visit, deadline);
    return Answer(place.status(), place.ok() ? ToJson(*place) : Json::object());
  }
  TFSWITCH_RETURN_IF_ERROR(request.status());
  if (call == "leave_together") {
    const auto applier = request.NumberOf<uint64_t>("applier");
    TFSWITCH_RETURN_IF_ERROR(request.status());
    return Answer(
        replicas.LeaveTogether(worker, incarnation, applier, visit, deadline),
        Json::object());
  }
  request.Refuse(absl::StrCat("unknown call '", call, "'"));
  return request.status();
}

}  // namespace tfswitch
