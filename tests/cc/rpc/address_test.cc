#include "cc/rpc/address.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(AddressTest, HostAndPort) {
  const Address address = ParseAddress("host-b.example:7002").value();
  EXPECT_FALSE(address.is_unix);
  EXPECT_EQ(address.host, "host-b.example");
  EXPECT_EQ(address.port, 7002);
  EXPECT_EQ(address.ToString(), "host-b.example:7002");
  EXPECT_EQ(ParseAddress("[::1]:0")->ToString(), "[::1]:0");
}

TEST(AddressTest, UnixSocket) {
  EXPECT_TRUE(ParseAddress("unix:/tmp/x.sock")->is_unix);
  EXPECT_EQ(ParseAddress("unix:/tmp/x.sock")->path, "/tmp/x.sock");
  EXPECT_EQ(ParseAddress("unix:///tmp/x.sock")->ToString(), "unix:/tmp/x.sock");
  EXPECT_EQ(ParseAddress("unix:relative")->path, "relative");
}

TEST(AddressTest, BadAddressesAreNamed) {
  for (const std::string& text :
       {std::string(""), std::string("host"), std::string("host:"),
        std::string(":7077"), std::string("host:port"), std::string("host:-1"),
        std::string("host: 1"), std::string("host:65536"),
        std::string("::1:7077"), std::string("http://host:1"),
        std::string("unix:"), absl::StrCat("unix:/", std::string(108, 'x'))}) {
    const absl::Status status = ParseAddress(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()),
                testing::AllOf(testing::HasSubstr(absl::StrCat("'", text, "'")),
                               testing::HasSubstr("expected host:port")));
  }
}

}  // namespace
}  // namespace tfswitch
