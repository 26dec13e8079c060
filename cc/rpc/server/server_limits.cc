#include "cc/rpc/server/server_limits.h"

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"

namespace tfswitch {
namespace {

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kMaxInt = std::numeric_limits<int>::max();
// Linux's limit for a process.
constexpr uint64_t kMaxSystemThreads = 1 << 22;

}  // namespace

std::vector<ServerLimit> ListServerLimits(GrpcServerOptions* server,
                                          ShardOptions* shard) {
  return {
      {"max_buffer_bytes",
       "Memory for requests that arrive, and as much for answers that are not "
       "read yet. 0: half of the machine's, at least two longest messages.",
       0, kAny, &server->max_buffer_bytes},
      {"max_connections",
       "Connections at a time; also, three quarters of the files that the "
       "process may open.",
       1, kAny, &server->max_connections},
      {"max_calls_per_connection",
       "Calls of one connection at a time; more wait in the client.", 1,
       kMaxInt, &server->max_calls_per_connection},
      {"max_control_calls",
       "Calls at a time that do not move rows; each holds a thread. Three "
       "quarters of them may wait for other workers.",
       4, kMaxSystemThreads, &server->max_control_calls},
      {"max_tables", "Tables.", 1, kAny, &shard->max_tables},
      {"max_memory",
       "Memory for the rows of all tables. When it is full, new ids get no "
       "rows, or evict others. 0: no ceiling.",
       0, static_cast<uint64_t>(std::numeric_limits<int64_t>::max()),
       &shard->max_memory},
      {"max_bloom_bytes",
       "Memory for the Bloom filters of all tables. 0: half of the machine's.",
       0, kAny, &shard->max_bloom_bytes},
      {"max_save_bytes",
       "Memory for what changes while the state is saved to --data_dir. 0: "
       "half "
       "of what is available when the save begins.",
       0, kAny, &shard->max_save_bytes},
      {"max_groups", "Groups of workers, ever.", 1, kAny,
       &shard->coordinator.max_groups},
      {"max_workers",
       "Workers that have ever joined a group, and contributions to a round.",
       1, kAny, &shard->coordinator.max_workers},
      {"max_work_queues", "Work queues of all groups.", 1, kAny,
       &shard->coordinator.max_work_queues},
      {"max_work_queue_bytes", "Memory for the items of all work queues.", 1,
       kAny, &shard->coordinator.max_work_queue_bytes},
  };
}

namespace {

// Accepts sizes with a unit of 2^10, 2^20, 2^30 or 2^40 bytes, too.
bool ParseNumber(absl::string_view text, uint64_t* number) {
  constexpr absl::string_view kUnits[] = {"KiB", "MiB", "GiB", "TiB"};
  int shift = 0;
  for (int i = 0; i < 4; ++i) {
    if (!absl::ConsumeSuffix(&text, kUnits[i])) continue;
    shift = 10 * (i + 1);
    break;
  }
  if (!absl::SimpleAtoi(text, number) || *number > (UINT64_MAX >> shift)) {
    return false;
  }
  *number <<= shift;
  return true;
}

}  // namespace

absl::Status SetServerLimit(absl::string_view name, absl::string_view value,
                            GrpcServerOptions* server, ShardOptions* shard) {
  const std::vector<ServerLimit> limits = ListServerLimits(server, shard);
  for (const ServerLimit& limit : limits) {
    if (name != limit.name) continue;
    uint64_t number = 0;
    if (!ParseNumber(value, &number) || number < limit.least ||
        number > limit.most) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " must be ", limit.least, " to ", limit.most,
                       ", or a size such as '16GiB', got '", value, "'"));
    }
    *limit.value = number;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "no limit '", name, "'; there are: ",
      absl::StrJoin(limits, ", ",
                    [](std::string* out, const ServerLimit& limit) {
                      out->append(limit.name);
                    })));
}

}  // namespace tfswitch
