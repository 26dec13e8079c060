// Short forms that the tests of client and server share.

#ifndef TFSWITCH_TESTS_CC_RPC_SERVER_UNDER_TEST_H_
#define TFSWITCH_TESTS_CC_RPC_SERVER_UNDER_TEST_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/client/local_client.h"
#include "cc/client/parameter_client.h"
#include "cc/client/sharded_client.h"
#include "cc/rpc/client/grpc_client.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/shard/shard.h"
#include "gtest/gtest.h"

namespace tfswitch {

inline std::unique_ptr<GrpcServer> StartServer(GrpcServerOptions options = {},
                                               ShardOptions shard = {}) {
  auto server = GrpcServer::Start(options, std::make_shared<Shard>(shard));
  EXPECT_TRUE(server.ok()) << server.status();
  return std::move(server).value();
}

inline absl::StatusOr<std::unique_ptr<ParameterClient>> Connect(
    const std::string& address, absl::Duration timeout = absl::Seconds(30)) {
  GrpcClientOptions options;
  options.address = address;
  options.timeout = timeout;
  return NewGrpcClient(options);
}

// The tables of a cluster; with 0 servers, in this process.
class ClusterUnderTest {
 public:
  explicit ClusterUnderTest(int num_servers) {
    if (num_servers == 0) shard_ = std::make_shared<Shard>(ShardOptions());
    servers_.resize(static_cast<size_t>(num_servers));
    for (uint32_t i = 0; i < servers_.size(); ++i) Start(i, "127.0.0.1:0", {});
  }

  // Replaces the server by an empty one.
  void Restart(uint32_t shard, const ShardOptions& options = {}) {
    const std::string address = servers_[shard]->address();
    servers_[shard].reset();
    Start(shard, address, options);
  }

  // Returns the client of one worker.
  std::shared_ptr<ParameterClient> Connect(
      OnLostTables on_lost_tables = OnLostTables::kFail) const {
    if (shard_ != nullptr) return NewLocalClient(shard_);
    std::vector<std::unique_ptr<ParameterClient>> clients;
    for (uint32_t i = 0; i < servers_.size(); ++i) {
      clients.push_back(ConnectTo(i));
    }
    return NewShardedClient(std::move(clients), on_lost_tables);
  }

  std::unique_ptr<ParameterClient> ConnectTo(uint32_t shard) const {
    GrpcClientOptions options;
    options.address = servers_[shard]->address();
    options.shard_index = shard;
    options.num_shards = static_cast<uint32_t>(servers_.size());
    options.timeout = absl::Seconds(20);
    auto client = NewGrpcClient(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return std::move(client).value();
  }

 private:
  void Start(uint32_t shard, const std::string& address, ShardOptions options) {
    options.shard_index = shard;
    options.num_shards = static_cast<uint32_t>(servers_.size());
    GrpcServerOptions server;
    server.address = address;
    server.num_threads = 2;
    servers_[shard] = StartServer(server, options);
  }

  std::shared_ptr<Shard> shard_;
  std::vector<std::unique_ptr<GrpcServer>> servers_;
};

inline std::vector<Key> RandomKeys(int count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<Key> keys(count);
  for (Key& key : keys) key = static_cast<Key>(random());
  return keys;
}

inline TableConfig SmallTable(const std::string& name, int dim = 2) {
  TableConfig config;
  config.name = name;
  config.dim = dim;
  config.initializer = ConstantInitializer{1.0f};
  return config;
}

inline absl::StatusOr<std::vector<float>> PullRows(
    ParameterClient& client, const std::string& table, int dim,
    const std::vector<Key>& keys, bool insert_missing = false) {
  std::vector<float> rows(keys.size() * dim, -99.0f);
  PullArgs args;
  args.table = table;
  args.dim = dim;
  args.keys = keys;
  args.insert_missing = insert_missing;
  absl::Status status = client.Pull(args, absl::MakeSpan(rows));
  if (!status.ok()) return status;
  return rows;
}

// Gradients of 1, learning rate of 1: each step takes 1 from every value.
inline absl::StatusOr<v1::ShrinkResponse> ShrinkOf(
    ParameterClient& client, const v1::ShrinkRequest& request) {
  v1::ShrinkResponse response;
  const absl::Status status = client.Call(request, &response);
  if (!status.ok()) return status;
  return response;
}

inline absl::StatusOr<WriteResult> PushOnes(ParameterClient& client,
                                            const std::string& table, int dim,
                                            const std::vector<Key>& keys,
                                            PushId id = {}) {
  const std::vector<float> gradients(keys.size() * dim, 1.0f);
  PushArgs args;
  args.table = table;
  args.dim = dim;
  args.keys = keys;
  args.gradients = gradients;
  args.learning_rate = 1.0f;
  args.insert_missing = true;
  args.keys_are_unique = true;
  args.id = id;
  return client.Push(args);
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_RPC_SERVER_UNDER_TEST_H_
