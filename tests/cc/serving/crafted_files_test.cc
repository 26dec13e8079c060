// Files that lie about themselves, with checksums that fit: each is refused, or
// read as far as it is there.

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc/serving/export_folder.h"
#include "cc/wire/json.h"
#include "gtest/gtest.h"
#include "tests/cc/serving/crafted_row_file.h"

namespace tfswitch {
namespace {

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
  }
  ~CraftedManifestTest() override {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  std::string ManifestPath() const {
    return path_ + "/base-00000001/manifest.json";
  }
  // Returns the status of reading a changed manifest without a new checksum.
  absl::Status Read(const std::function<void(v1::ExportManifest*)>& change) {
    v1::ExportManifest manifest;
    EXPECT_TRUE(ReadMessageFile(ManifestPath(), 1 << 20, &manifest).ok());
    change(&manifest);
    EXPECT_TRUE(WriteMessageFile(ManifestPath(), 1 << 20, &manifest).ok());
    return ReadExport(path_, {1, false}).status();
  }

  std::string path_;
};

TEST_F(CraftedManifestTest, AChangeIsNoticedByTheChecksum) {
  EXPECT_TRUE(Read([](v1::ExportManifest*) {}).ok());
  const absl::Status status = Read([](v1::ExportManifest* manifest) {
    manifest->mutable_content()->set_created_ms(1);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_NE(status.message().find("its checksum does not fit"),
            std::string::npos);
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

}  // namespace
}  // namespace tfswitch
