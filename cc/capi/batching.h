// Turns batches of ids from a model into calls: sends each id once, sums
// gradients, and makes one call for all tables of a cluster.

#ifndef TFSWITCH_CC_CAPI_BATCHING_H_
#define TFSWITCH_CC_CAPI_BATCHING_H_

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "cc/base/parallel.h"
#include "cc/capi/tfswitch.h"
#include "cc/client/cluster.h"
#include "cc/table/table_config.h"

// An open table of the C API. Thread-safe.
struct Tfswitch_Table {
  Tfswitch_Table() = default;
  // Waits for pushes in flight.
  ~Tfswitch_Table();
  Tfswitch_Table(const Tfswitch_Table&) = delete;
  Tfswitch_Table& operator=(const Tfswitch_Table&) = delete;

  // Constant once it is open.
  std::shared_ptr<tfswitch::Cluster> cluster;
  tfswitch::TableConfig config;
  std::shared_ptr<const void> hold;  // Keeps a table of this process.
  int slot_floats = 0;
  // Whether the table has logged a warning about NaN. It logs only one, because
  // after one gradient with NaN more usually follow.
  std::atomic<bool> has_warned{false};
};

// Tickets whose rows have not been read. Not thread-safe.
struct Tfswitch_Prefetch {
  Tfswitch_Prefetch() = default;
  ~Tfswitch_Prefetch();
  Tfswitch_Prefetch(const Tfswitch_Prefetch&) = delete;
  Tfswitch_Prefetch& operator=(const Tfswitch_Prefetch&) = delete;

  std::map<std::shared_ptr<tfswitch::Cluster>,
           std::vector<std::shared_ptr<tfswitch::Prefetches::Ticket>>>
      tickets;
  bool is_run = false;
};

namespace tfswitch {

// InvalidArgument for a batch with too many keys for one call.
absl::Status CheckBatch(const Tfswitch_Table& table, size_t num_keys);

// Implements `pull` of Tfswitch_Api. If many keys repeat, sends each only once.
absl::Status PullBatch(absl::Span<const Tfswitch_PullPart> parts,
                       bool insert_missing, const LentThreads* threads);

// Implements `push` of Tfswitch_Api. Sets the results of the parts.
absl::Status PushBatch(absl::Span<Tfswitch_PushPart> parts, int depth,
                       const LentThreads* threads);

// Implements `begin_prefetch` of Tfswitch_Api. Reads nothing yet.
std::unique_ptr<Tfswitch_Prefetch> BeginPrefetch(
    absl::Span<const Tfswitch_PullPart> parts, bool is_exact,
    const uint64_t* sources, size_t limit);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_BATCHING_H_
