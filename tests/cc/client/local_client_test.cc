#include "cc/client/local_client.h"

#include <memory>

#include "cc/shard/shard.h"
#include "tests/cc/testing/parameter_client_suite.h"

namespace tfswitch {
namespace {

class LocalUnderTest : public ClientUnderTest {
 public:
  LocalUnderTest()
      : client_(NewLocalClient(std::make_shared<Shard>(ShardOptions{}))) {}
  ParameterClient& client() override { return *client_; }

 private:
  const std::unique_ptr<ParameterClient> client_;
};

INSTANTIATE_TEST_SUITE_P(
    Local, ParameterClientSuite,
    testing::Values(ClientFactory{
        "local", [] { return std::make_unique<LocalUnderTest>(); }}),
    NameOfFactory);

}  // namespace
}  // namespace tfswitch
