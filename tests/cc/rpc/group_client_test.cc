// GroupClient in this process, over one server, and over three.

#include "cc/client/group_client.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cc/base/steady_clock.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/deadlines.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;
using testing::Pair;
using testing::UnorderedElementsAre;

// The parameter is the number of servers; 0: tables in this process.
class GroupClientTest : public testing::TestWithParam<int> {
 protected:
  // What one worker holds.
  std::shared_ptr<ParameterClient> Connect() const {
    return cluster_.Connect();
  }

  const ClusterUnderTest cluster_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Servers, GroupClientTest, testing::Values(0, 1, 3));

TEST_P(GroupClientTest, UnevenWorkersTrainInRoundsAndAllEnd) {
  constexpr int kWorkers = 3;
  WorkerGroupOptions options;
  options.num_workers = kWorkers;
  std::vector<std::vector<Round>> rounds(kWorkers);
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      const auto client = Connect();
      GroupClient& groups = client->groups();
      ASSERT_TRUE(groups.CreateGroup("g", options).ok());
      const WorkerGroup::Place joined = *groups.Join("g", w, 0, 0, 0, "");
      const GroupMember member = {"g", w, joined.incarnation};
      int64_t round = joined.round;
      for (int64_t i = 0; i < 20 + 10 * w; ++i, ++round) {
        ASSERT_TRUE(
            groups.Arrive(member, joined.clock + i, round, 0.5 + w, {}).ok());
        auto closed = groups.WaitForRound(member, round, Soon());
        ASSERT_TRUE(closed.ok()) << closed.status();
        rounds[w].push_back(*std::move(closed));
      }
      EXPECT_TRUE(groups.Leave(member, kLong).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();

  for (int w = 0; w < kWorkers; ++w) {
    ASSERT_EQ(rounds[w].size(), 20u + 10 * w);
    for (size_t r = 0; r < rounds[w].size(); ++r) {
      EXPECT_EQ(rounds[w][r].number, static_cast<int64_t>(r));
      EXPECT_EQ(rounds[w][r].contributions, rounds[2][r].contributions);
      EXPECT_EQ(rounds[w][r].total_weight, rounds[2][r].total_weight);
    }
  }
  EXPECT_EQ(rounds[2][0].total_weight, 4.5);
  const v1::GetGroupStatsResponse stats =
      *Connect()->groups().GroupStats("g", absl::Minutes(1));
  EXPECT_EQ(stats.rounds(), 40);
  EXPECT_EQ(stats.contributions(), 20 + 30 + 40);
  EXPECT_EQ(stats.num_active(), 0);
  EXPECT_THAT(stats.num_steps(),
              UnorderedElementsAre(Pair(0, 20), Pair(1, 30), Pair(2, 40)));
}

TEST_P(GroupClientTest, StalenessIsBounded) {
  constexpr int kWorkers = 3;
  WorkerGroupOptions options;
  options.num_workers = kWorkers;
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      const auto client = Connect();
      GroupClient& groups = client->groups();
      ASSERT_TRUE(groups.CreateGroup("g", options).ok());
      const GroupMember member = {
          "g", w, groups.Join("g", w, 0, 0, 0, "")->incarnation};
      for (int64_t clock = 0; clock < 100; ++clock) {
        const absl::Status turn = groups.WaitForTurn(member, clock, 1, Soon());
        ASSERT_TRUE(turn.ok()) << turn;
        ASSERT_TRUE(
            groups.Arrive(member, clock, WorkerGroup::kNoRound, 0, {}).ok());
      }
      EXPECT_TRUE(groups.Leave(member, kLong).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto stats = Connect()->groups().GroupStats("g", absl::Minutes(1));
  EXPECT_EQ(stats->staleness(0) + stats->staleness(1), 300);
}

TEST_P(GroupClientTest, AWaitThatTakesTooLongSaysForWhom) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  ASSERT_TRUE(groups.CreateGroup("g", {}).ok());
  const GroupMember member = {"g", 0,
                              groups.Join("g", 0, 0, 0, 0, "")->incarnation};
  ASSERT_TRUE(groups.Join("g", 4, 0, 0, 0, "").ok());
  ASSERT_TRUE(groups.Arrive(member, 0, 0, 1.0, {}).ok());
  const absl::Time deadline = SteadyNow() + absl::Milliseconds(50);
  for (const absl::Status& status :
       {groups.WaitForRound(member, 0, deadline).status(),
        groups.WaitForTurn(member, 1, 0, deadline)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(status.message(), HasSubstr("group 'g'"));
    EXPECT_THAT(status.message(),
                HasSubstr("worker 4 (at step 0, last heard "));
  }
}

TEST_P(GroupClientTest, WorkersMeetAtBarriers) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  WorkerGroupOptions options;
  options.num_workers = 3;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  std::atomic<int> num_before{0};
  std::vector<std::thread> workers;
  for (uint32_t w = 0; w < 3; ++w) {
    workers.emplace_back([&, w] {
      const auto own = Connect();
      const auto joined = own->groups().Join("g", w, 0, 0, 0, "");
      ASSERT_TRUE(joined.ok());
      const GroupMember member = {"g", w, joined->incarnation};
      for (int64_t visit = 0; visit < 20; ++visit) {
        ++num_before;
        const auto place =
            own->groups().WaitAtBarrier(member, "b", visit, Soon());
        ASSERT_TRUE(place.ok()) << place.status();
        EXPECT_GE(num_before, 3 * (visit + 1));
      }
      EXPECT_TRUE(own->groups().Leave(member, kLong).ok());
    });
  }
  for (std::thread& worker : workers) worker.join();
}

TEST_P(GroupClientTest, ABarrierSaysForWhomItWaits) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  WorkerGroupOptions options;
  options.num_workers = 3;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  const GroupMember member = {"g", 0,
                              groups.Join("g", 0, 0, 0, 0, "")->incarnation};
  const GroupMember other = {"g", 4,
                             groups.Join("g", 4, 0, 0, 0, "")->incarnation};
  const absl::Status late =
      groups.WaitAtBarrier(member, "b", 0, SteadyNow() + absl::Milliseconds(50))
          .status();
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(late.message()),
              testing::AllOf(HasSubstr("group 'g': barrier 'b' waits for "),
                             HasSubstr("worker 4 (at step 0, last heard "),
                             HasSubstr("1 of 3 workers")));
  // Who comes to another one hears of it, and so does the first.
  ASSERT_TRUE(groups.Join("g", 5, 0, 0, 0, "").ok());
  ASSERT_TRUE(
      groups
          .Leave({"g", 5, groups.Join("g", 5, 0, 0, 0, "")->incarnation}, kLong)
          .ok());
  for (const auto& [who, where] :
       {std::pair(other, "c"), std::pair(member, "b")}) {
    const absl::Status status =
        groups.WaitAtBarrier(who, where, 0, Soon()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("worker 0 at 'b', worker 4 at 'c'"));
  }
}

TEST_P(GroupClientTest, TheDeadAreDroppedWhenTheirLeaseEnds) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  WorkerGroupOptions options;
  options.lease = absl::Seconds(1);
  options.num_workers = 2;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  const GroupMember member = {"g", 0,
                              groups.Join("g", 0, 0, 0, 0, "")->incarnation};
  const GroupMember dead = {"g", 1,
                            groups.Join("g", 1, 0, 0, 0, "")->incarnation};
  ASSERT_TRUE(groups.Arrive(member, 0, 0, 1.0, {}).ok());

  const auto round = groups.WaitForRound(member, 0, Soon());

  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->contributions.size(), 1u);
  EXPECT_EQ(groups.Heartbeat(dead, kLong).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(groups.GroupStats("g", absl::Minutes(1))->expired(), 1);
  EXPECT_TRUE(groups.Join("g", 1, 0, 0, 0, "").ok());
  EXPECT_EQ(groups.GroupStats("g", absl::Minutes(1))->rejoined(), 1);
}

TEST_P(GroupClientTest, ErrorsAreThoseOfTheGroup) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  EXPECT_EQ(groups.Join("g", 0, 0, 0, 0, "").status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(groups.CreateGroup("g", {}).ok());
  EXPECT_TRUE(groups.CreateGroup("g", {}).ok());
  ASSERT_TRUE(groups.Join("g", 1, 0, 0, 0, "").ok());
  WorkerGroupOptions other;
  other.settings = "bsp(mean)";
  EXPECT_EQ(groups.CreateGroup("g", other).code(),
            absl::StatusCode::kAlreadyExists);
  other.lease = absl::ZeroDuration();
  EXPECT_EQ(groups.CreateGroup("h", other).code(),
            absl::StatusCode::kInvalidArgument);
  const GroupMember member = {"g", 0,
                              groups.Join("g", 0, 0, 0, 0, "")->incarnation};
  EXPECT_EQ(groups.Arrive(member, 5, 0, 1.0, {}).status().code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ(groups.Arrive(member, 0, 0, -1.0, {}).status().code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(
      groups.Join("g", 0, 0, 0, 0, "").ok());  // Somebody else, as worker 0.
  EXPECT_EQ(groups.Heartbeat(member, kLong).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(GroupClientOverGrpcTest, AStoppingServerEndsTheWait) {
  const auto server = StartServer();
  const auto client = Connect(server->address(), absl::Seconds(1));
  ASSERT_TRUE(client.ok());
  GroupClient& groups = (*client)->groups();
  WorkerGroupOptions options;
  options.num_workers = 2;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  const GroupMember member = {"g", 0,
                              groups.Join("g", 0, 0, 0, 0, "")->incarnation};
  std::thread stopping([&] { server->Stop(absl::Seconds(30)); });

  const absl::Status status = groups.WaitForRound(member, 0, Soon()).status();

  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_THAT(status.message(), HasSubstr(server->address()));
  stopping.join();
}

TEST(GroupClientOverGrpcTest, OnlyServerZeroCoordinates) {
  ShardOptions shard;
  shard.shard_index = 1;
  shard.num_shards = 2;
  const auto server = StartServer({}, shard);
  GrpcClientOptions options;
  options.address = server->address();
  options.shard_index = 1;
  options.num_shards = 2;
  const auto client = NewGrpcClient(options);
  ASSERT_TRUE(client.ok());
  const absl::Status status = (*client)->groups().CreateGroup("g", {});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("shard 0"));
}

}  // namespace
}  // namespace tfswitch
