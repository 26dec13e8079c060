// Damages of a data folder with a push log: a server starts with all writes
// that it has acknowledged, or refuses, until a repair.

#include "cc/recovery/repair.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "cc/recovery/data_folder.h"
#include "cc/recovery/state_keeper.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
namespace fs = std::filesystem;

constexpr int kFirstSaved = 5;  // Writes before the first save,
constexpr int kSaved = 10;      // and before the second one.
constexpr int kWrites = 40;     // All of them; write i makes the row of key i.

// Bytes by path in the folder.
using Files = std::map<std::string, std::string>;

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

Files FilesOf(const std::string& folder) {
  Files files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file() && entry.path().filename() != ".lock") {
      files[fs::relative(entry.path(), folder)] = ReadFile(entry.path());
    }
  }
  return files;
}

// A server without a network, that writes into several segments.
class Server {
 public:
  Server(const std::string& path, bool is_always_synced) {
    auto folder = DataFolder::Open(path, {});
    status_ = folder.status();
    if (!status_.ok()) return;
    folder_ = *std::move(folder);
    ShardOptions options;
    options.num_writes = folder_->num_writes();
    shard_ = std::make_unique<Shard>(options);
    StateKeeperOptions keeper;
    keeper.has_log = true;
    keeper.save_every = absl::InfiniteDuration();
    keeper.log.segment_bytes = 500;
    keeper.log.sync_every =
        is_always_synced ? absl::ZeroDuration() : absl::Hours(1);
    keeper_ =
        std::make_unique<StateKeeper>(keeper, folder_.get(), shard_.get());
    status_ = keeper_->Recover([] { return absl::OkStatus(); });
  }

  const absl::Status& status() const { return status_; }
  Shard& shard() { return *shard_; }
  uint64_t lost_writes() const {
    return shard_->own_state().report()->lost_writes();
  }
  absl::Status Save() { return keeper_->Save(); }

  absl::Status Push(Key key) {
    const std::vector<Key> keys = {key};
    const std::vector<float> gradients = {1.0f};
    PushRequest push;
    push.keys = keys;
    push.gradients = gradients;
    push.learning_rate = 1.0f;
    push.table = "t";
    push.insert_missing = true;
    return shard_->Push(**shard_->FindTable("t"), push).status();
  }

  // How many writes it has; -1 if these are not the first ones.
  int NumWrites() {
    const auto table = shard_->FindTable("t");
    if (!table.ok()) return 0;
    int num = 0;
    Key last = 0;
    EXPECT_TRUE((*table)
                    ->ForEachRow(100,
                                 [&](const RowChunk& chunk) {
                                   for (const Key key : chunk.keys) {
                                     ++num;
                                     last = std::max(last, key);
                                   }
                                   return absl::OkStatus();
                                 })
                    .ok());
    return last == num ? num : -1;
  }

 private:
  absl::Status status_;
  std::unique_ptr<DataFolder> folder_;
  std::unique_ptr<Shard> shard_;
  std::unique_ptr<StateKeeper> keeper_;
};

// The folder of a server that was killed.
void MakeFolder(const std::string& path, bool is_always_synced) {
  Server server(path, is_always_synced);
  ASSERT_TRUE(server.status().ok()) << server.status();
  TableConfig config;
  config.name = "t";
  config.dim = 1;
  config.optimizer = SgdConfig{};
  ASSERT_TRUE(server.shard().tables().Create(config).ok());
  for (Key key = 1; key <= kWrites; ++key) {
    ASSERT_TRUE(server.Push(key).ok());
    if (key == kFirstSaved || key == kSaved) {
      ASSERT_TRUE(server.Save().ok());
      absl::SleepFor(absl::Milliseconds(2));  // A later id.
    }
  }
}

std::vector<fs::path> Segments(const std::string& folder) {
  std::vector<fs::path> paths;
  for (const auto& entry : fs::directory_iterator(DataFolder::LogOf(folder))) {
    paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

// All records have the same length.
size_t RecordBytes(const fs::path& segment) {
  const std::string bytes = ReadFile(segment);
  uint64_t payload = 0;
  std::memcpy(&payload, bytes.data() + 8 + 16, sizeof(payload));
  return 40 + (payload + 7) / 8 * 8;
}

void FlipRecord(const fs::path& segment, size_t index) {
  const auto at =
      static_cast<std::streamoff>(8 + index * RecordBytes(segment) + 41);
  std::fstream file(segment, std::ios::in | std::ios::out | std::ios::binary);
  file.seekg(at);
  const int byte = file.get();
  file.seekp(at);
  file.put(static_cast<char>(byte ^ 4));
}

void Shorten(const fs::path& file, size_t bytes) {
  fs::resize_file(file, fs::file_size(file) - bytes);
}

void DamageNewestSave(const std::string& folder) {
  // The newest last, because ids of saves begin with their time.
  std::vector<fs::path> files;
  for (const auto& entry :
       fs::directory_iterator(DataFolder::StateOf(folder) + "/t")) {
    files.push_back(entry.path());
  }
  const fs::path file = *std::max_element(files.begin(), files.end());
  std::fstream(file, std::ios::in | std::ios::out | std::ios::binary)
          .seekp(-1, std::ios::end)
      << '\x7f';
}

struct Damage {
  const char* name;
  std::function<void(const std::string& folder)> make;
  bool is_none = false;  // A server has all writes.
  // A power loss may do it to records that were not flushed.
  bool is_tail = false;
  int num_saved = kSaved;  // Writes in the newest whole save.
};

std::vector<Damage> Damages() {
  // Segments 0 and 1 have records that the save has, and the last is open.
  return {
      {"nothing", [](const std::string&) {}, true},
      {"a write that was torn",
       [](const std::string& folder) {
         const fs::path last = Segments(folder).back();
         const std::string bytes = ReadFile(last);
         std::ofstream(last, std::ios::binary | std::ios::app)
             << bytes.substr(8, RecordBytes(last) - 1);
       },
       true},
      {"a record that the save has",
       [](const std::string& folder) { FlipRecord(Segments(folder)[0], 1); },
       true},
      {"the newest save", DamageNewestSave, true, false, kFirstSaved},
      {"the newest save and records behind the one before",
       [](const std::string& folder) {
         DamageNewestSave(folder);
         fs::remove(Segments(folder)[1]);
       },
       false, false, kFirstSaved},
      {"a bit of a closed segment",
       [](const std::string& folder) { FlipRecord(Segments(folder)[3], 2); },
       false, true},
      {"a bit of the last segment",
       [](const std::string& folder) {
         FlipRecord(Segments(folder).back(), 0);
       },
       false, true},
      {"a part of the last record",
       [](const std::string& folder) { Shorten(Segments(folder).back(), 9); },
       false, true},
      {"the last record",
       [](const std::string& folder) {
         const fs::path last = Segments(folder).back();
         Shorten(last, RecordBytes(last));
       },
       false, true},
      {"all of the last segment",
       [](const std::string& folder) {
         fs::resize_file(Segments(folder).back(), 0);
       },
       false, true},
      {"the last record of a closed segment",
       [](const std::string& folder) {
         const fs::path segment = Segments(folder)[3];
         Shorten(segment, RecordBytes(segment));
       }},
      {"the last segment",
       [](const std::string& folder) { fs::remove(Segments(folder).back()); },
       false, true},
      {"a segment in the middle",
       [](const std::string& folder) { fs::remove(Segments(folder)[3]); }},
      {"the first segment that is needed",
       [](const std::string& folder) {
         for (const int i : {2, 1, 0}) fs::remove(Segments(folder)[i]);
       }},
      {"the log",
       [](const std::string& folder) {
         fs::remove_all(DataFolder::LogOf(folder));
       },
       false, true},
      {"writes",
       [](const std::string& folder) { fs::remove(folder + "/writes"); }},
      {"the bytes of writes",
       [](const std::string& folder) {
         fs::resize_file(folder + "/writes", 0);
         fs::resize_file(folder + "/writes", 72);
       }},
      {"the log and writes",
       [](const std::string& folder) {
         fs::remove_all(DataFolder::LogOf(folder));
         fs::remove(folder + "/writes");
       }},
      {"the log, the saves and writes",
       [](const std::string& folder) {
         fs::remove_all(DataFolder::LogOf(folder));
         fs::remove_all(DataFolder::StateOf(folder));
         fs::remove(folder + "/writes");
       }},
  };
}

class RepairTest : public testing::TestWithParam<bool> {
 protected:
  // Calls `check` with the folder of each damage.
  void ForEachDamage(
      const std::function<void(const Damage&, const std::string&)>& check) {
    fs::remove_all(good_);
    MakeFolder(good_, GetParam());
    ASSERT_GE(Segments(good_).size(), 6u);
    const std::string path = scoped_.path() + "/data";
    for (const Damage& damage : Damages()) {
      SCOPED_TRACE(damage.name);
      fs::copy(good_, path, fs::copy_options::recursive);
      damage.make(path);
      check(damage, path);
      fs::remove_all(path);
    }
  }

  static absl::Status Run(const std::string& path, RepairKind kind,
                          std::string* said = nullptr) {
    return Repair(path, kind, ShardOptions(), [said](absl::string_view line) {
      if (said != nullptr) absl::StrAppend(said, line, "\n");
    });
  }

  const ScopedFolder scoped_;
  const std::string good_ = scoped_.path() + "/good";
};

INSTANTIATE_TEST_SUITE_P(Sync, RepairTest, testing::Bool(),
                         [](const auto& info) {
                           return info.param ? "Always" : "AtIntervals";
                         });

TEST_P(RepairTest, AServerHasAllAcknowledgedWritesOrRefuses) {
  for (const bool is_same_boot : {true, false}) {
    SCOPED_TRACE(is_same_boot ? "same boot" : "another boot");
    ForEachDamage([&](const Damage& damage, const std::string& path) {
      if (!is_same_boot && !ReadFile(path + "/writes").empty() &&
          ReadFile(path + "/writes")[8] != '\0') {
        std::fstream(path + "/writes",
                     std::ios::in | std::ios::out | std::ios::binary)
                .seekp(8)
            << "another";
      }
      const Files before = FilesOf(path);
      for (int start = 0; start < 2; ++start) {  // It changes nothing.
        Server server(path, GetParam());
        const absl::Status& status = server.status();
        if (damage.is_none) {
          ASSERT_TRUE(status.ok()) << status;
          EXPECT_EQ(server.NumWrites(), kWrites);
          EXPECT_EQ(server.lost_writes(), 0u);
        } else if (damage.is_tail && !is_same_boot && !GetParam()) {
          ASSERT_TRUE(status.ok()) << status;
          EXPECT_GE(server.NumWrites(), kSaved);
          EXPECT_LT(server.NumWrites(), kWrites);
          EXPECT_EQ(server.lost_writes(),
                    start > 0 ? 0u : kWrites - server.NumWrites());
        } else {
          ASSERT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
          const std::string message(status.message());
          EXPECT_THAT(message, HasSubstr("`tfswitch repair " + path));
          const bool has_writes =
              before.count("writes") > 0 && before.at("writes")[8] != '\0';
          EXPECT_THAT(message,
                      HasSubstr(path + (has_writes ? "/log" : "/writes")));
          if (has_writes) {
            EXPECT_THAT(message, AllOf(HasSubstr("at offset "),
                                       HasSubstr(" acknowledged writes")));
          } else {
            EXPECT_THAT(message, HasSubstr("how many writes are lost"));
          }
          Files after = FilesOf(path);
          EXPECT_EQ(after, before);
        }
      }
    });
  }
}

TEST_P(RepairTest, ItGoesBackToWhatIsWholeAndKeepsTheRest) {
  for (const RepairKind kind : {RepairKind::kCut, RepairKind::kToSave}) {
    ForEachDamage([&](const Damage& damage, const std::string& path) {
      const bool is_cut = kind == RepairKind::kCut;
      const Files before = FilesOf(path);
      const bool knows_writes =
          before.count("writes") > 0 && before.at("writes")[8] != '\0';
      const bool has_log = fs::exists(DataFolder::LogOf(path));
      std::string said;
      ASSERT_TRUE(Run(path, RepairKind::kDryRun, &said).ok());
      EXPECT_EQ(FilesOf(path), before);

      ASSERT_TRUE(Run(path, kind).ok());

      // Each file of the log is where it was, or aside.
      Files kept;
      const Files after = FilesOf(path);
      for (const auto& [name, bytes] : after) {
        if (name.rfind("log.removed-", 0) == 0) {
          kept["log" + name.substr(name.find('/'))] = bytes;
        }
      }
      kept.insert(after.begin(), after.end());
      for (const auto& [name, bytes] : before) {
        if (name != "writes") {
          EXPECT_EQ(kept[name], bytes) << name;
        }
      }
      int num_writes = 0;
      {
        Server server(path, GetParam());
        ASSERT_TRUE(server.status().ok()) << server.status();
        num_writes = server.NumWrites();
        if (before.count("state/manifest.json") == 0) {
          EXPECT_EQ(num_writes, 0);
          return;
        }
        EXPECT_GE(num_writes, damage.num_saved);
        const bool is_known = knows_writes || has_log;
        const uint64_t lost = is_known ? kWrites - num_writes : 0;
        EXPECT_EQ(server.lost_writes(), lost);
        if (!is_cut) {
          EXPECT_EQ(num_writes, damage.num_saved);
        } else if (damage.is_none) {
          EXPECT_EQ(num_writes, kWrites);
        }
        if (knows_writes && !(is_cut && damage.is_none)) {
          EXPECT_THAT(said, HasSubstr(absl::StrCat(": ", lost,
                                                   " acknowledged writes")));
        }
        ASSERT_TRUE(server.Push(num_writes + 1).ok());
      }
      Server again(path, GetParam());
      ASSERT_TRUE(again.status().ok()) << again.status();
      EXPECT_EQ(again.lost_writes(), 0u);
      EXPECT_EQ(again.NumWrites(), num_writes + 1);
    });
  }
}

TEST_P(RepairTest, WorkersJoinAgainAfterARepair) {
  GroupMember member = MemberOf("g", 0, 0);
  {
    Server server(good_, GetParam());
    Coordinator& coordinator = *server.shard().FindCoordinator().value();
    ASSERT_TRUE(coordinator.CreateGroup("g", WorkerGroupOptions()).ok());
    member.set_incarnation(coordinator.Join(JoinOf("g", 0))->incarnation());
    ASSERT_TRUE(
        coordinator
            .Arrive(ArrivalOf(member, 0, /*round=*/WorkerGroup::kNoRound, 1.0))
            .ok());
  }
  Shorten(Segments(good_).back(), 8);  // The arrival is lost.
  ASSERT_TRUE(Run(good_, RepairKind::kCut).ok());

  Server server(good_, GetParam());

  ASSERT_TRUE(server.status().ok()) << server.status();
  EXPECT_TRUE(absl::IsNotFound(
      server.shard().FindCoordinator().value()->Heartbeat(member)));
}

TEST_P(RepairTest, AFolderThatIsNotAServersOrIsInUseIsLeftAlone) {
  {
    const Server server(good_, GetParam());
    const Files before = FilesOf(good_);

    const absl::Status status = Run(good_, RepairKind::kToSave);

    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(good_));
    EXPECT_EQ(FilesOf(good_), before);
  }
  fs::create_directories(scoped_.path() + "/other");
  EXPECT_EQ(Run(scoped_.path() + "/other", RepairKind::kCut).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(fs::is_empty(scoped_.path() + "/other"));
}

}  // namespace
}  // namespace tfswitch
