// The addresses of a cluster's servers, which may change.

#ifndef TFSWITCH_CC_RPC_CLIENT_SERVER_PLACES_H_
#define TFSWITCH_CC_RPC_CLIENT_SERVER_PLACES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe.
class ServerPlaces {
 public:
  // In shard order, as in GrpcClientOptions.
  explicit ServerPlaces(std::vector<std::string> addresses)
      : num_servers_(addresses.size()), addresses_(std::move(addresses)) {}

  size_t num_servers() const { return num_servers_; }

  std::vector<std::string> addresses() const {
    MutexLock lock(&mutex_);
    return addresses_;
  }

  // Incremented with each move.
  uint64_t version() const { return version_.load(std::memory_order_acquire); }

  // REQUIRES: as many addresses as before.
  void Move(std::vector<std::string> addresses) {
    MutexLock lock(&mutex_);
    if (addresses == addresses_) return;
    addresses_ = std::move(addresses);
    version_.fetch_add(1, std::memory_order_release);
  }

 private:
  const size_t num_servers_;
  mutable Mutex mutex_;
  std::vector<std::string> addresses_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> version_{0};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CLIENT_SERVER_PLACES_H_
