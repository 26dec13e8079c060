// The groups of one server, and waiting in them.

#ifndef TFSWITCH_CC_SYNC_COORDINATOR_H_
#define TFSWITCH_CC_SYNC_COORDINATOR_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/sync/worker_group.h"

namespace tfswitch {

// Runs one WorkerGroup per name. Every wait ends by its deadline with
// DeadlineExceeded that says whom it waits for, and by Shutdown() with
// Cancelled.
//
// Thread-safe.
class Coordinator {
 public:
  Coordinator() = default;
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Makes the group unless it is there. AlreadyExists if others train in it
  // with other options, InvalidArgument if they make no sense.
  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options);

  // The events of WorkerGroup, with its errors; NotFound if there is no such
  // group.
  absl::StatusOr<WorkerGroup::Place> Join(const std::string& group,
                                          uint32_t worker,
                                          uint64_t previous = 0);
  absl::Status Beat(const std::string& group, uint32_t worker,
                    uint64_t incarnation);
  // Returns the open round afterwards.
  absl::StatusOr<int64_t> Arrive(const std::string& group, uint32_t worker,
                                 uint64_t incarnation, int64_t clock,
                                 int64_t round, double weight);
  absl::Status Leave(const std::string& group, uint32_t worker,
                     uint64_t incarnation);

  // Waits until round `number` has closed. A worker that waits is alive: its
  // lease does not end meanwhile.
  absl::StatusOr<Round> WaitForRound(const std::string& group, uint32_t worker,
                                     uint64_t incarnation, int64_t number,
                                     absl::Time deadline);

  // Waits until a worker that has ended `clock` steps may begin another one
  // with at most `staleness`.
  absl::Status WaitForTurn(const std::string& group, uint32_t worker,
                           uint64_t incarnation, int64_t clock,
                           int64_t staleness, absl::Time deadline);

  // Has the worker wait at a barrier until all workers do; see
  // WorkerGroup::Enter. Returns where it goes on.
  absl::StatusOr<WorkerGroup::Place> WaitAtBarrier(
      const std::string& group, uint32_t worker, uint64_t incarnation,
      const std::string& barrier, int64_t visit, absl::Time deadline);

  absl::StatusOr<WorkerGroup::Stats> GroupStats(const std::string& group);

  // Ends all waits, now and later. Idempotent.
  void Shutdown();

 private:
  struct Group {
    explicit Group(const WorkerGroupOptions& group_options)
        : options(group_options),
          state(std::in_place, group_options, DrawFirstIncarnation()) {}
    WorkerGroupOptions options;
    std::optional<WorkerGroup> state;  // Always there.
    CondVar changed;
  };

  // Later groups have greater ones.
  static uint64_t DrawFirstIncarnation();

  absl::StatusOr<Group*> Find(const std::string& group)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // Waits until is_over() is true, the worker is no member any more, or the
  // deadline has come: then `describe` says whom it waited for.
  absl::Status Wait(Group* group, uint32_t worker, uint64_t incarnation,
                    absl::Time deadline, const std::function<bool()>& is_over,
                    const std::function<std::string()>& describe)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // One lock for all groups: an event takes less than a microsecond.
  Mutex mutex_;
  // Groups stay until the end, so that pointers to them do.
  std::map<std::string, std::unique_ptr<Group>> groups_ ABSL_GUARDED_BY(mutex_);
  bool is_shut_down_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SYNC_COORDINATOR_H_
