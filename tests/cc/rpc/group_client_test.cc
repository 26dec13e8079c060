// GroupClient in this process, over one server, and over three.

#include "cc/client/group_client.h"

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
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/deadlines.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

// The parameter is the number of servers; 0: tables in this process.
class GroupClientTest : public testing::TestWithParam<int> {
 protected:
  // Returns the client of one worker.
  std::shared_ptr<ParameterClient> Connect() const {
    return cluster_.Connect();
  }

  const ClusterUnderTest cluster_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Servers, GroupClientTest, testing::Values(0, 1, 3));

TEST_P(GroupClientTest, ABarrierSaysForWhomItWaits) {
  const auto client = Connect();
  GroupClient& groups = client->groups();
  WorkerGroupOptions options;
  options.num_workers = 3;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  const GroupMember member =
      MemberOf("g", 0, groups.Join("g", 0, 0, 0, 0, "")->incarnation());
  const GroupMember other =
      MemberOf("g", 4, groups.Join("g", 4, 0, 0, 0, "")->incarnation());
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
          .Leave(
              MemberOf("g", 5, groups.Join("g", 5, 0, 0, 0, "")->incarnation()),
              kLong)
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

TEST(GroupClientOverGrpcTest, AStoppingServerEndsTheWait) {
  const auto server = StartServer();
  const auto client = Connect(server->address(), absl::Seconds(1));
  ASSERT_TRUE(client.ok());
  GroupClient& groups = (*client)->groups();
  WorkerGroupOptions options;
  options.num_workers = 2;
  ASSERT_TRUE(groups.CreateGroup("g", options).ok());
  const GroupMember member =
      MemberOf("g", 0, groups.Join("g", 0, 0, 0, 0, "")->incarnation());
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
