// A process's connection to a cluster, and the worker that trains through it.

#ifndef TFSWITCH_CC_CLIENT_CLUSTER_H_
#define TFSWITCH_CC_CLIENT_CLUSTER_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/mutex.h"
#include "cc/client/parameter_client.h"
#include "cc/client/prefetches.h"
#include "cc/client/push_queue.h"
#include "cc/client/server_capability.h"
#include "cc/client/worker_session.h"

namespace tfswitch {

// A connection to a cluster: its client, its worker, and the ids and the queue
// for its pushes. Only pulls and pushes, and calls that change nothing, may be
// made while pushes are in flight: other callers of client() first call
// FinishPushes().
//
// Thread-safe.
class Cluster {
 public:
  Cluster(std::unique_ptr<ParameterClient> client, bool is_remote);

  ParameterClient& client() { return *client_; }
  // The pushes that are in flight while the program goes on, and rows that were
  // read ahead.
  PushQueue& pushes() { return pushes_; }
  Prefetches& prefetches() { return *prefetches_; }
  // For calls of Prefetches::Drop on the thread of a queue, which must not
  // destroy a cluster.
  const std::shared_ptr<Prefetches>& shared_prefetches() const {
    return prefetches_;
  }
  // Lets the queue's thread read rows again that pushes or rounds have changed.
  void ReadAgainSoon();
  // Makes the tables as they would be without either.
  absl::Status FinishPushes();
  // Whether this process has opened another connection to these servers, with
  // another timeout or other credentials. Once true, stays true.
  bool has_twins() const { return has_twins_; }
  void set_has_twins() { has_twins_ = true; }
  // Joins a group as a worker. A worker that joined before leaves its group.
  absl::Status Join(const WorkerOptions& options);
  // The worker of this process; null if Join() was not called.
  std::shared_ptr<WorkerSession> worker() const;

  // The day that pushes carry, in days since 1970. kServersDay means that the
  // server uses its own clock.
  void set_day(float day) { day_.store(day, std::memory_order_relaxed); }
  float day() const { return day_.load(std::memory_order_relaxed); }

  // Unique among the clusters of all processes.
  uint64_t id() const { return client_id_; }
  int num_shards() const { return client_->num_shards(); }
  // Whether rows and gradients may travel as 16-bit numbers. False for tables
  // of this process, which do not travel.
  absl::StatusOr<bool> KnowsWireDtype() {
    if (!is_remote_) return false;
    return servers_know_wire_dtype_.IsKnown();
  }
  bool is_remote() const { return is_remote_; }

  // A new id for one push. Servers apply a push with the same id only once.
  PushId NextPushId() {
    return {client_id_, next_sequence_.fetch_add(1, std::memory_order_relaxed)};
  }

 private:
  // Constant after construction.
  const std::shared_ptr<ParameterClient> client_;
  const bool is_remote_;
  const uint64_t client_id_;

  // These have their own synchronisation. The queue, which uses the prefetches,
  // is destroyed first.
  ServerCapability servers_know_wire_dtype_;
  const std::shared_ptr<Prefetches> prefetches_;
  PushQueue pushes_;

  // Atomic, so no mutex guards these fields.
  std::atomic<uint64_t> next_sequence_{1};
  std::atomic<float> day_{kServersDay};
  std::atomic<bool> has_twins_{false};

  mutable Mutex mutex_;
  std::shared_ptr<WorkerSession> worker_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_CLUSTER_H_
