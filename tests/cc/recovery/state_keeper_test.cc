#include "cc/recovery/state_keeper.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

// A server without a network, and its folder.
class ServerRun {
 public:
  explicit ServerRun(const std::string& path, ShardOptions options = {})
      : folder_(DataFolder::Open(path,
                                 {"", options.shard_index, options.num_shards})
                    .value()),
        shard_(WithFolder(options)),
        keeper_(folder_.get(), &shard_) {}

  Shard& operator*() { return shard_; }
  Shard* operator->() { return &shard_; }
  StateKeeper& keeper() { return keeper_; }

  absl::Status Recover() {
    return keeper_.Recover([] { return absl::OkStatus(); });
  }

  // With gradients of 1 and a learning rate of 1.
  absl::StatusOr<WriteResult> Push(const std::vector<Key>& keys,
                                   PushId id = {}) {
    const auto table = shard_.FindTable("t");
    if (!table.ok()) return table.status();
    const std::vector<float> gradients(keys.size() * (*table)->dim(), 1.0f);
    PushRequest push;
    push.keys = keys;
    push.gradients = gradients;
    push.learning_rate = 1.0f;
    push.insert_missing = true;
    push.id = id;
    return shard_.Push(**table, push);
  }

  // Rows of table "t", embeddings and slots.
  std::map<Key, std::vector<float>> Rows() {
    std::map<Key, std::vector<float>> rows;
    const auto table = shard_.FindTable("t").value();
    const absl::Status status =
        table->ForEachRow(100, [&](const RowChunk& chunk) {
          const size_t dim = table->dim();
          const size_t num_slots = table->slot_floats();
          for (size_t i = 0; i < chunk.keys.size(); ++i) {
            std::vector<float>& row = rows[chunk.keys[i]];
            const auto embedding = chunk.embeddings.subspan(i * dim, dim);
            const auto slots = chunk.slots.subspan(i * num_slots, num_slots);
            row.assign(embedding.begin(), embedding.end());
            row.insert(row.end(), slots.begin(), slots.end());
          }
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    return rows;
  }

 private:
  ShardOptions WithFolder(ShardOptions options) const {
    options.num_writes = folder_->num_writes();
    return options;
  }

  const std::unique_ptr<DataFolder> folder_;
  Shard shard_;
  StateKeeper keeper_;
};

TableConfig Adagrad() {
  TableConfig config;
  config.name = "t";
  config.dim = 3;
  config.optimizer = AdagradConfig{};
  return config;
}

// Keys that shard `shard` of two owns.
std::vector<Key> KeysOf(uint32_t shard, int count) {
  std::vector<Key> keys;
  for (Key key = 0; static_cast<int>(keys.size()) < count; ++key) {
    if (OwnerOfVirtualShard(VirtualShardOf(key, 1024), 1024, 2) == shard) {
      keys.push_back(key);
    }
  }
  return keys;
}

TEST(StateKeeperTest, AServerComesBackAsItWasStopped) {
  const ScopedFolder scoped;
  const ShardOptions options{1, 2};
  const std::vector<Key> keys = KeysOf(1, 500);
  std::map<Key, std::vector<float>> rows;
  TableIdentity identity;
  {
    ServerRun run(scoped.path(), options);
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_FALSE(run->recovery().has_value());
    ASSERT_TRUE(run->CreateTable(Adagrad(), {77, {5, 6}}).ok());
    ASSERT_TRUE(run.Push(keys).ok());
    ASSERT_TRUE(run.Push({keys[3]}).ok());
    rows = run.Rows();
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  ServerRun run(scoped.path(), options);

  ASSERT_TRUE(run.Recover().ok());

  EXPECT_EQ(run.Rows(), rows);
  const auto table = run->FindTable({"t", 77});
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ((*table)->identity().shard_instances,
            (std::vector<uint64_t>{5, 6}));
  EXPECT_EQ(run->recovery()->lost_writes(), 0u);
}

TEST(StateKeeperTest, WritesSinceTheSaveAreCounted) {
  const ScopedFolder scoped;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->CreateTable(Adagrad()).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(run.Push({1}).ok());
    ASSERT_EQ(run.Push({1}, {4, 1})->duplicate, false);
    ASSERT_EQ(run.Push({1}, {4, 1})->duplicate, true);  // No write.
  }
  for (const uint64_t lost : {4, 0}) {  // Those are said once.
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run->recovery()->lost_writes(), lost);
    EXPECT_FALSE(run->recovery()->are_at_least());
    EXPECT_TRUE(run.Rows().empty());
  }
}

TEST(StateKeeperTest, AWriteThatWasSavedIsNotAppliedAgain) {
  const ScopedFolder scoped;
  int64_t num_rows = 0;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->CreateTable(Adagrad()).ok());
    num_rows = run.Push({1, 2, 3}, {9, 40})->num_rows;
    ASSERT_TRUE(run.Push({1}, {9, 41}).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  ServerRun run(scoped.path());
  ASSERT_TRUE(run.Recover().ok());
  const auto rows = run.Rows();

  const auto again = run.Push({1, 2, 3}, {9, 40});

  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->duplicate);
  EXPECT_EQ(again->num_rows, num_rows);
  EXPECT_EQ(run.Rows(), rows);
  EXPECT_FALSE(run.Push({1}, {9, 42})->duplicate);
  EXPECT_FALSE(run.Push({1}, {8, 40})->duplicate);
}

TEST(StateKeeperTest, ADamagedSaveIsSkippedAndAFolderWithNoGoodOneRefused) {
  const ScopedFolder scoped;
  const auto damage = [&](const std::string& what) {
    // The newest first, because ids of saves begin with their time.
    std::vector<fs::path> files;
    for (const auto& entry :
         fs::directory_iterator(scoped.path() + "/state/" + what)) {
      files.push_back(entry.path());
    }
    std::sort(files.rbegin(), files.rend());
    std::fstream file(files[0], std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put('\x7f');
  };
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->CreateTable(Adagrad()).ok());
    ASSERT_TRUE(run.Push({1}, {9, 40}).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
    absl::SleepFor(absl::Milliseconds(2));  // A later id.
    ASSERT_TRUE(run.Push({2}, {9, 41}).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  damage("t");
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run.Rows().count(1), 1u);
    EXPECT_EQ(run.Rows().count(2), 0u);
    EXPECT_EQ(run->recovery()->lost_writes(), 1u);
    // The damaged one is no save any more.
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  std::ofstream(scoped.path() + "/state/manifest.json") << "{}";
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run.Rows().size(), 1u);
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  std::ofstream(scoped.path() + "/state/manifest.json") << "{}";
  std::ofstream(scoped.path() + "/state/manifest-000001.json") << "{}";
  ServerRun run(scoped.path());
  EXPECT_FALSE(run.Recover().ok());

  const absl::Status status = run.Recover();

  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr(scoped.path()), HasSubstr("move the folder")));
}

TEST(StateKeeperTest, ItSavesAtIntervals) {
  const ScopedFolder scoped;
  ServerRun run(scoped.path());
  ASSERT_TRUE(run.Recover().ok());
  ASSERT_TRUE(run->CreateTable(Adagrad()).ok());

  run.keeper().Start(absl::Milliseconds(20));

  const std::string third = scoped.path() + "/state/manifest-000002.json";
  while (!fs::exists(third)) absl::SleepFor(absl::Milliseconds(5));
}

TEST(StateKeeperTest, FilesOfASaveThatDiedHalfWayAreRemoved) {
  const ScopedFolder scoped;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->CreateTable(Adagrad()).ok());
    ASSERT_TRUE(run.Push({1}).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
  }
  const std::string left = scoped.path() + "/state/t/half.safetensors.1.tmp";
  std::ofstream(left) << "half";
  ServerRun run(scoped.path());

  ASSERT_TRUE(run.Recover().ok());

  EXPECT_FALSE(fs::exists(left));
  EXPECT_EQ(run.Rows().size(), 1u);
}

TEST(StateKeeperTest, ClientsMayUseTheFolderButNotTheServersOwnState) {
  const ScopedFolder scoped;
  ShardOptions options;
  options.data_folder = scoped.path();
  options.own_folder = DataFolder::StateOf(scoped.path());
  options.checkpoint_root = DataFolder::CheckpointsOf(scoped.path());
  ServerRun run(scoped.path(), options);
  ASSERT_TRUE(run.Recover().ok());
  ASSERT_TRUE(run->CreateTable(Adagrad()).ok());
  ASSERT_TRUE(run.Push({1}).ok());
  v1::SaveShardRequest request;
  const auto save = [&](const std::string& path) {
    request.set_path(path);
    request.set_save_id(absl::StrCat("s", path.size()));
    return run->SaveShard(request).status();
  };

  EXPECT_TRUE(save("daily").ok());
  EXPECT_TRUE(fs::exists(scoped.path() + "/checkpoints/daily"));
  EXPECT_TRUE(save(scoped.path() + "/elsewhere").ok());
  for (const std::string& path :
       {scoped.path() + "/state", scoped.path() + "/state/t",
        std::string("../state"), std::string("/elsewhere")}) {
    EXPECT_EQ(save(path).code(), absl::StatusCode::kPermissionDenied) << path;
  }
}

}  // namespace
}  // namespace tfswitch
