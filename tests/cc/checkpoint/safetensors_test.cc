#include "cc/checkpoint/safetensors.h"

#include <unistd.h>
#include <zlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class SafetensorsTest : public testing::Test {
 protected:
  SafetensorsTest() {
    std::string pattern = testing::TempDir() + "/safetensorsXXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ + "/a.safetensors";
  }
  ~SafetensorsTest() override {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }

  WrittenFile Write() {
    const std::vector<TensorToWrite> tensors = {
        {"keys", "I64", {2}, Bytes(keys_)},
        {"embeddings", "F32", {2, 3}, Bytes(values_)}};
    return WriteSafetensors(path_, tensors, {{"table", "t"}}).value();
  }

  template <typename T>
  static absl::Span<const char> Bytes(const std::vector<T>& data) {
    return {reinterpret_cast<const char*>(data.data()),
            data.size() * sizeof(T)};
  }

  std::string ReadAll() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void Rewrite(const std::string& contents) const {
    std::ofstream(path_, std::ios::binary) << contents;
  }
  // A file whose manifest fits it, with this header.
  absl::StatusOr<SafetensorsFile> ReadCrafted(const std::string& header,
                                              const std::string& data) const {
    const uint64_t length = header.size();
    const std::string contents =
        std::string(reinterpret_cast<const char*>(&length), sizeof(length)) +
        header + data;
    Rewrite(contents);
    return ReadSafetensors(path_, static_cast<int64_t>(contents.size()),
                           Crc(contents));
  }
  static uint32_t Crc(const std::string& contents) {
    return static_cast<uint32_t>(crc32(
        0, reinterpret_cast<const Bytef*>(contents.data()), contents.size()));
  }

  std::string folder_;
  std::string path_;
  const std::vector<int64_t> keys_ = {-1, 7};
  const std::vector<float> values_ = {1, 2, 3, 4, 5, 6};
};

TEST_F(SafetensorsTest, ReadsBackWhatWasWritten) {
  const WrittenFile written = Write();
  const auto file = ReadSafetensors(path_, written.bytes, written.crc32);

  ASSERT_TRUE(file.ok()) << file.status();
  const auto keys = file->Get("keys", "I64", {2});
  ASSERT_TRUE(keys.ok());
  EXPECT_EQ(std::memcmp(keys->data(), keys_.data(), 16), 0);
  const auto values = file->Get("embeddings", "F32", {2, 3});
  ASSERT_TRUE(values.ok());
  EXPECT_EQ(std::memcmp(values->data(), values_.data(), 24), 0);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(keys->data()) % 8, 0u);
}

TEST_F(SafetensorsTest, LeavesNoTemporaryFile) {
  Write();
  int files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    EXPECT_EQ(entry.path().string(), path_);
    ++files;
  }
  EXPECT_EQ(files, 1);
}

TEST_F(SafetensorsTest, WrongTensorIsDataLossNamingFileAndTensor) {
  const WrittenFile written = Write();
  const auto file = ReadSafetensors(path_, written.bytes, written.crc32);
  ASSERT_TRUE(file.ok());

  for (const absl::Status& status :
       {file->Get("slots", "F32", {2, 3}).status(),
        file->Get("embeddings", "F32", {2, 4}).status(),
        file->Get("embeddings", "I64", {2, 3}).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr(path_));
  }
}

TEST_F(SafetensorsTest, TruncatedMissingOrChangedFileIsDataLoss) {
  const WrittenFile written = Write();
  const std::string contents = ReadAll();

  Rewrite(contents.substr(0, contents.size() - 1));
  EXPECT_THAT(std::string(ReadSafetensors(path_, written.bytes, written.crc32)
                              .status()
                              .message()),
              HasSubstr("truncated"));
  std::string changed = contents;
  changed.back() ^= 4;
  Rewrite(changed);
  EXPECT_THAT(std::string(ReadSafetensors(path_, written.bytes, written.crc32)
                              .status()
                              .message()),
              HasSubstr("checksum"));
  std::filesystem::remove(path_);
  EXPECT_EQ(
      ReadSafetensors(path_, written.bytes, written.crc32).status().code(),
      absl::StatusCode::kDataLoss);
}

TEST_F(SafetensorsTest, MalformedHeadersAreRefused) {
  Write();
  const std::string contents = ReadAll();
  std::vector<std::string> bad = {"", "abc"};
  std::string long_header = contents;
  long_header[6] = 1;  // A length of 2^48.
  bad.push_back(long_header);
  std::string not_json = contents;
  not_json[8] = '[';
  bad.push_back(not_json);
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{
           {"\"data_offsets\":[0,", "\"data_offsets\":[9,"},
           {"\"shape\":[2]", "\"shape\":[x]"},
           {"\"dtype\"", "\"dtyqe\""},
           {"[16,40]", "[16,99]"}}) {
    std::string changed = contents;
    const size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    bad.push_back(changed);
  }

  for (const std::string& each : bad) {
    Rewrite(each);
    const auto file =
        ReadSafetensors(path_, static_cast<int64_t>(each.size()), Crc(each));
    // Either the header is refused, or a tensor no longer fits.
    absl::Status status = file.status();
    if (file.ok()) {
      status = file->Get("keys", "I64", {2}).status();
      status.Update(file->Get("embeddings", "F32", {2, 3}).status());
    }
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss)
        << each.substr(0, 200);
  }
}

// 2^61 numbers of 8 bytes are 0 bytes, if they are counted in 64 bits.
TEST_F(SafetensorsTest, ShapesOfMoreBytesThan64BitsCountAreRefused) {
  for (const auto& [dtype, shape] :
       std::vector<std::pair<std::string, std::vector<int64_t>>>{
           {"I64", {int64_t{1} << 61}},
           {"F32", {int64_t{1} << 31, int64_t{1} << 31}},
           {"U8", {int64_t{1} << 62, 4}}}) {
    const auto file = ReadCrafted(
        absl::StrCat(R"({"a":{"dtype":")", dtype, R"(","shape":[)",
                     absl::StrJoin(shape, ","), R"(],"data_offsets":[0,0]}})"),
        "");
    ASSERT_TRUE(file.ok()) << file.status();

    const absl::Status status = file->Get("a", dtype, shape).status();

    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(path_), HasSubstr("tensor 'a'")));
  }
}

TEST_F(SafetensorsTest, TensorsThatAreNotAlignedAreRefused) {
  const auto file =
      ReadCrafted(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                  R"("b":{"dtype":"I64","shape":[1],"data_offsets":[4,12]}})",
                  std::string(12, '\1'));
  ASSERT_TRUE(file.ok()) << file.status();

  EXPECT_TRUE(file->Get("a", "U8", {4}).ok());
  EXPECT_EQ(file->Get("b", "I64", {1}).status().code(),
            absl::StatusCode::kDataLoss);
}

// Without memory for it: the file has a hole of a tebibyte.
TEST_F(SafetensorsTest, AFileThatIsLongerThanItsTensorsIsRefusedUnread) {
  const WrittenFile written = Write();
  constexpr int64_t kBytes = int64_t{1} << 40;
  std::filesystem::resize_file(path_, kBytes);

  const absl::Status status =
      ReadSafetensors(path_, kBytes, written.crc32).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(path_), HasSubstr("its tensors have 40 bytes")));
}

TEST_F(SafetensorsTest, AHeaderThatIsTooDeepIsRefused) {
  const absl::Status status =
      ReadCrafted(R"({"__metadata__":)" + std::string(200'000, '['), "")
          .status();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(path_), HasSubstr("inside each other")));
}

TEST_F(SafetensorsTest, FolderThatIsNotThereIsAnErrorNamingIt) {
  const auto written =
      WriteSafetensors(folder_ + "/none/a.safetensors", {}, {});

  EXPECT_EQ(written.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(written.status().message()), HasSubstr("none"));
}

}  // namespace
}  // namespace tfswitch::checkpoint
