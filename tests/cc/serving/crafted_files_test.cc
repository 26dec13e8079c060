// Files that lie about themselves, with checksums that fit: each is refused, or
// read as far as it is there.

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/base/checksum.h"
#include "cc/serving/export_folder.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/cc/serving/crafted_row_file.h"

namespace tfswitch {
namespace {

using Json = nlohmann::json;

TEST(CraftedFilesTest, NoRowFileLeadsTheReaderOutOfIt) {
  std::mt19937 random(5);
  int num_open = 0;
  int num_refused = 0;
  for (int i = 0; i < 4000; ++i) {
    std::vector<uint8_t> choices(3 + random() % 60);
    for (uint8_t& choice : choices) choice = static_cast<uint8_t>(random());
    const CraftedResult result = ReadCrafted(choices);
    ASSERT_EQ(result.fault, "") << i;
    ++(result.is_open ? num_open : num_refused);
  }
  // Else this would prove nothing.
  EXPECT_GT(num_open, 400);
  EXPECT_GT(num_refused, 400);
}

// A default row that lies behind what the checksums are of would be compared
// with a checksum that is not there.
TEST(CraftedFilesTest, ADefaultRowBehindTheBlocksIsRefused) {
  // dim 1, float32, no rows; one change: array 0 (default_row), moved (3), by
  // 64 x 255 bytes and so on; whatever lies behind all blocks is refused.
  for (int step = 0; step < 256; ++step) {
    const CraftedResult result = ReadCrafted(std::vector<uint8_t>{
        0, 0, 0, 0, 1, 0, 3, 3, static_cast<uint8_t>(step)});
    ASSERT_EQ(result.fault, "") << step;
    ASSERT_TRUE(step < 4 || !result.is_open) << step;
  }
}

class CraftedManifestTest : public testing::Test {
 protected:
  CraftedManifestTest() {
    std::string pattern = testing::TempDir() + "/manifestXXXXXX";
    path_ = mkdtemp(pattern.data());
    auto writer = ExportWriter::Begin(path_, /*is_delta=*/false).value();
    RowFileKind kind;
    kind.table = "t";
    kind.dim = 2;
    kind.default_row = {0.0f, 0.0f};
    auto file = writer->AddTable(kind).value();
    writer->FinishTable("t", file->Finish().value(), {{1, 2}, {3, 4}});
    EXPECT_TRUE(writer->Publish().ok());
    std::ifstream manifest(ManifestPath());
    json_ = Json::parse(manifest);
  }
  ~CraftedManifestTest() override {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  std::string ManifestPath() const {
    return path_ + "/base-00000001/manifest.json";
  }
  absl::Status ReadText(const std::string& text) const {
    std::ofstream(ManifestPath()) << text;
    return ReadExport(path_, {1, false}).status();
  }
  absl::Status ReadContent(const Json& content) const {
    const std::string compact = content.dump(-1, ' ', true);
    return ReadText(
        Json({{"checksum", absl::StrFormat("%016x", Checksum(compact.data(),
                                                             compact.size()))},
              {"content", content}})
            .dump());
  }

  std::string path_;
  Json json_;
};

TEST_F(CraftedManifestTest, EachFieldOfAnotherTypeIsRefusedByName) {
  ASSERT_TRUE(ReadContent(json_["content"]).ok());
  const Json flat = json_["content"].flatten();
  const std::vector<Json> others = {
      nullptr,       -1,   1.5,        "x",
      Json::array(), true, {{"a", 1}}, uint64_t{1} << 63};
  for (const auto& [pointer, value] : flat.items()) {
    for (const Json& other : others) {
      Json content = json_["content"];
      content[Json::json_pointer(pointer)] = other;
      const absl::Status status = ReadContent(content);
      if (status.ok()) {
        // Another value of the right type.
        EXPECT_EQ(other.type(), value.type()) << pointer << " " << other;
        continue;
      }
      EXPECT_TRUE(status.code() == absl::StatusCode::kDataLoss ||
                  status.code() == absl::StatusCode::kFailedPrecondition)
          << pointer << " " << other << " " << status;
      EXPECT_NE(status.message().find(ManifestPath()), std::string::npos);
    }
    Json content = json_["content"];
    const Json::json_pointer place(pointer);
    if (content[place.parent_pointer()].is_object()) {
      content[place.parent_pointer()].erase(place.back());
      EXPECT_FALSE(ReadContent(content).ok()) << pointer;
    }
  }
}

TEST_F(CraftedManifestTest, NoExportFollowsTheLastNumberThereIs) {
  std::filesystem::rename(path_ + "/base-00000001",
                          path_ + "/base-9223372036854775807");

  const absl::Status status =
      ExportWriter::Begin(path_, /*is_delta=*/false).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_NE(status.message().find("base-9223372036854775807"),
            std::string::npos);
}

TEST_F(CraftedManifestTest, CutOrDeepTextIsRefused) {
  const std::string text = json_.dump(1);
  for (size_t size = 0; size + 1 < text.size(); size += 7) {
    EXPECT_EQ(ReadText(text.substr(0, size)).code(),
              absl::StatusCode::kDataLoss);
  }
  constexpr size_t kDepth = 5'000'000;
  EXPECT_EQ(ReadText(absl::StrCat("{\"checksum\": \"\", \"content\": {\"a\": ",
                                  std::string(kDepth, '['),
                                  std::string(kDepth, ']'), "}}"))
                .code(),
            absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace tfswitch
