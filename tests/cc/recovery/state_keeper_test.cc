#include "cc/recovery/state_keeper.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "cc/base/log_writer.h"
#include "cc/base/steady_clock.h"
#include "cc/recovery/repair.h"
#include "cc/shard/control_calls.h"
#include "cc/wire/table_config_conversion.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;
namespace fs = std::filesystem;

// A server without a network, and its folder.
class ServerRun {
 public:
  explicit ServerRun(const std::string& path, ShardOptions options = {},
                     const StateKeeperOptions& keeper = {})
      : folder_(DataFolder::Open(path,
                                 {"", options.shard_index, options.num_shards})
                    .value()),
        shard_(WithFolder(options)),
        keeper_(keeper, folder_.get(), &shard_) {}

  Shard& operator*() { return shard_; }
  Shard* operator->() { return &shard_; }
  StateKeeper& keeper() { return keeper_; }

  absl::Status Recover() {
    return keeper_.Recover([] { return absl::OkStatus(); });
  }

  // As it does at intervals.
  absl::Status SaveNow() { return keeper_.Save(); }

  absl::Status SaveForClient(const std::string& path) {
    v1::SaveShardRequest save;
    save.set_path(path);
    save.set_save_id("s");
    const auto part = shard_.saves().Write(save);
    if (!part.ok()) return part.status();
    v1::CommitCheckpointRequest commit;
    commit.set_path(path);
    commit.set_save_id("s");
    *commit.add_manifest_parts() = *part;
    return shard_.saves().Commit(commit).status();
  }
  absl::Status StageRestore(const std::string& path, const std::string& id) {
    v1::StageRestoreRequest restore;
    restore.set_path(path);
    restore.set_restore_id(id);
    return shard_.restores().Stage(restore).status();
  }

  // With gradients of 1 and a learning rate of 1.
  absl::StatusOr<WriteResult> Push(const std::vector<Key>& keys, PushId id = {},
                                   bool insert_missing = true,
                                   const StepTag& step = {}) {
    const auto table = shard_.FindTable("t");
    if (!table.ok()) return table.status();
    const std::vector<float> gradients(keys.size() * (*table)->dim(), 1.0f);
    PushRequest push;
    push.keys = keys;
    push.gradients = gradients;
    push.learning_rate = 1.0f;
    push.table = "t";
    push.insert_missing = insert_missing;
    push.id = id;
    push.step = step;
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
    EXPECT_FALSE(run->own_state().report().has_value());
    ASSERT_TRUE(run->tables().Create(Adagrad(), {77, {5, 6}}).ok());
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
  EXPECT_EQ(run->own_state().report()->lost_writes(), 0u);
}

TEST(StateKeeperTest, WritesGoOnWhileASaveIsWrittenAndAreNotInIt) {
  const ScopedFolder scoped;
  std::map<Key, std::vector<float>> rows;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    ASSERT_TRUE(run.Push({1, 2}, {9, 1}).ok());
    rows = run.Rows();
    bool was_pushed = false;
    ASSERT_TRUE(run.keeper()
                    .Save([&] {
                      if (std::exchange(was_pushed, true)) {
                        return absl::OkStatus();
                      }
                      return run.Push({1, 3}, {9, 2}).status();
                    })
                    .ok());
    ASSERT_TRUE(was_pushed);
    EXPECT_NE(run.Rows(), rows);
  }
  ServerRun run(scoped.path());
  ASSERT_TRUE(run.Recover().ok());
  EXPECT_EQ(run.Rows(), rows);
  EXPECT_EQ(run->own_state().report()->lost_writes(), 1u);
  EXPECT_FALSE(run.Push({1, 3}, {9, 2})->duplicate);
}

TEST(StateKeeperTest, WritesWaitOnceASaveHasTakenItsMemory) {
  const ScopedFolder scoped;
  ShardOptions options;
  options.max_save_bytes = 1;
  ServerRun run(scoped.path(), options);
  ASSERT_TRUE(run.Recover().ok());
  ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
  ASSERT_TRUE(run.Push({1}).ok());
  std::vector<Key> keys(50'000);
  std::future<bool> waiting;
  // Until writing takes longer than two polls are apart.
  for (int round = 0; round < 20 && !waiting.valid(); ++round) {
    std::iota(keys.begin(), keys.end(), keys.back() + 10);
    ASSERT_TRUE(run.Push(keys).ok());
    bool is_first = true;
    ASSERT_TRUE(run.keeper()
                    .Save([&] {
                      // These changes are copied. Then the memory is used up.
                      if (std::exchange(is_first, false)) {
                        return run.Push(keys).status();
                      }
                      if (waiting.valid()) return absl::OkStatus();
                      auto push = std::async(std::launch::async, [&run] {
                        return run.Push({1}).ok();
                      });
                      if (push.wait_for(std::chrono::milliseconds(20)) ==
                          std::future_status::timeout) {
                        waiting = std::move(push);
                      }
                      return absl::OkStatus();
                    })
                    .ok());
  }
  ASSERT_TRUE(waiting.valid());
  EXPECT_TRUE(waiting.get());
}

// Each way in which a row, or a key that waits for one, may come and go.
TEST(StateKeeperTest, SavesOfChangesBringTheSameRowsAsTheyWere) {
  for (const bool has_candidates : {false, true}) {
    const ScopedFolder scoped;
    std::mt19937 random(1);
    const auto draw = [&](int count) {
      std::set<Key> keys;
      while (static_cast<int>(keys.size()) < count) {
        keys.insert(static_cast<Key>(random() % 3000));
      }
      return std::vector<Key>(keys.begin(), keys.end());
    };
    TableConfig config = Adagrad();
    config.dim = 16;
    config.statistics.kind = StatisticsKind::kUsage;
    if (has_candidates) {
      config.admission.policy = MinCountAdmission{3};
    }
    std::vector<Key> all(3000);
    std::iota(all.begin(), all.end(), 0);
    const auto counts = [&](ServerRun& run) {
      std::vector<UsageOfRow> usage(all.size());
      std::vector<KeyState> states(all.size());
      const auto table = run->FindTable("t").value();
      EXPECT_TRUE(table
                      ->ReadUsage(all, 20000.0f, absl::MakeSpan(usage),
                                  absl::MakeSpan(states))
                      .ok());
      std::vector<float> result;
      for (size_t i = 0; i < all.size(); ++i) {
        result.push_back(static_cast<float>(states[i]));
        result.push_back(usage[i].count);
      }
      return result;
    };
    std::map<Key, std::vector<float>> rows;
    std::vector<float> counted;
    std::set<std::string> files;
    int num_shared = 0;
    for (int start = 0; start < 4; ++start) {
      ServerRun run(scoped.path());
      ASSERT_TRUE(run.Recover().ok());
      ASSERT_TRUE(run->tables().Create(config).ok());
      ASSERT_EQ(run.Rows(), rows);
      if (start > 0) {
        ASSERT_EQ(counts(run), counted);
      }
      for (int round = 0; round < 10; ++round) {
        ASSERT_TRUE(run.Push(draw(start == 0 ? 1500 : 40)).ok());
        const auto table = run->FindTable("t").value();
        ASSERT_TRUE(run->Erase(*table, draw(20)).ok());
        if (round == 4) {
          EvictionConfig rules;
          rules.max_rows = static_cast<uint64_t>(table->size() - 30);
          ASSERT_TRUE(run->Shrink(*table, rules, 20000.0f, false).ok());
        }
        ASSERT_TRUE(run.Push(draw(40)).ok());
        ASSERT_TRUE(run.SaveNow().ok());
        const auto manifest =
            checkpoint::ReadManifest(scoped.path() + "/state").value();
        for (const auto& file : manifest.tables().at("t").files()) {
          if (!files.insert(file.name()).second) ++num_shared;
        }
        EXPECT_EQ(checkpoint::RowsOf(manifest),
                  static_cast<uint64_t>(table->size()));
      }
      rows = run.Rows();
      counted = counts(run);
    }
    EXPECT_GT(num_shared, 30);
  }
}

TEST(StateKeeperTest, ASaveThatSharesNoFileStays) {
  const ScopedFolder scoped;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    // The 31st has all rows again.
    for (Key key = 0; key < 33; ++key) {
      ASSERT_TRUE(run.Push({key}).ok());
      ASSERT_TRUE(run.SaveNow().ok());
    }
    const auto manifest =
        checkpoint::ReadManifest(scoped.path() + "/state").value();
    ASSERT_EQ(manifest.tables().at("t").files_size(), 3);
    fs::remove(scoped.path() + "/state/" +
               manifest.tables().at("t").files(0).name());
  }
  ServerRun run(scoped.path());
  ASSERT_TRUE(run.Recover().ok());
  EXPECT_EQ(run.Rows().size(), 30u);
}

TEST(StateKeeperTest, WritesSinceTheSaveAreCounted) {
  const ScopedFolder scoped;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    ASSERT_TRUE(run.keeper().Stop().ok());
    for (int i = 0; i < 3; ++i) ASSERT_TRUE(run.Push({1}).ok());
    ASSERT_EQ(run.Push({1}, {4, 1})->duplicate, false);
    ASSERT_EQ(run.Push({1}, {4, 1})->duplicate, true);  // No write.
  }
  for (const uint64_t lost : {4, 0}) {  // Those are said once.
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run->own_state().report()->lost_writes(), lost);
    EXPECT_FALSE(run->own_state().report()->are_at_least());
    EXPECT_TRUE(run.Rows().empty());
  }
}

TEST(StateKeeperTest, AWriteThatWasSavedIsNotAppliedAgain) {
  const ScopedFolder scoped;
  int64_t num_rows = 0;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
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
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
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
    EXPECT_EQ(run->own_state().report()->lost_writes(), 1u);
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

TEST(StateKeeperTest, DamageInFilesThatAreNotNeededHindersNoStart) {
  const ScopedFolder scoped;
  const std::string whole = scoped.path() + "/whole";
  {
    ServerRun run(whole);
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    for (const Key key : {1, 2, 3}) {
      ASSERT_TRUE(run.Push({key}).ok());
      ASSERT_TRUE(run.keeper().Stop().ok());
    }
  }
  const std::string former = "/state/manifest-000002.json";
  using Damage = std::function<void(const std::string& folder)>;
  std::vector<Damage> cases = {
      [&](const std::string& folder) { fs::resize_file(folder + former, 0); },
      [&](const std::string& folder) {
        fs::remove(folder + former);
        fs::create_directories(folder + former + "/x");
      },
      [&](const std::string& folder) {
        fs::resize_file(folder + former, fs::file_size(folder + former) / 2);
      },
      [&](const std::string& folder) {
        std::ofstream(folder + "/state/manifest-000001.json") << "{}";
        std::ofstream(folder + former) << "{}";
      },
  };
  for (size_t at = 0; at < fs::file_size(whole + former); at += 41) {
    cases.push_back([&, at](const std::string& folder) {
      std::fstream file(folder + former, std::ios::in | std::ios::out);
      file.seekg(static_cast<std::streamoff>(at));
      const int byte = file.get();
      file.seekp(static_cast<std::streamoff>(at));
      file.put(static_cast<char>(byte ^ 0x80));
    });
  }
  for (size_t i = 0; i < cases.size(); ++i) {
    const std::string folder = absl::StrCat(scoped.path(), "/", i);
    fs::copy(whole, folder, fs::copy_options::recursive);
    cases[i](folder);
    {
      ServerRun run(folder);
      testing::internal::CaptureStderr();
      const absl::Status status = run.Recover();
      LogWriter::Get().Flush(absl::Minutes(1));
      const std::string said = testing::internal::GetCapturedStderr();
      ASSERT_TRUE(status.ok()) << i << status;
      EXPECT_THAT(said, AllOf(HasSubstr("warning"), HasSubstr(former))) << i;
      EXPECT_EQ(run.Rows().size(), 3u);
      ASSERT_TRUE(run.Push({4}).ok());
      ASSERT_TRUE(run.keeper().Stop().ok());
    }
    ServerRun run(folder);
    ASSERT_TRUE(run.Recover().ok()) << i;
    EXPECT_EQ(run.Rows().size(), 4u);
  }
}

TEST(StateKeeperTest, ItSavesAtIntervals) {
  const ScopedFolder scoped;
  StateKeeperOptions options;
  options.save_every = absl::Milliseconds(20);
  ServerRun run(scoped.path(), {}, options);
  ASSERT_TRUE(run.Recover().ok());
  ASSERT_TRUE(run->tables().Create(Adagrad()).ok());

  run.keeper().Start();

  for (;; absl::SleepFor(absl::Milliseconds(5))) {
    const auto save = checkpoint::ReadManifest(scoped.path() + "/state");
    if (save.ok() && save->save() >= 3) break;
  }
}

TEST(StateKeeperTest, FilesOfASaveThatDiedHalfWayAreRemoved) {
  const ScopedFolder scoped;
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
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
  ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
  ASSERT_TRUE(run.Push({1}).ok());
  v1::SaveShardRequest request;
  const auto save = [&](const std::string& path) {
    request.set_path(path);
    request.set_save_id(absl::StrCat("s", path.size()));
    return run->saves().Write(request).status();
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

StateKeeperOptions WithLog() {
  StateKeeperOptions options;
  options.has_log = true;
  options.save_every = absl::InfiniteDuration();
  return options;
}

TEST(PushLogRecoveryTest, EachKindOfWriteComesBack) {
  const ScopedFolder scoped;
  std::map<Key, std::vector<float>> rows;
  TableConfig other = Adagrad();
  other.name = "other";
  {
    ServerRun run(scoped.path(), {}, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    const ShardCall call{*run, [] { return absl::OkStatus(); }};
    const auto create = [&](const TableConfig& config) {
      v1::CreateTableRequest request;
      request.set_protocol_version(kProtocolVersion);
      *request.mutable_config() = ToProto(config);
      v1::CreateTableResponse response;
      return ::tfswitch::Run(call, request, &response);
    };
    TableConfig config = Adagrad();
    config.statistics.kind = StatisticsKind::kUsage;
    config.storage_dtype.embeddings =
        FloatType::kBfloat16;  // Rounded by chance.
    ASSERT_TRUE(create(config).ok());
    ASSERT_TRUE(create(other).ok());
    ASSERT_TRUE(run.Push({1, 2, 2, 3, 4, 5}, {9, 1}).ok());
    // Saved in the middle: what came before is not replayed.
    ASSERT_TRUE(run.SaveNow().ok());
    ASSERT_TRUE(run.Push({3, 6}, {9, 2}).ok());
    for (int i = 0; i < 5; ++i) ASSERT_TRUE(run.Push({1, 2, 3, 5}).ok());
    const auto table = run->FindTable("t").value();
    std::vector<float> read(6);
    ASSERT_TRUE(
        run->Pull(*table, {7, 1}, IfMissing::kInsert, absl::MakeSpan(read))
            .ok());
    const std::vector<float> values = {1, 2, 3};
    AssignRequest assign;
    assign.table = "t";
    const std::vector<Key> eight = {8};
    assign.keys = eight;
    assign.embeddings = values;
    ASSERT_TRUE(run->AssignOnce(assign).ok());
    v1::EraseRequest erase;
    erase.set_table("t");
    erase.add_keys(4);
    v1::EraseResponse erased;
    ASSERT_TRUE(::tfswitch::Run(call, erase, &erased).ok());
    EvictionConfig rules;
    rules.max_rows = 5;
    ASSERT_TRUE(run->Shrink(*table, rules, kServersDay, false).ok());
    v1::DropTableRequest drop;
    drop.set_table("other");
    v1::DropTableResponse dropped;
    ASSERT_TRUE(::tfswitch::Run(call, drop, &dropped).ok());
    TableConfig open = Adagrad();
    open.name = "open";
    open.optimizer = AdamConfig();
    open.optimizer.is_open = true;
    ASSERT_TRUE(create(open).ok());
    open.optimizer = AdagradConfig();
    ASSERT_TRUE(create(open).ok());
    // Without insertion: the row must be there for it.
    ASSERT_TRUE(run.Push({7}, {9, 3}, /*insert_missing=*/false).ok());
    rows = run.Rows();
    ASSERT_EQ(rows.size(), 5u);
  }  // As if it were killed: nothing is saved.
  for (int i = 0; i < 2; ++i) {
    ServerRun run(scoped.path(), {}, WithLog());

    ASSERT_TRUE(run.Recover().ok());

    EXPECT_EQ(run.Rows(), rows);
    EXPECT_EQ(run->tables().All().size(), 2u);
    EXPECT_TRUE(run->FindTable("open").value()->config().optimizer ==
                OptimizerConfig(AdagradConfig()));
    EXPECT_EQ(run->own_state().report()->lost_writes(), 0u);
    EXPECT_TRUE(run.Push({3, 6}, {9, 2})->duplicate);
  }
}

TEST(PushLogRecoveryTest, EachGradientCountsOnceWhileStatesAreSaved) {
  const ScopedFolder scoped;
  TableConfig config = Adagrad();
  config.optimizer = SgdConfig{};
  config.initializer = ConstantInitializer{0.0f};
  std::atomic<int64_t> num_pushes{0};
  // So many that a save meets pushes that are half done.
  std::vector<Key> keys(5000);
  std::iota(keys.begin(), keys.end(), 1);
  for (int run_number = 0; run_number < 3; ++run_number) {
    ServerRun run(scoped.path(), {}, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    if (run_number == 0) {
      v1::CreateTableRequest request;
      request.set_protocol_version(kProtocolVersion);
      *request.mutable_config() = ToProto(config);
      v1::CreateTableResponse response;
      const ShardCall call{*run, [] { return absl::OkStatus(); }};
      ASSERT_TRUE(::tfswitch::Run(call, request, &response).ok());
    }
    // The last save begins before the pushes end.
    const int64_t end = num_pushes + 100;
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 3; ++t) {
      threads.emplace_back([&, t] {
        for (uint64_t i = 1; i <= 60; ++i) {
          const uint64_t client = 10 * (run_number + 1) + t;
          EXPECT_TRUE(run.Push(keys, {client, i}).ok());
          EXPECT_TRUE(run.Push(keys, {client, i})->duplicate);
          ++num_pushes;
        }
      });
    }
    do {
      EXPECT_TRUE(run.SaveNow().ok());
    } while (num_pushes < end);
    for (std::thread& thread : threads) thread.join();
  }

  ServerRun run(scoped.path(), {}, WithLog());
  ASSERT_TRUE(run.Recover().ok());
  const auto rows = run.Rows();
  ASSERT_EQ(rows.size(), keys.size());
  for (const auto& [key, row] : rows) {
    EXPECT_EQ(row[0], -static_cast<float>(num_pushes)) << key;
  }
  EXPECT_EQ(run->own_state().report()->lost_writes(), 0u);
}

TEST(PushLogRecoveryTest, AStepOfWorkersThatIsOpenIsClosedAfterwards) {
  for (const bool is_saved : {false, true}) {
    SCOPED_TRACE(is_saved);
    const ScopedFolder scoped;
    TableConfig config = Adagrad();
    config.consistency.kind = ConsistencyKind::kBsp;
    config.consistency.reduction = Reduction::kSum;
    const auto step = [](uint32_t worker, int64_t clock) {
      return StepTag{"g", worker, worker + 1, clock};
    };
    const auto round = [](int64_t number) {
      return RoundOf(number,
                     {ContributionOf(0, 1, number, 1.0),
                      ContributionOf(1, 2, number, 1.0)},
                     /*group_instance=*/5);
    };
    std::map<Key, std::vector<float>> undisturbed;
    for (const bool is_killed : {false, true}) {
      const std::string path =
          absl::StrCat(scoped.path(), is_killed ? "/killed" : "/whole");
      auto run = std::make_unique<ServerRun>(path, ShardOptions(), WithLog());
      ASSERT_TRUE(run->Recover().ok());
      v1::CreateTableRequest request;
      request.set_protocol_version(kProtocolVersion);
      *request.mutable_config() = ToProto(config);
      v1::CreateTableResponse response;
      ASSERT_TRUE(
          ::tfswitch::Run(ShardCall{**run, [] { return absl::OkStatus(); }},
                          request, &response)
              .ok());
      const auto restart = [&] {
        if (!is_killed) return;
        if (is_saved) {
          ASSERT_TRUE(run->SaveNow().ok());
        }
        run.reset();
        run = std::make_unique<ServerRun>(path, ShardOptions(), WithLog());
        ASSERT_TRUE(run->Recover().ok());
      };
      ASSERT_TRUE(run->Push({1, 2}, {8, 1}, true, step(0, 0)).ok());
      ASSERT_TRUE(run->Push({2, 3}, {9, 1}, true, step(1, 0)).ok());
      ASSERT_EQ((*run)->rounds().Commit("g", round(0)).value(), 0);
      ASSERT_TRUE(run->Push({2, 3}, {8, 2}, true, step(0, 1)).ok());
      restart();
      ASSERT_TRUE(run->Push({3, 4}, {9, 2}, true, step(1, 1)).ok());
      restart();
      if (is_killed) {  // A save brings it before a worker does.
        v1::PauseRoundsRequest hold;
        hold.set_save_id("s");
        hold.set_hold_ms(10'000);
        ASSERT_TRUE((*run)->rounds().Pause(hold).ok());
        v1::SaveShardRequest save;
        save.set_path(absl::StrCat(scoped.path(), "/save"));
        save.set_save_id("s");
        save.add_tables(config.name);
        v1::CommitRoundRequest& last = *save.mutable_cut()->add_rounds();
        last.set_group("g");
        *last.mutable_round() = round(1);
        const auto part = (*run)->saves().Write(save);
        ASSERT_TRUE(part.ok()) << part.status();
      } else {
        ASSERT_EQ((*run)->rounds().Commit("g", round(1)).value(), 1);
      }
      restart();
      ASSERT_EQ((*run)->rounds().Commit("g", round(1)).value(), 1);  // Again.
      if (!is_killed) undisturbed = run->Rows();
      EXPECT_EQ(run->Rows(), undisturbed);
      EXPECT_EQ(undisturbed.size(), 4u);
    }
  }
}

// Two workers of group "g" on one server, which share a work queue.
class GroupRecoveryTest : public testing::Test {
 protected:
  void Start(const StateKeeperOptions& keeper = WithLog()) {
    run_.reset();
    run_ = std::make_unique<ServerRun>(scoped_.path(), ShardOptions(), keeper);
    ASSERT_TRUE(run_->Recover().ok());
  }

  // Also without a restart, so that a run to compare with is the same.
  void Kill(bool is_killed, bool is_saved = false) {
    if (!is_killed) return;
    if (is_saved) {
      ASSERT_TRUE(run_->SaveNow().ok());
    }
    Start();
  }

  Coordinator& coordinator() { return *(*run_)->FindCoordinator().value(); }

  void MakeGroup() {
    WorkerGroupOptions options;
    options.num_workers = 2;
    ASSERT_TRUE(coordinator().CreateGroup("g", options).ok());
    for (uint32_t worker : {0, 1}) {
      const auto place = coordinator().Join(JoinOf("g", worker));
      ASSERT_TRUE(place.ok());
      members_[worker] = MemberOf("g", worker, place->incarnation());
      instance_ = place->group_instance();
    }
  }

  void MakeTable() {
    TableConfig config = Adagrad();
    config.consistency.kind = ConsistencyKind::kBsp;
    v1::CreateTableRequest request;
    request.set_protocol_version(kProtocolVersion);
    *request.mutable_config() = ToProto(config);
    v1::CreateTableResponse response;
    const ShardCall call{**run_, [] { return absl::OkStatus(); }};
    ASSERT_TRUE(::tfswitch::Run(call, request, &response).ok());
  }

  absl::Status Push(uint32_t worker, int64_t clock) {
    const GroupMember& member = members_[worker];
    return run_
        ->Push({worker + 1, worker + 2},
               {worker + 8, 1 + static_cast<uint64_t>(clock)}, true,
               StepTag{"g", worker, member.incarnation(), clock})
        .status();
  }

  absl::Status Arrive(uint32_t worker, int64_t clock) {
    return coordinator()
        .Arrive(
            ArrivalOf(members_[worker], clock, /*round=*/clock, 2.0 + worker))
        .status();
  }

  const ScopedFolder scoped_;
  std::unique_ptr<ServerRun> run_;
  GroupMember members_[2];
  uint64_t instance_ = 0;
};

TEST_F(GroupRecoveryTest, TheOpenStepOfAGroupCountsAfterAKill) {
  std::map<Key, std::vector<float>> undisturbed;
  for (const bool is_saved : {false, true}) {
    for (const bool is_killed : {false, true}) {
      SCOPED_TRACE(absl::StrCat(is_saved, is_killed));
      run_.reset();
      fs::remove_all(scoped_.path());
      Start();
      MakeTable();
      MakeGroup();
      for (int64_t clock = 0; clock < 4; ++clock) {
        ASSERT_TRUE(Push(0, clock).ok());
        Kill(is_killed, is_saved);
        ASSERT_TRUE(Push(1, clock).ok());
        ASSERT_TRUE(Arrive(0, clock).ok());
        Kill(is_killed, is_saved);
        // Its answer was lost.
        ASSERT_TRUE(Arrive(0, clock).ok());
        ASSERT_TRUE(Arrive(1, clock).ok());
        Kill(is_killed, is_saved);
        const auto round = coordinator().WaitForRound(members_[0], clock,
                                                      absl::InfinitePast());
        ASSERT_TRUE(round.ok()) << round.status();
        EXPECT_EQ(round->group_instance(), instance_);
        EXPECT_EQ(round->contributions_size(), 2);
        ASSERT_EQ((*run_)->rounds().Commit("g", *round).value(), clock);
        Kill(is_killed, is_saved);
      }
      if (!is_killed) undisturbed = run_->Rows();
      EXPECT_EQ(run_->Rows(), undisturbed);
      EXPECT_EQ(undisturbed.size(), 3u);
      EXPECT_EQ(coordinator().GroupStats("g")->rounds(), 4);
    }
  }
}

TEST_F(GroupRecoveryTest, EachItemOfAWorkQueueIsHandedOutOnce) {
  Start();
  MakeGroup();
  const WorkQueueOptions options = ItemsOf({"a", "b", "c", "d", "e"});
  ASSERT_TRUE(coordinator().CreateWorkQueue(QueueOf("g", "q", options)).ok());
  std::vector<std::string> finished;
  for (int i = 0; i < 5; ++i) {
    const GroupMember& member = members_[i % 2];
    const auto item = coordinator().TakeWorkItem(TakeOf(member, "q"));
    ASSERT_TRUE(item.ok() && item->has_value());
    Kill(true, i == 1);
    const auto again = coordinator().TakeWorkItem(TakeOf(member, "q"));
    ASSERT_TRUE(again.ok() && again->has_value());
    EXPECT_EQ((*again)->value(), (*item)->value());
    const WorkProgress progress = ProgressOf("q", 0, (*item)->index(), 3);
    ASSERT_TRUE(coordinator()
                    .Arrive(ArrivalOf(member, i / 2, WorkerGroup::kNoRound, 3.0,
                                      {progress}))
                    .ok());
    Kill(true, i == 2);
    EXPECT_EQ((*coordinator().TakeWorkItem(TakeOf(member, "q")))->offset(), 3);
    ASSERT_TRUE(coordinator()
                    .FinishWorkItem(FinishOf(member, "q", 0, (*item)->index()))
                    .ok());
    Kill(true, i == 3);
    // Its answer was lost.
    ASSERT_TRUE(coordinator()
                    .FinishWorkItem(FinishOf(member, "q", 0, (*item)->index()))
                    .ok());
    finished.push_back((*item)->value());
  }

  EXPECT_THAT(finished, testing::ElementsAreArray(options.items()));
  EXPECT_FALSE(
      coordinator().TakeWorkItem(TakeOf(members_[0], "q"))->has_value());
  EXPECT_EQ(coordinator().WorkQueueStats("g", "q")->num_finished(), 5);
  EXPECT_EQ(coordinator().WorkQueueStats("g", "q")->reissued(), 0);
}

TEST_F(GroupRecoveryTest, AWorkerThatDiedWithTheServerIsGivenUpAfterwards) {
  Start();
  WorkerGroupOptions options;
  options.lease = absl::Milliseconds(20);
  ASSERT_TRUE(coordinator().CreateGroup("g", options).ok());
  const auto place = coordinator().Join(JoinOf("g", 0));
  ASSERT_TRUE(place.ok());
  absl::SleepFor(absl::Milliseconds(30));
  Kill(true);
  // The lease began with the end of the recovery.
  ASSERT_EQ(coordinator().GroupStats("g")->num_active(), 1);

  const auto other = coordinator().Join(JoinOf("g", 1));
  ASSERT_TRUE(other.ok());
  ASSERT_TRUE(coordinator()
                  .Arrive(ArrivalOf(MemberOf("g", 1, other->incarnation()),
                                    other->clock(), other->round(), 1.0))
                  .ok());
  EXPECT_TRUE(coordinator()
                  .WaitForRound(MemberOf("g", 1, other->incarnation()),
                                other->round(), SteadyNow() + absl::Seconds(20))
                  .ok());
  Kill(true);
  EXPECT_EQ(coordinator().GroupStats("g")->expired(), 1);
}

// A group that is older than its workers would refuse their steps.
TEST_F(GroupRecoveryTest, WithoutALogWorkersJoinAgain) {
  Start();
  MakeGroup();
  ASSERT_TRUE(run_->SaveNow().ok());
  // With the log that is there the group is as it was.
  Start(StateKeeperOptions());
  EXPECT_TRUE(coordinator().Heartbeat(members_[0]).ok());

  Start(StateKeeperOptions());
  EXPECT_TRUE(absl::IsNotFound(coordinator().Heartbeat(members_[0])));
  // Nor is it taken from a save that it is in, if the log is gone.
  Start();
  MakeGroup();
  ASSERT_TRUE(run_->SaveNow().ok());
  run_.reset();
  fs::remove_all(DataFolder::LogOf(scoped_.path()));
  Start();
  EXPECT_TRUE(absl::IsNotFound(coordinator().Heartbeat(members_[0])));
  Start();
  EXPECT_TRUE(absl::IsNotFound(coordinator().Heartbeat(members_[0])));
}

// The end of the log may be lost then, and workers be ahead of their group.
TEST_F(GroupRecoveryTest, AfterAPowerLossWorkersJoinAgain) {
  for (const bool is_always_synced : {false, true}) {
    SCOPED_TRACE(is_always_synced);
    run_.reset();
    fs::remove_all(scoped_.path());
    StateKeeperOptions keeper = WithLog();
    if (is_always_synced) keeper.log.sync_every = absl::ZeroDuration();
    Start(keeper);
    MakeGroup();
    const WorkQueueOptions options = ItemsOf({"a", "b"});
    ASSERT_TRUE(coordinator().CreateWorkQueue(QueueOf("g", "q", options)).ok());
    ASSERT_TRUE(coordinator().TakeWorkItem(TakeOf(members_[0], "q")).ok());
    // Its step would count with a round that is open.
    ASSERT_TRUE(coordinator()
                    .Arrive(ArrivalOf(members_[0], 0, 0, 1.0,
                                      {ProgressOf("q", 0, 0, 3)}))
                    .ok());
    run_.reset();
    {
      std::fstream file(scoped_.path() + "/writes",
                        std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(16);
      file << "another start of the machine";
    }
    for (int i = 0; i < 2; ++i) {
      Start(keeper);
      const absl::Status heard = coordinator().Heartbeat(members_[0]);
      EXPECT_EQ(heard.ok(), is_always_synced) << heard;
    }
    if (is_always_synced) continue;
    MakeGroup();
    // As they are from then on.
    Start(keeper);
    EXPECT_TRUE(coordinator().Heartbeat(members_[0]).ok());
    const auto item = coordinator().TakeWorkItem(TakeOf(members_[0], "q"));
    ASSERT_TRUE(item.ok() && item->has_value());
    EXPECT_EQ((*item)->value(), "a");
    EXPECT_EQ((*item)->offset(), 0);
  }
}

TEST(PushLogRecoveryTest, TablesThatManyMakeAtOnceComeBackAsTheSame) {
  const ScopedFolder scoped;
  constexpr int kTables = 8;
  const auto name = [](int i) { return absl::StrCat("table", i); };
  std::map<std::string, uint64_t> incarnations;
  {
    ServerRun run(scoped.path(), {}, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    std::vector<std::thread> threads;
    for (uint64_t t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        const ShardCall call{*run, [] { return absl::OkStatus(); }};
        for (int i = 0; i < kTables; ++i) {
          TableConfig config = Adagrad();
          config.name = name(i);
          v1::CreateTableRequest request;
          request.set_protocol_version(kProtocolVersion);
          request.set_client_id(t + 1);
          request.set_sequence(static_cast<uint64_t>(i) + 1);
          *request.mutable_config() = ToProto(config);
          v1::CreateTableResponse response;
          EXPECT_TRUE(::tfswitch::Run(call, request, &response).ok());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (int i = 0; i < kTables; ++i) {
      incarnations[name(i)] = run->FindTable(name(i)).value()->incarnation();
    }
  }
  ServerRun run(scoped.path(), {}, WithLog());

  ASSERT_TRUE(run.Recover().ok());

  for (const auto& [table, incarnation] : incarnations) {
    EXPECT_TRUE(run->FindTable({table, incarnation}).ok()) << table;
  }
}

TEST(PushLogRecoveryTest, CallsThatWereRefusedDoNotKeepAServerFromStarting) {
  const ScopedFolder scoped;
  ShardOptions options;
  options.max_tables = 1;
  std::map<Key, std::vector<float>> rows;
  {
    ServerRun run(scoped.path(), options, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    const ShardCall call{*run, [] { return absl::OkStatus(); }};
    const auto create = [&](const TableConfig& config) {
      v1::CreateTableRequest request;
      request.set_protocol_version(kProtocolVersion);
      *request.mutable_config() = ToProto(config);
      v1::CreateTableResponse response;
      return ::tfswitch::Run(call, request, &response);
    };
    ASSERT_TRUE(create(Adagrad()).ok());
    TableConfig other = Adagrad();
    other.dim = 5;
    EXPECT_EQ(create(other).code(), absl::StatusCode::kAlreadyExists);
    other.name = "too many";
    EXPECT_EQ(create(other).code(), absl::StatusCode::kResourceExhausted);
    other.dim = -1;
    EXPECT_EQ(create(other).code(), absl::StatusCode::kInvalidArgument);
    const std::vector<Key> keys = {1};
    const std::vector<float> values = {1, std::nanf(""), 3};
    AssignRequest assign;
    assign.table = "t";
    assign.keys = keys;
    assign.embeddings = values;
    EXPECT_EQ(run->AssignOnce(assign).status().code(),
              absl::StatusCode::kInvalidArgument);
    v1::CommitRoundRequest round;
    round.set_group("g");
    round.mutable_round()->set_number(7);
    v1::CommitRoundResponse committed;
    EXPECT_TRUE(::tfswitch::Run(call, round, &committed).ok());
    ASSERT_TRUE(run.Push({1, 2}).ok());
    rows = run.Rows();
  }
  ServerRun run(scoped.path(), options, WithLog());

  ASSERT_TRUE(run.Recover().ok());

  EXPECT_EQ(run.Rows(), rows);
}

TEST(PushLogRecoveryTest, ALogThatIsNotWantedAnyMoreIsTakenIntoTheState) {
  const ScopedFolder scoped;
  std::map<Key, std::vector<float>> rows;
  {
    ServerRun run(scoped.path(), {}, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    v1::CreateTableRequest request;
    request.set_protocol_version(kProtocolVersion);
    *request.mutable_config() = ToProto(Adagrad());
    v1::CreateTableResponse response;
    const ShardCall call{*run, [] { return absl::OkStatus(); }};
    ASSERT_TRUE(::tfswitch::Run(call, request, &response).ok());
    ASSERT_TRUE(run.Push({1, 2}).ok());
    rows = run.Rows();
  }
  {
    ServerRun run(scoped.path());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run.Rows(), rows);
  }
  EXPECT_FALSE(fs::exists(DataFolder::LogOf(scoped.path())));
  ServerRun run(scoped.path(), {}, WithLog());
  ASSERT_TRUE(run.Recover().ok());
  EXPECT_EQ(run.Rows(), rows);
}

TEST(PushLogRecoveryTest, RestoredRowsAreSavedAtOnce) {
  const ScopedFolder scoped;
  ShardOptions options;
  options.checkpoint_root = scoped.path();
  options.own_folder = DataFolder::StateOf(scoped.path() + "/data");
  std::map<Key, std::vector<float>> rows;
  {
    ServerRun run(scoped.path() + "/data", options, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    ASSERT_TRUE(run.Push({1, 2}).ok());
    ASSERT_TRUE(run.SaveNow().ok());
    ASSERT_TRUE(run.SaveForClient("saved").ok());
    ASSERT_TRUE(run.Push({1, 3}).ok());
    ASSERT_TRUE(run.StageRestore("saved", "r").ok());
    ASSERT_TRUE(run->CommitRestore("r", false).ok());
    rows = run.Rows();
    ASSERT_EQ(rows.size(), 2u);
    fs::remove_all(scoped.path() + "/saved");
  }
  // Writes that come after are in the log, as always.
  for (const Key key : {4, 5}) {
    ServerRun run(scoped.path() + "/data", options, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run.Rows(), rows);
    ASSERT_TRUE(run.Push({key}).ok());
    rows = run.Rows();
  }
  // No save from before goes with the log from after.
  std::ofstream(scoped.path() + "/data/state/manifest.json") << "{}";
  ServerRun run(scoped.path() + "/data", options, WithLog());
  EXPECT_EQ(run.Recover().code(), absl::StatusCode::kDataLoss);
}

TEST(PushLogRecoveryTest, ADamagedLogDoesNotCostTheRowsOfTheSave) {
  const ScopedFolder scoped;
  StateKeeperOptions options = WithLog();
  options.log.sync_every = absl::ZeroDuration();
  {
    ServerRun run(scoped.path(), {}, options);
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    ASSERT_TRUE(run.Push({1, 2}).ok());
    ASSERT_TRUE(run.SaveNow().ok());
    for (const Key key : {3, 4, 5}) ASSERT_TRUE(run.Push({key}).ok());
  }
  const std::string log = DataFolder::LogOf(scoped.path());
  std::vector<fs::path> segments;
  for (const auto& entry : fs::directory_iterator(log)) {
    segments.push_back(entry.path());
  }
  std::sort(segments.begin(), segments.end());
  std::fstream(segments.back(), std::ios::in | std::ios::out).seekp(20).put(9);
  {
    ServerRun run(scoped.path(), {}, options);
    const absl::Status status = run.Recover();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(segments.back().string()),
                      HasSubstr("; 3 acknowledged writes from there on"),
                      HasSubstr("`tfswitch repair ")));
  }
  // Without the log it does not drop these writes either, unless told so.
  const std::string aside = scoped.path() + "/aside";
  fs::rename(log, aside);
  {
    ServerRun run(scoped.path(), {}, options);
    const absl::Status status = run.Recover();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("; 3 acknowledged writes from there on"));
  }
  ASSERT_TRUE(Repair(scoped.path(), RepairKind::kCut, ShardOptions(),
                     [](absl::string_view) {})
                  .ok());
  ServerRun run(scoped.path(), {}, options);
  ASSERT_TRUE(run.Recover().ok());
  EXPECT_EQ(run.Rows().size(), 2u);
  EXPECT_EQ(run->own_state().report()->lost_writes(), 3u);
}

TEST(PushLogRecoveryTest, ARestoreThatAKillHasEndedIsUndone) {
  const ScopedFolder scoped;
  const std::string data = scoped.path() + "/data";
  ShardOptions options;
  options.checkpoint_root = scoped.path();
  options.own_folder = "/proc/none";  // So that it ends before there is a save.
  std::map<Key, std::vector<float>> rows;
  {
    ServerRun run(data, options, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    ASSERT_TRUE(run->tables().Create(Adagrad()).ok());
    ASSERT_TRUE(run.SaveNow().ok());
    ASSERT_TRUE(run.Push({1, 2}).ok());
    ASSERT_TRUE(run.SaveForClient("saved").ok());
    ASSERT_TRUE(run.Push({1, 3}).ok());
    rows = run.Rows();
    ASSERT_TRUE(run.StageRestore("saved", "r").ok());
    ASSERT_FALSE(run->CommitRestore("r", false).ok());
  }
  // Each run goes on with the rows of the one before.
  for (const Key key : {4, 5}) {
    ServerRun run(data, options, WithLog());
    ASSERT_TRUE(run.Recover().ok());
    EXPECT_EQ(run.Rows(), rows);
    ASSERT_TRUE(run.Push({key}).ok());
    rows = run.Rows();
  }
}

}  // namespace
}  // namespace tfswitch
