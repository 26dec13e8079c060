// Many threads on one table. Rows are such that a torn one shows: all floats of
// a row are equal whenever it is read whole.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

constexpr int kDim = 24;

bool IsWhole(const float* row, int dim) {
  return std::all_of(row, row + dim, [row](float f) { return f == row[0]; });
}

// Runs the threads to their end.
void RunThreads(const std::vector<std::function<void()>>& bodies) {
  std::vector<std::thread> threads;
  for (const auto& body : bodies) threads.emplace_back(body);
  for (std::thread& thread : threads) thread.join();
}

TEST(EmbeddingTableConcurrencyTest, EveryUpdateCountsAndNoReadIsTorn) {
  // Powers of two stay exact in float32.
  constexpr int kNumUpdaters = 3;
  const int num_steps = 2000 / kSlowdown;
  auto table = MakeTable(kDim, SgdConfig{}, ConstantInitializer{0.0f});
  const std::vector<Key> keys = KeyRange(0, 50);
  FindOrInsertAll(table.get(), keys);
  const std::vector<float> gradients(keys.size() * kDim, -1.0f);
  std::atomic<int> num_running{kNumUpdaters};
  std::atomic<int64_t> num_torn{0};
  std::atomic<int64_t> num_updates{0};

  std::vector<std::function<void()>> threads(kNumUpdaters, [&] {
    for (int i = 0; i < num_steps; ++i) {
      num_updates +=
          table->ApplyGradients({keys, gradients, 1.0f, i % 2 == 0}).value();
    }
    --num_running;
  });
  threads.push_back([&] {
    std::vector<float> out(keys.size() * kDim);
    std::vector<float> last(keys.size());
    while (num_running > 0) {
      ASSERT_EQ(table->Find(keys, absl::MakeSpan(out)).value(), 50);
      for (size_t i = 0; i < keys.size(); ++i) {
        num_torn += !IsWhole(&out[i * kDim], kDim);
        ASSERT_GE(out[i * kDim], last[i]);
        last[i] = out[i * kDim];
      }
    }
  });
  RunThreads(threads);

  EXPECT_EQ(num_torn, 0);
  EXPECT_EQ(num_updates, int64_t{50} * kNumUpdaters * num_steps);
  for (const float value : FindAll(*table, keys)) {
    ASSERT_EQ(value, static_cast<float>(kNumUpdaters * num_steps));
  }
}

TEST(EmbeddingTableConcurrencyTest, ConcurrentFirstReadsInsertOneRow) {
  const int64_t num_keys = 20000 / kSlowdown;
  auto table = MakeTable(kDim);
  const std::vector<Key> keys = KeyRange(0, num_keys);
  std::vector<std::vector<float>> outs(4);

  std::vector<std::function<void()>> threads;
  for (std::vector<float>& out : outs) {
    threads.push_back([&] { out = FindOrInsertAll(table.get(), keys); });
  }
  RunThreads(threads);

  EXPECT_EQ(table->size(), num_keys);
  EXPECT_EQ(table->stats().inserted_rows, num_keys);
  for (const std::vector<float>& out : outs) EXPECT_EQ(out, outs[0]);
}

TEST(EmbeddingTableConcurrencyTest, GrowthUnderReadersAndUpdatersLosesNoKey) {
  // Keys [0, num_old) are there all the time while others come in.
  const int64_t num_old = 2000;
  const int64_t num_new = 400000 / kSlowdown;
  auto table = MakeTable(kDim, SgdConfig{}, ConstantInitializer{0.0f});
  const std::vector<Key> old_keys = KeyRange(0, num_old);
  FindOrInsertAll(table.get(), old_keys);
  std::atomic<bool> is_growing{true};
  std::atomic<int64_t> num_inserted{0};
  int64_t num_rounds = 0;

  RunThreads(
      {[&] {
         for (int64_t i = 0; i < num_new; i += 500) {
           FindOrInsertAll(table.get(), KeyRange(num_old + i, 500));
           num_inserted = i + 500;
         }
         is_growing = false;
       },
       [&] {
         std::vector<float> out(old_keys.size() * kDim);
         while (is_growing) {
           ASSERT_EQ(table->Find(old_keys, absl::MakeSpan(out)).value(),
                     num_old);
           for (size_t i = 0; i < old_keys.size(); ++i) {
             ASSERT_TRUE(IsWhole(&out[i * kDim], kDim));
           }
           // And what was inserted before this call.
           const int64_t end = num_inserted;
           if (end == 0) continue;
           const std::vector<Key> recent = KeyRange(num_old + end - 500, 500);
           std::vector<float> recent_out(recent.size() * kDim);
           ASSERT_EQ(table->Find(recent, absl::MakeSpan(recent_out)).value(),
                     500);
         }
       },
       [&] {
         const std::vector<float> gradients(old_keys.size() * kDim, -1.0f);
         while (is_growing) {
           ASSERT_EQ(table->ApplyGradients({old_keys, gradients, 1.0f, false})
                         .value(),
                     num_old);
           ++num_rounds;
         }
       }});

  EXPECT_EQ(table->size(), num_old + num_new);
  for (const float value : FindAll(*table, old_keys)) {
    ASSERT_EQ(value, static_cast<float>(num_rounds));
  }
}

TEST(EmbeddingTableConcurrencyTest, ErasedRowsAreNeverReadAsAnotherKeysRow) {
  // The row of key k holds k in each float, or 0 when absent. Erasing and
  // inserting makes rows change hands all the time.
  const int num_rounds = 600 / kSlowdown;
  constexpr Key kNumKeys = 400;
  auto table = MakeTable(kDim);
  std::atomic<int> num_running{2};
  const auto churn = [&](uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<float> values;
    for (int round = 0; round < num_rounds; ++round) {
      std::vector<Key> keys = KeyRange(1, kNumKeys);
      std::shuffle(keys.begin(), keys.end(), random);
      keys.resize(kNumKeys / 4);
      values.clear();
      for (const Key key : keys) {
        values.insert(values.end(), kDim, static_cast<float>(key));
      }
      ASSERT_TRUE(Assign(*table, keys, values).ok());
      std::shuffle(keys.begin(), keys.end(), random);
      keys.resize(kNumKeys / 5);
      EXPECT_TRUE(table->Erase(keys).ok());
    }
    --num_running;
  };

  RunThreads(
      {[&] { churn(1); }, [&] { churn(2); },
       [&] {
         const std::vector<Key> keys = KeyRange(1, kNumKeys);
         std::vector<float> out(keys.size() * kDim);
         while (num_running > 0) {
           ASSERT_TRUE(table->Find(keys, absl::MakeSpan(out)).ok());
           for (size_t i = 0; i < keys.size(); ++i) {
             const float* row = &out[i * kDim];
             ASSERT_TRUE(IsWhole(row, kDim)) << keys[i];
             ASSERT_TRUE(row[0] == 0.0f ||
                         row[0] == static_cast<float>(keys[i]))
                 << keys[i] << " " << row[0];
           }
         }
       },
       [&] {
         // Steps that change nothing, but write the whole row.
         const std::vector<Key> keys = KeyRange(1, kNumKeys);
         const std::vector<float> zeros(keys.size() * kDim);
         while (num_running > 0) {
           ASSERT_TRUE(table->ApplyGradients({keys, zeros, 1.0f, false}).ok());
         }
       }});

  EXPECT_EQ(table->stats().num_rows, table->size());
}

TEST(EmbeddingTableConcurrencyTest, ForEachRowSeesEachStayingRowOnceInGrowth) {
  const int64_t num_staying = 5000;
  const int64_t num_new = 200000 / kSlowdown;
  auto table = MakeTable(/*dim=*/2);
  const std::vector<Key> staying = KeyRange(0, num_staying);
  FindOrInsertAll(table.get(), staying);
  std::atomic<bool> is_growing{true};

  RunThreads(
      {[&] {
         for (int64_t i = 0; i < num_new; i += 100) {
           FindOrInsertAll(table.get(), KeyRange(num_staying + i, 100));
           if (i % 300 == 0) {
             EXPECT_TRUE(table->Erase(KeyRange(num_staying + i / 2, 20)).ok());
           }
         }
         is_growing = false;
       },
       [&] {
         do {
           std::map<Key, int> seen;
           ASSERT_TRUE(table
                           ->ForEachRow(50,
                                        [&](const RowChunk& chunk) {
                                          for (const Key key : chunk.keys) {
                                            ++seen[key];
                                          }
                                          return absl::OkStatus();
                                        })
                           .ok());
           for (const Key key : staying) ASSERT_EQ(seen[key], 1) << key;
         } while (is_growing);
       }});
}

TEST(EmbeddingTableConcurrencyTest, MixedWorkKeepsEachThreadsOwnKeysExact) {
  // Each thread owns the keys that are its number modulo the threads, and
  // knows what they must be, while all of them share stripes and buckets.
  constexpr int kNumThreads = 4;
  const int num_rounds = 400 / kSlowdown;
  auto table = MakeTable(kDim, SgdConfig{}, ConstantInitializer{0.0f});
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE(::testing::Message() << "seed " << seed);

  std::vector<std::function<void()>> threads;
  for (int t = 0; t < kNumThreads; ++t) {
    threads.push_back([&, t] {
      std::mt19937 random(seed + t);
      std::map<Key, float> model;
      for (int round = 0; round < num_rounds; ++round) {
        std::vector<Key> keys;
        const Key first = static_cast<Key>(random() % (20 * (round + 1)));
        for (Key k = first; k < first + 200; ++k) {
          keys.push_back(k * kNumThreads + t);
        }
        const std::vector<float> gradients(keys.size() * kDim, -1.0f);
        switch (random() % 4) {
          case 0:
            FindOrInsertAll(table.get(), keys);
            for (const Key key : keys) model.try_emplace(key, 0.0f);
            break;
          case 1:
            ASSERT_TRUE(
                table->ApplyGradients({keys, gradients, 1.0f, true}).ok());
            for (const Key key : keys) model[key] += 1.0f;
            break;
          case 2:
            keys.resize(100);
            EXPECT_TRUE(table->Erase(keys).ok());
            for (const Key key : keys) model.erase(key);
            break;
          case 3: {
            const std::vector<float> out = FindAll(*table, keys);
            for (size_t i = 0; i < keys.size(); ++i) {
              const auto it = model.find(keys[i]);
              const float expected = it == model.end() ? 0.0f : it->second;
              ASSERT_EQ(out[i * kDim], expected) << keys[i];
              ASSERT_TRUE(IsWhole(&out[i * kDim], kDim)) << keys[i];
            }
          }
        }
      }
      for (const auto& [key, value] : model) {
        ASSERT_EQ(FindAll(*table, {key})[0], value) << key;
      }
    });
  }
  RunThreads(threads);
}

}  // namespace
}  // namespace tfswitch
