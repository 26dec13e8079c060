#include "cc/rpc/server_limits.h"

#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tfswitch {
namespace {

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();

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
  };
}

absl::Status SetServerLimit(absl::string_view name, absl::string_view value,
                            GrpcServerOptions* server, ShardOptions* shard) {
  const std::vector<ServerLimit> limits = ListServerLimits(server, shard);
  for (const ServerLimit& limit : limits) {
    if (name != limit.name) continue;
    uint64_t number = 0;
    if (!absl::SimpleAtoi(value, &number) || number < limit.least ||
        number > limit.most) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, " must be ", limit.least, " to ", limit.most,
                       ", got '", value, "'"));
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
