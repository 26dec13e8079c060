// The command line of tfswitch-server.

#ifndef TFSWITCH_CC_SERVER_SERVER_FLAGS_H_
#define TFSWITCH_CC_SERVER_SERVER_FLAGS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/recovery/repair.h"
#include "cc/recovery/state_keeper.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/shard/shard.h"

namespace tfswitch {

struct ServerFlags {
  GrpcServerOptions server;
  ShardOptions shard;
  absl::Duration grace_period;
  std::string http_address;               // Empty: no HTTP.
  std::vector<std::string> http_servers;  // Origins; see pages.h.
  // An absolute path. If it is empty, the state is only in memory.
  std::string data_dir;
  StateKeeperOptions keeper;
  std::string cluster_name;
  // If this is set, the program repairs the data folder and does not serve.
  std::optional<RepairKind> repair;
  bool has_json_log = false;
  bool help = false;
  bool only_checks = false;
  bool version = false;
  // All flags whose value is not the default, as "--name=value".
  std::vector<std::string> changed;
};

// Reads "--name=value" and "--name value". InvalidArgument naming the flag and
// the value. absl::ParseCommandLine is not used because it ends the process,
// with an exit code of its own, when a flag is wrong.
absl::Status ParseServerFlags(const std::vector<std::string>& arguments,
                              ServerFlags* flags);

// The text of --help.
std::string ServerUsage();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVER_SERVER_FLAGS_H_
