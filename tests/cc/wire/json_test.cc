#include "cc/wire/json.h"

#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "gmock/gmock.h"
#include "google/protobuf/text_format.h"
#include "google/protobuf/util/message_differencer.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"
#include "tfswitch/v1/checkpoint.pb.h"
#include "tfswitch/v1/export.pb.h"

namespace tfswitch {
namespace {

using google::protobuf::util::MessageDifferencer;
using testing::AllOf;
using testing::HasSubstr;

template <typename Message>
Message FromText(const std::string& text) {
  Message message;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &message));
  return message;
}

// Each field is set.
v1::CheckpointManifest Manifest() {
  return FromText<v1::CheckpointManifest>(R"(
    save: 3 save_id: "s"
    work_queues { queues { group: "g" queue: "q" epoch: 1 num_taken: 2
                           options { items: "a" num_epochs: 3 seed: 4 }
                           unfinished { key: 0 value: 5 } } }
    tables { key: "t" value {
      config { name: "t" dim: 2 seed: 18446744073709551615 }
      incarnation: 5 shard_instances: 6 slot_floats: 1 num_rows: 0
      last_day: 0.5
      steps { last_step: 1 runs { first: 1 learning_rate: 0.25 } }
      files { name: "t/a" kind: BLOOM virtual_shards_end: 4 num_rows: 7
              bytes: 9007199254740993 crc32: 4294967295 } } }
    server { num_writes: 1 saved_at_ms: 2 last_record: 3 groups {}
      rounds { key: "g" value { committed: 1 instance: 2 next_incarnation: 3
        active: 4 closed_clocks { key: 5 value: 6 } } } })");
}

class MessageFileTest : public testing::Test {
 protected:
  std::string Write(google::protobuf::Message* message) {
    EXPECT_TRUE(WriteMessageFile(path_, 1 << 20, message).ok());
    return ReadWholeFile(path_, 1 << 20).value();
  }
  template <typename Message>
  absl::Status Read(const std::string& text) {
    std::ofstream(path_) << text;
    Message message;
    return ReadMessageFile(path_, 1 << 20, &message);
  }

  const ScopedFolder folder_;
  const std::string path_ = folder_.path() + "/file.json";
};

TEST_F(MessageFileTest, WhatIsWrittenIsRead) {
  v1::CheckpointManifest manifest = Manifest();
  const std::string text = Write(&manifest);

  v1::CheckpointManifest read;
  ASSERT_TRUE(ReadMessageFile(path_, 1 << 20, &read).ok());

  EXPECT_TRUE(MessageDifferencer::Equals(read, manifest));
  // Names of the proto, strings for 64 bits, and fields that are 0.
  for (const char* part :
       {"\"format\": \"tfswitch-checkpoint\"", "\"version\": 2",
        "\"bytes\": \"9007199254740993\"", "\"num_rows\": \"0\"",
        "\"kind\": \"BLOOM\"", "\"virtual_shards_begin\": 0",
        "\"crc32\": 4294967295"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(MessageFileTest, ALongFileIsNeitherWrittenNorRead) {
  v1::CheckpointManifest manifest = Manifest();
  Write(&manifest);
  EXPECT_TRUE(
      absl::IsResourceExhausted(WriteMessageFile(path_, 100, &manifest)));
  const absl::Status status = ReadMessageFile(path_, 100, &manifest);
  EXPECT_TRUE(absl::IsDataLoss(status)) << status;
}

TEST_F(MessageFileTest, AnotherFormatOrVersionIsNamedBeforeAllElse) {
  for (const char* text :
       {"", "[]", "{}", R"({"format": 1, "version": 2})",
        R"({"format": "other", "version": 2})",
        R"({"format": "tfswitch-checkpoint", "version": "2"})"}) {
    const absl::Status status = Read<v1::CheckpointManifest>(text);
    EXPECT_TRUE(absl::IsDataLoss(status)) << text << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("checkpoint manifest '", path_,
                                       "' is damaged")));
  }
  const absl::Status newer = Read<v1::CheckpointManifest>(
      R"({"format": "tfswitch-checkpoint", "version": 9, "news": []})");
  EXPECT_TRUE(absl::IsFailedPrecondition(newer));
  EXPECT_THAT(std::string(newer.message()),
              AllOf(HasSubstr(path_), HasSubstr("version 9"),
                    HasSubstr("reads version 2")));
  v1::CheckpointManifest manifest;
  EXPECT_TRUE(
      absl::IsNotFound(ReadMessageFile(path_ + "x", 1 << 20, &manifest)));
}

// Each value of a file is taken away, and is replaced by others.
TEST_F(MessageFileTest, AFieldThatIsMissingOrOfAnotherTypeIsRefusedByName) {
  v1::CheckpointManifest manifest = Manifest();
  const Json good = ParseJson(Write(&manifest)).value();
  const std::vector<Json> others = {
      nullptr,       -1,   1.5,        "x",
      Json::array(), true, {{"a", 1}}, uint64_t{1} << 63};
  int num_missing = 0;
  const Json flat = good.flatten();
  for (const auto& [pointer, value] : flat.items()) {
    const Json::json_pointer place(pointer);
    // Its own reader checks it.
    if (absl::StrContains(pointer, "/config/")) continue;
    for (const Json& other : others) {
      Json json = good;
      json[place] = other;
      const absl::Status status = Read<v1::CheckpointManifest>(json.dump());
      EXPECT_TRUE(status.ok() || absl::IsDataLoss(status) ||
                  place.back() == "version")
          << pointer << other << status;
      const bool is_number =
          value.is_number() || (value.is_string() && other.is_number());
      EXPECT_TRUE(!status.ok() || other.is_null() || is_number ||
                  other.type() == value.type() || value.is_null())
          << pointer << " " << other;
    }
    Json json = good;
    if (!json[place.parent_pointer()].is_object()) continue;
    json[place.parent_pointer()].erase(place.back());
    const absl::Status status = Read<v1::CheckpointManifest>(json.dump());
    const bool may_be_missing =
        place.back() == "work_queues" || place.back() == "last_day" ||
        place.back() == "groups" ||
        absl::StrContains(pointer, "/closed_clocks/") ||
        absl::StrContains(pointer, "/unfinished/");  // Entries of maps.
    EXPECT_EQ(status.ok(), may_be_missing) << pointer << status;
    if (status.ok() || place.back() == "format" || place.back() == "version") {
      continue;
    }
    ++num_missing;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(place.back()), HasSubstr("is missing")));
  }
  EXPECT_GT(num_missing, 20);
}

TEST_F(MessageFileTest, ListsMapsAndMessagesMustBeThereToo) {
  v1::CheckpointManifest manifest = Manifest();
  const Json good = ParseJson(Write(&manifest)).value();
  for (const char* pointer :
       {"/tables", "/tables/t/files", "/tables/t/shard_instances",
        "/tables/t/config", "/server/rounds", "/server/files"}) {
    const Json::json_pointer place(pointer);
    Json json = good;
    json[place.parent_pointer()].erase(place.back());
    EXPECT_THAT(
        std::string(Read<v1::CheckpointManifest>(json.dump()).message()),
        HasSubstr(absl::StrCat(place.back(), "' is missing")));
  }
}

TEST_F(MessageFileTest, ValuesOutOfTheirRangeAreRefusedByName) {
  v1::ModelFile model = FromText<v1::ModelFile>(R"(
    id: "i" tables { key: "t" value: 4 }
    remote { addresses: "grpc://a:1" deadline_secs: 2.5 cache_rows: 3
             cache_secs: 4 })");
  const Json good = ParseJson(Write(&model)).value();
  EXPECT_TRUE(Read<v1::ModelFile>(good.dump()).ok());
  const std::vector<std::pair<std::string, std::vector<Json>>> changes = {
      {"/id", {""}},
      {"/tables/t", {0, -1}},
      {"/remote/addresses", {""}},
      {"/remote/deadline_secs", {0, -1, 1e10, "NaN", "Infinity"}},
      {"/remote/cache_rows", {-1, uint64_t{1} << 33}},
      {"/remote/cash_rows", {3}},
      {"/embedded", {{{"rows", "x"}}}},
  };
  for (const auto& [pointer, values] : changes) {
    for (const Json& value : values) {
      Json json = good;
      json[Json::json_pointer(pointer)] = value;
      const absl::Status status = Read<v1::ModelFile>(json.dump());
      EXPECT_TRUE(absl::IsDataLoss(status)) << pointer << value << status;
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr(path_), HasSubstr("Save the model again."),
                        HasSubstr(Json::json_pointer(pointer).back())));
    }
  }
  Json without = good;
  without.erase("remote");
  EXPECT_THAT(std::string(Read<v1::ModelFile>(without.dump()).message()),
              HasSubstr("'mode' is missing"));
}

TEST_F(MessageFileTest, AValueThatNoEnumHasIsRefused) {
  v1::CheckpointManifest manifest = Manifest();
  Json json = ParseJson(Write(&manifest)).value();
  for (const Json& kind : {Json(77), Json("BLOOMS")}) {
    json["tables"]["t"]["files"][0]["kind"] = kind;
    const absl::Status status = Read<v1::CheckpointManifest>(json.dump());
    EXPECT_TRUE(absl::IsDataLoss(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("kind"));
  }
}

TEST_F(MessageFileTest, CutOrDeepTextIsRefused) {
  v1::CheckpointManifest manifest = Manifest();
  const std::string text = Write(&manifest);
  for (size_t size = 0; size + 2 < text.size(); size += 7) {
    EXPECT_TRUE(
        absl::IsDataLoss(Read<v1::CheckpointManifest>(text.substr(0, size))));
  }
  constexpr size_t kDepth = 5'000'000;
  const absl::Status deep = Read<v1::CheckpointManifest>(
      absl::StrCat(R"({"format": "tfswitch-checkpoint", "version": 2, "a": )",
                   std::string(kDepth, '['), std::string(kDepth, ']'), "}"));
  EXPECT_TRUE(absl::IsDataLoss(deep));
  EXPECT_LT(deep.message().size(), 1000);
}

}  // namespace
}  // namespace tfswitch
