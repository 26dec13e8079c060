#include "cc/serving/row_file.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/serving/row_decode.h"
#include "cc/serving/row_file_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class RowFileTest : public testing::Test {
 protected:
  RowFileTest() {
    std::string pattern = testing::TempDir() + "/row_fileXXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_ + "/rows.safetensors";
  }
  ~RowFileTest() override {
    std::error_code error;
    std::filesystem::remove_all(folder_, error);
  }

  static RowFileKind Kind(RowFormat format, int dim) {
    RowFileKind kind;
    kind.table = "user/age";
    kind.dim = dim;
    kind.format = format;
    kind.default_row.assign(static_cast<size_t>(dim), 0.25f);
    return kind;
  }

  // Returns a row whose values depend on the key.
  static std::vector<float> RowOf(Key key, int dim) {
    std::vector<float> row(static_cast<size_t>(dim));
    for (int i = 0; i < dim; ++i) {
      row[i] =
          static_cast<float>(key % 1000) / 7.0f - static_cast<float>(i) * 0.3f;
    }
    return row;
  }

  RowFileInfo Write(const RowFileKind& kind, const std::vector<Key>& keys,
                    const std::vector<Key>& removed = {}) {
    auto writer = RowFileWriter::Create(path_, kind).value();
    for (const Key key : keys) {
      EXPECT_TRUE(
          writer->Add(std::vector<Key>{key}, RowOf(key, kind.dim)).ok());
    }
    writer->Remove(removed);
    const auto info = writer->Finish();
    EXPECT_TRUE(info.ok()) << info.status();
    return *info;
  }

  std::shared_ptr<const RowFile> Open(const RowFileInfo& info) {
    auto file = RowFile::Open(path_, info);
    EXPECT_TRUE(file.ok()) << file.status();
    return file.ok() ? *file : nullptr;
  }

  // Returns the row of a key; empty if it has none.
  static std::vector<float> Read(const RowFile& file, Key key) {
    const auto found = file.FindVerified(key);
    EXPECT_TRUE(found.ok()) << found.status();
    if (!found.ok() || found->row == nullptr) return {};
    EXPECT_EQ(file.Find(key).row, found->row);
    std::vector<float> values(static_cast<size_t>(file.kind().dim));
    file.decoder()(found->row, file.kind().dim, values.data());
    return values;
  }

  void Flip(int64_t at) {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 0x10);
    file.seekp(at);
    file.put(byte);
  }

  std::string folder_;
  std::string path_;
};

TEST_F(RowFileTest, EveryKeyReadsAsItWasWritten) {
  std::mt19937_64 random(7);
  std::vector<Key> keys = {0, -1, std::numeric_limits<Key>::min(),
                           std::numeric_limits<Key>::max()};
  while (keys.size() < 5000) keys.push_back(static_cast<Key>(random()));
  for (const int dim : {1, 3, 16, 67}) {
    const RowFileInfo info = Write(Kind(RowFormat::kFloat32, dim), keys);
    EXPECT_EQ(info.num_rows, 5000);
    const auto file = Open(info);
    ASSERT_NE(file, nullptr);
    EXPECT_EQ(file->kind().table, "user/age");
    EXPECT_EQ(file->kind().default_row, std::vector<float>(dim, 0.25f));
    EXPECT_FALSE(file->is_verified());
    for (const Key key : keys) ASSERT_EQ(Read(*file, key), RowOf(key, dim));
    for (int i = 0; i < 1000; ++i) {
      ASSERT_EQ(Read(*file, static_cast<Key>(random() | 1)),
                std::vector<float>());
    }
    EXPECT_TRUE(file->Verify().ok());
    EXPECT_TRUE(file->is_verified());
  }
}

TEST_F(RowFileTest, OfAKeyTheLastWordCounts) {
  auto writer =
      RowFileWriter::Create(path_, Kind(RowFormat::kFloat32, 1)).value();
  const auto add = [&](Key key, float value) {
    ASSERT_TRUE(
        writer->Add(std::vector<Key>{key}, std::vector<float>{value}).ok());
  };
  add(1, 1.0f);
  add(1, 2.0f);
  add(2, 3.0f);
  writer->Remove(std::vector<Key>{2, 3});
  add(3, 4.0f);
  const RowFileInfo info = writer->Finish().value();
  EXPECT_EQ(info.num_rows, 2);
  EXPECT_EQ(info.num_removed, 1);
  const auto file = Open(info);
  EXPECT_EQ(Read(*file, 1), std::vector<float>{2.0f});
  EXPECT_TRUE(file->FindVerified(2).value().is_here);
  EXPECT_EQ(Read(*file, 2), std::vector<float>());
  EXPECT_EQ(Read(*file, 3), std::vector<float>{4.0f});
  EXPECT_FALSE(file->FindVerified(4).value().is_here);
}

TEST_F(RowFileTest, EachNumberOfKeysHasItsPlaces) {
  // Each size of a part has its own chances.
  for (Key num_keys = 1; num_keys < 300; ++num_keys) {
    std::vector<Key> keys(static_cast<size_t>(num_keys));
    std::iota(keys.begin(), keys.end(), -num_keys / 2);
    const auto file = Open(Write(Kind(RowFormat::kFloat32, 1), keys));
    ASSERT_EQ(file->num_rows(), num_keys);
    for (const Key key : keys) ASSERT_EQ(Read(*file, key), RowOf(key, 1));
    ASSERT_FALSE(file->FindVerified(num_keys).value().is_here);
    Key num_visited = 0;
    Key sum = 0;
    EXPECT_TRUE(file->ForEachKey([&](Key key, const char*) {
                      ++num_visited;
                      sum += key;
                      return absl::OkStatus();
                    })
                    .ok());
    ASSERT_EQ(num_visited, num_keys);
    ASSERT_EQ(sum, std::accumulate(keys.begin(), keys.end(), Key{0}));
  }
}

TEST_F(RowFileTest, ManyRowsHaveSeveralParts) {
  std::vector<Key> keys(250'000);
  std::iota(keys.begin(), keys.end(), Key{0});
  const auto file = Open(Write(Kind(RowFormat::kInt8, 3), keys, {-7}));
  EXPECT_EQ(file->view().hash.num_parts, 3);
  EXPECT_LT(file->view().num_slots, 260'000);
  ASSERT_TRUE(file->Verify().ok());
  for (const Key key : keys) {
    const RowFile::Found found = file->Find(key);
    ASSERT_TRUE(found.is_here) << key;
    float values[3];
    file->decoder()(found.row, 3, values);
    ASSERT_NEAR(values[0], static_cast<float>(key % 1000) / 7.0f, 0.6f);
  }
  EXPECT_TRUE(file->Find(-7).is_here);
  EXPECT_EQ(file->Find(-7).row, nullptr);
}

// A caller who knows the hash can choose ids that collide.
TEST_F(RowFileTest, KeysThatWereChosenToCollideHavePlaces) {
  // For each of many seeds that could be foreseen.
  std::vector<Key> keys;
  for (Key number = 0; number < 64; ++number) {
    PerfectHash seeded;
    seeded.seed = HashKey(number);
    for (uint64_t point = 0; point < 70; ++point) {
      // The inverse, modulo 2^64, of the multiplier in PointOf().
      keys.push_back(KeyOfHash(point * 0xf1de83e19937733dULL ^ seeded.seed));
      ASSERT_EQ(seeded.PointOf(HashKey(keys.back())), point);
    }
  }
  const auto file = Open(Write(Kind(RowFormat::kFloat32, 2), keys));
  EXPECT_NE(file->view().hash.seed, 0);
  for (const Key key : keys) ASSERT_EQ(Read(*file, key), RowOf(key, 2));
}

// So many in one part that all parts would be as large.
TEST_F(RowFileTest, KeysThatWereChosenForOnePartTakeNoMoreRoom) {
  PerfectHash unseeded;
  unseeded.num_parts = NumPerfectHashParts(200'000);
  std::vector<Key> keys;
  for (Key key = 0; keys.size() < 200'000; ++key) {
    if (unseeded.PartOf(unseeded.PointOf(HashKey(key))) == 0) {
      keys.push_back(key);
    }
  }
  const auto file = Open(Write(Kind(RowFormat::kFloat32, 1), keys));
  EXPECT_LT(file->view().num_slots, 210'000);
  for (size_t i = 0; i < keys.size(); i += 100) {
    ASSERT_EQ(Read(*file, keys[i]), RowOf(keys[i], 1));
  }
}

TEST_F(RowFileTest, KeysThatAreSaidTwiceTakeNoMoreRoom) {
  std::vector<Key> keys(60'000);
  std::iota(keys.begin(), keys.end(), Key{0});
  const RowFileKind kind = Kind(RowFormat::kFloat32, 1);
  const RowFileInfo info = Write(kind, keys);
  keys.insert(keys.end(), keys.begin(), keys.end());
  EXPECT_EQ(Write(kind, keys).header_checksum, info.header_checksum);
}

TEST_F(RowFileTest, RowsThatCannotBeKeptAreNotForgotten) {
  auto writer =
      RowFileWriter::Create(path_, Kind(RowFormat::kFloat32, 4096)).value();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = rlim_t{16} << 20;
  const auto ignored = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  absl::Status failed;
  for (Key key = 0; key < 4096 && failed.ok(); ++key) {
    failed = writer->Add(std::vector<Key>{key}, RowOf(key, 4096));
  }
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, ignored);
  EXPECT_FALSE(failed.ok());
  EXPECT_EQ(writer->Add(std::vector<Key>{1}, RowOf(1, 4096)), failed);
  EXPECT_EQ(writer->Finish().status(), failed);
}

TEST_F(RowFileTest, AManifestThatCountsMoreKeysThanThereIsRoomForIsRefused) {
  RowFileInfo info = Write(Kind(RowFormat::kFloat32, 1), {1, 2, 3});
  for (const int64_t lie : {int64_t{-1}, int64_t{1} << 60}) {
    RowFileInfo wrong = info;
    wrong.num_removed = lie;
    EXPECT_EQ(RowFile::Open(path_, wrong).status().code(),
              absl::StatusCode::kDataLoss);
  }
}

TEST_F(RowFileTest, TheOrderOfRowsDoesNotMatter) {
  std::vector<Key> keys(5000);
  std::iota(keys.begin(), keys.end(), Key{-100});
  const RowFileKind kind = Kind(RowFormat::kFloat16, 5);
  const RowFileInfo info = Write(kind, keys, {7000, 8000});
  std::shuffle(keys.begin(), keys.end(), std::mt19937(9));
  EXPECT_EQ(Write(kind, keys, {8000, 7000}).header_checksum,
            info.header_checksum);
}

TEST_F(RowFileTest, RowsOfALargeFileWaitWithoutAName) {
  auto writer =
      RowFileWriter::Create(path_, Kind(RowFormat::kFloat32, 4096)).value();
  // 64 MiB.
  for (Key key = 0; key < 4096; ++key) {
    ASSERT_TRUE(writer->Add(std::vector<Key>{key}, RowOf(key, 4096)).ok());
  }
  const auto num_files = [this] {
    return std::distance(std::filesystem::directory_iterator(folder_), {});
  };
  // The new one, and one that is nowhere.
  EXPECT_EQ(num_files(), 1);
  int num_open = 0;
  const std::string prefix = std::filesystem::canonical(folder_).string() + "/";
  for (const auto& file :
       std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string to = std::filesystem::read_symlink(file, gone).string();
    num_open += static_cast<int>(to.rfind(prefix, 0) == 0);
  }
  EXPECT_EQ(num_open, 2);
  const auto file = Open(writer->Finish().value());
  EXPECT_EQ(num_files(), 1);
  for (Key key = 0; key < 4096; ++key) {
    ASSERT_EQ(Read(*file, key), RowOf(key, 4096));
  }
}

TEST_F(RowFileTest, AnEmptyFileHasNoKeys) {
  const auto file = Open(Write(Kind(RowFormat::kInt8, 5), {}));
  ASSERT_NE(file, nullptr);
  EXPECT_EQ(file->num_rows(), 0);
  EXPECT_EQ(Read(*file, 0), std::vector<float>());
  EXPECT_TRUE(file->Verify().ok());
}

TEST_F(RowFileTest, FormatsKeepTheirErrors) {
  const std::vector<float> row = {1.0f, -0.3f, 127.25f, 1e-3f, 0.0f, -127.0f};
  for (const RowFormat format :
       {RowFormat::kFloat32, RowFormat::kFloat16, RowFormat::kInt8}) {
    auto writer = RowFileWriter::Create(path_, Kind(format, 6)).value();
    ASSERT_TRUE(writer->Add(std::vector<Key>{5}, row).ok());
    const auto file = Open(writer->Finish().value());
    const std::vector<float> read = Read(*file, 5);
    for (size_t i = 0; i < row.size(); ++i) {
      float bound = 0.0f;
      if (format == RowFormat::kFloat16) bound = std::abs(row[i]) * 0x1p-11f;
      if (format == RowFormat::kInt8) bound = 127.25f / 127.0f / 2 * 1.0001f;
      EXPECT_NEAR(read[i], row[i], bound) << NameOf(format) << " " << i;
    }
  }
}

TEST_F(RowFileTest, Int8HasRoomForZerosAndSmallNumbers) {
  for (const float value : {0.0f, 1e-44f, 3e38f}) {
    auto writer =
        RowFileWriter::Create(path_, Kind(RowFormat::kInt8, 2)).value();
    ASSERT_TRUE(
        writer->Add(std::vector<Key>{5}, std::vector<float>{value, 0.0f}).ok());
    const std::vector<float> read = Read(*Open(writer->Finish().value()), 5);
    EXPECT_NEAR(read[0], value, value > 1.0f ? value * 1e-6f : 1e-43f);
    EXPECT_EQ(read[1], 0.0f);
  }
}

TEST_F(RowFileTest, Int8RefusesWhatItCannotHold) {
  for (const float value : {std::numeric_limits<float>::quiet_NaN(),
                            -std::numeric_limits<float>::infinity()}) {
    auto writer =
        RowFileWriter::Create(path_, Kind(RowFormat::kInt8, 2)).value();
    const absl::Status refused =
        writer->Add(std::vector<Key>{5}, std::vector<float>{1.0f, value});
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()),
                AllOf(HasSubstr("'user/age'"), HasSubstr("id 5"),
                      HasSubstr("export float32")));
  }
}

TEST_F(RowFileTest, AFilterHasAllKeysAndFewOthers) {
  std::vector<Key> keys(20'000);
  std::iota(keys.begin(), keys.end(), Key{-10'000});
  const auto file = Open(Write(Kind(RowFormat::kFloat32, 1), keys, {50'000}));
  EXPECT_EQ(file->filter(), nullptr);
  ASSERT_TRUE(file->Verify().ok());
  file->BuildFilter();
  const KeyFilter* const filter = file->filter();
  ASSERT_NE(filter, nullptr);
  const auto may_have = [&](Key key) {
    const uint64_t hash = HashKey(key);
    return KeyFilter::MayHave(*filter->Word(hash), hash);
  };
  keys.push_back(50'000);
  for (const Key key : keys) ASSERT_TRUE(may_have(key)) << key;
  int num_others = 0;
  for (Key key = 100'000; key < 200'000; ++key) num_others += may_have(key);
  EXPECT_LT(num_others, 3000);
}

TEST_F(RowFileTest, VerifyingEndsWhenItIsCancelled) {
  std::vector<Key> keys(500);
  std::iota(keys.begin(), keys.end(), Key{0});
  const auto file = Open(Write(Kind(RowFormat::kFloat32, 4), keys));
  EXPECT_TRUE(absl::IsCancelled(file->Verify([] { return true; })));
  EXPECT_FALSE(file->is_verified());
  EXPECT_TRUE(file->Verify([] { return false; }).ok());
}

TEST_F(RowFileTest, InstructionSetsDecodeTheSameBits) {
  std::mt19937 random(3);
  for (const RowFormat format :
       {RowFormat::kFloat32, RowFormat::kFloat16, RowFormat::kInt8}) {
    for (int dim = 1; dim <= 67; ++dim) {
      std::vector<float> row(static_cast<size_t>(dim));
      for (float& value : row) {
        value = static_cast<float>(static_cast<int32_t>(random())) * 1e-9f;
      }
      std::vector<char> bytes(RowBytes(format, dim));
      EncodeRow(format, row.data(), dim, bytes.data());
      std::vector<float> scalar_row(row.size());
      std::vector<float> active_row(row.size());
      scalar::FindRowDecoder(format)(bytes.data(), dim, scalar_row.data());
      FindRowDecoder(format)(bytes.data(), dim, active_row.data());
      ASSERT_EQ(scalar_row, active_row);
    }
  }
}

TEST_F(RowFileTest, InstructionSetsDecodeTheSameHalves) {
  std::vector<uint16_t> halves;
  for (uint32_t half = 0; half < 0x10000; ++half) {
    const uint32_t magnitude = half & 0x7fff;
    // Signalling NaN, which no row has.
    if (magnitude > 0x7c00 && magnitude < 0x7e00) continue;
    halves.push_back(static_cast<uint16_t>(half));
  }
  const auto* const bytes = reinterpret_cast<const char*>(halves.data());
  const int dim = static_cast<int>(halves.size());
  std::vector<float> scalar_row(halves.size());
  std::vector<float> active_row(halves.size());
  scalar::FindRowDecoder(RowFormat::kFloat16)(bytes, dim, scalar_row.data());
  FindRowDecoder(RowFormat::kFloat16)(bytes, dim, active_row.data());
  EXPECT_EQ(std::memcmp(scalar_row.data(), active_row.data(),
                        halves.size() * sizeof(float)),
            0);
}

TEST_F(RowFileTest, AFileThatIsNotWholeIsRefused) {
  const RowFileInfo info = Write(Kind(RowFormat::kFloat32, 4), {1, 2, 3});
  std::filesystem::resize_file(path_, static_cast<size_t>(info.bytes) - 1);
  const absl::Status cut = RowFile::Open(path_, info).status();
  EXPECT_EQ(cut.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(cut.message()),
              AllOf(HasSubstr(path_), HasSubstr(absl::StrCat(info.bytes)),
                    HasSubstr("export the table again")));
  std::filesystem::remove(path_);
  EXPECT_EQ(RowFile::Open(path_, info).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_EQ(mkfifo(path_.c_str(), 0600), 0);  // Its opening holds nobody.
  EXPECT_EQ(RowFile::Open(path_, info).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(RowFileTest, NoFlippedBitGoesUnnoticed) {
  std::vector<Key> keys;
  for (Key key = 0; key < 400; ++key) keys.push_back(key);
  const RowFileInfo info = Write(Kind(RowFormat::kFloat32, 8), keys);
  for (int64_t at = 0; at < info.bytes; at += 97) {
    Flip(at);
    auto file = RowFile::Open(path_, info);
    if (at < static_cast<int64_t>(kRowFileHeaderBytes)) {
      EXPECT_EQ(file.status().code(), absl::StatusCode::kDataLoss) << at;
    } else if (file.ok()) {
      const absl::Status damaged = (*file)->Verify();
      EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss) << at;
      EXPECT_THAT(std::string(damaged.message()), HasSubstr(path_));
      // A row that is read is right, or refused.
      for (const Key key : keys) {
        const auto found = (*file)->FindVerified(key);
        if (!found.ok()) continue;
        ASSERT_TRUE(found->is_here) << key;
        std::vector<float> values(8);
        (*file)->decoder()(found->row, 8, values.data());
        ASSERT_EQ(values, RowOf(key, 8));
      }
    }
    // A writer would wait for the lease of an open file.
    if (file.ok()) file->reset();
    Flip(at);
  }
  EXPECT_TRUE(Open(info)->Verify().ok());
}

TEST_F(RowFileTest, AFileThatNoThreadCanWatchIsRefusedUntilOneCan) {
  const RowFileInfo info = Write(Kind(RowFormat::kFloat32, 2), {1});
  // In a process that has no such thread yet.
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_EXIT(
      {
        pthread_attr_t before;
        pthread_getattr_default_np(&before);
        pthread_attr_t endless = before;
        pthread_attr_setstacksize(&endless, size_t{1} << 50);
        pthread_setattr_default_np(&endless);
        std::cerr << RowFile::Open(path_, info).status();
        pthread_setattr_default_np(&before);
        std::_Exit(RowFile::Open(path_, info).ok() ? 0 : 1);
      },
      testing::ExitedWithCode(0),
      "RESOURCE_EXHAUSTED: cannot start the thread .*`ulimit -u`");
}

TEST_F(RowFileTest, AFileInMemoryIsOneToo) {
  const int fd = memfd_create("rows", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  const auto writer =
      RowFileWriter::WriteTo(fd, "memory", Kind(RowFormat::kFloat16, 4));
  ASSERT_TRUE(writer->Add(std::vector<Key>{8}, RowOf(8, 4)).ok());
  const RowFileInfo info = writer->Finish().value();
  const auto file = RowFile::Map(fd, "memory", info);
  const auto copy = RowFile::Copy(fd, "memory", info);
  close(fd);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(copy.ok()) << copy.status();
  EXPECT_EQ(Read(**file, 8).size(), 4);
  EXPECT_EQ(Read(**copy, 8), Read(**file, 8));
}

TEST_F(RowFileTest, WithoutFinishThereIsNoFile) {
  {
    const auto writer =
        RowFileWriter::Create(path_, Kind(RowFormat::kFloat32, 4)).value();
    EXPECT_EQ(writer->Add(std::vector<Key>{1}, std::vector<float>(3)).code(),
              absl::StatusCode::kInvalidArgument);
  }
  EXPECT_FALSE(std::filesystem::exists(path_));
}

}  // namespace
}  // namespace tfswitch
