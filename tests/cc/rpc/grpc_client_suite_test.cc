// The behaviour that all clients share, over the network: one server, three
// servers, and a unix socket.

#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/client/sharded_client.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/parameter_client_suite.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

class ServersUnderTest : public ClientUnderTest {
 public:
  ServersUnderTest(uint32_t num_servers, bool unix_sockets) {
    std::vector<std::unique_ptr<ParameterClient>> clients;
    for (uint32_t i = 0; i < num_servers; ++i) {
      GrpcServerOptions options;
      options.num_threads = 2;
      if (unix_sockets) {
        options.address = absl::StrCat("unix:", folder_.path(), "/", i);
      }
      servers_.push_back(StartServer(options, ShardOptions{i, num_servers}));
      GrpcClientOptions client_options;
      client_options.address = servers_.back()->address();
      client_options.shard_index = i;
      client_options.num_shards = num_servers;
      auto client = NewGrpcClient(client_options);
      EXPECT_TRUE(client.ok()) << client.status();
      clients.push_back(std::move(client).value());
    }
    client_ = num_servers == 1 ? std::move(clients[0])
                               : NewShardedClient(std::move(clients));
  }

  ParameterClient& client() override { return *client_; }

 private:
  const ScopedFolder folder_;
  std::vector<std::unique_ptr<GrpcServer>> servers_;
  std::unique_ptr<ParameterClient> client_;  // Goes before the servers.
};

ClientFactory Servers(const std::string& name, uint32_t num_servers,
                      bool unix_sockets) {
  return {name, [num_servers, unix_sockets] {
            return std::make_unique<ServersUnderTest>(num_servers,
                                                      unix_sockets);
          }};
}

INSTANTIATE_TEST_SUITE_P(Grpc, ParameterClientSuite,
                         testing::Values(Servers("one_server", 1, false),
                                         Servers("unix_socket", 1, true),
                                         Servers("three_servers", 3, false)),
                         NameOfFactory);

}  // namespace
}  // namespace tfswitch
