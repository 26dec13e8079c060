#include <string>

#include "cc/capi/cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(ClusterAddressTest, TakesTheDocumentedForms) {
  EXPECT_FALSE(ParseClusterAddress("local://")->is_remote);
  EXPECT_EQ(ParseClusterAddress("local://a")->local_name, "a");
  EXPECT_THAT(ParseClusterAddress("grpc://a:1,b:2")->servers,
              ElementsAre("a:1", "b:2"));
  EXPECT_FALSE(ParseClusterAddress("grpc://a:1")->has_tls);
  EXPECT_THAT(ParseClusterAddress("grpcs://a:1,b:2")->servers,
              ElementsAre("a:1", "b:2"));
  EXPECT_TRUE(ParseClusterAddress("grpcs://a:1")->has_tls);
  EXPECT_THAT(ParseClusterAddress("grpc+unix:///tmp/s,/tmp/t")->servers,
              ElementsAre("unix:/tmp/s", "unix:/tmp/t"));
  EXPECT_THAT(ParseClusterAddress("grpc://unix:/tmp/s,b:2")->servers,
              ElementsAre("unix:/tmp/s", "b:2"));
}

TEST(ClusterAddressTest, RefusesOthersNamingTheAddressAndTheForms) {
  for (const std::string address :
       {"", "a:1", "http://a:1", "grpc://", "grpc://a:1,", "grpc://a",
        "grpcs://", "grpcs://a", "grpc+unix://relative"}) {
    const absl::Status status = ParseClusterAddress(address).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(HasSubstr("'" + address + "'"),
                               HasSubstr("grpc://host:port")));
  }
}

}  // namespace
}  // namespace tfswitch
