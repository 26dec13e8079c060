#include "cc/table/initializer.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/table/table_testing.h"

namespace tfswitch {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::Pointwise;

std::vector<float> Fill(const InitializerConfig& config, uint64_t seed, int dim,
                        Key key) {
  std::vector<float> row(dim);
  Initializer(config, seed, dim).Fill(&key, 1, row.data());
  return row;
}

std::vector<InitializerConfig> AllKinds() {
  return {ConstantInitializer{0.5f}, UniformInitializer{}, NormalInitializer{},
          TruncatedNormalInitializer{}, GlorotUniformInitializer{}};
}

// The values of many keys, one after the other.
std::vector<float> Sample(const InitializerConfig& config, int dim) {
  std::vector<float> values;
  for (Key key = -500; key < 500; ++key) {
    const std::vector<float> row = Fill(config, 7, dim, key);
    values.insert(values.end(), row.begin(), row.end());
  }
  return values;
}

double Mean(const std::vector<float>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) /
         static_cast<double>(values.size());
}

double Stddev(const std::vector<float>& values) {
  const double mean = Mean(values);
  double sum = 0.0;
  for (const float v : values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(values.size()));
}

TEST(InitializerTest, ValuesAreFixedForAllTime) {
  // These numbers are part of what a model trains to: a change of the random
  // stream changes every run, and a mix of versions on several servers. They
  // were computed by an independent program. (The logarithm and the cosine of a
  // normal come from the C library, which may round differently.)
  EXPECT_THAT(
      Fill(UniformInitializer{-1.0f, 1.0f}, 1, 4, 42),
      ElementsAre(-0.777369261f, -0.912392616f, 0.0670164824f, 0.165454268f));
  EXPECT_THAT(Fill(NormalInitializer{0.0f, 1.0f}, 1, 4, 42),
              Pointwise(FloatNear(1e-6f), {2.01655360f, 0.56946154f,
                                           -0.97291143f, -0.55678070f}));
  EXPECT_THAT(Fill(TruncatedNormalInitializer{0.0f, 1.0f}, 1, 4, 42),
              Pointwise(FloatNear(1e-6f),
                        {0.56915040f, -0.97291143f, 0.56832465f, 0.59696587f}));
}

TEST(InitializerTest, ConstantFillsEveryFloat) {
  EXPECT_THAT(Fill(ConstantInitializer{0.25f}, 9, 5, 1), Each(0.25f));
}

TEST(InitializerTest, UniformStaysInTheHalfOpenRangeAndFillsIt) {
  const std::vector<float> values =
      Sample(UniformInitializer{-0.05f, 0.05f}, 33);

  EXPECT_GE(*std::min_element(values.begin(), values.end()), -0.05f);
  EXPECT_LT(*std::max_element(values.begin(), values.end()), 0.05f);
  EXPECT_NEAR(Mean(values), 0.0, 0.001);
  EXPECT_NEAR(Stddev(values), 0.1 / std::sqrt(12.0), 0.001);
}

TEST(InitializerTest, UniformValuesDoNotDependOnWhatIsFilledAtOnce) {
  constexpr int kDim = 40;
  // In the second range, rounding often gives the excluded end.
  for (const UniformInitializer& config :
       {UniformInitializer{-0.05f, 0.05f}, UniformInitializer{1.0f, 1.0000002f},
        UniformInitializer{-3e37f, 3e37f}}) {
    const std::vector<Key> keys = {-7, 0, 1, std::numeric_limits<Key>::max()};
    std::vector<float> rows(keys.size() * kDim);
    Initializer(config, 3, kDim).Fill(keys.data(), keys.size(), rows.data());
    for (size_t k = 0; k < keys.size(); ++k) {
      for (int dim = 1; dim <= kDim; ++dim) {
        const auto row = rows.begin() + static_cast<std::ptrdiff_t>(k * kDim);
        EXPECT_EQ(Fill(config, 3, dim, keys[k]),
                  std::vector<float>(row, row + dim));
      }
    }
  }
}

TEST(InitializerTest, UniformOfAnEmptyRangeIsItsValue) {
  EXPECT_THAT(Fill(UniformInitializer{0.5f, 0.5f}, 1, 3, 1), Each(0.5f));
}

TEST(InitializerTest, NormalHasItsMeanAndDeviation) {
  const std::vector<float> values = Sample(NormalInitializer{1.0f, 0.5f}, 33);

  EXPECT_NEAR(Mean(values), 1.0, 0.01);
  EXPECT_NEAR(Stddev(values), 0.5, 0.01);
  EXPECT_GT(*std::max_element(values.begin(), values.end()), 1.0f + 3 * 0.5f);
}

TEST(InitializerTest, TruncatedNormalStaysWithinTwoDeviations) {
  const std::vector<float> values =
      Sample(TruncatedNormalInitializer{1.0f, 0.5f}, 33);

  EXPECT_GE(*std::min_element(values.begin(), values.end()), 0.0f);
  EXPECT_LE(*std::max_element(values.begin(), values.end()), 2.0f);
  EXPECT_NEAR(Mean(values), 1.0, 0.01);
  // The deviation of a normal cut at two is 0.8796 of the uncut one.
  EXPECT_NEAR(Stddev(values), 0.5 * 0.8796, 0.01);
}

TEST(InitializerTest, GlorotUniformDependsOnTheDim) {
  const std::vector<float> values = Sample(GlorotUniformInitializer{}, 23);
  const float limit = std::sqrt(6.0f / 24.0f);

  EXPECT_GE(*std::min_element(values.begin(), values.end()), -limit);
  EXPECT_LT(*std::max_element(values.begin(), values.end()), limit);
  EXPECT_NEAR(Stddev(values), limit / std::sqrt(3.0), 0.01);
}

TEST(InitializerTest, SeedAndKeyBothMatterAndDoNotTradePlaces) {
  std::set<std::vector<float>> rows;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{2},
                              std::numeric_limits<uint64_t>::max()}) {
    for (const Key key :
         {Key{0}, Key{1}, Key{2}, Key{-1}, std::numeric_limits<Key>::min(),
          std::numeric_limits<Key>::max()}) {
      rows.insert(Fill(UniformInitializer{}, seed, 8, key));
    }
  }

  EXPECT_EQ(rows.size(), 24u);
}

TEST(InitializerTest, NeighbouringKeysAreUncorrelated) {
  double product = 0.0;
  for (Key key = 0; key < 20000; ++key) {
    const UniformInitializer unit{-1.0f, 1.0f};
    product += static_cast<double>(Fill(unit, 0, 1, key)[0]) *
               static_cast<double>(Fill(unit, 0, 1, key + 1)[0]);
  }

  // Four standard errors of the mean of products with variance 1/9.
  EXPECT_NEAR(product / 20000, 0.0, 4.0 / 3.0 / std::sqrt(20000.0));
}

TEST(InitializerTest, RowsAreTheSameInAnyThreadOrderAndTable) {
  const std::vector<Key> keys = KeyRange(-1000, 2000);
  for (const InitializerConfig& kind : AllKinds()) {
    const TableConfig config = MakeConfig(/*dim=*/5, AdamConfig{}, kind);
    auto forward = MakeTable(config);
    const std::vector<float> expected = FindOrInsertAll(forward.get(), keys);

    auto one_by_one = MakeTable(config);
    for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
      FindOrInsertAll(one_by_one.get(), {*key});
    }
    EXPECT_EQ(FindAll(*one_by_one, keys), expected);

    auto threaded = MakeTable(config);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        FindOrInsertAll(threaded.get(), KeyRange(-1000 + 400 * t, 800));
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(FindAll(*threaded, keys), expected);

    for (const Key key : {Key{-1000}, Key{0}, Key{999}}) {
      EXPECT_EQ(FindAll(*forward, {key}), Fill(kind, config.seed, 5, key));
    }
  }
}

}  // namespace
}  // namespace tfswitch
