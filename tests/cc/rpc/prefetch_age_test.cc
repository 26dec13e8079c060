// Prefetches of one process, while another process changes the rows.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/client/checkpoints.h"
#include "cc/client/prefetches.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"

namespace tfswitch {
namespace {

using Change = std::function<void(ParameterClient&, const std::vector<Key>&)>;

// Prefetches the keys, lets another process change their rows, pushes other
// keys, and looks the rows up.
struct Lookup {
  bool is_prefetched = false;
  std::vector<float> rows;
  Prefetches::Stats stats;
};

Lookup LookUpAfter(const Change& change, bool is_exact) {
  const ClusterUnderTest cluster(2);
  const auto client = cluster.Connect();
  const auto other = cluster.Connect();
  TableConfig config = SmallTable("t");
  config.statistics.kind = StatisticsKind::kUsage;
  EXPECT_TRUE(client->CreateTable(config).ok());
  const std::vector<Key> all = RandomKeys(40);
  const std::vector<Key> keys(all.begin(), all.begin() + 20);
  const std::vector<Key> pushed(all.begin() + 20, all.end());
  EXPECT_TRUE(PushOnes(*client, "t", 2, keys).ok());
  Prefetches prefetches(client.get());
  const auto ticket = prefetches.Begin(config, keys, {is_exact, 1, 1});
  prefetches.Run({ticket});
  change(*other, keys);
  PushArgs push;
  push.table = "t";
  push.keys = pushed;
  const uint64_t number = prefetches.PushBegins(push).value();
  EXPECT_TRUE(PushOnes(*client, "t", 2, pushed).ok());
  if (prefetches.PushEnded("t", number, true)) prefetches.ReadAgain();
  Lookup lookup;
  lookup.rows.resize(keys.size() * 2);
  lookup.is_prefetched = prefetches
                             .Use(config, keys, /*inserts=*/true, kServersDay,
                                  lookup.rows.data(), nullptr)
                             .value();
  lookup.stats = prefetches.stats().at("t");
  return lookup;
}

TEST(PrefetchAgeTest, RowsThatChangeOtherThanByPushesAreLookedUpAgain) {
  const std::string saves = testing::TempDir() + "/prefetch_age";
  const std::vector<std::pair<std::string, Change>> changes = {
      {"erase",
       [](ParameterClient& other, const std::vector<Key>& keys) {
         EXPECT_EQ(*other.Erase({"t"}, keys), 20);
       }},
      {"assign",
       [](ParameterClient& other, const std::vector<Key>& keys) {
         const std::vector<float> rows(keys.size() * 2, 5.0f);
         AssignArgs assign;
         assign.table = "t";
         assign.dim = 2;
         assign.keys = keys;
         assign.embeddings = rows;
         EXPECT_TRUE(other.Assign(assign).ok());
       }},
      {"evict",
       [](ParameterClient& other, const std::vector<Key>&) {
         v1::ShrinkRequest shrink;
         shrink.set_table("t");
         shrink.mutable_rules()->set_max_rows(0);
         EXPECT_EQ(ShrinkOf(other, shrink)->evicted_rows(), 20);
       }},
      {"restore",
       [&](ParameterClient& other, const std::vector<Key>& keys) {
         v1::SaveRequest save;
         save.set_path(saves);
         EXPECT_TRUE(SaveCheckpoint(other, save).ok());
         v1::RestoreRequest restore;
         restore.set_path(saves);
         EXPECT_TRUE(RestoreCheckpoint(other, restore).ok());
       }},
  };
  for (const auto& [name, change] : changes) {
    for (const bool is_exact : {true, false}) {
      SCOPED_TRACE(absl::StrCat(name, is_exact ? ", exact" : ""));
      const Lookup lookup = LookUpAfter(change, is_exact);
      EXPECT_FALSE(lookup.is_prefetched);
      EXPECT_EQ(lookup.stats.num_misses, 1);
      EXPECT_EQ(lookup.stats.num_hits, 0);
    }
  }
}

TEST(PrefetchAgeTest, CountsTheLaterPushesOfThisProcessAndOfOthers) {
  for (const bool is_exact : {true, false}) {
    const Lookup lookup = LookUpAfter(
        [](ParameterClient& other, const std::vector<Key>& keys) {
          for (int i = 0; i < 3; ++i) {
            EXPECT_TRUE(PushOnes(other, "t", 2, keys).ok());
          }
          v1::ShrinkRequest evicts_nothing;
          evicts_nothing.set_table("t");
          evicts_nothing.mutable_rules()->set_max_rows(1000);
          EXPECT_EQ(ShrinkOf(other, evicts_nothing)->evicted_rows(), 0);
        },
        is_exact);
    EXPECT_TRUE(lookup.is_prefetched);
    // An exact prefetch may read some of the rows again after the own push.
    if (!is_exact) EXPECT_EQ(lookup.rows, std::vector<float>(40, 0.0f));
    EXPECT_EQ(lookup.stats.other_pushes, 3);
    EXPECT_EQ(lookup.stats.own_pushes, is_exact ? 0 : 1);
  }
}

}  // namespace
}  // namespace tfswitch
