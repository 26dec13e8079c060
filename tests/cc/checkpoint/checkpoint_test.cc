#include "cc/checkpoint/checkpoint.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/time.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/wire/json.h"
#include "cc/wire/table_config_conversion.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/snapshots.h"

namespace tfswitch::checkpoint {
namespace {

using testing::AllOf;
using testing::HasSubstr;

absl::Status Never() { return absl::OkStatus(); }

class CheckpointTest : public testing::Test {
 protected:
  CheckpointTest() {
    std::string pattern = testing::TempDir() + "/checkpointXXXXXX";
    path_ = mkdtemp(pattern.data());
  }
  ~CheckpointTest() override {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  static std::unique_ptr<EmbeddingTable> MakeTable(const std::string& name,
                                                   int rows) {
    TableConfig config;
    config.name = name;
    config.dim = 4;
    config.optimizer = AdagradConfig{};
    auto table = EmbeddingTable::Create(config).value();
    std::vector<Key> keys(rows);
    for (int i = 0; i < rows; ++i) keys[i] = i - 5;
    std::vector<float> out(rows * 4);
    EXPECT_TRUE(table->FindOrInsert(keys, absl::MakeSpan(out)).ok());
    return table;
  }

  void Save(EmbeddingTable& table, const std::string& save_id,
            bool all_tables = true, const CommitOptions& options = {}) {
    PartWriter writer(path_, save_id, 0, 1, all_tables, Never);
    ASSERT_TRUE(AddTable(table, writer).ok());
    const auto number = Commit(path_, save_id, {writer.Finish()}, options);
    ASSERT_TRUE(number.ok()) << number.status();
  }

  std::string ManifestText() const {
    std::ifstream stream(path_ + "/manifest.json");
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  // Reads a manifest that has `text` as its contents.
  absl::Status ReadManifestText(const std::string& text) const {
    std::ofstream(path_ + "/manifest.json") << text;
    return ReadManifest(path_).status();
  }

  // The file of table "user".
  static v1::CheckpointFile* FileOf(v1::CheckpointManifest& manifest) {
    return (*manifest.mutable_tables())["user"].mutable_files(0);
  }

  int CountRowFiles() const {
    int count = 0;
    for (const auto& entry :
         std::filesystem::recursive_directory_iterator(path_)) {
      if (entry.path().extension() == ".safetensors") ++count;
    }
    return count;
  }

  std::string path_;
};

TEST_F(CheckpointTest, ManifestKeepsTheConfig) {
  const auto table = MakeTable("user", 10);
  Save(*table, "s1");

  const auto manifest = ReadManifest(path_);

  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ASSERT_EQ(manifest->tables().count("user"), 1u);
  EXPECT_EQ(FromProto(manifest->tables().at("user").config()), table->config());
  EXPECT_EQ(manifest->tables().at("user").slot_floats(), 4);
}

TEST_F(CheckpointTest, NoCommitNoCheckpoint) {
  const auto table = MakeTable("user", 10);
  PartWriter writer(path_, "s1", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*table, writer).ok());

  EXPECT_EQ(ReadManifest(path_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, SavesBeyondThoseToKeepGoWithTheirFiles) {
  const auto table = MakeTable("user", 10);
  for (int i = 1; i <= 4; ++i) Save(*table, absl::StrCat("s", i));

  EXPECT_EQ(ReadManifest(path_)->save_id(), "s4");
  EXPECT_EQ(ReadManifest(path_)->save(), 4);
  EXPECT_EQ(ReadManifest(path_, 3)->save_id(), "s3");
  EXPECT_EQ(ReadManifest(path_, 0, 1)->save_id(), "s3");
  const absl::Status gone = ReadManifest(path_, 2).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(gone.message(), HasSubstr("has no save 2; it has: 4, 3"));
  EXPECT_EQ(ReadManifest(path_, 0, 2).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(CountRowFiles(), 2);
  auto loaded = MakeTable("user", 0);
  ASSERT_TRUE(LoadTable(path_, ReadManifest(path_, 3)->tables().at("user"), 0,
                        1, Never, *loaded)
                  .ok());
  EXPECT_EQ(loaded->size(), 10);

  Save(*table, "s5", true, {1, {}});
  EXPECT_EQ(CountRowFiles(), 1);
}

TEST_F(CheckpointTest, OldSavesThatCannotBeRemovedAreNamed) {
  const auto table = MakeTable("user", 10);
  for (int i = 1; i <= 2; ++i) Save(*table, absl::StrCat("s", i));
  std::ofstream(path_ + "/manifest-000001.json") << "{";

  testing::internal::CaptureStderr();
  Save(*table, "s3");
  LogWriter::Get().Flush(absl::Minutes(1));
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      AllOf(HasSubstr("old saves stay in"), HasSubstr("manifest-000001.json")));
  EXPECT_EQ(ReadManifest(path_)->save(), 3);
}

TEST_F(CheckpointTest, AfterTheLastNumberThereIsNoSave) {
  Save(*MakeTable("user", 10), "s1");
  const std::string last = absl::StrReplaceAll(
      ManifestText(), {{"\"save\": \"1\"", "\"save\": \"1000000000000\""}});
  ASSERT_TRUE(ReadManifestText(last).ok());
  PartWriter writer(path_, "s2", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());

  EXPECT_THAT(Commit(path_, "s2", {writer.Finish()}, {}).status().message(),
              HasSubstr("no number after save 1000000000000"));
  EXPECT_EQ(ReadManifest(path_)->save_id(), "s1");
}

TEST_F(CheckpointTest, AFileIsNoCheckpoint) {
  const std::string file = path_ + "/file";
  std::ofstream{file};
  for (const int64_t number : {0, 3}) {
    EXPECT_THAT(ReadManifest(file, number).status().message(),
                HasSubstr("Not a directory"));
  }
}

TEST_F(CheckpointTest, ASaveOfSomeTablesSharesTheFilesOfTheOthers) {
  const auto user = MakeTable("user", 10);
  const auto item = MakeTable("item", 10);
  Save(*item, "s1");
  for (int i = 2; i <= 5; ++i) {
    Save(*user, absl::StrCat("s", i), /*all_tables=*/false);
  }

  EXPECT_EQ(CountRowFiles(), 3);  // Two of "user", one of "item".
  for (const int64_t number : {0, 4}) {
    const auto manifest = ReadManifest(path_, number);
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    for (const auto& [name, saved] : manifest->tables()) {
      auto loaded = MakeTable(name, 0);
      EXPECT_TRUE(LoadTable(path_, saved, 0, 1, Never, *loaded).ok());
      EXPECT_EQ(loaded->size(), 10) << name;
    }
  }
}

TEST_F(CheckpointTest, TheLastRowsOfAnotherIncarnationStay) {
  Save(*MakeTable("user", 20), "good1");
  Save(*MakeTable("user", 20), "good2");
  const auto reset = MakeTable("user", 3);
  for (int i = 1; i <= 5; ++i) Save(*reset, absl::StrCat("rest", i));

  const auto kept = ReadManifest(path_, 0, 2);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->save_id(), "good2");
  auto loaded = MakeTable("user", 0);
  ASSERT_TRUE(
      LoadTable(path_, kept->tables().at("user"), 0, 1, Never, *loaded).ok());
  EXPECT_EQ(loaded->size(), 20);
  EXPECT_EQ(CountRowFiles(), 3);
}

TEST_F(CheckpointTest, TheLargestOfOtherIncarnationsStays) {
  Save(*MakeTable("user", 20), "good");
  for (int i = 1; i <= 3; ++i) {
    // Lost again and again.
    const auto rest = MakeTable("user", 2);
    for (int k = 0; k < 3; ++k) Save(*rest, absl::StrCat("rest", i, "-", k));
  }

  const auto kept = ReadManifest(path_, 1);
  ASSERT_TRUE(kept.ok()) << kept.status();
  EXPECT_EQ(kept->save_id(), "good");
  auto loaded = MakeTable("user", 0);
  ASSERT_TRUE(
      LoadTable(path_, kept->tables().at("user"), 0, 1, Never, *loaded).ok());
  EXPECT_EQ(loaded->size(), 20);
  EXPECT_EQ(CountRowFiles(), 4);
}

TEST_F(CheckpointTest, WithoutItsManifestTheSaveBeforeIsTheNewest) {
  Save(*MakeTable("user", 10), "s1");
  Save(*MakeTable("item", 20), "s2", /*all_tables=*/false);
  std::filesystem::remove(path_ + "/manifest.json");

  EXPECT_EQ(ReadManifest(path_)->save_id(), "s1");
  Save(*MakeTable("item", 30), "s3", /*all_tables=*/false);
  EXPECT_EQ(ReadManifest(path_)->save(), 2);
  EXPECT_EQ(ReadManifest(path_)->tables().count("user"), 1u);
}

TEST_F(CheckpointTest, TablesAreNotDroppedUnlessTheyAreNamed) {
  Save(*MakeTable("user", 10), "s1");
  const auto item = MakeTable("item", 10);
  PartWriter writer(path_, "s2", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*item, writer).ok());
  const v1::CheckpointPart part = writer.Finish();

  const absl::Status status = Commit(path_, "s2", {part}, {}).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("has tables that the servers have "
                                          "not: 'user'"));
  EXPECT_EQ(ReadManifest(path_)->save_id(), "s1");
  EXPECT_TRUE(Commit(path_, "s2", {part}, {2, {"user"}}).ok());
  EXPECT_EQ(ReadManifest(path_)->tables().count("user"), 0u);
}

TEST_F(CheckpointTest, ATableThatIsNotWholeIsNotPublished) {
  const auto table = MakeTable("user", 10);
  PartWriter first(path_, "s1", 0, 2, true, Never);
  PartWriter second(path_, "s1", 1, 2, true, Never);
  ASSERT_TRUE(AddTable(*table, first).ok());
  const v1::CheckpointPart part = first.Finish();
  const absl::Status missing =
      Commit(path_, "s1", {part, second.Finish()}, {}).status();
  // The other table has the same name, and was made separately.
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), second).ok());
  const absl::Status other =
      Commit(path_, "s1", {part, second.Finish()}, {}).status();

  EXPECT_EQ(missing.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(missing.message(), HasSubstr("'user' is on 1 of 2 shards"));
  EXPECT_EQ(other.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(other.message(), HasSubstr("not the same table on all shards"));
  EXPECT_EQ(ReadManifest(path_).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, ARepeatedCommitIsTheFirst) {
  PartWriter writer(path_, "s1", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());
  const v1::CheckpointPart part = writer.Finish();
  EXPECT_EQ(Commit(path_, "s1", {part}, {}).value(), 1);
  EXPECT_EQ(Commit(path_, "s1", {part}, {}).value(), 1);
  Save(*MakeTable("user", 20), "s2");
  EXPECT_EQ(Commit(path_, "s1", {part}, {}).value(), 1);
  EXPECT_EQ(ReadManifest(path_)->save_id(), "s2");
  EXPECT_EQ(ReadManifest(path_, 0, 2).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, WaitingForAnotherWriterEndsWhenItIsInterrupted) {
  PartWriter writer(path_, "s1", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());
  const v1::CheckpointPart part = writer.Finish();
  int asked = 0;
  const Interrupt stop = [&]() -> absl::Status {
    return ++asked < 3 ? absl::OkStatus() : absl::UnavailableError("stopping");
  };

  auto other = FolderLock::Take(path_, absl::ZeroDuration(), Never);
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_EQ(Commit(path_, "s1", {part}, {2, {}, stop}).status().message(),
            "stopping");
  EXPECT_EQ(RemoveUnpublished(path_, writer.files(), stop).message(),
            "stopping");
  EXPECT_EQ(ReadManifest(path_).status().code(), absl::StatusCode::kNotFound);
  other->reset();
  EXPECT_EQ(Commit(path_, "s1", {part}, {}).value(), 1);
}

TEST_F(CheckpointTest, AFolderStaysLockedWhenItsLockFileIsRemoved) {
  std::filesystem::create_directories(path_);
  auto one = FolderLock::Take(path_, absl::ZeroDuration(), Never);
  ASSERT_TRUE(one.ok()) << one.status();
  ASSERT_TRUE(std::filesystem::remove(path_ + "/.lock"));

  EXPECT_TRUE(absl::IsAborted(
      FolderLock::Take(path_, absl::ZeroDuration(), Never).status()));
  one->reset();
  EXPECT_TRUE(FolderLock::Take(path_, absl::ZeroDuration(), Never).ok());
}

TEST_F(CheckpointTest, SavesAtTheSameTimeAreAllWhole) {
  constexpr int kSavers = 4;
  constexpr int kSaves = 8;
  const auto table = MakeTable("user", 100);
  std::vector<std::thread> threads;
  for (int t = 0; t < kSavers; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kSaves; ++i) {
        Save(*table, absl::StrCat("s", t, "-", i), true, {kSavers, {}});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(ReadManifest(path_)->save(), kSavers * kSaves);
  EXPECT_EQ(CountRowFiles(), kSavers);
  for (int i = 0; i < kSavers; ++i) {
    const auto manifest = ReadManifest(path_, 0, i);
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    auto loaded = MakeTable("user", 0);
    EXPECT_TRUE(
        LoadTable(path_, manifest->tables().at("user"), 0, 1, Never, *loaded)
            .ok());
  }
}

TEST_F(CheckpointTest, FilesThatNoSaveHasWrittenAreRefusedAndStay) {
  Save(*MakeTable("user", 10), "s1");
  std::ofstream(path_ + "/mine.safetensors") << "mine";
  // A file of another save; as long as that of the next one.
  std::filesystem::copy(
      path_ + "/" + ReadManifest(path_)->tables().at("user").files(0).name(),
      path_ + "/user/mine.safetensors");
  PartWriter writer(path_, "s2", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());
  const v1::CheckpointPart part = writer.Finish();
  for (const std::string bad :
       {"mine.safetensors", "../mine.safetensors", "user/../mine.safetensors",
        "/etc/passwd", "user/.safetensors", "item/s2-0.safetensors",
        "user/mine.safetensors"}) {
    v1::CheckpointPart changed = part;
    FileOf(*changed.mutable_manifest())->set_name(bad);
    EXPECT_EQ(Commit(path_, "s2", {changed}, {}).status().code(),
              absl::StatusCode::kInvalidArgument)
        << bad;
  }
  // A table without a name, as the folder itself.
  v1::CheckpointPart nameless = part;
  v1::CheckpointManifest& manifest = *nameless.mutable_manifest();
  (*manifest.mutable_tables())[""] = manifest.tables().at("user");
  EXPECT_EQ(Commit(path_, "s2", {nameless}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Commit(path_, "../s2", {part}, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  for (int i = 3; i < 6; ++i) {
    Save(*MakeTable("user", 10), absl::StrCat("s", i));
  }
  EXPECT_TRUE(std::filesystem::exists(path_ + "/mine.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(path_ + "/user/mine.safetensors"));
}

TEST_F(CheckpointTest, ASaveEndsWhenItIsInterrupted) {
  int asked = 0;
  {
    PartWriter writer(path_, "s1", 0, 1, true, [&asked]() -> absl::Status {
      if (++asked < 2) return absl::OkStatus();
      return absl::UnavailableError("stopping");
    });
    EXPECT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());
    EXPECT_EQ(CountRowFiles(), 1);
    EXPECT_EQ(AddTable(*MakeTable("item", 10), writer).code(),
              absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(CountRowFiles(), 0);
}

TEST_F(CheckpointTest, ASaveThatFailsLeavesNoFiles) {
  const auto table = MakeTable("user", 10);
  {
    PartWriter writer(path_, "s1", 0, 1, true, Never);
    ASSERT_TRUE(AddTable(*table, writer).ok());
    EXPECT_EQ(CountRowFiles(), 1);
  }
  EXPECT_EQ(CountRowFiles(), 0);
}

TEST_F(CheckpointTest, AManifestThatCannotBeWrittenLeavesTheFormerOne) {
  Save(*MakeTable("user", 10), "s1");
  PartWriter writer(path_, "s2", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 20), writer).ok());
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 64;
  const auto former = signal(SIGXFSZ, SIG_IGN);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status =
      Commit(path_, "s2", {writer.Finish()}, {}).status();
  EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  signal(SIGXFSZ, former);

  EXPECT_THAT(status.message(), HasSubstr("manifest.json"));
  const auto manifest = ReadManifest(path_);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->save_id(), "s1");
  auto loaded = MakeTable("user", 0);
  ASSERT_TRUE(
      LoadTable(path_, manifest->tables().at("user"), 0, 1, Never, *loaded)
          .ok());
  EXPECT_EQ(loaded->size(), 10);
}

TEST_F(CheckpointTest, AFileThatIsNotSeenWholeLeavesTheFormerManifest) {
  Save(*MakeTable("user", 10), "s1");
  PartWriter writer(path_, "s2", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 20), writer).ok());
  for (const auto& entry :
       std::filesystem::directory_iterator(path_ + "/user")) {
    if (!absl::StrContains(entry.path().string(), "s2-")) continue;
    std::filesystem::resize_file(entry, entry.file_size() - 1);
  }

  const absl::Status status =
      Commit(path_, "s2", {writer.Finish()}, {}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("is not visible in"));
  EXPECT_EQ(ReadManifest(path_)->save_id(), "s1");
}

TEST_F(CheckpointTest, RepeatedSavesDoNotShareFiles) {
  const auto table = MakeTable("user", 10);
  PartWriter first(path_, "s1", 0, 1, true, Never);
  PartWriter second(path_, "s1", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*table, first).ok());
  ASSERT_TRUE(AddTable(*table, second).ok());

  EXPECT_EQ(CountRowFiles(), 2);
}

TEST_F(CheckpointTest, NamesOfAnyKindMakeSafeFolders) {
  for (const std::string name : {"../up", "a/b", ".", "..", "name with é"}) {
    const auto table = MakeTable(name, 3);
    Save(*table, "s" + std::to_string(name.size()), /*all_tables=*/false);
    const auto manifest = ReadManifest(path_);
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    auto loaded = MakeTable(name, 0);
    ASSERT_TRUE(
        LoadTable(path_, manifest->tables().at(name), 0, 1, Never, *loaded)
            .ok());
    EXPECT_EQ(loaded->size(), 3);
  }
  EXPECT_FALSE(std::filesystem::exists(path_ + "/../up"));
}

TEST_F(CheckpointTest, EmptyTableIsSavedToo) {
  Save(*MakeTable("user", 0), "s1");

  const auto manifest = ReadManifest(path_);
  ASSERT_TRUE(manifest.ok());
  EXPECT_TRUE(manifest->tables().at("user").files().empty());
}

TEST_F(CheckpointTest, PartsOfDifferentSavesAreRefused) {
  const auto table = MakeTable("user", 4);
  PartWriter first(path_, "s1", 0, 2, true, Never);
  PartWriter second(path_, "s2", 1, 2, true, Never);
  ASSERT_TRUE(AddTable(*table, first).ok());
  ASSERT_TRUE(AddTable(*table, second).ok());

  EXPECT_EQ(Commit(path_, "s1", {first.Finish(), second.Finish()}, {})
                .status()
                .code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Commit(path_, "s1", {first.Finish()}, {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      Commit(path_, "s1", {first.Finish(), first.Finish()}, {}).status().code(),
      absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadManifest(path_).status().code(), absl::StatusCode::kNotFound);
}

// tests/cc/wire/json_test.cc has what the rules of the fields refuse.
TEST_F(CheckpointTest, ManifestsAndPartsThatCannotBeAreRefusedByName) {
  PartWriter writer(path_, "s1", 0, 1, true, Never);
  ASSERT_TRUE(AddTable(*MakeTable("user", 10), writer).ok());
  const v1::CheckpointPart good = writer.Finish();
  ASSERT_TRUE(Commit(path_, "s1", {good}, {}).ok());
  const v1::CheckpointManifest saved = ReadManifest(path_).value();
  using Table = v1::CheckpointTable;
  using File = v1::CheckpointFile;
  const std::vector<std::pair<std::function<void(Table*, File*)>, std::string>>
      changes = {
          // 2^61 keys of 8 bytes are 0 bytes, if they are counted in 64 bits.
          {[](Table*, File* f) { f->set_num_rows(int64_t{1} << 61); },
           "num_rows of 'user/s1"},
          {[](Table*, File* f) { f->set_num_rows(9); },
           "num_rows of table 'user': 10, and its files have 9"},
          {[](Table*, File* f) { f->set_kind(File::MARKS); },
           "kind of 'user/s1"},
          {[](Table*, File* f) { f->set_name("../user/s1.safetensors"); },
           "name of '../user/s1"},
          {[](Table*, File* f) { f->set_virtual_shards_end(1025); },
           "virtual shards of 'user/s1"},
          {[](Table*, File* f) { f->set_virtual_shards_begin(1025); },
           "virtual shards of 'user/s1"},
          {[](Table*, File* f) { f->set_bytes(-1); }, "bytes' is -1"},
          {[](Table* t, File*) { t->set_last_day(-2.0f); }, "last_day"},
          {[](Table* t, File*) { t->set_slot_floats(-1); }, "slot_floats"},
          // Fewer than its statistics: slots would be read before their begin.
          {[](Table* t, File*) {
             t->mutable_config()->mutable_statistics()->set_kind(
                 v1::StatisticsConfig::SHOW_CLICK);
           },
           "slot_floats of table 'user'"},
          {[](Table* t, File*) { t->mutable_config()->set_dim(0); },
           "config of table 'user'"},
          {[](Table* t, File*) { t->mutable_config()->set_name("item"); },
           "config of table 'user'"}};
  for (const auto& [change, why] : changes) {
    v1::CheckpointManifest manifest = saved;
    change(&(*manifest.mutable_tables())["user"], FileOf(manifest));
    ASSERT_TRUE(
        WriteMessageFile(path_ + "/manifest.json", 1 << 20, &manifest).ok());

    const absl::Status damage = ReadManifest(path_).status();

    EXPECT_EQ(damage.code(), absl::StatusCode::kDataLoss) << why << damage;
    EXPECT_THAT(std::string(damage.message()),
                AllOf(HasSubstr(path_ + "/manifest.json"), HasSubstr(why)));
    v1::CheckpointPart part = good;
    change(&(*part.mutable_manifest()->mutable_tables())["user"],
           FileOf(*part.mutable_manifest()));

    const absl::Status refused = Commit(path_, "s1", {part}, {}).status();

    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << why;
    EXPECT_THAT(std::string(refused.message()),
                HasSubstr("save 's1': a part of the manifest"));
  }
}

TEST_F(CheckpointTest, RowsThatDoNotFitTheTableAreRefused) {
  Save(*MakeTable("user", 4), "s1");
  const auto manifest = ReadManifest(path_);
  ASSERT_TRUE(manifest.ok());
  TableConfig config;
  config.name = "user";
  config.dim = 4;
  config.optimizer = AdamConfig{};
  auto adam = EmbeddingTable::Create(config).value();

  const absl::Status status =
      LoadTable(path_, manifest->tables().at("user"), 0, 1, Never, *adam);

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("adagrad"), HasSubstr("adam")));
}

TEST_F(CheckpointTest, OptimizersOfEqualStateMayDifferInTheirKnobs) {
  TableConfig config;
  config.name = "user";
  config.dim = 4;
  int num_saves = 0;
  const auto load = [&](const OptimizerConfig& from,
                        const OptimizerConfig& to) {
    config.optimizer = from;
    Save(*EmbeddingTable::Create(config).value(),
         absl::StrCat("s", ++num_saves));
    const auto manifest = ReadManifest(path_);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    config.optimizer = to;
    auto table = EmbeddingTable::Create(config).value();
    return LoadTable(path_, manifest->tables().at("user"), 0, 1, Never, *table);
  };
  StepOptions options;
  options.l2 = 0.5f;

  EXPECT_TRUE(load(AdagradConfig{}, {AdagradConfig{0.5f, 0.0f}, options}).ok());
  EXPECT_TRUE(load(AdamConfig{}, AdamWConfig{}).ok());
  // As many floats, which mean something else.
  EXPECT_EQ(load(RowwiseAdagradConfig{}, PaddleAdagradConfig{}).code(),
            absl::StatusCode::kFailedPrecondition);
  OptimizerConfig dense = AdamConfig{};
  dense.is_dense = true;
  EXPECT_TRUE(load(dense, dense).ok());
  for (const absl::Status& status :
       {load(AdamConfig{}, dense), load(dense, AdamConfig{})}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("adam with dense updates"));
  }
}

TEST_F(CheckpointTest, StepsOfDenseUpdatesComeBackAndDamagedOnesAreNamed) {
  TableConfig config;
  config.name = "user";
  config.dim = 1;
  config.optimizer = SgdConfig{0.9f};
  config.optimizer.is_dense = true;
  auto table = EmbeddingTable::Create(config).value();
  for (const float rate : {0.5f, 0.5f, 0.25f}) {
    ASSERT_TRUE(table->ApplyGradients({{7}, {1.0f}, rate, true}).ok());
  }
  Save(*table, "s1");
  const std::string text = ManifestText();

  const auto manifest = ReadManifest(path_);

  ASSERT_TRUE(manifest.ok()) << manifest.status();
  const SavedSteps steps = StepsOf(manifest->tables().at("user"));
  EXPECT_EQ(steps.last_step, 3);
  ASSERT_EQ(steps.runs.size(), 2);
  EXPECT_EQ(steps.runs[1].first, 3);
  EXPECT_EQ(steps.runs[1].learning_rate, 0.25f);
  for (const auto& [from, to] :
       std::vector<std::pair<std::string, std::string>>{
           {"\"last_step\": 3", "\"last_step\": 2"}, {"0.25", "-1"}}) {
    ASSERT_TRUE(absl::StrContains(text, from)) << text;

    const absl::Status status =
        ReadManifestText(absl::StrReplaceAll(text, {{from, to}}));

    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << to;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(path_), HasSubstr("steps of table 'user'")));
  }
}

using Floats = std::vector<float>;

class LoadedStateTest : public CheckpointTest {
 protected:
  static constexpr float kSavedDay = 100.0f;

  LoadedStateTest() {
    config_.name = "saved";
    config_.dim = 2;
    config_.optimizer = AdagradConfig{};
    config_.statistics.kind = StatisticsKind::kUsage;
    auto table = EmbeddingTable::Create(config_).value();
    // Accumulators, count and day.
    EXPECT_TRUE(table
                    ->AssignRows({{1}, {1.0f, 2.0f}, {5, 6, 7, kSavedDay}},
                                 AssignMode::kSaved)
                    .ok());
    Save(*table, "s1");
    config_.name = "loaded";
  }

  // The optimizer state and the statistics of the row.
  std::pair<Floats, Floats> Load(LoadedState state) {
    auto table = EmbeddingTable::Create(config_).value();
    const absl::Status status =
        LoadTable(path_, ReadManifest(path_)->tables().at("saved"), 0, 1, Never,
                  *table, /*progress=*/nullptr, state);
    EXPECT_TRUE(status.ok()) << status;
    Floats embedding(2);
    EXPECT_TRUE(table->Find({1}, absl::MakeSpan(embedding)).ok());
    EXPECT_EQ(embedding, (Floats{1.0f, 2.0f}));
    return SlotsOf(*table);
  }

  // The state of a row that was just made.
  Floats FreshState() {
    auto table = EmbeddingTable::Create(config_).value();
    EXPECT_TRUE(
        table->AssignRows({{1}, {1.0f, 2.0f}, {}}, AssignMode::kSaved).ok());
    return SlotsOf(*table).first;
  }

  static std::pair<Floats, Floats> SlotsOf(const EmbeddingTable& table) {
    Floats slots;
    EXPECT_TRUE(table
                    .ForEachRow(10,
                                [&](const RowChunk& chunk) {
                                  slots.assign(chunk.slots.begin(),
                                               chunk.slots.end());
                                  return absl::OkStatus();
                                })
                    .ok());
    const auto split =
        slots.end() - RowStatistics(table.config().statistics).num_floats();
    return {Floats(slots.begin(), split), Floats(split, slots.end())};
  }

  TableConfig config_;
};

TEST_F(LoadedStateTest, OfAnotherOptimizerBeginsAnewAndStatisticsStay) {
  OptimizerConfig dense = AdamConfig{};
  dense.is_dense = true;
  for (const OptimizerConfig& optimizer :
       {OptimizerConfig(AdamConfig{}), OptimizerConfig(SgdConfig{}), dense}) {
    config_.optimizer = optimizer;

    const auto [state, statistics] = Load(LoadedState::kResetIfDifferent);

    EXPECT_EQ(state, FreshState()) << OptimizerName(optimizer);
    EXPECT_EQ(statistics, (Floats{7, kSavedDay}));
  }
}

TEST_F(LoadedStateTest, OfTheSameOptimizerStays) {
  const auto [state, statistics] = Load(LoadedState::kResetIfDifferent);

  EXPECT_EQ(state, (Floats{5, 6}));
  EXPECT_EQ(statistics, (Floats{7, kSavedDay}));
}

TEST_F(LoadedStateTest, OfEmbeddingsAloneBeginsAnewWithTheStatistics) {
  const auto [state, statistics] = Load(LoadedState::kReset);

  EXPECT_EQ(state, FreshState());
  ASSERT_EQ(statistics.size(), 2);
  EXPECT_EQ(statistics[0], 0.0f);
  EXPECT_GT(statistics[1], kSavedDay);  // Seen today.
}

TEST_F(CheckpointTest, IdsThatWaitKeepTheirCountsUnlessTheyHaveOptimizerState) {
  // A weight learns by the first segment.
  const auto segments = [](const RuleConfig& rule) {
    return OptimizerConfig(std::vector{SegmentConfig{1, 1.0f, rule, {}},
                                       SegmentConfig{0, 1.0f, rule, {}}});
  };
  for (const NotAdmittedKind kind :
       {NotAdmittedKind::kZeros, NotAdmittedKind::kWeight}) {
    TableConfig config;
    config.name = "user";
    config.dim = 2;
    config.optimizer = segments(AdagradConfig{});
    config.statistics.kind = StatisticsKind::kUsage;
    config.admission.policy = MinCountAdmission{5};
    config.admission.not_admitted.kind = kind;
    auto saved = EmbeddingTable::Create(config).value();
    const Floats records(CandidateFloats(saved->config()), 3.0f);
    ASSERT_TRUE(saved->AssignCandidates({1}, records).ok());
    Save(*saved, kind == NotAdmittedKind::kZeros ? "s1" : "s2");
    config.optimizer = segments(AdamConfig{});
    for (const LoadedState state :
         {LoadedState::kResetIfDifferent, LoadedState::kReset}) {
      auto table = EmbeddingTable::Create(config).value();

      const absl::Status status =
          LoadTable(path_, ReadManifest(path_)->tables().at("user"), 0, 1,
                    Never, *table, /*progress=*/nullptr, state);

      ASSERT_TRUE(status.ok()) << status;
      UsageOfRow usage;
      KeyState key_state;
      EXPECT_TRUE(table
                      ->ReadUsage({1}, 3.0f, absl::MakeSpan(&usage, 1),
                                  absl::MakeSpan(&key_state, 1))
                      .ok());
      const bool is_kept = kind == NotAdmittedKind::kZeros &&
                           state == LoadedState::kResetIfDifferent;
      EXPECT_EQ(key_state, is_kept ? KeyState::kCandidate : KeyState::kUnknown);
    }
  }
}

}  // namespace
}  // namespace tfswitch::checkpoint
