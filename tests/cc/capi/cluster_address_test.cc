#include <cstdlib>
#include <string>

#include "cc/capi/cluster.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

TEST(ClusterAddressTest, TakesTheDocumentedForms) {
  EXPECT_FALSE(ParseClusterAddress("local://")->is_remote);
  EXPECT_EQ(ParseClusterAddress("local://a")->local_name, "a");
  EXPECT_THAT(ParseClusterAddress("grpc://a:1,b:2")->servers,
              ElementsAre("a:1", "b:2"));
  EXPECT_THAT(ParseClusterAddress("grpc:// a:1,\tb:2 ")->servers,
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
        "grpcs://", "grpcs://a", "grpc+unix://relative",
        "grpcs://a:1,grpc://b:2", "grpc://a b:1", "grpc://a:one", "grpc://a:0",
        "grpc://a:70000", "grpc://a:1 b:2", "grpc://a:1;b:2"}) {
    const absl::Status status = ParseClusterAddress(address).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(
        std::string(status.message()),
        AllOf(HasSubstr("'" + address + "'"), HasSubstr("grpc://host:port")));
  }
}

TEST(ClusterAddressTest, DoesNotRepeatASecret) {
  for (const std::string address :
       {"grpc://hidden@a:1", "grpcs://a:1,b:hidden@c:2",
        "grpc://tfswitch_0123456789ab_hidden", "hidden@a:1",
        "hidden@grpc://a:1", "tfswitch_0123456789ab_hidden://a:1"}) {
    const absl::Status status = ParseClusterAddress(address).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                testing::Not(HasSubstr("hidden")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("no token"));
  }
  EXPECT_TRUE(ParseClusterAddress("grpc+unix:///a@b").ok());
  EXPECT_TRUE(ParseClusterAddress("local://a@b").ok());
}

TEST(ClusterAddressTest, ServersThatMoveAreWhereTheProcessHasPutThem) {
  EXPECT_THAT(
      ParseClusterAddress("ray://a").status(),
      AllOf(testing::Property(&absl::Status::code,
                              absl::StatusCode::kFailedPrecondition),
            testing::Property(&absl::Status::message,
                              HasSubstr("tfswitch.connect('ray://a')"))));
  ASSERT_TRUE(PlaceServers("ray://a", {"a:1", "b:2"}, true).ok());
  {
    const ClusterAddress parsed = *ParseClusterAddress("ray://a");
    EXPECT_TRUE(parsed.is_remote && parsed.has_tls);
    EXPECT_THAT(parsed.servers, ElementsAre("a:1", "b:2"));

    ASSERT_TRUE(PlaceServers("ray://a", {"a:1", "c:3"}, true).ok());
    EXPECT_THAT(parsed.places->addresses(), ElementsAre("a:1", "c:3"));
    // Clients of two servers cannot go on with one, nor with plaintext.
    EXPECT_TRUE(
        absl::IsFailedPrecondition(PlaceServers("ray://a", {"a:1"}, true)));
    EXPECT_TRUE(absl::IsFailedPrecondition(
        PlaceServers("ray://a", {"a:1", "c:3"}, false)));
  }
  EXPECT_TRUE(PlaceServers("ray://a", {"a:1"}, false).ok());
  EXPECT_THAT(ParseClusterAddress("ray://a")->servers, ElementsAre("a:1"));
}

TEST(ClusterAddressTest, PlacesOfServersAreChecked) {
  for (const std::string address : {"ray://", "grpc://a:1", ""}) {
    EXPECT_TRUE(absl::IsInvalidArgument(PlaceServers(address, {"a:1"}, false)));
  }
  for (const std::string server : {"a", "", "a:b", "a:70000"}) {
    EXPECT_TRUE(
        absl::IsInvalidArgument(PlaceServers("ray://b", {server}, false)));
  }
  EXPECT_TRUE(absl::IsInvalidArgument(PlaceServers("ray://b", {}, false)));
}

TEST(ClusterAddressTest, ATokenDoesNotFollowAServerOverPlaintext) {
  setenv("TFSWITCH_TOKEN", "secret", 1);
  EXPECT_TRUE(PlaceServers("ray://c", {"127.0.0.1:1"}, false).ok());
  const absl::Status status = PlaceServers("ray://c", {"10.0.0.1:1"}, false);
  EXPECT_TRUE(PlaceServers("ray://d", {"10.0.0.1:1"}, true).ok());
  unsetenv("TFSWITCH_TOKEN");

  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(ParseClusterAddress("ray://c")->servers,
              ElementsAre("127.0.0.1:1"));
}

}  // namespace
}  // namespace tfswitch
