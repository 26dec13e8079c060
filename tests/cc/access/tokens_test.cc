#include "cc/access/tokens.h"

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cc/access/token_list.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

const std::string& Token() {
  static const auto* const token = new std::string(absl::StrCat(
      "tfswitch_", std::string(12, 'a'), "_", std::string(64, 'b')));
  return *token;
}

// A record with `fields` beside those that each must have.
std::string FileWith(absl::string_view fields) {
  return absl::StrCat(
      R"({"tokens": [{"id": "aaaaaaaaaaaa", "role": "train", "tables": ["*"],)",
      R"("sha256": ")", std::string(64, 'c'), "\"", fields, "}]}");
}

TEST(TokensTest, AFileGivesItsRecords) {
  const auto records = ParseTokenFile(FileWith(
      R"(, "expires": "2030-01-31T00:00:00Z", "max_rows": 7, "note": "n")"));

  ASSERT_TRUE(records.ok()) << records.status();
  ASSERT_EQ(records->size(), 1);
  const TokenRecord& record = (*records)[0];
  EXPECT_EQ(record.id, "aaaaaaaaaaaa");
  EXPECT_EQ(record.role, v1::ROLE_TRAIN);
  EXPECT_EQ(record.hash[31], 0xcc);
  EXPECT_EQ(record.expires, absl::FromUnixSeconds(1896048000));
  EXPECT_EQ(record.quota.max_rows, 7);
  EXPECT_EQ(record.quota.max_tables, TokenQuota::kNone);
}

TEST(TokensTest, AnErrorNamesThePlaceInAFile) {
  const std::pair<std::string, std::string> cases[] = {
      {"{}", "it is not a JSON object with a list 'tokens'"},
      {R"({"tokens": [1]})", "entry 1 of 'tokens': it must be an object"},
      {FileWith(R"(, "max_rows": 0)"), "'max_rows' must be a whole number"},
      {FileWith(R"(, "max_rows": -1)"), "'max_rows' must be a whole number"},
      {FileWith(R"(, "max_row": 1)"), "'max_row' is not known"},
      {FileWith(R"(, "expires": "soon")"), "'expires' must be a time such"},
      {FileWith(R"(, "role": "root")"), "'role' must be read, train or admin"},
      {FileWith(R"(, "tables": [])"), "'tables' must be a list"},
      {FileWith(R"(, "sha256": "cc")"), "'sha256' must be 64 hexadecimal"},
  };
  for (const auto& [text, message] : cases) {
    const absl::Status status = ParseTokenFile(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << text;
  }
}

TEST(TokensTest, TwoRecordsOfOneIdAreRefused) {
  const std::string one = FileWith("");
  const size_t begin = one.find('[') + 1;
  const std::string record = one.substr(begin, one.rfind(']') - begin);
  EXPECT_TRUE(
      ParseTokenFile(absl::StrCat("{\"tokens\": [", record, "]}")).ok());
  EXPECT_FALSE(
      ParseTokenFile(absl::StrCat("{\"tokens\": [", record, ",", record, "]}"))
          .ok());
}

TEST(TokensTest, ATokenOfAnotherFormIsNotRepeated) {
  EXPECT_EQ(*TokenId(Token()), std::string(12, 'a'));
  for (const std::string& text :
       {std::string("secret"), Token() + "b", Token().substr(1),
        Token().substr(0, 85) + "B", std::string()}) {
    const absl::Status status = TokenId(text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()),
                testing::Not(HasSubstr("secret")));
  }
}

TEST(TokensTest, AHashIsThatOfSha256) {
  const auto hash = HashToken("abc");
  ASSERT_TRUE(hash.has_value());
  EXPECT_EQ(absl::BytesToHexString(
                {reinterpret_cast<const char*>(hash->data()), hash->size()}),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(TokensTest, PatternsMatchNames) {
  const std::pair<const char*, const char*> good[] = {
      {"*", ""},         {"*", "a"},       {"a*", "a"},    {"a*c", "abbc"},
      {"*a*b*", "xaxb"}, {"a?c", "abc"},   {"", ""},       {"**", "x"},
      {"*ab", "aab"},    {"*.*", "a.b.c"}, {"[a]", "[a]"}, {"é?", "éé"},
      {"*?é", "日本é"},  {"?", "\xFF"}};
  for (const auto& [pattern, name] : good) {
    EXPECT_TRUE(MatchesPattern(pattern, name)) << pattern << " " << name;
  }
  const std::pair<const char*, const char*> bad[] = {
      {"a", "A"},   {"a*", "ba"}, {"a?", "a"},   {"", "a"},    {"a*c", "abcd"},
      {"[a]", "a"}, {"*a", "ab"}, {"u??", "ué"}, {"*??", "日"}};
  for (const auto& [pattern, name] : bad) {
    EXPECT_FALSE(MatchesPattern(pattern, name)) << pattern << " " << name;
  }
}

TEST(TokensTest, AQuotaCountsWhatIsUnderWay) {
  TokenRecord record;
  record.quota.max_calls_in_flight = 2;
  record.quota.max_bytes_in_flight = 100;
  TokenUse use;
  EXPECT_TRUE(use.Enter(record).ok());
  EXPECT_TRUE(use.Add(record, 60).ok());
  EXPECT_TRUE(use.Enter(record).ok());
  EXPECT_FALSE(use.Add(record, 60).ok());
  EXPECT_FALSE(use.Enter(record).ok());
  use.Leave(60);
  EXPECT_TRUE(use.Enter(record).ok());
  EXPECT_TRUE(use.Add(record, 40).ok());
}

TEST(TokensTest, CallsOfManyThreadsLeaveNothingBehind) {
  TokenRecord record;
  record.quota.max_calls_in_flight = 3;
  TokenUse use;
  std::atomic<int> inside{0};
  std::atomic<int> most{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        if (!use.Enter(record).ok()) continue;
        EXPECT_TRUE(use.Add(record, 5).ok());
        const int now = ++inside;
        int known = most;
        while (now > known && !most.compare_exchange_weak(known, now)) {
        }
        --inside;
        use.Leave(5);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(most, 3);
  record.quota.max_bytes_in_flight = 5;
  EXPECT_TRUE(use.Add(record, 5).ok());
}

}  // namespace
}  // namespace tfswitch
