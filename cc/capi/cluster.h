// Clusters by address, as the C API hands them out.

#ifndef TFSWITCH_CC_CAPI_CLUSTER_H_
#define TFSWITCH_CC_CAPI_CLUSTER_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/client/parameter_client.h"
#include "cc/client/worker_session.h"

namespace tfswitch {

// An address, taken apart.
struct ClusterAddress {
  bool is_remote = false;
  std::string local_name;            // Of "local://NAME".
  std::vector<std::string> servers;  // In shard order, as gRPC names them.
};

// InvalidArgument naming the address and the accepted forms.
absl::StatusOr<ClusterAddress> ParseClusterAddress(absl::string_view address);

// Connects to servers only to read what is there: it makes no table, and a
// table that a server has lost is read again when others have made it whole.
// InvalidArgument for an address of this process; else an error of the first
// server that does not answer within `timeout`, which is that of each call,
// too.
absl::StatusOr<std::unique_ptr<ParameterClient>> OpenReadingClient(
    const std::string& address, absl::Duration timeout);

// An open cluster: its client, and the identity under which this process
// pushes.
//
// Thread-safe.
class Cluster {
 public:
  // Returns the cluster that is open at this address with this timeout, or
  // opens it. "local://NAME" clusters live as long as the process.
  static absl::StatusOr<std::shared_ptr<Cluster>> Open(
      const std::string& address, absl::Duration timeout);

  ParameterClient& client() { return *client_; }
  // Joins a group as a worker; what this process was before leaves.
  absl::Status Join(const WorkerOptions& options);
  // Who trains here; null if Join() was not called.
  std::shared_ptr<WorkerSession> worker() const;

  // When pushes happen, in days since 1970; see kServersDay.
  void set_day(float day) { day_.store(day, std::memory_order_relaxed); }
  float day() const { return day_.load(std::memory_order_relaxed); }

  int num_shards() const { return num_shards_; }
  bool is_remote() const { return is_remote_; }

  // A new identity for one push.
  PushId NextPushId() {
    return {client_id_, next_sequence_.fetch_add(1, std::memory_order_relaxed)};
  }

 private:
  Cluster(std::unique_ptr<ParameterClient> client, int num_shards,
          bool is_remote);

  // Constant after construction.
  const std::shared_ptr<ParameterClient> client_;
  const int num_shards_;
  const bool is_remote_;
  const uint64_t client_id_;

  // Has its own synchronisation.
  std::atomic<uint64_t> next_sequence_{1};
  std::atomic<float> day_{kServersDay};

  mutable Mutex mutex_;
  std::shared_ptr<WorkerSession> worker_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CLUSTER_H_
