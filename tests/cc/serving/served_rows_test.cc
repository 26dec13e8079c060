#include "cc/serving/served_rows.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/serving/export_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kDim = 4;

class ServedRowsTest : public testing::Test {
 protected:
  ServedRowsTest() {
    std::string pattern = testing::TempDir() + "/served_rowsXXXXXX";
    root_ = mkdtemp(pattern.data());
    path_ = root_ + "/exports";
    options_.path = path_;
    options_.tables = {{"t", kDim}};
  }
  ~ServedRowsTest() override {
    std::error_code error;
    std::filesystem::remove_all(root_, error);
  }

  static RowFileKind Kind(const std::string& table = "t") {
    RowFileKind kind;
    kind.table = table;
    kind.dim = kDim;
    kind.default_row.assign(kDim, -1.0f);
    return kind;
  }

  // Publishes rows whose values are all the same.
  void Export(bool is_delta, const std::map<Key, float>& rows,
              const std::vector<Key>& removed = {}) {
    auto writer = ExportWriter::Begin(path_, is_delta);
    ASSERT_TRUE(writer.ok()) << writer.status();
    auto file = (*writer)->AddTable(Kind());
    ASSERT_TRUE(file.ok()) << file.status();
    for (const auto& [key, value] : rows) {
      ASSERT_TRUE(
          (*file)
              ->Add(std::vector<Key>{key}, std::vector<float>(kDim, value))
              .ok());
    }
    (*file)->Remove(removed);
    const auto info = (*file)->Finish();
    ASSERT_TRUE(info.ok()) << info.status();
    (*writer)->FinishTable("t", *info, {{7, 8}});
    const absl::Status published = (*writer)->Publish();
    ASSERT_TRUE(published.ok()) << published;
  }
  void Base(const std::map<Key, float>& rows) { Export(false, rows); }
  void Delta(const std::map<Key, float>& rows,
             const std::vector<Key>& removed = {}) {
    Export(true, rows, removed);
  }

  std::shared_ptr<ServedRows> Open() {
    auto rows = ServedRows::Open(options_);
    EXPECT_TRUE(rows.ok()) << rows.status();
    return rows.ok() ? *rows : nullptr;
  }

  // The first value of each key's row.
  static std::vector<float> Read(const RowSnapshot& snapshot,
                                 const std::vector<Key>& keys) {
    std::vector<float> rows(keys.size() * kDim);
    const absl::Status status = snapshot.tables()[0].Lookup(keys, rows.data());
    EXPECT_TRUE(status.ok()) << status;
    std::vector<float> values;
    for (size_t i = 0; i < keys.size(); ++i) values.push_back(rows[i * kDim]);
    return values;
  }
  static std::vector<float> Read(const ServedRows& rows,
                                 const std::vector<Key>& keys) {
    return Read(*rows.Pin(), keys);
  }

  // Whether it does, before a test would be given up.
  static bool ComesTrue(const std::function<bool()>& condition) {
    const absl::Time give_up = absl::Now() + absl::Seconds(30);
    while (!condition() && absl::Now() < give_up) {
      absl::SleepFor(absl::Milliseconds(1));
    }
    return condition();
  }

  std::string FileOf(const std::string& name) const {
    return absl::StrCat(path_, "/", name, "/t.safetensors");
  }

  static void FlipByte(const std::string& path, int64_t at) {
    std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(at);
    const char byte = static_cast<char>(file.get() ^ 1);
    file.seekp(at);
    file.put(byte);
    ASSERT_TRUE(file.good());
  }

  std::string root_;
  std::string path_;
  ServedRowsOptions options_;
};

TEST_F(ServedRowsTest, ServesABaseAndTheDeltasAfterIt) {
  Base({{1, 1.0f}, {2, 2.0f}, {3, 3.0f}});
  Delta({{2, 2.5f}, {4, 4.0f}}, {3});
  const auto rows = Open();
  EXPECT_THAT(Read(*rows, {1, 2, 3, 4, 5}),
              ElementsAre(1.0f, 2.5f, -1.0f, 4.0f, -1.0f));
  EXPECT_EQ(rows->state().number, 2);
  EXPECT_EQ(rows->state().base_number, 1);

  const auto before = rows->Pin();
  Delta({{3, 3.5f}}, {1});
  ASSERT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1, 2, 3}), ElementsAre(-1.0f, 2.5f, 3.5f));
  // Who has pinned the former rows still reads those.
  EXPECT_THAT(Read(*before, {1, 2, 3}), ElementsAre(1.0f, 2.5f, -1.0f));

  Base({{9, 9.0f}});
  Delta({{10, 10.0f}});
  ASSERT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {2, 9, 10}), ElementsAre(-1.0f, 9.0f, 10.0f));
  EXPECT_EQ(rows->state().base_number, 4);
}

TEST_F(ServedRowsTest, ManyDeltasStayFewFiles) {
  Base({{0, 0.0f}});
  const auto rows = Open();
  for (int i = 1; i <= 100; ++i) {
    Delta({{i, static_cast<float>(i)}, {0, static_cast<float>(i)}},
          i > 50 ? std::vector<Key>{i - 50} : std::vector<Key>{});
    ASSERT_TRUE(rows->Refresh().ok());
    ASSERT_EQ(rows->state().number, i + 1);
  }
  EXPECT_LE(rows->Pin()->tables()[0].files.size(), 8);
  EXPECT_THAT(Read(*rows, {0, 1, 50, 51, 100}),
              ElementsAre(100.0f, -1.0f, -1.0f, 51.0f, 100.0f));
  // The same for who comes later.
  const auto later = Open();
  EXPECT_LE(later->Pin()->tables()[0].files.size(), 8);
  EXPECT_THAT(Read(*later, {0, 1, 50, 51, 100}),
              ElementsAre(100.0f, -1.0f, -1.0f, 51.0f, 100.0f));
}

TEST_F(ServedRowsTest, AGapIsNotedAndEndsWithTheNextBase) {
  Base({{1, 1.0f}});
  Delta({{1, 2.0f}});
  Delta({{1, 3.0f}});
  const auto rows = Open();
  Delta({{1, 4.0f}});
  Delta({{1, 5.0f}});
  std::filesystem::rename(path_ + "/delta-00000004", root_ + "/away");
  const absl::Status gap = rows->Refresh();
  EXPECT_EQ(gap.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(gap.message()),
              AllOf(HasSubstr("delta-00000005"), HasSubstr("number 3"),
                    HasSubstr("Publish a new base")));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(3.0f));
  EXPECT_EQ(rows->state().error, gap);
  EXPECT_EQ(rows->state().num_refused, 1);
  // Who comes now gets as far as can be.
  EXPECT_EQ(Open()->state().number, 3);

  std::filesystem::rename(root_ + "/away", path_ + "/delta-00000004");
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(5.0f));
  Base({{1, 6.0f}});
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(6.0f));
  EXPECT_TRUE(rows->state().error.ok());
}

TEST_F(ServedRowsTest, ADeltaOfAnotherBaseIsRefused) {
  Base({{1, 1.0f}});
  const auto rows = Open();
  Delta({{1, 2.0f}});
  std::filesystem::rename(path_, root_ + "/first");
  Base({{1, 7.0f}});
  Delta({{1, 8.0f}});
  std::filesystem::remove_all(root_ + "/first/delta-00000002");
  std::filesystem::rename(path_ + "/delta-00000002",
                          root_ + "/first/delta-00000002");
  std::filesystem::remove_all(path_);
  std::filesystem::rename(root_ + "/first", path_);
  EXPECT_THAT(std::string(rows->Refresh().message()),
              HasSubstr("of another base"));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));
  EXPECT_EQ(Open()->state().number, 1);
}

TEST_F(ServedRowsTest, DamagedFilesAreRefusedAndTheRunningOnesStay) {
  Base({{1, 1.0f}});
  const auto rows = Open();
  Delta({{1, 2.0f}});
  FlipByte(FileOf("delta-00000002"), 4200);
  const absl::Status damaged = rows->Refresh();
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(damaged.message()),
              HasSubstr(FileOf("delta-00000002")));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));

  Base({{1, 3.0f}});
  FlipByte(FileOf("base-00000003"), 4200);
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));
  // Who starts now has an older base, if all is checked.
  options_.verify_first = true;
  const auto later = Open();
  EXPECT_EQ(later->state().number, 1);
  EXPECT_EQ(later->state().error.code(), absl::StatusCode::kDataLoss);

  Base({{1, 4.0f}});
  FlipByte(path_ + "/base-00000004/manifest.json", 30);
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  Base({{1, 5.0f}});
  std::filesystem::resize_file(FileOf("base-00000005"), 5000);
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  Base({{1, 6.0f}});
  std::filesystem::remove(FileOf("base-00000006"));
  EXPECT_THAT(std::string(rows->Refresh().message()),
              HasSubstr(FileOf("base-00000006")));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));
}

TEST_F(ServedRowsTest, WithoutCheckingADamagedRowIsRefusedWhenItIsRead) {
  std::map<Key, float> all;
  for (Key key = 0; key < 3000; ++key) all[key] = 1.0f;
  Base(all);
  // Some blocks behind the header: it has rows, and other blocks have others.
  FlipByte(FileOf("base-00000001"), 4096 + 64 + 999 * 16);
  const auto rows = Open();
  ASSERT_NE(rows, nullptr);
  const auto snapshot = rows->Pin();
  int num_refused = 0;
  for (const auto& [key, value] : all) {
    std::vector<float> row(kDim);
    const absl::Status status =
        snapshot->tables()[0].Lookup(std::vector<Key>{key}, row.data());
    if (status.ok()) {
      ASSERT_EQ(row[0], value) << key;
    } else {
      ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss);
      ++num_refused;
    }
  }
  EXPECT_GT(num_refused, 0);
  EXPECT_LT(num_refused, 1000);
}

TEST_F(ServedRowsTest, DamageThatIsFoundLaterEndsWithAnOlderBase) {
  std::map<Key, float> all;
  for (Key key = 0; key < 3000; ++key) all[key] = 1.0f;
  Base(all);
  Delta({{7, 2.0f}});
  Base(all);
  const std::string path = FileOf("base-00000003");
  std::filesystem::copy_file(path, root_ + "/whole");
  FlipByte(path, 4096 + 64 + 999 * 16);
  const auto rows = Open();
  EXPECT_TRUE(ComesTrue([&] { return rows->state().number == 2; }));
  EXPECT_THAT(Read(*rows, {7, 999}), ElementsAre(2.0f, 1.0f));
  EXPECT_EQ(rows->state().error.code(), absl::StatusCode::kDataLoss);
  const int64_t num_refused = rows->state().num_refused;
  // Looking again changes nothing, until the file is whole.
  EXPECT_THAT(std::string(rows->Refresh().message()), HasSubstr(path));
  EXPECT_EQ(rows->state().number, 2);
  EXPECT_EQ(rows->state().num_refused, num_refused);
  std::filesystem::rename(root_ + "/whole", path);
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_EQ(rows->state().number, 3);
  EXPECT_TRUE(rows->state().error.ok());
}

TEST_F(ServedRowsTest, TheOnlyBaseIsServedAsFarAsItIsWholeAndMendedByACopy) {
  std::map<Key, float> all;
  for (Key key = 0; key < 3000; ++key) all[key] = 1.0f;
  Base(all);
  const std::string path = FileOf("base-00000001");
  std::filesystem::copy_file(path, root_ + "/whole");
  FlipByte(path, 4096 + 64 + 999 * 16);
  const auto rows = Open();
  EXPECT_TRUE(ComesTrue([&] { return !rows->state().error.ok(); }));
  Delta({{7, 2.0f}});
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(rows->state().number, 2);
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Read(*rows, {0, 7}), ElementsAre(1.0f, 2.0f));
  std::filesystem::rename(root_ + "/whole", path);
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {7, 999}), ElementsAre(2.0f, 1.0f));
}

TEST_F(ServedRowsTest, AFileThatIsWrittenToIsRefusedUntilItIsWholeAgain) {
  Base({{1, 1.0f}});
  const std::string path = FileOf("base-00000001");
  const auto rows = Open();
  const auto lookup = [&rows] {
    std::vector<float> row(kDim);
    return rows->Pin()->tables()[0].Lookup(std::vector<Key>{1}, row.data());
  };
  ASSERT_TRUE(lookup().ok());
  FlipByte(path, 4200);
  EXPECT_TRUE(ComesTrue([&] { return !lookup().ok(); }));
  EXPECT_EQ(lookup().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(lookup().message()), HasSubstr(path));
  // Rows that follow it do not hide that.
  Delta({{2, 2.0f}});
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(lookup().code(), absl::StatusCode::kDataLoss);
  FlipByte(path, 4200);
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1, 2}), ElementsAre(1.0f, 2.0f));
}

TEST_F(ServedRowsTest, AFileThatIsOpenForWritingIsNotTakenBack) {
  Base({{1, 1.0f}});
  const auto rows = Open();
  {
    const std::ofstream writer(FileOf("base-00000001"), std::ios::app);
    const auto fails = [&rows] {
      return rows->Pin()->tables()[0].CheckUnchanged().code() ==
             absl::StatusCode::kDataLoss;
    };
    if (!ComesTrue(fails)) GTEST_SKIP() << "no leases here";
    EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kDataLoss);
  }
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));
}

TEST_F(ServedRowsTest, AWholeCopyIsNotTakenForTheDamagedFileThatItReplaced) {
  std::map<Key, float> all;
  for (Key key = 0; key < 3000; ++key) all[key] = 1.0f;
  Base(all);
  const std::string path = FileOf("base-00000001");
  std::filesystem::copy_file(path, root_ + "/whole");
  FlipByte(path, 4096 + 64 + 999 * 16);
  // The damaged file is open. Its path has the undamaged one before the next
  // read.
  const auto rows = Open();
  std::filesystem::rename(root_ + "/whole", path);
  EXPECT_TRUE(ComesTrue([&] {
    return !rows->state().error.ok() ||
           rows->Pin()->tables()[0].files[0]->is_verified();
  }));
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {999}), ElementsAre(1.0f));
  EXPECT_TRUE(rows->RollBack(1).ok());
}

TEST_F(ServedRowsTest, AFileThatHappensToHaveTheNameOfAnExportIsNone) {
  Base({{1, 1.0f}});
  std::ofstream(path_ + "/base-00000002") << "no folder";
  EXPECT_EQ(Open()->state().number, 1);
  EXPECT_TRUE(Open()->state().error.ok());
}

TEST_F(ServedRowsTest, RollsBackAndGoesOn) {
  Base({{1, 1.0f}});
  Delta({{1, 2.0f}});
  Base({{1, 3.0f}});
  Delta({{1, 4.0f}});
  const auto rows = Open();
  ASSERT_TRUE(rows->RollBack(2).ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
  Delta({{1, 5.0f}});
  ASSERT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
  EXPECT_TRUE(rows->state().is_held);
  const absl::Status none = rows->RollBack(17);
  EXPECT_EQ(none.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(none.message()), HasSubstr("17"));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
  ASSERT_TRUE(rows->Resume().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(5.0f));
  EXPECT_FALSE(rows->state().is_held);
}

TEST_F(ServedRowsTest, WhatTheModelLooksUpMustBeThere) {
  EXPECT_EQ(ServedRows::Open(options_).status().code(),
            absl::StatusCode::kNotFound);
  Base({{1, 1.0f}});
  options_.tables = {{"t", kDim + 1}};
  EXPECT_THAT(std::string(ServedRows::Open(options_).status().message()),
              HasSubstr("dim 5"));
  options_.tables = {{"u", kDim}};
  const absl::Status missing = ServedRows::Open(options_).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.message()),
              AllOf(HasSubstr("'u'"), HasSubstr("it has: t")));
}

TEST_F(ServedRowsTest, AWatchServesWhatAppears) {
  Base({{1, 1.0f}});
  const auto rows = Open();
  rows->Watch(absl::Milliseconds(5));
  Delta({{1, 2.0f}});
  EXPECT_TRUE(ComesTrue([&] { return rows->state().number == 2; }));
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
}

TEST_F(ServedRowsTest, ReadersNeverSeeHalfADelta) {
  std::map<Key, float> rows;
  std::vector<Key> keys;
  for (Key key = 0; key < 500; ++key) {
    keys.push_back(key);
    rows[key] = 0.0f;
  }
  Base(rows);
  const auto served = Open();
  std::atomic<bool> is_over{false};
  std::atomic<int64_t> num_reads{0};
  std::vector<std::thread> readers;
  for (int t = 0; t < 2; ++t) {
    readers.emplace_back([&] {
      float last = 0.0f;
      while (!is_over) {
        const std::vector<float> values = Read(*served, keys);
        ASSERT_EQ(std::count(values.begin(), values.end(), values[0]), 500);
        ASSERT_GE(values[0], last);
        last = values[0];
        ++num_reads;
      }
    });
  }
  for (int i = 1; i <= 20; ++i) {
    for (auto& [key, value] : rows) value = static_cast<float>(i);
    Export(/*is_delta=*/i % 7 != 0, rows);
    EXPECT_TRUE(served->Refresh().ok());
  }
  is_over = true;
  for (std::thread& reader : readers) reader.join();
  EXPECT_GT(num_reads, 0);
  EXPECT_THAT(Read(*served, {499}), ElementsAre(20.0f));
}

TEST_F(ServedRowsTest, OneProcessAtATimeExports) {
  Base({{1, 1.0f}});
  const auto first = ExportWriter::Begin(path_, true).value();
  const absl::Status second = ExportWriter::Begin(path_, true).status();
  EXPECT_EQ(second.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(second.message()),
              AllOf(HasSubstr("another process writes to"), HasSubstr(path_)));
}

TEST_F(ServedRowsTest, ANumberThatComesAgainIsNotTakenForTheServedOne) {
  Base({{1, 1.0f}});
  const auto rows = Open();
  std::filesystem::remove_all(path_);
  Base({{1, 2.0f}});
  EXPECT_EQ(rows->Refresh().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(1.0f));
}

TEST_F(ServedRowsTest, ADeltaNeedsABase) {
  EXPECT_THAT(std::string(ExportWriter::Begin(path_, true).status().message()),
              HasSubstr("Export a base first"));
  EXPECT_THAT(ListExports(path_).value(), ElementsAre());
}

TEST_F(ServedRowsTest, AProcessThatDiesWhileItExportsLeavesTheFormerOnes) {
  Base({{1, 1.0f}});
  const pid_t child = fork();
  if (child == 0) {
    auto writer = ExportWriter::Begin(path_, true).value();
    auto file = writer->AddTable(Kind()).value();
    std::vector<float> row(kDim, 9.0f);
    for (Key key = 0; key < 100000; ++key) {
      file->Add({&key, 1}, row).IgnoreError();
    }
    _exit(9);  // As if killed: no destructor runs.
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_EQ(WEXITSTATUS(status), 9);
  EXPECT_EQ(ListExports(path_).value().size(), 1);
  const auto rows = Open();
  Delta({{1, 2.0f}});
  EXPECT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
  // The remains have been removed.
  int num_hidden = 0;
  for (const auto& entry : std::filesystem::directory_iterator(path_)) {
    if (entry.path().filename().string().rfind(".writing", 0) == 0) {
      ++num_hidden;
    }
  }
  EXPECT_EQ(num_hidden, 0);
}

TEST_F(ServedRowsTest, OldExportsGoAndTheServedRowsStay) {
  Base({{1, 1.0f}});
  Delta({{1, 2.0f}});
  const auto rows = Open();
  Base({{1, 3.0f}});
  Delta({{1, 4.0f}});
  Base({{1, 5.0f}});
  ASSERT_TRUE(RemoveOldExports(path_, 2).ok());
  const std::vector<ExportName> left = ListExports(path_).value();
  ASSERT_EQ(left.size(), 3);
  EXPECT_EQ(left[0].ToString(), "base-00000003");
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(2.0f));
  ASSERT_TRUE(rows->Refresh().ok());
  EXPECT_THAT(Read(*rows, {1}), ElementsAre(5.0f));
}

}  // namespace
}  // namespace tfswitch
