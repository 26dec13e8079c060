#include "cc/shard/shard.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <future>
#include <iterator>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/hash.h"
#include "cc/base/log_writer.h"
#include "cc/base/racy_memory.h"
#include "cc/shard/control_calls.h"
#include "cc/table/counting_bloom.h"
#include "cc/wire/codec.h"
#include "cc/wire/table_config_conversion.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TableConfig Config(const std::string& name) {
  TableConfig config;
  config.name = name;
  config.dim = 2;
  return config;
}

absl::StatusOr<int64_t> Assign(Shard& shard, const std::vector<Key>& keys,
                               const std::vector<float>& floats,
                               const std::vector<float>& slots = {},
                               bool only_missing = false,
                               const std::string& table = "t") {
  AssignRequest request;
  request.table = table;
  request.keys = keys;
  request.embeddings = floats;
  request.slots = slots;
  request.only_missing = only_missing;
  const absl::StatusOr<WriteResult> written = shard.AssignOnce(request);
  if (!written.ok()) return written.status();
  return written->num_rows;
}

// A write without a record.
absl::StatusOr<WriteResult> WriteOnce(
    Shard& shard, uint64_t client_id, uint64_t sequence,
    absl::FunctionRef<absl::StatusOr<int64_t>()> write) {
  return shard.journal().WriteOnce(
      {client_id, sequence}, [] { return absl::StatusOr<uint64_t>(0); }, write);
}

TEST(ShardOptionsTest, PlaceMustBeInTheCluster) {
  EXPECT_TRUE((ShardOptions{1, 2}).Validate().ok());
  EXPECT_THAT(std::string((ShardOptions{2, 2}).Validate().message()),
              HasSubstr("shard_index"));
  EXPECT_THAT(std::string((ShardOptions{0, 0}).Validate().message()),
              HasSubstr("num_shards"));
}

TEST(ShardTest, ATableTooManyIsRefusedAndNamed) {
  ShardOptions options;
  options.max_tables = 2;
  Shard shard(options);
  ASSERT_TRUE(shard.tables().Create(Config("a")).ok());
  ASSERT_TRUE(shard.tables().Create(Config("b")).ok());

  const absl::Status status = shard.tables().Create(Config("c")).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(
      std::string(status.message()),
      AllOf(HasSubstr("'c'"), HasSubstr("2"), HasSubstr("--max_tables")));
  EXPECT_FALSE(shard.tables().Create(Config("b"))->created);  // It is there.
  ASSERT_TRUE(shard.tables().Drop("a"));
  EXPECT_TRUE(shard.tables().Create(Config("c"))->created);
}

TEST(ShardTest, OfManyWhoMakeATableAtOnceOneDoes) {
  constexpr int kThreads = 4;
  // ThreadSanitizer leaves a program addresses for about 50.
  constexpr int kTables = 16;
  ShardOptions options;
  options.max_tables = kTables;
  Shard shard(options);
  std::atomic<int> num_ready{0};
  std::atomic<int> num_made{0};
  std::atomic<int> num_refused{0};
  std::vector<std::shared_ptr<EmbeddingTable>> found(kThreads * kTables);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      ++num_ready;
      while (num_ready < kThreads) std::this_thread::yield();
      for (int i = 0; i < kTables; ++i) {
        const std::string name = std::to_string(i);
        num_made += shard.tables().Create(Config(name))->created ? 1 : 0;
        found[t * kTables + i] = shard.FindTable(name).value();
        TableConfig other = Config(name);
        other.dim = 3;
        num_refused +=
            absl::IsAlreadyExists(shard.tables().Create(other).status()) ? 1
                                                                         : 0;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();

  EXPECT_EQ(num_made, kTables);
  EXPECT_EQ(num_refused, kThreads * kTables);
  for (int i = 0; i < kThreads * kTables; ++i) {
    EXPECT_EQ(found[i], found[i % kTables]) << i;
  }
}

TEST(ShardTest, BloomFiltersOfAllTablesShareOneLimit) {
  const auto config = [](const std::string& name, uint64_t capacity) {
    TableConfig table = Config(name);
    BloomMinCountAdmission bloom;
    bloom.min_count = 2;
    bloom.capacity = capacity;
    table.admission.policy = bloom;
    return table;
  };
  ShardOptions options;
  options.max_bloom_bytes = static_cast<uint64_t>(
      2.5 *
      CountingBloom::SizeBytes(std::get<BloomMinCountAdmission>(
                                   config("", 1'000'000).admission.policy),
                               config("", 1).num_virtual_shards));
  Shard shard(options);
  ASSERT_TRUE(shard.tables().Create(config("a", 1'000'000)).ok());
  ASSERT_TRUE(shard.tables().Create(config("b", 1'000'000)).ok());

  const absl::Status beside =
      shard.tables().Create(config("c", 1'000'000)).status();
  const absl::Status alone =
      shard.tables().Create(config("c", 9'000'000)).status();

  EXPECT_EQ(beside.code(), absl::StatusCode::kResourceExhausted) << beside;
  EXPECT_EQ(alone.code(), absl::StatusCode::kInvalidArgument) << alone;
  for (const absl::Status& status : {beside, alone}) {
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'c'"), HasSubstr(" GB"),
                      HasSubstr("--max_bloom_bytes")));
  }
  EXPECT_TRUE(shard.tables().Create(Config("c")).ok());
  ASSERT_TRUE(shard.tables().Drop("a"));
  EXPECT_TRUE(shard.tables().Create(config("d", 1'000'000)).ok());
}

TEST(ShardTest, ReservesItsShareOfTheCapacityUnlessThatIsMoreThanItsMemory) {
  constexpr uint64_t kRows = 100'000;
  TableConfig config = Config("a");
  Shard whole(ShardOptions{0, 1});
  Shard half(ShardOptions{1, 2});
  const auto index_bytes_of = [](Shard& shard, const std::string& name) {
    shard.ReserveCapacity(name);
    return (*shard.tables().Find(name))->stats().index_bytes;
  };
  ASSERT_TRUE(whole.tables().Create(config).ok());
  const int64_t empty = index_bytes_of(whole, "a");
  config.name = "b";
  config.capacity.num_rows = kRows;
  ASSERT_TRUE(whole.tables().Create(config).ok());
  ASSERT_TRUE(half.tables().Create(config).ok());

  const int64_t all = index_bytes_of(whole, "b");
  EXPECT_GT(all, 10 * empty);
  EXPECT_NEAR(static_cast<double>(index_bytes_of(half, "b")), all / 2.0,
              0.2 * static_cast<double>(all));

  // A client with another capacity uses the same table.
  config.capacity.num_rows = 1;
  EXPECT_FALSE(whole.tables().Create(config)->created);
  EXPECT_EQ(index_bytes_of(whole, "b"), all);

  config.name = "c";
  config.capacity.num_rows = uint64_t{1} << 60;
  const absl::Status refused = half.tables().CheckCapacity(config);
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("'c'"), HasSubstr("capacity"), HasSubstr(" GB"),
                    HasSubstr("on shard 1")));
  config.num_virtual_shards = 0;  // It comes from a message.
  EXPECT_THAT(std::string(half.tables().CheckCapacity(config).message()),
              HasSubstr("num_virtual_shards"));
  config.name = "b";
  EXPECT_TRUE(half.tables().CheckCapacity(config).ok());  // It exists.
}

TEST(ShardTest, SimultaneousCallsDoNotExceedMaxRows) {
  constexpr int64_t kMaxRows = 64;
  TableConfig config = Config("t");
  config.statistics.kind = StatisticsKind::kUsage;
  config.eviction.max_rows = kMaxRows;
  Shard shard(ShardOptions{0, 1});
  ASSERT_TRUE(shard.tables().Create(config).ok());
  const auto table = *shard.FindTable(config.name);
  const auto call = [&](unsigned seed) {
    std::minstd_rand random(seed);
    for (int i = 0; i < 10; ++i) {
      std::vector<Key> keys(10);
      for (Key& key : keys) key = static_cast<Key>(random() % 400);
      std::vector<float> rows(2 * keys.size(), 1.0f);
      EXPECT_TRUE(
          shard.Pull(*table, keys, IfMissing::kInsert, absl::MakeSpan(rows))
              .ok());
      PushRequest push;
      for (Key& key : keys) key = static_cast<Key>(random() % 400);
      push.keys = keys;
      push.gradients = rows;
      push.insert_missing = true;
      EXPECT_TRUE(shard.Push(*table, push).ok());
    }
  };
  for (unsigned round = 0; round < 50; ++round) {
    std::vector<std::thread> threads;
    for (unsigned t = 1; t <= 4; ++t) threads.emplace_back(call, 4 * round + t);
    for (std::thread& thread : threads) thread.join();
    // A size is exact only while nobody writes.
    EXPECT_LE(table->size(), kMaxRows);
  }
  EXPECT_EQ(table->claimed_rows(), 0);
  EXPECT_GT(table->size(), kMaxRows / 2);
  EXPECT_EQ(table->stats().refused_keys, 0);
}

TEST(ShardTest, AReplayMakesATableForWhichThereIsLessMemoryNow) {
  ShardOptions options;
  options.max_reserved_bytes = 1 << 20;
  Shard shard(options);
  TableConfig config = Config("a");
  config.capacity.num_rows = 1'000'000;
  v1::CreateTableRequest request;
  request.set_protocol_version(kProtocolVersion);
  *request.mutable_config() = ToProto(config);
  v1::CreateTableResponse response;
  ShardCall call{shard, [] { return absl::OkStatus(); }};

  EXPECT_EQ(tfswitch::Run(call, request, &response).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(shard.tables().Find("a").ok());
  call.is_replay = true;
  EXPECT_TRUE(tfswitch::Run(call, request, &response).ok());
  EXPECT_TRUE(shard.tables().Find("a").ok());
}

TEST(ShardTest, KeyOfAnotherShardIsRefusedAndItsOwnerNamed) {
  Shard shard(ShardOptions{0, 2});
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  const auto table = shard.FindTable("t").value();
  Key foreign = 0;
  while (OwnerOfVirtualShard(VirtualShardOf(foreign, 1024), 1024, 2) != 1) {
    ++foreign;
  }
  std::vector<float> out(2);

  const absl::Status status =
      shard.Pull(*table, {foreign}, IfMissing::kInsert, absl::MakeSpan(out));

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("shard 1 of 2"));
  EXPECT_EQ(table->size(), 0);

  // Key 0 is this shard's, and takes no step either.
  const std::vector<Key> keys = {0, foreign};
  const std::vector<float> floats(4, 1.0f);
  PushRequest push;
  push.keys = keys;
  push.gradients = floats;
  push.learning_rate = 1.0f;
  push.insert_missing = true;
  EXPECT_EQ(shard.Push(*table, push).status(), status);
  EXPECT_EQ(Assign(shard, keys, floats).status(), status);
  EXPECT_EQ(shard.Erase(*table, keys).status(), status);
  EXPECT_EQ(table->size(), 0);
}

TEST(ShardTest, EveryKeyHasOneOwner) {
  for (const uint32_t num_shards : {1u, 2u, 3u, 7u, 1024u}) {
    std::vector<int> owned(num_shards, 0);
    for (uint32_t v = 0; v < 1024; ++v) {
      const uint32_t owner = OwnerOfVirtualShard(v, 1024, num_shards);
      ASSERT_LT(owner, num_shards);
      ++owned[owner];
    }
    for (const int count : owned) EXPECT_NEAR(count, 1024.0 / num_shards, 1.0);
  }
}

TEST(ShardTest, MoreServersThanVirtualShardsIsRefused) {
  Shard shard(ShardOptions{0, 4});
  TableConfig config = Config("t");
  config.num_virtual_shards = 2;

  EXPECT_EQ(shard.tables().Create(config).status().code(),
            absl::StatusCode::kInvalidArgument);
}

#if !TFSWITCH_THREAD_SANITIZER && !defined(__SANITIZE_ADDRESS__)
// Sanitizers need more address space than the limit leaves.
TEST(ShardTest, APushThatRanOutOfMemoryCountsAsApplied) {
  constexpr int kDim = 4096;
  constexpr size_t kKeys = 1000;
  Shard shard{ShardOptions{}};
  TableConfig config = Config("t");
  config.dim = kDim;
  config.initializer = ConstantInitializer{1.0f};
  {
    // Less than a table takes where it can, and more than the least it takes.
    size_t pages = 0;
    ASSERT_TRUE(std::ifstream("/proc/self/statm") >> pages);
    rlimit before;
    ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
    rlimit small = before;
    small.rlim_cur = pages * static_cast<size_t>(sysconf(_SC_PAGESIZE)) +
                     (size_t{800} << 20);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
    const auto created = shard.tables().Create(config);
    ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
    ASSERT_TRUE(created.ok()) << created.status();
  }
  EmbeddingTable& table = *shard.FindTable("t").value();
  // Until a stripe is full.
  std::vector<Key> keys(kKeys);
  const std::vector<float> floats(kKeys * kDim, 0.25f);
  absl::Status assigned;
  for (Key first = 0; assigned.ok(); first += kKeys) {
    std::iota(keys.begin(), keys.end(), first);
    assigned = Assign(shard, keys, floats).status();
  }
  ASSERT_EQ(assigned.code(), absl::StatusCode::kResourceExhausted);

  // The first has a row, and many of the others would need one in that stripe.
  std::iota(keys.begin(), keys.end(), Key{1} << 40);
  keys[0] = 0;
  PushRequest push;
  push.keys = keys;
  push.gradients = floats;
  push.learning_rate = 1.0f;
  push.insert_missing = true;
  push.keys_are_unique = true;
  push.id.client_id = 1;
  push.id.sequence = 1;
  EXPECT_EQ(shard.Push(table, push).status().code(),
            absl::StatusCode::kResourceExhausted);
  const auto repeated = shard.Push(table, push);

  ASSERT_TRUE(repeated.ok()) << repeated.status();
  EXPECT_TRUE(repeated->duplicate);
  std::vector<float> row(kDim);
  ASSERT_TRUE(
      shard.Pull(table, {keys[0]}, IfMissing::kValue, absl::MakeSpan(row))
          .ok());
  EXPECT_EQ(row[0], 0.0f);
}
#endif

TEST(ShardTest, APushHeldBackPastTheWindowIsRefusedAndNotApplied) {
  Shard shard{ShardOptions{}};
  TableConfig config = Config("t");
  config.initializer = ConstantInitializer{10.0f};
  ASSERT_TRUE(shard.tables().Create(config).ok());
  const auto table = shard.FindTable("t").value();
  const std::vector<Key> keys = {1};
  const std::vector<float> ones(2, 1.0f);
  PushRequest push;
  push.keys = keys;
  push.gradients = ones;
  push.learning_rate = 1.0f;
  push.insert_missing = true;
  push.id.client_id = 5;
  push.id.sequence = 1 + WriteLedger::kWindow;
  ASSERT_TRUE(shard.Push(*table, push).ok());
  PushRequest late = push;
  late.id.sequence = 1;

  const absl::Status refused = shard.Push(*table, late).status();

  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(refused.message()),
      AllOf(HasSubstr("table 't': write 1 of client 5 has come too late"),
            HasSubstr("It was not applied now")));
  // Beside others it is the only one that is not applied.
  push.id.sequence += 1;
  const std::vector<TablePush> both = {{table, &late}, {table, &push}};
  std::vector<WriteResult> results(2);
  EXPECT_EQ(shard.PushMany(both, absl::MakeSpan(results)), refused);
  std::vector<float> row(2);
  ASSERT_TRUE(
      shard.Pull(*table, keys, IfMissing::kValue, absl::MakeSpan(row)).ok());
  EXPECT_THAT(row, testing::Each(8.0f));
  // An assignment goes the same way.
  EXPECT_EQ(WriteOnce(shard, 5, 1, [] { return 1; }).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(ShardTest, AWriteIsDoneOnceAndItsCountIsRemembered) {
  Shard shard{ShardOptions{}};
  int calls = 0;
  const auto write = [&]() -> absl::StatusOr<int64_t> { return 10 + ++calls; };

  for (const bool again : {false, true}) {
    const auto written = WriteOnce(shard, 7, 1, write);
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->num_rows, 11);
    EXPECT_EQ(written->duplicate, again);
  }
  // Without an identity it is another one each time.
  EXPECT_EQ(WriteOnce(shard, 0, 1, write)->num_rows, 12);
  EXPECT_EQ(WriteOnce(shard, 0, 1, write)->num_rows, 13);
}

TEST(ShardTest, AWriteThatFailedMayBeTriedAgainUnderItsIdentity) {
  Shard shard{ShardOptions{}};

  EXPECT_EQ(WriteOnce(shard, 7, 1,
                      []() -> absl::StatusOr<int64_t> {
                        return absl::NotFoundError("no such thing");
                      })
                .status()
                .code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(
      WriteOnce(shard, 7, 1,
                []() -> absl::StatusOr<int64_t> { throw std::bad_alloc(); })
          .status()
          .code(),
      absl::StatusCode::kResourceExhausted);
  const auto written = WriteOnce(shard, 7, 1, [] { return 3; });

  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(written->num_rows, 3);
  EXPECT_FALSE(written->duplicate);
}

TEST(ShardTest, ADroppedTableLivesWhileItIsUsed) {
  Shard shard(ShardOptions{});
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  const auto table = shard.FindTable("t").value();

  EXPECT_TRUE(shard.tables().Drop("t"));
  EXPECT_FALSE(shard.tables().Drop("t"));

  std::vector<float> out(2);
  EXPECT_TRUE(
      shard.Pull(*table, {1}, IfMissing::kInsert, absl::MakeSpan(out)).ok());
}

TEST(ShardTest, ATableGoesWithItsLastHold) {
  Shard shard(ShardOptions{});
  EXPECT_FALSE(shard.tables().Hold("t").ok());
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  ASSERT_TRUE(shard.tables().Create(Config("never held")).ok());
  ASSERT_TRUE(shard.tables().Hold("t").ok());
  ASSERT_TRUE(shard.tables().Hold("t").ok());

  shard.tables().Release("t");
  EXPECT_TRUE(shard.FindTable("t").ok());
  shard.tables().Release("t");

  EXPECT_FALSE(shard.FindTable("t").ok());
  EXPECT_TRUE(shard.FindTable("never held").ok());
}

TEST(ShardTest, ATableThatIsMadeAgainWithoutItsRowsIsWarnedOf) {
  Shard shard(ShardOptions{});
  const auto make = [&](bool with_row) {
    ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
    ASSERT_TRUE(shard.tables().Hold("t").ok());
    if (!with_row) return;
    std::vector<float> out(2);
    ASSERT_TRUE(shard
                    .Pull(*shard.FindTable("t").value(), {1},
                          IfMissing::kInsert, absl::MakeSpan(out))
                    .ok());
  };
  const auto warnings = [&](bool drops) {
    if (drops) shard.tables().Drop("t");
    testing::internal::CaptureStderr();
    make(false);
    LogWriter::Get().Flush(absl::Minutes(1));
    return testing::internal::GetCapturedStderr();
  };
  make(true);
  shard.tables().Release("t");
  EXPECT_THAT(warnings(/*drops=*/false), HasSubstr("table 't' had 1 rows"));
  shard.tables().Release("t");  // It had none.
  EXPECT_EQ(warnings(/*drops=*/false), "");
  shard.tables().Release("t");
  make(true);
  shard.tables().Release("t");
  EXPECT_EQ(warnings(/*drops=*/true), "");
}

v1::StageRestoreRequest RestoreOf(const std::string& path,
                                  const std::string& id,
                                  const std::vector<std::string>& tables = {}) {
  v1::StageRestoreRequest request;
  request.set_path(path);
  request.set_restore_id(id);
  request.mutable_tables()->Add(tables.begin(), tables.end());
  return request;
}

v1::SaveShardRequest SaveOf(const std::string& path, const std::string& id,
                            bool all_tables,
                            const std::vector<std::string>& tables = {}) {
  v1::SaveShardRequest request;
  request.set_path(path);
  request.set_save_id(id);
  request.set_all_tables(all_tables);
  request.mutable_tables()->Add(tables.begin(), tables.end());
  return request;
}

v1::CommitCheckpointRequest CommitOf(
    const std::string& path, const std::string& id,
    const std::vector<v1::CheckpointPart>& parts, uint32_t keep = 2) {
  v1::CommitCheckpointRequest request;
  request.set_path(path);
  request.set_save_id(id);
  request.mutable_manifest_parts()->Add(parts.begin(), parts.end());
  request.set_keep(keep);
  return request;
}

// A folder with a checkpoint of a table "t" of three rows.
class CheckpointFolderTest : public testing::Test {
 protected:
  CheckpointFolderTest() {
    std::string pattern = testing::TempDir() + "/rootXXXXXX";
    root_ = mkdtemp(pattern.data());
    EXPECT_TRUE(Save(Shard(OptionsBelow(root_)), "good").ok());
  }
  ~CheckpointFolderTest() override {
    std::error_code error;
    std::filesystem::remove_all(root_, error);
  }

  static ShardOptions OptionsBelow(const std::string& root) {
    ShardOptions options;
    options.checkpoint_root = root;
    return options;
  }

  static absl::Status Save(Shard&& shard, const std::string& path,
                           const std::string& save_id = "s") {
    EXPECT_TRUE(shard.tables().Create(Config("t")).ok());
    std::vector<float> out(6);
    EXPECT_TRUE(shard
                    .Pull(*shard.FindTable("t").value(), {1, 2, 3},
                          IfMissing::kInsert, absl::MakeSpan(out))
                    .ok());
    const auto part = shard.saves().Write(SaveOf(path, save_id, false, {"t"}));
    if (!part.ok()) return part.status();
    return shard.saves().Commit(CommitOf(path, save_id, {*part}, 2)).status();
  }

  std::string root_;
};

// As a handler of a signal might.
TEST_F(CheckpointFolderTest, ASaveInsideASaveOfItsThreadIsRefused) {
  Shard shard(OptionsBelow(root_));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  absl::Status inside;

  const auto part = shard.saves().Write(SaveOf("outer", "o", true), [&] {
    inside = shard.saves().Write(SaveOf("inner", "i", true)).status();
    return absl::OkStatus();
  });

  EXPECT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(inside.code(), absl::StatusCode::kFailedPrecondition) << inside;
}

TEST_F(CheckpointFolderTest, ASaveDoesNotHaveATableThatWentWhileItWaited) {
  Shard shard(OptionsBelow(root_));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  std::promise<void> waits;
  std::once_flag is_said;
  std::future<absl::Status> second;

  const auto first = shard.saves().Write(SaveOf("first", "f", true), [&] {
    if (second.valid()) return absl::OkStatus();
    second = std::async(std::launch::async, [&] {
      return shard.saves()
          .Write(SaveOf("second", "s", true),
                 [&] {
                   std::call_once(is_said, [&] { waits.set_value(); });
                   return absl::OkStatus();
                 })
          .status();
    });
    waits.get_future().wait();
    EXPECT_TRUE(shard.tables().Drop("t"));
    return absl::OkStatus();
  });

  EXPECT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(second.get().code(), absl::StatusCode::kAborted);
}

TEST_F(CheckpointFolderTest, PathsOfClientsLieBelowTheRoot) {
  EXPECT_TRUE(std::filesystem::exists(root_ + "/good/manifest.json"));
  EXPECT_TRUE(Save(Shard(OptionsBelow(root_)), root_ + "/abs/olute").ok());
  const std::string outside = root_ + "2";
  std::filesystem::create_directory(outside);
  std::filesystem::create_symlink(outside, root_ + "/link");
  // The folder of a table.
  std::filesystem::create_directory(root_ + "/inner");
  std::filesystem::create_symlink(outside, root_ + "/inner/t");

  for (const std::string& path :
       std::vector<std::string>{outside, "/", "../x", root_ + "/../x",
                                "good/../../x", "link", "link/x", "inner"}) {
    Shard shard(OptionsBelow(root_));
    const absl::Status stage =
        shard.restores().Stage(RestoreOf(path, "r")).status();
    EXPECT_EQ(stage.code(), absl::StatusCode::kPermissionDenied)
        << path << stage;
    EXPECT_EQ(shard.saves().Abort(path, "s").code(),
              absl::StatusCode::kPermissionDenied)
        << path;
    EXPECT_EQ(shard.saves().Commit(CommitOf(path, "s", {}, 2)).status().code(),
              absl::StatusCode::kPermissionDenied)
        << path;
    const absl::Status save = Save(std::move(shard), path);
    EXPECT_EQ(save.code(), absl::StatusCode::kPermissionDenied) << path;
    EXPECT_THAT(std::string(save.message()),
                AllOf(HasSubstr(path), HasSubstr(root_),
                      HasSubstr("--checkpoint_root")));
  }
  EXPECT_TRUE(std::filesystem::is_empty(outside));
  std::filesystem::remove_all(outside);
}

TEST_F(CheckpointFolderTest, WithoutARootSavesAreRefused) {
  const absl::Status save = Save(Shard(OptionsBelow("")), "x");
  EXPECT_EQ(save.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(save.message()), HasSubstr("--checkpoint_root"));
}

TEST_F(CheckpointFolderTest, IdsThatAreNoNamesAreRefused) {
  Shard shard(OptionsBelow(root_));
  for (const std::string& id :
       std::vector<std::string>{"", "../x", "a/b", "a b", "a\nb"}) {
    EXPECT_EQ(shard.saves().Write(SaveOf("x", id, false)).status().code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(shard.saves().Abort("x", id).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(shard.restores().Stage(RestoreOf("good", id)).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
  const std::string with_nul("x\0y", 3);
  EXPECT_EQ(shard.saves().Write(SaveOf(with_nul, "s", false)).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(CheckpointFolderTest, AnAbortedSaveLeavesNoFilesAndWritesNoMore) {
  Shard shard(OptionsBelow(root_));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  std::vector<float> out(2);
  ASSERT_TRUE(shard
                  .Pull(*shard.FindTable("t").value(), {1}, IfMissing::kInsert,
                        absl::MakeSpan(out))
                  .ok());
  const auto part = shard.saves().Write(SaveOf("x", "s", false));
  ASSERT_TRUE(part.ok()) << part.status();
  const std::string folder = root_ + "/x/t";
  EXPECT_FALSE(std::filesystem::is_empty(folder));

  EXPECT_TRUE(shard.saves().Abort("x", "s").ok());
  EXPECT_TRUE(shard.saves().Abort("x", "s").ok());
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  // One that is repeated late.
  EXPECT_EQ(shard.saves().Write(SaveOf("x", "s", false)).status().code(),
            absl::StatusCode::kAborted);
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  EXPECT_EQ(
      shard.saves().Commit(CommitOf("x", "s", {*part}, 2)).status().code(),
      absl::StatusCode::kFailedPrecondition);
}

TEST_F(CheckpointFolderTest, PartsThatAServerHasNotWrittenAreNotPublished) {
  Shard shard(OptionsBelow(root_));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  const v1::CheckpointPart part =
      shard.saves().Write(SaveOf("good", "new", true)).value();
  // The same save, of other contents.
  Shard other(OptionsBelow(root_));
  const v1::CheckpointPart forged =
      other.saves().Write(SaveOf("x", "new", true)).value();

  for (const std::vector<v1::CheckpointPart>& parts :
       std::vector<std::vector<v1::CheckpointPart>>{{}, {forged}}) {
    v1::CommitCheckpointRequest commit = CommitOf("good", "new", parts, 1);
    commit.add_dropped_tables("t");
    const absl::Status status = shard.saves().Commit(commit).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("save again"));
  }
  // One that was written elsewhere, and one that is not known.
  EXPECT_FALSE(shard.saves().Commit(CommitOf("x", "new", {part}, 1)).ok());
  EXPECT_FALSE(other.saves().Commit(CommitOf("good", "new", {part}, 1)).ok());
  EXPECT_EQ(Shard(OptionsBelow(root_))
                .restores()
                .Stage(RestoreOf("good", "r"))
                ->num_rows(),
            3);
  EXPECT_TRUE(shard.saves().Commit(CommitOf("good", "new", {part}, 1)).ok());
}

TEST_F(CheckpointFolderTest, WhatNobodyPublishesGoesWithALaterSave) {
  ShardOptions options = OptionsBelow(root_);
  options.save_expiry = absl::ZeroDuration();
  Shard shard(options);
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  std::vector<float> out(2);
  ASSERT_TRUE(shard
                  .Pull(*shard.FindTable("t").value(), {1}, IfMissing::kInsert,
                        absl::MakeSpan(out))
                  .ok());
  const auto count_files = [this] {
    const std::filesystem::directory_iterator files(root_ + "/x/t");
    return std::distance(begin(files), end(files));
  };
  const v1::CheckpointPart left =
      shard.saves().Write(SaveOf("x", "left", true)).value();
  const v1::CheckpointPart part =
      shard.saves().Write(SaveOf("x", "s", true)).value();

  EXPECT_EQ(count_files(), 1);
  EXPECT_FALSE(shard.saves().Commit(CommitOf("x", "left", {left}, 2)).ok());
  ASSERT_TRUE(shard.saves().Commit(CommitOf("x", "s", {part}, 2)).ok());
  // Published files stay.
  ASSERT_TRUE(shard.saves().Write(SaveOf("x", "later", true)).ok());
  EXPECT_EQ(count_files(), 2);
  // A folder that was removed has no files.
  std::filesystem::remove_all(root_ + "/x");
  testing::internal::CaptureStderr();
  ASSERT_TRUE(shard.saves().Write(SaveOf("y", "last", true)).ok());
  LogWriter::Get().Flush(absl::Minutes(1));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
}

TEST_F(CheckpointFolderTest, ARestoreStaysWithinTheBounds) {
  ShardOptions options = OptionsBelow(root_);
  options.max_tables = 1;
  Shard shard(options);
  ASSERT_TRUE(shard.tables().Create(Config("other")).ok());

  const absl::Status full =
      shard.restores().Stage(RestoreOf("good", "r")).status();

  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()), HasSubstr("--max_tables"));
  ASSERT_TRUE(shard.tables().Drop("other"));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  EXPECT_TRUE(shard.restores().Stage(RestoreOf("good", "s")).ok());
}

TEST_F(CheckpointFolderTest, NewNamesThatCannotBeAreRefused) {
  Shard shard(OptionsBelow(root_));
  const auto stage = [&](const std::vector<std::string>& tables,
                         const std::map<std::string, std::string>& new_names,
                         int state = 0) {
    v1::StageRestoreRequest request = RestoreOf("good", "r", tables);
    request.mutable_new_names()->insert(new_names.begin(), new_names.end());
    request.set_state(static_cast<v1::StageRestoreRequest::State>(state));
    return shard.restores().Stage(request).status();
  };
  const auto invalid = absl::StatusCode::kInvalidArgument;

  EXPECT_EQ(stage({"t", "t"}, {}).code(), invalid);
  EXPECT_EQ(stage({"t", "u"}, {{"t", "x"}, {"u", "x"}}).code(), invalid);
  EXPECT_EQ(stage({"t", "u"}, {{"t", "u"}}).code(), invalid);
  // New names for tables that are not restored are refused.
  EXPECT_EQ(stage({"t"}, {{"u", "x"}}).code(), invalid);
  EXPECT_EQ(stage({}, {{"t", "x"}}).code(), invalid);
  EXPECT_EQ(stage({"t"}, {{"t", ""}}).code(), invalid);
  EXPECT_EQ(stage({"t"}, {{"t", std::string(250, 'x')}}).code(), invalid);
  EXPECT_EQ(stage({"t"}, {}, 3).code(), invalid);
  EXPECT_EQ(stage({"u"}, {{"u", "x"}}).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(shard.restores().num_staged(), 0u);
}

TEST_F(CheckpointFolderTest, ANewNameCountsForTheBoundsAndIsAnotherTable) {
  ShardOptions options = OptionsBelow(root_);
  options.max_tables = 2;
  Shard shard(options);
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  v1::StageRestoreRequest request = RestoreOf("good", "r", {"t"});
  (*request.mutable_new_names())["t"] = "new";
  request.set_new_incarnation(7);

  const auto staged = shard.restores().Stage(request);

  ASSERT_TRUE(staged.ok()) << staged.status();
  EXPECT_THAT(staged->tables(), testing::ElementsAre("new"));
  ASSERT_TRUE(shard.CommitRestore("r", false).ok());
  EXPECT_EQ(shard.FindTable("new").value()->size(), 3);
  EXPECT_EQ(shard.FindTable("new").value()->incarnation(), 7u);
  EXPECT_EQ(shard.FindTable("t").value()->size(), 0);
  (*request.mutable_new_names())["t"] = "one_too_many";
  request.set_restore_id("s");
  EXPECT_EQ(shard.restores().Stage(request).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(CheckpointFolderTest, ProgressIsThatOfTheCallsWhoseIdBeginsSo) {
  Shard shard(OptionsBelow(root_));
  const auto progress_of = [&](const std::string& id) {
    v1::GetProgressResponse response;
    shard.saves().AddProgressTo(id, &response);
    shard.restores().AddProgressTo(id, &response);
    return std::make_pair(response.num_rows(), response.total_rows());
  };
  std::pair<int64_t, int64_t> at_begin;

  ASSERT_TRUE(shard.restores()
                  .Stage(RestoreOf("good", "call-1"),
                         [&] {
                           at_begin = progress_of("call");
                           return absl::OkStatus();
                         })
                  .ok());

  EXPECT_EQ(at_begin.second, 3);
  EXPECT_EQ(progress_of("call"), std::make_pair(int64_t{3}, int64_t{3}));
  EXPECT_EQ(progress_of("other"), std::make_pair(int64_t{0}, int64_t{0}));
  ASSERT_TRUE(shard.CommitRestore("call-1", false).ok());
  ASSERT_TRUE(shard.saves().Write(SaveOf("x", "save", true)).ok());
  EXPECT_EQ(progress_of("save"), std::make_pair(int64_t{3}, int64_t{3}));
}

TEST_F(CheckpointFolderTest, AbortingAPublishedSaveChangesNothing) {
  Shard shard(OptionsBelow(root_));
  ASSERT_TRUE(shard.tables().Create(Config("t")).ok());
  std::vector<float> out(2);
  ASSERT_TRUE(shard
                  .Pull(*shard.FindTable("t").value(), {1}, IfMissing::kInsert,
                        absl::MakeSpan(out))
                  .ok());
  const auto part = shard.saves().Write(SaveOf("x/.", "s", false));
  ASSERT_TRUE(part.ok()) << part.status();
  ASSERT_TRUE(shard.saves().Commit(CommitOf("x", "s", {*part}, 2)).ok());

  EXPECT_TRUE(shard.saves().Abort("x", "s").ok());

  EXPECT_EQ(shard.restores().Stage(RestoreOf("x", "r"))->num_rows(), 1);
}

TEST_F(CheckpointFolderTest, ARepeatedRestoreIsStagedOnce) {
  Shard shard(OptionsBelow(root_));
  std::atomic<bool> is_loading{false};
  std::atomic<bool> go_on{false};
  std::atomic<int> num_loads{0};
  const auto interrupt = [&]() -> absl::Status {
    if (!is_loading.exchange(true)) ++num_loads;
    while (!go_on) std::this_thread::yield();
    return absl::OkStatus();
  };
  std::thread first([&] {
    EXPECT_EQ(
        shard.restores().Stage(RestoreOf("good", "r"), interrupt)->num_rows(),
        3);
  });
  while (!is_loading) std::this_thread::yield();
  std::atomic<bool> has_asked{false};
  std::thread second([&] {
    // Asks whether to go on waiting, but does not read a file.
    EXPECT_EQ(shard.restores()
                  .Stage(RestoreOf("good", "r"),
                         [&]() -> absl::Status {
                           has_asked = true;
                           return absl::OkStatus();
                         })
                  ->num_rows(),
              3);
  });
  while (!has_asked) std::this_thread::yield();
  go_on = true;
  first.join();
  second.join();

  EXPECT_EQ(num_loads, 1);
  EXPECT_TRUE(shard.CommitRestore("r", false).ok());
}

TEST_F(CheckpointFolderTest, ANewRestoreEndsTheOneBefore) {
  Shard shard(OptionsBelow(root_));
  std::atomic<bool> is_loading{false};
  std::atomic<bool> go_on{false};
  std::thread first([&] {
    EXPECT_EQ(shard.restores()
                  .Stage(RestoreOf("good", "first"),
                         [&]() -> absl::Status {
                           is_loading = true;
                           while (!go_on) std::this_thread::yield();
                           return absl::OkStatus();
                         })
                  .status()
                  .code(),
              absl::StatusCode::kAborted);
  });
  while (!is_loading) std::this_thread::yield();
  ASSERT_TRUE(shard.restores().Stage(RestoreOf("good", "second")).ok());
  go_on = true;
  first.join();

  EXPECT_EQ(shard.CommitRestore("first", false).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(shard.CommitRestore("second", false).ok());
}

TEST_F(CheckpointFolderTest, WhatIsStagedAndNotCommittedExpires) {
  ShardOptions options = OptionsBelow(root_);
  options.staged_restore_expiry = absl::Milliseconds(1);
  Shard shard(options);
  ASSERT_TRUE(shard.restores().Stage(RestoreOf("good", "r")).ok());
  while (shard.restores().num_staged() > 0) std::this_thread::yield();

  EXPECT_EQ(shard.CommitRestore("r", false).code(),
            absl::StatusCode::kNotFound);
}

TEST(ShardTest, CommitOfARestoreThatIsNotStagedIsNotFound) {
  Shard shard(ShardOptions{});

  EXPECT_EQ(shard.CommitRestore("x", false).code(),
            absl::StatusCode::kNotFound);
  EXPECT_TRUE(shard.CommitRestore("x", true).ok());
}

TEST(ShardTest, OnlyMissingRowsAreSetIfAskedAndCounted) {
  Shard shard(ShardOptions{});
  TableConfig config = Config("t");
  config.optimizer = AdagradConfig{0.5f, 0.0f};
  ASSERT_TRUE(shard.tables().Create(config).ok());
  const auto table = shard.FindTable("t").value();
  ASSERT_EQ(Assign(shard, {1, 2}, {1, 1, 2, 2}, {7, 7, 8, 8}).value(), 2);

  EXPECT_EQ(Assign(shard, {2, 3, 1}, {-1, -1, 3, 3, -1, -1}, {}, true).value(),
            1);
  EXPECT_EQ(Assign(shard, {3}, {-1, -1}, {-1, -1}, true).value(), 0);
  EXPECT_EQ(Assign(shard, {3}, {4, 4}).value(), 1);

  std::vector<float> rows(6);
  ASSERT_TRUE(
      shard.Pull(*table, {1, 2, 3}, IfMissing::kValue, absl::MakeSpan(rows))
          .ok());
  EXPECT_THAT(rows, testing::ElementsAre(1, 1, 2, 2, 4, 4));
  // Slots of rows that were there stay; a new row has the initial ones.
  ASSERT_TRUE(table
                  ->ForEachRow(10,
                               [](const RowChunk& chunk) {
                                 for (size_t i = 0; i < chunk.keys.size();
                                      ++i) {
                                   const float expected[] = {0, 7, 8, 0.5f};
                                   EXPECT_EQ(chunk.slots[2 * i],
                                             expected[chunk.keys[i]]);
                                 }
                                 return absl::OkStatus();
                               })
                  .ok());
}

TEST(ShardTest, ADenseTableWithoutValuesDoesNotPassForZeros) {
  Shard shard(ShardOptions{});
  TableConfig config = Config("d");
  config.layout = "kernel:0 (2, 3)";
  ASSERT_TRUE(shard.tables().Create(config).ok());
  const auto table = shard.FindTable("d").value();
  ASSERT_TRUE(Assign(shard, {1, 2}, {1, 1, 2, 2}, {}, false, "d").ok());
  std::vector<float> rows(6);

  const absl::Status status =
      shard.Pull(*table, {1, 2, 3}, IfMissing::kValue, absl::MakeSpan(rows));

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(
      std::string(status.message()),
      testing::AllOf(HasSubstr("dense table 'd'"), HasSubstr("1 of 3")));
  EXPECT_TRUE(shard
                  .Pull(*table, {2, 1}, IfMissing::kValue,
                        absl::MakeSpan(rows).subspan(0, 4))
                  .ok());
  EXPECT_THAT(rows[0], 2.0f);
}

// A shard with a table "clock" that shrinks itself all the time, so that a test
// can wait until others would have been shrunk, too.
class ShrinkOnTimeTest : public testing::Test {
 protected:
  static constexpr float kOften = 0.001f;

  ShrinkOnTimeTest() { Create("clock", kOften); }

  // Everything that is in it goes, as often as that; 0: never by itself.
  void Create(const std::string& name, float every_secs) {
    TableConfig config = Config(name);
    config.eviction.min_l2_norm = 1e30f;
    config.eviction.every_secs = every_secs;
    const absl::Status status = shard_.tables().Create(config).status();
    ASSERT_TRUE(status.ok()) << status;
  }

  void Fill(const std::string& table) {
    std::vector<float> rows(2);
    ASSERT_TRUE(shard_
                    .Pull(*shard_.FindTable(table).value(), {1},
                          IfMissing::kInsert, absl::MakeSpan(rows))
                    .ok());
  }

  int64_t Size(const std::string& table) {
    return shard_.FindTable(table).value()->size();
  }

  void WaitUntilEmpty(const std::string& table) {
    while (Size(table) > 0) absl::SleepFor(absl::Milliseconds(1));
  }

  // For longer than it takes a table to be shrunk that is shrunk as often as
  // "clock".
  void WaitForClock() {
    for (int i = 0; i < 5; ++i) {
      Fill("clock");
      WaitUntilEmpty("clock");
    }
  }

  // A checkpoint of "t" with a row. It says that it is shrunk often, which
  // would have left nothing to save.
  std::string SaveFilledTable() {
    Create("t", 3600.0f);
    Fill("t");
    std::string path = testing::TempDir() + "/shrink_on_timeXXXXXX";
    EXPECT_NE(mkdtemp(path.data()), nullptr);
    const auto part = shard_.saves().Write(SaveOf(path, "s", false, {"t"}));
    EXPECT_TRUE(part.ok()) << part.status();
    EXPECT_TRUE(shard_.saves().Commit(CommitOf(path, "s", {*part}, 2)).ok());
    const std::string manifest = path + "/manifest.json";
    std::ifstream stream(manifest);
    std::string text{std::istreambuf_iterator<char>(stream), {}};
    const size_t place = text.find("3600");
    EXPECT_NE(place, text.npos);
    std::ofstream(manifest) << text.replace(place, 4, "0.001");
    return path;
  }

  static void Restore(const std::string& path, Shard* shard) {
    ASSERT_TRUE(shard->restores().Stage(RestoreOf(path, "r", {"t"})).ok());
    ASSERT_TRUE(shard->CommitRestore("r", /*abort=*/false).ok());
    std::error_code error;
    std::filesystem::remove_all(path, error);
  }

  Shard shard_{ShardOptions{}};
};

TEST_F(ShrinkOnTimeTest, ATableThatIsMadeAnewGoesByItsNewRules) {
  Create("t", kOften);
  Fill("t");
  WaitUntilEmpty("t");
  ASSERT_TRUE(shard_.tables().Drop("t"));
  WaitForClock();  // The table does not exist meanwhile.

  Create("t", 0.0f);
  Fill("t");
  WaitForClock();
  EXPECT_EQ(Size("t"), 1);

  ASSERT_TRUE(shard_.tables().Drop("t"));
  Create("t", kOften);
  Fill("t");
  WaitUntilEmpty("t");
}

TEST_F(ShrinkOnTimeTest, ATableThatARestoreMakesIsShrunkOnTime) {
  const std::string path = SaveFilledTable();
  Shard other(ShardOptions{});

  Restore(path, &other);

  const auto table = other.FindTable("t").value();
  while (table->size() > 0) absl::SleepFor(absl::Milliseconds(1));
}

TEST_F(ShrinkOnTimeTest, ATableThatARestoreFillsGoesOnByItsOwnRules) {
  const std::string path = SaveFilledTable();
  ASSERT_TRUE(shard_.tables().Drop("t"));
  Create("t", 0.0f);

  Restore(path, &shard_);

  WaitForClock();
  EXPECT_EQ(Size("t"), 1);
}

TEST_F(ShrinkOnTimeTest, ATableThatIsShrunkOnTimeStaysSoAfterARestore) {
  const std::string path = SaveFilledTable();
  ASSERT_TRUE(shard_.tables().Drop("t"));
  Create("t", kOften);

  Restore(path, &shard_);

  WaitUntilEmpty("t");
  Fill("t");
  WaitUntilEmpty("t");
}

// A shard with a table "t" of dim 2 that workers train in rounds, and a table
// "asp" that differs in its consistency alone, to compare with.
class RoundsTest : public testing::Test {
 protected:
  explicit RoundsTest(Reduction reduction = Reduction::kMean) {
    TableConfig config = Config("t");
    // Two steps with halves are not one step with the whole.
    config.optimizer = AdagradConfig{};
    config.initializer = ConstantInitializer{1.0f};
    config.consistency.kind = ConsistencyKind::kBsp;
    config.consistency.reduction = reduction;
    EXPECT_TRUE(shard_.tables().Create(config).ok());
    config.name = "asp";
    config.consistency = {};
    EXPECT_TRUE(shard_.tables().Create(config).ok());
  }

  absl::StatusOr<WriteResult> Push(const std::string& table,
                                   const std::vector<Key>& keys,
                                   const std::vector<float>& gradients,
                                   const StepTag& step = {},
                                   float learning_rate = 0.5f,
                                   uint64_t sequence = 0) {
    PushRequest push;
    push.keys = keys;
    push.gradients = gradients;
    push.learning_rate = learning_rate;
    push.insert_missing = true;
    push.step = step;
    push.id.client_id = sequence == 0 ? 0 : 99;
    push.id.sequence = sequence;
    return shard_.Push(*shard_.FindTable(table).value(), push);
  }

  // Worker w of incarnation w + 1.
  static StepTag StepOf(uint32_t worker, int64_t clock = 0) {
    return {"g", worker, worker + 1, clock};
  }

  // Worker w has weights[w], and is at clock `number`.
  static Round RoundOf(int64_t number, const std::vector<double>& weights) {
    std::vector<Contribution> contributions;
    for (uint32_t w = 0; w < weights.size(); ++w) {
      contributions.push_back(ContributionOf(w, w + 1, number, weights[w]));
    }
    return ::tfswitch::RoundOf(number, contributions);
  }

  // Zeros for what is not there.
  std::vector<float> Rows(const std::string& table,
                          const std::vector<Key>& keys) {
    std::vector<float> rows(2 * keys.size());
    EXPECT_TRUE(shard_
                    .Pull(*shard_.FindTable(table).value(), keys,
                          IfMissing::kValue, absl::MakeSpan(rows))
                    .ok());
    return rows;
  }

  Shard shard_{ShardOptions{}};
};

class SumRoundsTest : public RoundsTest {
 protected:
  SumRoundsTest() : RoundsTest(Reduction::kSum) {}
};

TEST_F(RoundsTest, APushUpdatesNothingUntilItsRoundIsCommitted) {
  const auto pushed = Push("t", {1}, {1, 1}, StepOf(0));
  ASSERT_TRUE(pushed.ok()) << pushed.status();
  EXPECT_EQ(pushed->num_rows, 0);
  EXPECT_FALSE(pushed->duplicate);
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);

  EXPECT_EQ(shard_.rounds().Commit("g", RoundOf(0, {1.0})).value(), 0);

  EXPECT_EQ(shard_.FindTable("t").value()->size(), 1);
  ASSERT_TRUE(Push("asp", {1}, {1, 1}).ok());
  EXPECT_EQ(Rows("t", {1}), Rows("asp", {1}));
}

TEST_F(RoundsTest, ARestoreDropsWhatWaitsForItsRound) {
  const ScopedFolder folder;
  const std::string path = folder.path() + "/c";
  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(0)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0})).ok());
  const auto part = shard_.saves().Write(SaveOf(path, "s", false, {"t"}));
  ASSERT_TRUE(part.ok()) << part.status();
  ASSERT_TRUE(shard_.saves().Commit(CommitOf(path, "s", {*part}, 2)).ok());
  const std::vector<float> saved = Rows("t", {1});

  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(0, 1)).ok());
  ASSERT_TRUE(shard_.restores().Stage(RestoreOf(path, "aborted")).ok());
  ASSERT_TRUE(shard_.CommitRestore("aborted", /*abort=*/true).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(1, {1.0})).ok());
  EXPECT_NE(Rows("t", {1}), saved);

  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(0, 2)).ok());
  ASSERT_TRUE(shard_.restores().Stage(RestoreOf(path, "r")).ok());
  ASSERT_TRUE(shard_.CommitRestore("r", /*abort=*/false).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(2, {1.0})).ok());
  EXPECT_EQ(Rows("t", {1}), saved);
}

TEST_F(RoundsTest, TheMeanIsWeightedBySamples) {
  // With the same keys, as all blocks of a dense table, and with other ones.
  ASSERT_TRUE(Push("t", {1, 2}, {1, 2, 3, 4}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {1, 2}, {5, 6, 7, 8}, StepOf(1)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0, 3.0})).ok());
  ASSERT_TRUE(Push("asp", {1, 2}, {4, 5, 6, 7}).ok());
  EXPECT_EQ(Rows("t", {1, 2}), Rows("asp", {1, 2}));

  ASSERT_TRUE(Push("t", {1, 3}, {1, 2, 3, 4}, StepOf(0, 1)).ok());
  ASSERT_TRUE(Push("t", {2, 1}, {5, 6, 7, 8}, StepOf(1, 1)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(1, {1.0, 3.0})).ok());
  ASSERT_TRUE(
      Push("asp", {1, 2, 3}, {5.5f, 6.5f, 3.75f, 4.5f, 0.75f, 1.0f}).ok());
  EXPECT_EQ(Rows("t", {1, 2, 3}), Rows("asp", {1, 2, 3}));
}

TEST_F(RoundsTest, OneWithoutGradientsCountsInTheMean) {
  ASSERT_TRUE(Push("t", {1}, {8, 4}, StepOf(0)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0, 3.0})).ok());
  ASSERT_TRUE(Push("asp", {1}, {2, 1}).ok());
  EXPECT_EQ(Rows("t", {1}), Rows("asp", {1}));
}

TEST_F(RoundsTest, ARoundWithoutSamplesTeachesNothing) {
  ASSERT_TRUE(Push("t", {1}, {8, 4}, StepOf(0)).ok());
  EXPECT_EQ(shard_.rounds().Commit("g", RoundOf(0, {0.0})).value(), 0);
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);
}

TEST_F(SumRoundsTest, TheSumDoesNotLookAtSamples) {
  ASSERT_TRUE(Push("t", {1, 2}, {1, 2, 3, 4}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {1, 2}, {5, 6, 7, 8}, StepOf(1)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {0.25, 3.0})).ok());
  ASSERT_TRUE(Push("asp", {1, 2}, {6, 8, 10, 12}).ok());
  EXPECT_EQ(Rows("t", {1, 2}), Rows("asp", {1, 2}));
}

TEST_F(SumRoundsTest, ButAStepWithoutSamplesCountsForNothing) {
  ASSERT_TRUE(Push("t", {1, 2}, {1, 2, 3, 4}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {1, 3}, {5, 6, 7, 8}, StepOf(1)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {3.0, 0.0})).ok());
  ASSERT_TRUE(Push("asp", {1, 2}, {1, 2, 3, 4}).ok());
  EXPECT_EQ(Rows("t", {1, 2}), Rows("asp", {1, 2}));
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 2);
}

TEST_F(SumRoundsTest, AKeyOfManyWorkersTakesOneStep) {
  // Within one push, over the pushes of a step, and over workers.
  ASSERT_TRUE(Push("t", {1, 1, 2}, {1, 1, 2, 2, 9, 9}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {1}, {4, 4}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {3, 1}, {5, 5, 8, 8}, StepOf(1)).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0, 1.0})).ok());
  ASSERT_TRUE(Push("asp", {1, 2, 3}, {15, 15, 9, 9, 5, 5}).ok());
  EXPECT_EQ(Rows("t", {1, 2, 3}), Rows("asp", {1, 2, 3}));
}

TEST_F(SumRoundsTest, TheLearningRateOfTheFirstContributionCounts) {
  // The rate of worker 0 counts, in any order of arrival.
  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(1), 0.125f).ok());
  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(0), 0.25f).ok());
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0, 1.0})).ok());
  ASSERT_TRUE(Push("asp", {1}, {2, 2}, {}, 0.25f).ok());
  EXPECT_EQ(Rows("t", {1}), Rows("asp", {1}));
}

TEST(RoundsOrderTest, TheResultDoesNotDependOnWhatArrivesFirst) {
  constexpr int kWorkers = 5;
  constexpr int kRounds = 4;
  const std::vector<Key> all_keys = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
  std::vector<std::vector<float>> results;
  for (const uint32_t order_seed : {1u, 2u, 3u}) {
    std::mt19937 order(order_seed);
    std::mt19937 random(17);  // The same pushes each time.
    std::uniform_real_distribution<float> value(-1.0f, 1.0f);
    Shard shard(ShardOptions{});
    TableConfig config = Config("t");
    config.optimizer = AdamConfig{};
    config.consistency.kind = ConsistencyKind::kBsp;
    ASSERT_TRUE(shard.tables().Create(config).ok());
    const auto table = shard.FindTable("t").value();
    for (int64_t number = 0; number < kRounds; ++number) {
      Round round;
      round.set_number(number);
      struct Sent {
        StepTag step;
        std::vector<Key> keys;
        std::vector<float> gradients;
      };
      std::vector<Sent> sent;
      for (uint32_t w = 0; w < kWorkers; ++w) {
        const double weight = 1.0 + random() % 7;
        *round.add_contributions() = ContributionOf(w, w + 1, number, weight);
        round.set_total_weight(round.total_weight() + weight);
        // Two to one table within a step.
        for (int i = 0; i < 2; ++i) {
          Sent push;
          push.step = {"g", w, w + 1, number};
          // In the last round all have the same keys.
          for (const Key key : all_keys) {
            if (number < kRounds - 1 && random() % 2 == 0) continue;
            push.keys.push_back(key);
            push.gradients.push_back(value(random));
            push.gradients.push_back(value(random));
          }
          sent.push_back(std::move(push));
        }
      }
      std::shuffle(sent.begin(), sent.end(), order);
      for (const Sent& each : sent) {
        PushRequest push;
        push.keys = each.keys;
        push.gradients = each.gradients;
        push.learning_rate = 0.1f;
        push.insert_missing = true;
        push.step = each.step;
        ASSERT_TRUE(shard.Push(*table, push).ok());
      }
      ASSERT_EQ(shard.rounds().Commit("g", round).value(), number);
    }
    std::vector<float> rows(2 * all_keys.size());
    ASSERT_TRUE(
        shard.Pull(*table, all_keys, IfMissing::kValue, absl::MakeSpan(rows))
            .ok());
    results.push_back(std::move(rows));
  }
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST_F(RoundsTest, APushThatBelongsToNoStepIsRefused) {
  const absl::Status status = Push("t", {1}, {1, 1}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("'t'"), HasSubstr("bsp(mean)")));
}

TEST_F(RoundsTest, APushToAClosedRoundIsRefusedHoweverOftenItComes) {
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0})).ok());
  for (int attempt = 0; attempt < 2; ++attempt) {
    EXPECT_EQ(Push("t", {1}, {1, 1}, StepOf(0), 0.5f, 1).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(RoundsTest, APushOfNanStagesNothing) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const absl::Status status =
      Push("t", {1, 7}, {1, 1, 1, nan}, StepOf(0)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("id 7"));

  EXPECT_EQ(shard_.rounds().Commit("g", RoundOf(0, {1.0})).value(), 0);
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);
}

TEST_F(SumRoundsTest, ASumThatOverflowsIsRefusedToAllAndChangesNothing) {
  const float big = std::numeric_limits<float>::max();
  ASSERT_TRUE(Push("t", {1, 2}, {1, 1, big, 1}, StepOf(0)).ok());
  ASSERT_TRUE(Push("t", {1, 2}, {1, 1, big, 1}, StepOf(1)).ok());
  for (int worker = 0; worker < 2; ++worker) {
    const absl::Status status =
        shard_.rounds().Commit("g", RoundOf(0, {1.0, 1.0})).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("id 2"));
  }
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);
}

TEST_F(SumRoundsTest, ARepeatedPushIsStagedOnce) {
  EXPECT_FALSE(Push("t", {1}, {1, 1}, StepOf(0), 0.5f, 1)->duplicate);
  EXPECT_TRUE(Push("t", {1}, {1, 1}, StepOf(0), 0.5f, 1)->duplicate);
  EXPECT_FALSE(Push("t", {1}, {1, 1}, StepOf(0), 0.5f, 2)->duplicate);
  ASSERT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0})).ok());
  // Also when its round has been applied: the first answer was lost.
  EXPECT_TRUE(Push("t", {1}, {1, 1}, StepOf(0), 0.5f, 2)->duplicate);
  ASSERT_TRUE(Push("asp", {1}, {2, 2}).ok());
  EXPECT_EQ(Rows("t", {1}), Rows("asp", {1}));
}

TEST_F(RoundsTest, TablesOfOtherConsistencyDoNotWaitForTheRound) {
  EXPECT_EQ(Push("asp", {1}, {1, 1}, StepOf(0))->num_rows, 1);
  EXPECT_EQ(shard_.rounds().Commit("g", RoundOf(0, {1.0})).value(), 0);
  EXPECT_EQ(shard_.FindTable("asp").value()->size(), 1);
}

// A save that holds the rounds of a shard.
class HeldRoundsTest : public SumRoundsTest {
 protected:
  HeldRoundsTest() {
    EXPECT_TRUE(shard_.rounds().Commit("g", RoundOf(0, {1.0})).ok());
    EXPECT_TRUE(Push("t", {1}, {1, 1}, StepOf(0, 1)).ok());
    v1::PauseRoundsRequest hold;
    hold.set_save_id("s");
    hold.set_hold_ms(10'000);
    const auto held = shard_.rounds().Pause(hold);
    EXPECT_TRUE(held.ok()) << held.status();
    EXPECT_EQ(held->committed_size(), 1);
    EXPECT_EQ(held->committed(0).group(), "g");
    EXPECT_EQ(held->committed(0).group_instance(), 1);
    EXPECT_EQ(held->committed(0).number(), 0);
  }

  // Cancelled if it would wait.
  absl::StatusOr<int64_t> Commit(const Round& round) {
    return shard_.rounds().Commit("g", round, {}, nullptr, [] {
      return absl::CancelledError("it waits");
    });
  }

  static v1::SaveShardRequest SaveOfRounds(const std::vector<Round>& rounds) {
    v1::SaveShardRequest request =
        SaveOf(testing::TempDir() + "/held_rounds", "s", false, {"t"});
    request.mutable_cut();
    for (const Round& round : rounds) {
      v1::CommitRoundRequest& proto = *request.mutable_cut()->add_rounds();
      proto.set_group("g");
      *proto.mutable_round() = round;
    }
    return request;
  }
};

TEST_F(HeldRoundsTest, ARoundWaitsUnlessItIsAppliedAlready) {
  const Round none = ::tfswitch::RoundOf(WorkerGroup::kNoRound, {});

  EXPECT_EQ(Commit(RoundOf(0, {1.0})).value(), 0);
  EXPECT_EQ(Commit(none).value(), 0);
  EXPECT_EQ(Commit(RoundOf(1, {1.0})).status(),
            absl::CancelledError("it waits"));
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);

  ASSERT_TRUE(shard_.saves().Abort(testing::TempDir() + "/x", "s").ok());
  EXPECT_EQ(Commit(RoundOf(1, {1.0})).value(), 1);
}

TEST_F(HeldRoundsTest, TheSaveBringsItsRoundsAndEndsItsHold) {
  const auto part = shard_.saves().Write(
      SaveOfRounds({RoundOf(0, {1.0}), RoundOf(1, {1.0})}));

  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 1);
  EXPECT_EQ(Commit(RoundOf(2, {1.0})).value(), 2);
}

TEST_F(HeldRoundsTest, ARoundWhoseStepFailsIsSavedAsItIs) {
  const float big = std::numeric_limits<float>::max();
  ASSERT_TRUE(Push("t", {1}, {big, 1}, StepOf(0, 1)).ok());
  ASSERT_TRUE(Push("t", {1}, {big, 1}, StepOf(0, 1)).ok());

  EXPECT_TRUE(shard_.saves().Write(SaveOfRounds({RoundOf(1, {1.0})})).ok());
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);
}

TEST_F(HeldRoundsTest, ASaveThatIsNotOfTheLastRoundIsRefused) {
  for (const Round& round : {RoundOf(-1, {1.0}), RoundOf(7, {1.0})}) {
    const absl::Status status =
        shard_.saves().Write(SaveOfRounds({round})).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'g'"), HasSubstr("round 0"),
                      HasSubstr(absl::StrCat("round ", round.number())),
                      HasSubstr("Save again")));
    v1::PauseRoundsRequest hold;
    hold.set_save_id("s");
    hold.set_hold_ms(10'000);
    ASSERT_TRUE(shard_.rounds().Pause(hold).ok());
  }
}

TEST_F(HeldRoundsTest, OtherSavesComeAfterTheHold) {
  v1::PauseRoundsRequest hold;
  hold.set_save_id("other");
  hold.set_hold_ms(10'000);
  v1::SaveShardRequest save = SaveOfRounds({});
  save.clear_cut();
  save.set_save_id("other");

  EXPECT_FALSE(shard_.rounds().Pause(hold)->waiting_for().empty());
  EXPECT_EQ(shard_.saves()
                .Write(save, [] { return absl::CancelledError("no"); })
                .status(),
            absl::CancelledError("no"));
  EXPECT_EQ(shard_.own_state()
                .Save(testing::TempDir() + "/held_rounds_state",
                      [] { return absl::CancelledError("no"); })
                .status(),
            absl::CancelledError("no"));

  hold.set_save_id("s");
  hold.set_hold_ms(0);
  ASSERT_TRUE(shard_.rounds().Pause(hold).ok());
  EXPECT_TRUE(shard_.saves().Write(save).ok());
}

TEST_F(HeldRoundsTest, WhileASaveIsWrittenNoOtherHoldsRounds) {
  v1::PauseRoundsRequest hold;
  hold.set_save_id("other");
  hold.set_hold_ms(10'000);
  std::atomic<int> num_asked{0};

  const auto part =
      shard_.saves().Write(SaveOfRounds({RoundOf(0, {1.0})}), [&] {
        // On another thread, as calls come.
        std::thread([&] {
          const auto held = shard_.rounds().Pause(hold);
          EXPECT_FALSE(held.ok() && held->waiting_for().empty());
          if (num_asked++ == 0) return;
          EXPECT_TRUE(Commit(RoundOf(1, {1.0})).ok());  // The cut is taken.
        }).join();
        return absl::OkStatus();
      });

  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_GT(num_asked, 0);
  EXPECT_TRUE(shard_.rounds().Pause(hold)->waiting_for().empty());
}

TEST_F(HeldRoundsTest, ASaveWithoutTheWorkQueuesOfItsCutIsRefused) {
  v1::SaveShardRequest request = SaveOfRounds({RoundOf(0, {1.0})});
  request.set_all_tables(true);

  EXPECT_EQ(shard_.saves().Write(request).status().code(),
            absl::StatusCode::kAborted);
}

TEST_F(HeldRoundsTest, ASaveWhoseHoldHasEndedIsRefused) {
  ASSERT_TRUE(shard_.saves().Write(SaveOfRounds({RoundOf(0, {1.0})})).ok());
  v1::SaveShardRequest other = SaveOfRounds({RoundOf(0, {1.0})});
  other.set_save_id("other");
  v1::ChooseSnapshotRoundRequest take;
  take.set_save_id("other");

  for (const absl::Status& status :
       {shard_.saves().Write(other).status(),
        shard_.rounds().ChooseSnapshotRound(take).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kAborted) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'other'"), HasSubstr("Save again")));
  }
}

TEST_F(RoundsTest, WhatWasStagedGoesWithItsTable) {
  ASSERT_TRUE(Push("t", {1}, {1, 1}, StepOf(0)).ok());
  TableConfig config = shard_.FindTable("t").value()->config();
  ASSERT_TRUE(shard_.tables().Drop("t"));
  config.dim = 3;
  ASSERT_TRUE(shard_.tables().Create(config).ok());

  EXPECT_EQ(shard_.rounds().Commit("g", RoundOf(0, {1.0})).value(), 0);
  EXPECT_EQ(shard_.FindTable("t").value()->size(), 0);
}

}  // namespace
}  // namespace tfswitch
