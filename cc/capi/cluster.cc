// The registry owns local shards, so that their rows live as long as the
// process. It has only weak pointers to clusters, so that a connection is
// closed when its last user frees it. Its mutex is not held during calls to
// servers, because they may take long. If two threads open the same cluster at
// once, both connect, and the second thread gets the cluster of the first.
//
// OpenCluster() arms the fork guard before it opens anything.
// OpenReadingClient() makes a new connection each time and does not use the
// registry, because its client differs from others: it uses a lost table again
// when another process has restored the table (OnLostTables::kFollow).

#include "cc/capi/cluster.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/access/tokens.h"
#include "cc/base/fork_guard.h"
#include "cc/base/malloc_tuning.h"
#include "cc/base/mutex.h"
#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "cc/rpc/address.h"
#include "cc/rpc/client/grpc_client.h"
#include "cc/shard/shard.h"

namespace tfswitch {
namespace {

// How long to wait for a server after the servers before it used up the time.
constexpr absl::Duration kShortestWait = absl::Milliseconds(1);

constexpr absl::string_view kLocal = "local://";
constexpr absl::string_view kUnix = "grpc+unix://";
// The servers of these addresses may move.
constexpr absl::string_view kRay = "ray://";

// The shards and open clusters of this process. It is never destroyed, because
// threads of TensorFlow may still push while static objects are destroyed.
struct Registry {
  Mutex mutex;
  std::map<std::string, std::shared_ptr<Shard>> local_shards
      ABSL_GUARDED_BY(mutex);
  struct Opened {
    uint64_t id = 0;
    std::weak_ptr<Cluster> cluster;
    std::weak_ptr<Prefetches> prefetches;
  };
  // The key consists of the address, the timeout and the credentials.
  std::map<std::string, Opened> open ABSL_GUARDED_BY(mutex);
  // The key is only the address, because graphs and saved models have nothing
  // else to find credentials by.
  std::map<std::string, Credentials> credentials ABSL_GUARDED_BY(mutex);
  struct Placed {
    std::shared_ptr<ServerPlaces> places;
    bool has_tls = false;
  };
  // The keys are addresses.
  std::map<std::string, Placed> placed ABSL_GUARDED_BY(mutex);

  // Keeps credentials that the servers have accepted.
  void Keep(const std::string& address, const Credentials& given)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    Credentials& kept = credentials[address];
    if (given.tls.has_value()) kept.tls = given.tls;
    if (!(given.token == TokenSource())) kept.token = given.token;
  }

  // Finds the open cluster with this address and id. Null if there is none.
  std::shared_ptr<Cluster> Find(const std::string& address, uint64_t id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    for (const auto& [key, opened] : open) {
      if (opened.id == id &&
          absl::StartsWith(key, absl::StrCat(address, "\n"))) {
        return opened.cluster.lock();
      }
    }
    return nullptr;
  }
};

Registry& TheRegistry() {
  static Registry* const registry = new Registry;
  return *registry;
}

absl::Status BadAddress(absl::string_view address, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("cluster address '", address, "': ", why,
                   ". Use 'local://', 'grpc://host:port,host:port', "
                   "'grpcs://host:port,host:port' (TLS), "
                   "'grpc+unix:///path' or 'ray://NAME'"));
}

// Refuses addresses with secrets, because errors and logs contain addresses.
absl::Status CheckHasNoSecret(absl::string_view address) {
  bool has_user = false;
  // Does not check paths, nor the NAMEs of "ray://" and "local://", because
  // these may contain an '@'.
  if (!absl::StartsWith(address, kRay) && !absl::StartsWith(address, kLocal) &&
      !absl::StartsWith(address, kUnix)) {
    for (const absl::string_view server : absl::StrSplit(address, ',')) {
      has_user |= server.find('@') < server.find("unix:/");
    }
  }
  if (!has_user && !HasToken(address)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "a cluster address must have no token, and no host with an '@'; give a "
      "token in the file that TFSWITCH_TOKEN_FILE names. The address is left "
      "out here, as it may have a secret");
}

// Returns the given credentials. If none are given, returns those with which
// the address was opened before or, if there are none, those of the
// environment.
Credentials CredentialsFor(const std::string& address,
                           const ClusterAddress& parsed, Credentials given) {
  if (!parsed.is_remote) return {};
  {
    Registry& registry = TheRegistry();
    MutexLock lock(&registry.mutex);
    const Credentials& former = registry.credentials[address];
    if (!given.tls.has_value()) given.tls = former.tls;
    if (given.token == TokenSource()) given.token = former.token;
  }
  given.tls = parsed.has_tls
                  ? WithTlsEnvironment(given.tls.value_or(TlsFiles()))
                  : TlsFiles();
  given.token = WithTokenEnvironment(std::move(given.token));
  return given;
}

// InvalidArgument if a token would be sent to another machine without
// encryption.
absl::Status CheckTokenIsSafe(const std::string& address,
                              const ClusterAddress& parsed) {
  if (parsed.has_tls) return absl::OkStatus();
  for (const std::string& server : parsed.servers) {
    TFSWITCH_ASSIGN_OR_RETURN(const Address place, ParseAddress(server));
    if (!IsLocal(place)) {
      return BadAddress(address,
                        absl::StrCat("a token (`token`, TFSWITCH_TOKEN or "
                                     "TFSWITCH_TOKEN_FILE) never goes over "
                                     "plaintext to other machines, such as ",
                                     server));
    }
  }
  return absl::OkStatus();
}

// Returns the options for clients of the servers, with the credentials, for
// all but the address.
absl::StatusOr<GrpcClientOptions> OptionsFor(const std::string& name,
                                             const ClusterAddress& address,
                                             const Credentials& credentials,
                                             absl::Duration timeout) {
  GrpcClientOptions options;
  options.places = address.places;
  options.num_shards = static_cast<uint32_t>(address.servers.size());
  options.timeout = timeout;
  if (address.has_tls) {
    TFSWITCH_ASSIGN_OR_RETURN(options.tls, MakeClientTls(*credentials.tls));
  }
  TFSWITCH_ASSIGN_OR_RETURN(options.token,
                            ClientToken::Open(credentials.token));
  if (options.token != nullptr) {
    TFSWITCH_RETURN_IF_ERROR(CheckTokenIsSafe(name, address));
  }
  return options;
}

// Makes a client of all servers. A reader waits at most `timeout` for all of
// them together.
absl::StatusOr<std::unique_ptr<ParameterClient>> ConnectToServers(
    const std::string& name, const ClusterAddress& address,
    const Credentials& credentials, absl::Duration timeout,
    OnLostTables on_lost_tables) {
  const absl::Time deadline = SteadyNow() + timeout;
  const std::vector<std::string>& servers = address.servers;
  TFSWITCH_ASSIGN_OR_RETURN(GrpcClientOptions options,
                            OptionsFor(name, address, credentials, timeout));
  std::vector<std::unique_ptr<ParameterClient>> shards;
  for (size_t i = 0; i < servers.size(); ++i) {
    options.address = servers[i];
    options.shard_index = static_cast<uint32_t>(i);
    if (on_lost_tables == OnLostTables::kFollow) {
      options.connect_timeout =
          std::max<absl::Duration>(deadline - SteadyNow(), kShortestWait);
    }
    TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<ParameterClient> client,
                              NewGrpcClient(options));
    shards.push_back(std::move(client));
  }
  return NewShardedClient(std::move(shards), on_lost_tables);
}

// The address of an open cluster, with which its key in the registry begins.
std::string AddressOf(const Cluster& cluster) {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  for (const auto& [key, opened] : registry.open) {
    if (opened.id == cluster.id()) return key.substr(0, key.find('\n') + 1);
  }
  return "";
}

// The open clusters whose keys in the registry begin with `address`.
std::vector<std::shared_ptr<Cluster>> ClustersAt(absl::string_view address) {
  std::vector<std::shared_ptr<Cluster>> clusters;
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  for (const auto& [key, opened] : registry.open) {
    if (!absl::StartsWith(key, address)) continue;
    if (auto cluster = opened.cluster.lock()) {
      clusters.push_back(std::move(cluster));
    }
  }
  return clusters;
}

}  // namespace

absl::StatusOr<ClusterAddress> ParseClusterAddress(absl::string_view address) {
  TFSWITCH_RETURN_IF_ERROR(CheckHasNoSecret(address));
  ClusterAddress parsed;
  absl::string_view rest = address;
  if (absl::ConsumePrefix(&rest, kLocal)) {
    parsed.local_name = std::string(rest);
    return parsed;
  }
  parsed.is_remote = true;
  if (absl::StartsWith(rest, kRay) && rest.size() > kRay.size()) {
    Registry& registry = TheRegistry();
    MutexLock lock(&registry.mutex);
    const auto found = registry.placed.find(std::string(address));
    if (found == registry.placed.end()) {
      return absl::FailedPreconditionError(
          absl::StrCat("cluster address '", address,
                       "': this process does not know where its servers are; "
                       "call tfswitch.connect('",
                       address, "') first"));
    }
    parsed.places = found->second.places;
    parsed.has_tls = found->second.has_tls;
    parsed.servers = parsed.places->addresses();
    return parsed;
  }
  const bool is_unix = absl::ConsumePrefix(&rest, kUnix);
  parsed.has_tls = absl::ConsumePrefix(&rest, "grpcs://");
  if (!is_unix && !parsed.has_tls && !absl::ConsumePrefix(&rest, "grpc://")) {
    return BadAddress(address, "unknown scheme");
  }
  for (absl::string_view server : absl::StrSplit(rest, ',')) {
    server = absl::StripAsciiWhitespace(server);
    if (server.empty()) return BadAddress(address, "a server name is empty");
    if (absl::StrContains(server, "://")) {
      return BadAddress(address, "it has more than one scheme");
    }
    if (is_unix && server[0] != '/') {
      return BadAddress(address, "a socket path must be absolute");
    }
    parsed.servers.push_back(absl::StrCat(is_unix ? "unix:" : "", server));
    const auto place = ParseAddress(parsed.servers.back());
    if (!place.ok()) return BadAddress(address, place.status().message());
    if (!place->is_unix && place->port == 0) {
      return BadAddress(address,
                        absl::StrCat("no server has port 0, as ", server));
    }
  }
  return parsed;
}

absl::Status PlaceServers(const std::string& address,
                          std::vector<std::string> servers, bool has_tls) {
  if (!absl::StartsWith(address, kRay) || address.size() == kRay.size()) {
    return BadAddress(address, "its servers stay where they are");
  }
  if (servers.empty()) return BadAddress(address, "it has no servers");
  for (const std::string& server : servers) {
    TFSWITCH_RETURN_IF_ERROR(ParseAddress(server).status());
  }
  ClusterAddress parsed;
  parsed.is_remote = true;
  parsed.has_tls = has_tls;
  parsed.servers = servers;
  if (!(CredentialsFor(address, parsed, {}).token == TokenSource())) {
    TFSWITCH_RETURN_IF_ERROR(CheckTokenIsSafe(address, parsed));
  }
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mutex);
  Registry::Placed& placed = registry.placed[address];
  const bool is_alike = placed.places != nullptr && placed.has_tls == has_tls &&
                        placed.places->num_servers() == servers.size();
  if (is_alike) {
    placed.places->Move(std::move(servers));
    return absl::OkStatus();
  }
  if (placed.places != nullptr && placed.places.use_count() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", address, "' has ", servers.size(), " servers ",
        has_tls ? "with" : "without", " TLS now, and this process has ",
        placed.places->num_servers(), " of them open, ",
        placed.has_tls ? "with" : "without",
        " TLS; close its clusters and tables first, or give the servers "
        "another name"));
  }
  placed = {std::make_shared<ServerPlaces>(std::move(servers)), has_tls};
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Cluster>> OpenCluster(const std::string& address,
                                                     absl::Duration timeout,
                                                     const Credentials& given,
                                                     uint64_t id) {
  Registry& registry = TheRegistry();
  {
    MutexLock lock(&registry.mutex);
    std::shared_ptr<Cluster> cluster = registry.Find(address, id);
    if (cluster != nullptr) return cluster;
  }
  TFSWITCH_ASSIGN_OR_RETURN(const ClusterAddress parsed,
                            ParseClusterAddress(address));
  if (given.tls.has_value() && !parsed.has_tls) {
    return BadAddress(address, "it is not one of TLS, and `tls` is given");
  }
  if (!(given.token == TokenSource()) && !parsed.is_remote) {
    return BadAddress(address,
                      "it is not one of servers, and `token` is given");
  }
  TFSWITCH_RETURN_IF_ERROR(
      ForkGuard::Arm(absl::StrCat("opened the cluster '", address, "'")));
  TuneMalloc();
  const Credentials credentials = CredentialsFor(address, parsed, given);
  const TlsFiles files = credentials.tls.value_or(TlsFiles());
  const std::string registry_key = absl::StrJoin(
      {address, absl::FormatDuration(timeout), files.ca, files.cert, files.key,
       files.server_name, credentials.token.text, credentials.token.file},
      "\n");
  std::shared_ptr<Shard> local_shard;
  {
    MutexLock lock(&registry.mutex);
    if (std::shared_ptr<Cluster> cluster =
            registry.open[registry_key].cluster.lock()) {
      registry.Keep(address, given);
      return cluster;
    }
    if (!parsed.is_remote) {
      std::shared_ptr<Shard>& shard = registry.local_shards[parsed.local_name];
      if (shard == nullptr) {
        // The shard has no limits: limits protect servers from clients, and
        // here this process is both.
        ShardOptions options;
        constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();
        options.max_tables = kNone;
        options.coordinator = {kNone, kNone, kNone, kNone};
        shard = std::make_shared<Shard>(options);
      }
      local_shard = shard;
    }
  }
  // Does not lock the registry while it connects, because servers may answer
  // late. If two threads open the same cluster, the cluster of the first one is
  // kept.
  std::unique_ptr<ParameterClient> client;
  if (parsed.is_remote) {
    TFSWITCH_ASSIGN_OR_RETURN(
        client, ConnectToServers(address, parsed, credentials, timeout,
                                 OnLostTables::kFail));
  } else {
    client = NewLocalClient(std::move(local_shard));
  }
  auto cluster = std::make_shared<Cluster>(std::move(client), parsed.is_remote);
  // Outlives the lock, so that no cluster is destroyed with the mutex held.
  std::vector<std::shared_ptr<Cluster>> twins;
  MutexLock lock(&registry.mutex);
  registry.Keep(address, given);
  Registry::Opened& open = registry.open[registry_key];
  if (std::shared_ptr<Cluster> first = open.cluster.lock()) return first;
  for (const auto& [key, other] : registry.open) {
    if (!absl::StartsWith(key, absl::StrCat(address, "\n"))) continue;
    std::shared_ptr<Cluster> twin = other.cluster.lock();
    if (twin == nullptr) continue;
    twin->set_has_twins();
    cluster->set_has_twins();
    twins.push_back(std::move(twin));
  }
  open = {cluster->id(), cluster, cluster->shared_prefetches()};
  return cluster;
}

std::vector<std::shared_ptr<Cluster>> OpenClusters() {
  return ClustersAt(/*address=*/"");
}

absl::Status FinishAllPushes(const Cluster& cluster) {
  absl::Status first;
  for (const auto& each : ClustersAt(AddressOf(cluster))) {
    first.Update(each->FinishPushes());
  }
  return first;
}

void DropAllPrefetches(const Cluster& cluster) {
  for (const auto& each : ClustersAt(AddressOf(cluster))) {
    each->prefetches().Drop(/*source=*/0);
  }
}

absl::Status FinishPushesOfTwins(const Cluster& cluster) {
  absl::Status first;
  if (!cluster.has_twins()) return first;
  for (const auto& each : ClustersAt(AddressOf(cluster))) {
    if (each.get() == &cluster) continue;
    each->pushes().Wait();
    first.Update(each->prefetches().InsertUsed(each->day()));
  }
  return first;
}

void DropPrefetchesOfTwins(const Cluster& cluster) {
  if (!cluster.has_twins()) return;
  const std::string address = AddressOf(cluster);
  std::vector<std::shared_ptr<Prefetches>> twins;
  {
    Registry& registry = TheRegistry();
    MutexLock lock(&registry.mutex);
    for (const auto& [key, opened] : registry.open) {
      if (!absl::StartsWith(key, address) || opened.id == cluster.id())
        continue;
      if (auto twin = opened.prefetches.lock())
        twins.push_back(std::move(twin));
    }
  }
  for (const auto& twin : twins) twin->Drop(/*source=*/0);
}

absl::StatusOr<std::unique_ptr<ParameterClient>> OpenReadingClient(
    const std::string& address, absl::Duration timeout) {
  TFSWITCH_ASSIGN_OR_RETURN(const ClusterAddress parsed,
                            ParseClusterAddress(address));
  if (!parsed.is_remote) return BadAddress(address, "no servers are there");
  TuneMalloc();
  return ConnectToServers(address, parsed, CredentialsFor(address, parsed, {}),
                          timeout, OnLostTables::kFollow);
}

absl::StatusOr<std::unique_ptr<ParameterClient>> OpenServer(
    const std::string& address, absl::Duration timeout) {
  TFSWITCH_ASSIGN_OR_RETURN(const ClusterAddress parsed,
                            ParseClusterAddress(address));
  if (parsed.servers.size() != 1) {
    return BadAddress(address, "expected exactly one server");
  }
  TFSWITCH_RETURN_IF_ERROR(
      ForkGuard::Arm(absl::StrCat("asked the server '", address, "'")));
  TuneMalloc();
  TFSWITCH_ASSIGN_OR_RETURN(
      GrpcClientOptions options,
      OptionsFor(address, parsed, CredentialsFor(address, parsed, {}),
                 timeout));
  options.address = parsed.servers[0];
  options.any_shard = true;
  options.connect_timeout = timeout;
  return NewGrpcClient(options);
}

}  // namespace tfswitch
