// Opens clusters by address.

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

// The parts of an address.
struct ClusterAddress {
  bool is_remote = false;
  bool has_tls = false;
  // NAME of "local://NAME".
  std::string local_name;
  // In shard order, in gRPC's form.
  std::vector<std::string> servers;
  // Set for "ray://NAME"; else null.
  std::shared_ptr<const ServerPlaces> places;
};

// InvalidArgument, naming the address and the accepted forms, for an invalid
// address. PlaceServers() sets the servers of "ray://NAME": FailedPrecondition
// if it was not called.
absl::StatusOr<ClusterAddress> ParseClusterAddress(absl::string_view address);

// Sets the addresses of the servers of "ray://NAME", in shard order. Open
// clients use the new addresses from now on. InvalidArgument if an address is
// invalid, or a token would be sent to another machine as plaintext.
// FailedPrecondition if open clients have another number of servers, or other
// TLS settings. Thread-safe.
absl::Status PlaceServers(const std::string& address,
                          std::vector<std::string> servers, bool has_tls);

// How a process identifies itself to servers, and which servers it trusts.
struct Credentials {
  std::optional<TlsFiles> tls;
  TokenSource token;
};

// Connects to servers for reading only; the client creates no tables. If a
// server has lost a table, reads work again when another process has restored
// the table. `timeout` also limits each later call. InvalidArgument for a
// "local://" address; otherwise the error of the first server that does not
// answer within `timeout`.
absl::StatusOr<std::unique_ptr<ParameterClient>> OpenReadingClient(
    const std::string& address, absl::Duration timeout);

// Connects to one server by itself, whatever its shard, for questions about
// this server. InvalidArgument unless the address has exactly one server;
// otherwise as OpenReadingClient().
absl::StatusOr<std::unique_ptr<ParameterClient>> OpenServer(
    const std::string& address, absl::Duration timeout);

// Returns the cluster that is open at this address with this id. If the id is
// 0, returns the cluster that is open at this address with this timeout and
// these credentials; if none is, opens one. "local://NAME" clusters live as
// long as the process.
//
// InvalidArgument if `given.tls` is set and the address is not "grpcs://", or
// if a token is given and the address is neither "grpcs://" nor of this
// machine. If the servers accept the credentials, later connections to this
// address without credentials use them, too: those of readers, and of graphs
// that other processes have made. Empty credentials are taken from earlier
// openings, then from the environment.
//
// Thread-safe.
absl::StatusOr<std::shared_ptr<Cluster>> OpenCluster(const std::string& address,
                                                     absl::Duration timeout,
                                                     const Credentials& given,
                                                     uint64_t id);

// All open clusters of this process. Thread-safe.
std::vector<std::shared_ptr<Cluster>> OpenClusters();

// These apply to all open clusters with the address of `cluster`, which may
// have other timeouts or credentials: Cluster::FinishPushes, which all of them
// do before the first error is returned, and Prefetches::Drop of all tickets.
// Thread-safe.
absl::Status FinishAllPushes(const Cluster& cluster);
void DropAllPrefetches(const Cluster& cluster);

// The same for the twins of `cluster`, without `cluster` itself. Both take no
// time if it has none. FinishPushesOfTwins() leaves the errors of pushes to the
// twins' own calls. DropPrefetchesOfTwins() may be called on the thread of a
// queue. Thread-safe.
absl::Status FinishPushesOfTwins(const Cluster& cluster);
void DropPrefetchesOfTwins(const Cluster& cluster);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CAPI_CLUSTER_H_
