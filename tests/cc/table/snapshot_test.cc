// A snapshot is the table as it was, whatever happens to the table meanwhile.

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cc/table/cold_tier.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"
#include "tests/cc/testing/scoped_folder.h"
#include "tests/cc/testing/snapshots.h"

namespace tfswitch {
namespace {

constexpr Key kKeys = 3000 / kSlowdown;

// Rows and candidates by their keys, and the cells of a Bloom filter.
struct State {
  std::map<Key, std::vector<float>> rows;
  std::map<Key, std::vector<float>> candidates;
  std::string cells;

  friend bool operator==(const State& a, const State& b) {
    return a.rows == b.rows && a.candidates == b.candidates &&
           a.cells == b.cells;
  }
};

std::vector<float> Slice(absl::Span<const float> values, size_t i,
                         size_t width) {
  return {values.begin() + i * width, values.begin() + (i + 1) * width};
}

// If a key is visited twice, both values must be equal.
void Add(Key key, const std::vector<float>& value,
         std::map<Key, std::vector<float>>* values) {
  const auto [at, is_new] = values->emplace(key, value);
  if (!is_new) {
    EXPECT_EQ(at->second, value) << key;
  }
}

// `source` is the table itself or a snapshot of it.
template <typename Source>
absl::Status Read(const EmbeddingTable& table, Source& source,
                  const CountingBloom* bloom, State* state) {
  const auto dim = static_cast<size_t>(table.dim());
  const auto width = static_cast<size_t>(table.slot_floats());
  const auto status = source.ForEachCandidate(
      50, [&](const CandidateChunk& chunk) -> absl::Status {
        for (size_t i = 0; i < chunk.keys.size(); ++i) {
          Add(chunk.keys[i],
              Slice(chunk.records, i,
                    static_cast<size_t>(CandidateFloats(table.config()))),
              &state->candidates);
        }
        std::this_thread::yield();
        return absl::OkStatus();
      });
  if (!status.ok()) return status;
  for (uint32_t shard = 0; bloom != nullptr && shard < 16; ++shard) {
    const auto cells = bloom->Cells(shard);
    state->cells.append(cells.data(), cells.size());
  }
  return source.ForEachRow(50, [&](const RowChunk& chunk) -> absl::Status {
    for (size_t i = 0; i < chunk.keys.size(); ++i) {
      std::vector<float> row = Slice(chunk.embeddings, i, dim);
      const std::vector<float> slots = Slice(chunk.slots, i, width);
      row.insert(row.end(), slots.begin(), slots.end());
      Add(chunk.keys[i], row, &state->rows);
    }
    std::this_thread::yield();
    return absl::OkStatus();
  });
}

State StateOf(EmbeddingTable& table) {
  State state;
  EXPECT_TRUE(Read(table, table, table.bloom(), &state).ok());
  return state;
}

void ChangeSomething(EmbeddingTable& table, std::mt19937& random) {
  std::vector<Key> keys;
  const Key step = 1 + static_cast<Key>(random() % 40);
  for (auto key = static_cast<Key>(random() % kKeys); key < kKeys;
       key += step) {
    keys.push_back(key);
  }
  std::vector<float> values(keys.size() * static_cast<size_t>(table.dim()));
  for (float& value : values) value = static_cast<float>(random() % 64) / 64;
  switch (random() % 8) {
    case 4:
      if (!table.config().demotes_when_full()) break;
      ASSERT_TRUE(table.Demote(kKeys / 4, {}).ok());
      break;
    case 0:
      ASSERT_TRUE(Assign(table, keys, values).ok());
      break;
    case 1:
      EXPECT_TRUE(table.Erase(keys).ok());
      break;
    case 2:
      ASSERT_TRUE(table.FindOrInsert(keys, absl::MakeSpan(values)).ok());
      break;
    case 3: {
      if (RowStatistics(table.config().statistics).num_floats() == 0) break;
      EvictionConfig rules;
      rules.max_rows = static_cast<uint64_t>(kKeys / 2);
      ASSERT_TRUE(table.Shrink(rules, 3.0f, /*dry_run=*/false).ok());
      break;
    }
    default: {
      GradientBatch batch;
      batch.keys = keys;
      batch.gradients = values;
      batch.learning_rate = 0.125f;
      batch.day = 2.0f;
      batch.insert_missing = true;
      ASSERT_TRUE(table.ApplyGradients(batch).ok());
    }
  }
}

std::vector<TableConfig> Configs() {
  std::vector<TableConfig> configs;
  configs.push_back(MakeConfig(4, AdagradConfig{}));
  configs.push_back(MakeConfig(4, SgdConfig{}));
  configs.back().statistics.kind = StatisticsKind::kShowClick;
  configs.back().admission = {MinCountAdmission{3},
                              {NotAdmittedKind::kWeight, 0.0f}};
  configs.back().optimizer = OptimizerConfig(std::vector<SegmentConfig>{
      {1, 1.0f, SgdConfig{}, {}}, {0, 1.0f, SgdConfig{}, {}}});
  configs.push_back(MakeConfig(4, AdagradConfig{}));
  configs.back().num_virtual_shards = 16;
  configs.back().statistics.kind = StatisticsKind::kUsage;
  configs.back().admission.policy = BloomMinCountAdmission{3, 10'000, 0.01f};
  configs.push_back(MakeConfig(4, AdamConfig{}));
  configs.back().storage_dtype = {FloatType::kBfloat16, FloatType::kFloat16,
                                  Rounding::kStochastic};
  configs.push_back(MakeConfig(4, AdamConfig{}));
  configs.back().optimizer.is_dense = true;
  // The same with rows on disk.
  for (size_t i = 0, end = configs.size(); i < end; ++i) {
    configs.push_back(configs[i]);
    configs.back().when_full = WhenFull::kDisk;
  }
  return configs;
}

class SnapshotTest : public testing::TestWithParam<size_t> {
 protected:
  void SetUp() override {
    if (!table_->config().demotes_when_full()) return;
    table_->SetColdFolder(*ColdFolder::Open(folder_.path()),
                          [](EmbeddingTable&) { return absl::OkStatus(); });
  }

  // Rows that have not changed take the steps that they have missed, in one go.
  void ExpectRowsWithSteps(const State& saved, const SavedSteps& steps,
                           const State& now) {
    const auto table = MakeTable(table_->config());
    ASSERT_TRUE(table->RestoreSteps(steps).ok());
    for (const auto& [key, row] : saved.rows) {
      const auto floats = absl::MakeConstSpan(row);
      ASSERT_TRUE(
          table
              ->AssignRows({{&key, 1}, floats.subspan(0, 4), floats.subspan(4)},
                           AssignMode::kSaved)
              .ok());
    }
    for (const auto& [key, row] : StateOf(*table).rows) {
      const std::vector<float>& expected = now.rows.at(key);
      for (size_t i = 0; i < row.size(); ++i) {
        ASSERT_NEAR(row[i], expected[i], 1e-5f) << key << ", " << i;
      }
    }
  }

  // Changes the table in threads as long as it lives.
  class Changes {
   public:
    Changes(EmbeddingTable* table, uint32_t seed) {
      for (uint32_t t = 0; t < 3; ++t) {
        threads_.emplace_back([this, table, seed, t] {
          std::mt19937 random(seed + t);
          while (!is_over_) ChangeSomething(*table, random);
        });
      }
    }
    ~Changes() {
      is_over_ = true;
      for (std::thread& thread : threads_) thread.join();
    }

   private:
    std::atomic<bool> is_over_{false};
    std::vector<std::thread> threads_;
  };

  const ScopedFolder folder_;
  const std::unique_ptr<EmbeddingTable> table_ =
      MakeTable(Configs()[GetParam()]);
  std::mt19937 random_{17};
};

TEST_P(SnapshotTest, HasTheTableOfItsMomentWhileThatChanges) {
  for (int i = 0; i < 30; ++i) ChangeSomething(*table_, random_);
  State base;
  ChangeCursor since;
  for (uint32_t round = 0; round < 6; ++round) {
    const State now = StateOf(*table_);
    const bool is_whole = round % 3 == 0;
    auto snapshot = SnapshotOf(*table_, is_whole ? ChangeCursor() : since);
    ASSERT_EQ(snapshot->is_whole, is_whole);
    EXPECT_EQ(snapshot->num_rows, static_cast<int64_t>(now.rows.size()));
    const ChangeCursor moment = snapshot->moment;
    const SavedSteps steps = snapshot->steps;
    State seen;
    {
      const Changes changes(table_.get(), 100 * round);
      ASSERT_TRUE(Read(*table_, *snapshot, snapshot->bloom.get(), &seen).ok());
      EXPECT_EQ(snapshot->kept_bytes(), 0);
    }
    if (!is_whole) {
      for (const Key key : snapshot->lost_rows) base.rows.erase(key);
      for (const auto& [key, row] : seen.rows) base.rows[key] = row;
      seen.rows = base.rows;
    }
    base = seen;
    since = moment;
    ASSERT_EQ(seen.rows.size(), now.rows.size()) << round;
    if (is_whole || !table_->config().optimizer.is_dense) {
      ASSERT_TRUE(seen == now) << round;
    } else {
      ExpectRowsWithSteps(seen, steps, now);
    }
  }
}

TEST_P(SnapshotTest, OneThatIsGivenUpLeavesNothingBehind) {
  for (int i = 0; i < 30; ++i) ChangeSomething(*table_, random_);
  const auto all = KeyRange(0, kKeys);
  const std::vector<float> values(all.size() * 4, 0.5f);
  ASSERT_TRUE(Assign(*table_, all, values).ok());
  auto snapshot = SnapshotOf(*table_);
  ASSERT_TRUE(Assign(*table_, all, values).ok());
  EXPECT_GT(snapshot->kept_bytes(), kKeys * 4 * 2);
  EXPECT_EQ(snapshot
                ->ForEachRow(10,
                             [](const RowChunk&) {
                               return absl::CancelledError("enough");
                             })
                .code(),
            absl::StatusCode::kCancelled);
  snapshot.reset();
  ASSERT_TRUE(Assign(*table_, all, values).ok());
  snapshot = SnapshotOf(*table_);
  EXPECT_EQ(snapshot->kept_bytes(), 0);
  const State now = StateOf(*table_);
  State seen;
  ASSERT_TRUE(Read(*table_, *snapshot, snapshot->bloom.get(), &seen).ok());
  EXPECT_TRUE(seen == now);
}

INSTANTIATE_TEST_SUITE_P(Tables, SnapshotTest,
                         testing::Range(size_t{0}, Configs().size()));

}  // namespace
}  // namespace tfswitch
