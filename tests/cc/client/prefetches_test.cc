#include "cc/client/prefetches.h"

#include <algorithm>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "cc/client/local_client.h"
#include "cc/client/push_queue.h"
#include "cc/shard/shard.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/forwarding_client.h"

namespace tfswitch {
namespace {

constexpr int kDim = 2;

TableConfig PrefetchedTable(bool is_dense = false) {
  TableConfig config;
  config.name = "t";
  config.dim = kDim;
  if (is_dense) {
    config.optimizer = AdamConfig{};
    config.optimizer.is_dense = true;
  } else {
    config.optimizer = AdagradConfig{};
  }
  config.initializer = UniformInitializer{-1.0f, 1.0f};
  config.seed = 7;
  return config;
}

std::shared_ptr<ParameterClient> NewClient(bool is_dense = false) {
  std::shared_ptr<ParameterClient> client =
      NewLocalClient(std::make_shared<Shard>(ShardOptions{}));
  EXPECT_TRUE(client->CreateTable(PrefetchedTable(is_dense)).ok());
  return client;
}

std::vector<float> PullRows(ParameterClient& client,
                            const std::vector<Key>& keys, bool inserts) {
  PullArgs args;
  args.table = "t";
  args.dim = kDim;
  args.keys = keys;
  args.insert_missing = inserts;
  std::vector<float> rows(keys.size() * kDim);
  EXPECT_TRUE(client.Pull(args, absl::MakeSpan(rows)).ok());
  return rows;
}

PushArgs PushOf(const std::vector<Key>& keys,
                const std::vector<float>& gradients) {
  PushArgs args;
  args.table = "t";
  args.dim = kDim;
  args.keys = keys;
  args.keys_are_unique = true;
  args.gradients = gradients;
  args.learning_rate = 0.1f;
  args.insert_missing = true;
  return args;
}

int64_t NumRows(ParameterClient& client) {
  return client.ListTables({"t"}).value()[0].stats.num_rows;
}

// A program with prefetches, and one without that does the same.
class Twins {
 public:
  explicit Twins(bool is_dense) : is_dense_(is_dense) {}

  void Begin(const std::vector<Key>& keys, size_t limit) {
    auto ticket = prefetches_.Begin(PrefetchedTable(is_dense_), keys,
                                    {/*is_exact=*/true, 1, limit});
    ASSERT_NE(ticket, nullptr);
    reads_.emplace_back(
        [this, ticket = std::move(ticket)] { prefetches_.Run({ticket}); });
  }

  // Returns whether there was a ticket.
  bool Use(const std::vector<Key>& keys, bool inserts) {
    std::vector<float> rows(keys.size() * kDim);
    const absl::StatusOr<bool> is_used =
        prefetches_.Use(PrefetchedTable(is_dense_), keys, inserts, kServersDay,
                        rows.data(), nullptr);
    EXPECT_TRUE(is_used.ok()) << is_used.status();
    if (!*is_used) {
      Finish();
      rows = PullRows(*client_, keys, inserts);
    }
    EXPECT_EQ(rows, PullRows(*plain_, keys, inserts));
    return *is_used;
  }

  // A lookup that nobody has foreseen.
  void LookUp(const std::vector<Key>& keys, bool inserts) {
    Finish();
    EXPECT_EQ(PullRows(*client_, keys, inserts),
              PullRows(*plain_, keys, inserts));
  }

  void Push(const std::vector<Key>& keys, std::vector<float> gradients,
            bool is_queued) {
    ASSERT_TRUE(plain_->Push(PushOf(keys, gradients)).ok());
    if (!is_queued) ASSERT_TRUE(queue_.Finish().ok());
    const auto number = prefetches_.PushBegins(PushOf(keys, gradients));
    ASSERT_TRUE(number.ok());
    const auto send = [this, keys, gradients, number](const LentThreads*) {
      const absl::Status status =
          client_->Push(PushOf(keys, gradients)).status();
      if (prefetches_.PushEnded("t", *number, status.ok())) {
        prefetches_.ReadAgain();
      }
      return status;
    };
    if (is_queued) {
      ASSERT_TRUE(queue_.WaitForRoom(3).ok());
      queue_.Add("a push", send);
    } else {
      ASSERT_TRUE(send(nullptr).ok());
    }
  }

  void Finish() {
    ASSERT_TRUE(queue_.Finish().ok());
    ASSERT_TRUE(prefetches_.InsertUsed(kServersDay).ok());
  }

  void ExpectEqual() {
    Finish();
    EXPECT_EQ(NumRows(*client_), NumRows(*plain_));
  }

  void JoinReads() {
    for (std::thread& read : reads_) read.join();
    reads_.clear();
  }

  Prefetches& prefetches() { return prefetches_; }

  ~Twins() { JoinReads(); }

 private:
  const bool is_dense_;
  const std::shared_ptr<ParameterClient> client_ = NewClient(is_dense_);
  const std::shared_ptr<ParameterClient> plain_ = NewClient(is_dense_);
  Prefetches prefetches_{client_.get()};
  PushQueue queue_{0};
  std::vector<std::thread> reads_;
};

class PrefetchesTest
    : public testing::TestWithParam<std::tuple<int, bool, bool>> {};

TEST_P(PrefetchesTest, AreEqualToLookupsWhateverTheProgramDoes) {
  const auto [depth, is_queued, is_dense] = GetParam();
  std::mt19937 random(17 * depth + (is_queued ? 1 : 0));
  const auto below = [&](int n) { return static_cast<int>(random() % n); };
  Twins twins(is_dense);
  std::vector<std::vector<Key>> batches(300);
  for (std::vector<Key>& batch : batches) {
    batch.resize(1 + below(12));
    // Frequent ids, and new ones.
    for (Key& key : batch) {
      key = below(3) == 0 ? static_cast<Key>(random()) : below(10);
    }
  }
  size_t num_begun = 0;
  int num_used = 0;
  for (size_t step = 0; step < batches.size(); ++step) {
    while (num_begun < batches.size() && num_begun <= step + depth) {
      twins.Begin(batches[num_begun++], depth + 2);
    }
    const std::vector<Key>& batch = batches[step];
    const bool trains = below(8) != 0;
    num_used += twins.Use(batch, trains) ? 1 : 0;
    if (below(20) == 0) twins.prefetches().Drop(/*source=*/0);
    if (below(30) == 0) twins.ExpectEqual();
    if (below(10) == 0 && num_begun < batches.size()) {
      twins.LookUp(batches[num_begun - 1], /*inserts=*/below(2) == 0);
    }
    if (!trains || below(6) == 0) continue;
    std::vector<Key> keys = batch;
    if (below(6) == 0) keys.push_back(below(10));
    std::sort(keys.begin(), keys.end());
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    if (below(6) == 0) keys.resize((keys.size() + 1) / 2);
    std::vector<float> gradients(keys.size() * kDim);
    for (float& value : gradients) value = static_cast<float>(below(100));
    twins.Push(keys, gradients, is_queued);
  }
  twins.ExpectEqual();
  EXPECT_GT(num_used, 100);
}

INSTANTIATE_TEST_SUITE_P(Depths, PrefetchesTest,
                         testing::Combine(testing::Values(1, 3),
                                          testing::Bool(), testing::Bool()));

TEST(PrefetchesTest, MakeNoRowBeforeTrainingUsesIt) {
  Twins twins(/*is_dense=*/false);
  twins.Begin({1, 2}, 3);
  twins.Begin({3, 4}, 3);
  twins.JoinReads();
  twins.ExpectEqual();
  EXPECT_TRUE(twins.Use({1, 2}, /*inserts=*/false));
  EXPECT_TRUE(twins.Use({3, 4}, /*inserts=*/true));
  twins.ExpectEqual();
}

TEST(PrefetchesTest, ForwardPassesHoldNoMoreThanAFewBatches) {
  Twins twins(/*is_dense=*/false);
  for (Key i = 0; i < 1000; ++i) {
    twins.Begin({i}, 2);
    twins.JoinReads();
    if (i % 2 == 0) EXPECT_TRUE(twins.Use({i}, /*inserts=*/true));
    EXPECT_LE(twins.prefetches().stats().at("t").num_held, 2);
  }
  twins.ExpectEqual();
  const Prefetches::Stats stats = twins.prefetches().stats().at("t");
  EXPECT_EQ(stats.num_hits, 500);
  EXPECT_EQ(stats.num_unused + stats.num_held, 500);
}

TEST(PrefetchesTest, LaterRowsOfAnInexactTicketMayLackPushes) {
  const std::shared_ptr<ParameterClient> client = NewClient();
  Prefetches prefetches(client.get());
  const std::vector<float> before = PullRows(*client, {5}, /*inserts=*/true);
  const auto ticket =
      prefetches.Begin(PrefetchedTable(), {5}, {/*is_exact=*/false, 1, 1});
  prefetches.Run({ticket});
  const std::vector<float> gradients = {1, 1};
  const auto number = prefetches.PushBegins(PushOf({5}, gradients));
  ASSERT_TRUE(client->Push(PushOf({5}, gradients)).ok());
  EXPECT_FALSE(prefetches.PushEnded("t", *number, true));
  std::vector<float> rows(kDim);
  EXPECT_TRUE(*prefetches.Use(PrefetchedTable(), {5}, true, kServersDay,
                              rows.data(), nullptr));
  EXPECT_EQ(rows, before);
}

// Several threads may push at the same time, and end in any order.
TEST(PrefetchesTest, RowsAreReadAfterTheLastOfTwoPushes) {
  const std::shared_ptr<ParameterClient> client = NewClient();
  Prefetches prefetches(client.get());
  const auto ticket = prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 1});
  prefetches.Run({ticket});
  const std::vector<float> gradients = {1, 1};
  const auto first = prefetches.PushBegins(PushOf({5}, gradients));
  const auto second = prefetches.PushBegins(PushOf({5}, gradients));
  ASSERT_TRUE(client->Push(PushOf({5}, gradients)).ok());
  EXPECT_FALSE(prefetches.PushEnded("t", *second, true));
  ASSERT_TRUE(client->Push(PushOf({5}, gradients)).ok());
  EXPECT_TRUE(prefetches.PushEnded("t", *first, true));
  prefetches.ReadAgain();
  std::vector<float> rows(kDim);
  EXPECT_TRUE(*prefetches.Use(PrefetchedTable(), {5}, true, kServersDay,
                              rows.data(), nullptr));
  EXPECT_EQ(rows, PullRows(*client, {5}, false));
}

TEST(PrefetchesTest, RowsOfBspTablesAreReadAfterARoundAndNotAfterAPush) {
  const auto shard = std::make_shared<Shard>(ShardOptions{});
  const std::shared_ptr<ParameterClient> client = NewLocalClient(shard);
  TableConfig bsp = PrefetchedTable();
  bsp.consistency.kind = ConsistencyKind::kBsp;
  ASSERT_TRUE(client->CreateTable(bsp).ok());
  Prefetches prefetches(client.get());
  const auto ticket = prefetches.Begin(bsp, {5}, {true, 1, 2});
  const auto next = prefetches.Begin(bsp, {6}, {true, 1, 2});
  prefetches.Run({ticket, next});
  const std::vector<float> values = {3, 4};
  const auto push = prefetches.PushBegins(PushOf({5}, values));
  EXPECT_FALSE(prefetches.PushEnded("t", *push, true));
  // In place of a round.
  const std::vector<Key> keys = {5, 6};
  const std::vector<float> sums = {3, 4, 5, 6};
  ASSERT_TRUE((*shard->FindTable("t"))
                  ->ApplyGradients(GradientBatch(keys, sums, 1.0f, true))
                  .ok());
  const std::vector<float> stepped = PullRows(*client, keys, false);
  EXPECT_TRUE(prefetches.RoundEnded());
  prefetches.ReadAgain();
  for (size_t i = 0; i < 2; ++i) {
    std::vector<float> rows(kDim);
    EXPECT_TRUE(*prefetches.Use(bsp, {keys[i]}, true, kServersDay, rows.data(),
                                nullptr));
    EXPECT_EQ(rows, std::vector<float>(&stepped[kDim * i],
                                       &stepped[kDim * i] + kDim));
    // The second one waits for the round of the first.
    if (i == 0)
      EXPECT_FALSE(prefetches.PushEnded(
          "t", *prefetches.PushBegins(PushOf({5}, values)), true));
  }
  EXPECT_EQ(prefetches.stats().at("t").num_late, 0);
}

// A failed push must not lose the rows that training has used before it.
TEST(PrefetchesTest, RowsOfAFailedPushAreMadeLater) {
  const std::shared_ptr<ParameterClient> client = NewClient();
  Prefetches prefetches(client.get());
  prefetches.Run({prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 1})});
  std::vector<float> rows(kDim);
  EXPECT_TRUE(*prefetches.Use(PrefetchedTable(), {5}, true, kServersDay,
                              rows.data(), nullptr));
  const std::vector<float> gradients = {1, 1};
  const auto number = prefetches.PushBegins(PushOf({5}, gradients));
  prefetches.PushEnded("t", *number, /*is_applied=*/false);
  EXPECT_EQ(NumRows(*client), 0);
  EXPECT_TRUE(prefetches.InsertUsed(kServersDay).ok());
  EXPECT_EQ(NumRows(*client), 1);
  EXPECT_EQ(rows, PullRows(*client, {5}, false));
}

// A client whose reads fail, or whose servers are of an earlier version.
class OtherClient final : public ForwardingClient {
 public:
  using ForwardingClient::ForwardingClient;

  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override {
    class Failed final : public PendingCall {
      absl::Status Wait() override { return absl::UnavailableError("gone"); }
    };
    if (fails) return std::make_unique<Failed>();
    return ForwardingClient::StartPull(parts);
  }
  absl::StatusOr<std::vector<v1::HandshakeResponse>> AskServers() override {
    return std::vector<v1::HandshakeResponse>(is_old ? 1 : 0);
  }

  bool fails = false;
  bool is_old = false;
};

TEST(PrefetchesTest, AFailedReadLeavesTheLookupToItself) {
  const std::vector<float> gradients = {1, 1};
  for (const bool is_again : {false, true}) {
    const auto client = std::make_shared<OtherClient>(NewClient());
    Prefetches prefetches(client.get());
    const auto ticket = prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 1});
    client->fails = !is_again;
    prefetches.Run({ticket});
    if (is_again) {
      const auto number = prefetches.PushBegins(PushOf({5}, gradients));
      EXPECT_TRUE(prefetches.PushEnded("t", *number, true));
      client->fails = true;
      prefetches.ReadAgain();
    }
    std::vector<float> rows(kDim);
    EXPECT_FALSE(*prefetches.Use(PrefetchedTable(), {5}, true, kServersDay,
                                 rows.data(), nullptr));
  }
}

// The push that a row waits for never comes, and the server is gone.
TEST(PrefetchesTest, ALateReadThatFailsIsTheErrorOfTheLookup) {
  const auto client = std::make_shared<OtherClient>(NewClient());
  Prefetches prefetches(client.get());
  prefetches.Run({prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 2})});
  prefetches.Run({prefetches.Begin(PrefetchedTable(), {5, 6}, {true, 1, 2})});
  client->fails = true;
  std::vector<float> rows(2 * kDim);
  EXPECT_EQ(prefetches
                .Use(PrefetchedTable(), {5, 6}, true, kServersDay, rows.data(),
                     nullptr)
                .status(),
            absl::UnavailableError("gone"));
  EXPECT_FALSE(*prefetches.Use(PrefetchedTable(), {5, 6}, true, kServersDay,
                               rows.data(), nullptr));
}

TEST(PrefetchesTest, AFailedPushDropsTheRowsThatItMayHaveChanged) {
  const std::shared_ptr<ParameterClient> client = NewClient();
  Prefetches prefetches(client.get());
  prefetches.Run({prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 2})});
  prefetches.Run({prefetches.Begin(PrefetchedTable(), {6}, {true, 1, 2})});
  const std::vector<float> gradients = {1, 1};
  const auto number = prefetches.PushBegins(PushOf({5}, gradients));
  EXPECT_FALSE(prefetches.PushEnded("t", *number, /*is_applied=*/false));
  std::vector<float> rows(kDim);
  for (const Key key : {5, 6}) {
    EXPECT_EQ(*prefetches.Use(PrefetchedTable(), {key}, true, kServersDay,
                              rows.data(), nullptr),
              key == 6);
  }
}

TEST(PrefetchesTest, TablesWithoutAnOptimizerAndOldServersHaveNoTickets) {
  const auto client = std::make_shared<OtherClient>(NewClient());
  Prefetches prefetches(client.get());
  TableConfig open = PrefetchedTable();
  open.name = "open";
  open.optimizer.is_open = true;
  ASSERT_TRUE(client->CreateTable(open).ok());
  EXPECT_EQ(prefetches.Begin(open, {5}, {true, 1, 1}), nullptr);
  client->is_old = true;
  EXPECT_EQ(prefetches.Begin(PrefetchedTable(), {5}, {true, 1, 1}), nullptr);
}

}  // namespace
}  // namespace tfswitch
