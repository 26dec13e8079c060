#include "cc/base/json.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

std::string Nested(int depth) {
  return std::string(depth, '[') + std::string(depth, ']');
}

TEST(ParseJsonTest, ReadsWhatIsJson) {
  const auto json = ParseJson(R"({"a": [1, "[{\"[\\"], "b": {}})");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ((*json)["a"][1], "[{\"[\\");
}

TEST(ParseJsonTest, RefusesWhatIsNot) {
  for (const char* text : {"", "{", "nan", "{}}", "\"", "\"\\"}) {
    EXPECT_EQ(ParseJson(text).status().code(),
              absl::StatusCode::kInvalidArgument)
        << text;
  }
}

TEST(ParseJsonTest, RefusesMoreLevelsThanItIsTold) {
  EXPECT_TRUE(ParseJson(Nested(3), 3).ok());
  const auto deeper = ParseJson(Nested(4), 3);
  EXPECT_EQ(deeper.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(deeper.status().message(),
              HasSubstr("4 objects and lists inside each other"));
}

// A million levels would be walked with a million calls inside each other.
TEST(ParseJsonTest, RefusesWhatWouldOverflowTheStack) {
  EXPECT_FALSE(ParseJson(Nested(1'000'000)).ok());
  EXPECT_FALSE(ParseJson(std::string(1'000'000, '{')).ok());
  // A list beside another is not inside it.
  std::string wide = "[[]";
  for (int i = 0; i < 1000; ++i) wide += ",[]";
  EXPECT_TRUE(ParseJson(wide + "]").ok());
}

}  // namespace
}  // namespace tfswitch
