// Clusters by address.

#ifndef TFSWITCH_CC_CAPI_CLUSTER_H_
#define TFSWITCH_CC_CAPI_CLUSTER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/access/client_token.h"
#include "cc/client/cluster.h"
#include "cc/client/parameter_client.h"
#include "cc/rpc/client/server_places.h"
#include "cc/rpc/tls.h"

namespace tfswitch {

// An address, taken apart.
struct ClusterAddress {
  bool is_remote = false;
  bool has_tls = false;
  std::string local_name;            // NAME of "local://NAME".
  std::vector<std::string> servers;  // In shard order, as gRPC names them.
  std::shared_ptr<const ServerPlaces> places;  // Of "ray://NAME"; else null.
};

// InvalidArgument naming the address and the accepted forms. The servers of
// "ray://NAME" are where PlaceServers() has put them: FailedPrecondition if it
// has not.
absl::StatusOr<ClusterAddress> ParseClusterAddress(absl::string_view address);

// Says where the servers of "ray://NAME" are, in shard order: clients that are
// open already go there from now on. InvalidArgument if an address is none or a
// token would go to another machine as plaintext; FailedPrecondition if
// clients are open that know another number of servers, or others than these
// with regard to TLS. Thread-safe.
absl::Status PlaceServers(const std::string& address,
                          std::vector<std::string> servers, bool has_tls);

// What a process shows to servers, and whom it trusts.
struct Credentials {
  std::optional<TlsFiles> tls;
  TokenSource token;
};

// Connects to servers only for reading: it makes no table, and a table that a
// server has lost is read again when others have made it whole. InvalidArgument
// for an address of this process; else an error of the first server that does
// not answer within `timeout`, which is that of each call, too.
absl::StatusOr<std::unique_ptr<ParameterClient>> OpenReadingClient(
    const std::string& address, absl::Duration timeout);

// Returns the cluster that is open at this address under this id (0: none).
// Else the one that is open there with this timeout and these credentials, or
// opens it. "local://NAME" clusters live as long as the process. `given.tls` is
// for "grpcs://" addresses, and a token for those or for servers of this
// machine: InvalidArgument otherwise. Once they have led to the servers, all
// that connects to this address without them has them, as readers do, and the
// graphs of other processes. What is left empty comes from the environment.
// Thread-safe.
absl::StatusOr<std::shared_ptr<Cluster>> OpenCluster(const std::string& address,
                                                     absl::Duration timeout,
                                                     const Credentials& given,
                                                     uint64_t id);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CLUSTER_H_
