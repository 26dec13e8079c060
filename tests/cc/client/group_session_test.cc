#include "cc/client/group_session.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "cc/client/local_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

class GroupSessionTest : public testing::Test {
 protected:
  std::unique_ptr<GroupSession> Join(uint32_t worker,
                                     const WorkerGroupOptions& options) {
    auto session = GroupSession::Join(client_, "g", options, worker);
    EXPECT_TRUE(session.ok()) << session.status();
    return std::move(session).value();
  }

  const std::shared_ptr<ParameterClient> client_ =
      NewLocalClient(std::make_shared<Shard>(ShardOptions{}));
};

TEST_F(GroupSessionTest, WorkersContributeRoundByRound) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  std::vector<std::thread> workers;
  for (uint32_t w = 0; w < 2; ++w) {
    workers.emplace_back([&, w] {
      const auto session = Join(w, options);
      for (int64_t step = 0; step < 50 + 20 * w; ++step) {
        EXPECT_EQ(session->clock(), step);
        EXPECT_EQ(session->round(), step);
        ASSERT_TRUE(session->EndStep(true, 2.0).ok());
        const auto round = session->WaitForRound(kLong);
        ASSERT_TRUE(round.ok()) << round.status();
        EXPECT_EQ(round->number, step);
        EXPECT_EQ(round->total_weight, step < 50 ? 4.0 : 2.0);
      }
      EXPECT_EQ(session->waits().count, 50 + 20 * w);
      EXPECT_GE(session->waits().total, session->waits().longest);
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(client_->groups().GroupStats("g")->num_active, 0);
}

TEST_F(GroupSessionTest, AStepLongerThanTheLeaseIsNotDeath) {
  WorkerGroupOptions options;
  options.lease = absl::Seconds(2);
  const auto slow = Join(0, options);
  const auto fast = Join(1, options);
  ASSERT_TRUE(fast->EndStep(true, 1.0).ok());
  absl::SleepFor(absl::Seconds(3));  // A step of the slow one.
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(fast->WaitForRound(kLong)->contributions.size(), 2u);
  EXPECT_EQ(client_->groups().GroupStats("g")->expired, 0);
}

TEST_F(GroupSessionTest, OneGivenUpHearsOfItAndComesBack) {
  const auto session = Join(3, {});
  const GroupMember before = session->member();
  ASSERT_TRUE(client_->groups().Leave(before).ok());

  EXPECT_EQ(session->EndStep(true, 1.0).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(session->Rejoin().ok());

  EXPECT_NE(session->member().incarnation, before.incarnation);
  EXPECT_TRUE(session->EndStep(true, 1.0).ok());
  EXPECT_TRUE(session->WaitForRound(kLong).ok());
}

TEST_F(GroupSessionTest, OneThatFellBehindGoesOnWithTheOpenRound) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  options.contributions_per_round = 1;
  const auto fast = Join(0, options);
  const auto slow = Join(1, options);
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(fast->EndStep(true, 1.0).ok());
    ASSERT_TRUE(fast->WaitForRound(kLong).ok());
  }
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(slow->WaitForRound(kLong)->number, 9);
  EXPECT_EQ(slow->round(), 10);
  EXPECT_EQ(client_->groups().GroupStats("g")->dropped, 1);
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(slow->WaitForRound(kLong)->contributions[0].worker, 1u);
}

TEST_F(GroupSessionTest, NobodyWaitsForOneThatHasLeft) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  const auto leaver = Join(0, options);
  const auto other = Join(1, options);
  ASSERT_TRUE(other->EndStep(false, 0.0).ok());
  EXPECT_EQ(other->WaitForTurn(0, absl::Milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(leaver->Leave().ok());
  EXPECT_TRUE(leaver->Leave().ok());
  EXPECT_TRUE(other->WaitForTurn(0, kLong).ok());
}

TEST_F(GroupSessionTest, OptionsMustBeThoseOfTheOthers) {
  const auto session = Join(0, {});
  WorkerGroupOptions other;
  other.num_workers = 7;
  EXPECT_EQ(GroupSession::Join(client_, "g", other, 1).status().code(),
            absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace tfswitch
