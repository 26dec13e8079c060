#include "cc/client/group_session.h"

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/client/local_group_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

constexpr absl::Duration kLong = absl::Seconds(60);

// Passes calls on, and counts the renewals of leases.
class CountingGroups final : public GroupClient {
 public:
  explicit CountingGroups(std::unique_ptr<GroupClient> groups)
      : groups_(std::move(groups)) {}

  // Waits until `count` more leases have been renewed.
  void WaitForBeats(int count) {
    MutexLock lock(&mutex_);
    const int wanted = num_beats_ + count;
    while (num_beats_ < wanted) changed_.Wait(&mutex_);
  }

  absl::Status CreateGroup(const std::string& group,
                           const WorkerGroupOptions& options) override {
    return groups_->CreateGroup(group, options);
  }
  absl::StatusOr<WorkerGroup::Place> Join(const std::string& group,
                                          uint32_t worker) override {
    return groups_->Join(group, worker);
  }
  absl::Status Beat(const GroupMember& member) override {
    absl::Status status = groups_->Beat(member);
    MutexLock lock(&mutex_);
    ++num_beats_;
    changed_.NotifyAll();
    return status;
  }
  absl::StatusOr<int64_t> Arrive(const GroupMember& member, int64_t clock,
                                 int64_t round, double weight) override {
    return groups_->Arrive(member, clock, round, weight);
  }
  absl::StatusOr<Arrival> ArriveAndWait(const GroupMember& member,
                                        int64_t clock, int64_t round,
                                        double weight, int64_t staleness,
                                        absl::Time deadline) override {
    return groups_->ArriveAndWait(member, clock, round, weight, staleness,
                                  deadline);
  }
  absl::Status Leave(const GroupMember& member) override {
    return groups_->Leave(member);
  }
  absl::StatusOr<Round> WaitForRound(const GroupMember& member, int64_t number,
                                     absl::Time deadline) override {
    return groups_->WaitForRound(member, number, deadline);
  }
  absl::Status WaitForTurn(const GroupMember& member, int64_t clock,
                           int64_t staleness, absl::Time deadline) override {
    return groups_->WaitForTurn(member, clock, staleness, deadline);
  }
  absl::StatusOr<WorkerGroup::Stats> GroupStats(
      const std::string& group) override {
    return groups_->GroupStats(group);
  }

 private:
  const std::unique_ptr<GroupClient> groups_;
  Mutex mutex_;
  CondVar changed_;
  int num_beats_ ABSL_GUARDED_BY(mutex_) = 0;
};

class GroupSessionTest : public testing::Test {
 protected:
  std::unique_ptr<GroupSession> Join(uint32_t worker,
                                     const WorkerGroupOptions& options) {
    auto session = GroupSession::Join(groups_, "g", options, worker);
    EXPECT_TRUE(session.ok()) << session.status();
    return std::move(session).value();
  }

  const std::shared_ptr<CountingGroups> groups_ =
      std::make_shared<CountingGroups>(
          NewLocalGroupClient(std::make_shared<Shard>(ShardOptions{})));
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
  EXPECT_EQ(groups_->GroupStats("g")->num_active, 0);
}

TEST_F(GroupSessionTest, AStepLongerThanTheLeaseIsNotDeath) {
  WorkerGroupOptions options;
  options.lease = absl::Seconds(2);
  const auto slow = Join(0, options);
  const auto fast = Join(1, options);
  ASSERT_TRUE(fast->EndStep(true, 1.0).ok());
  // A step of the slow one: the two sessions renew six leases in the time that
  // one lasts.
  groups_->WaitForBeats(8);
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(fast->WaitForRound(kLong)->contributions.size(), 2u);
  EXPECT_EQ(groups_->GroupStats("g")->expired, 0);
}

TEST_F(GroupSessionTest, OneGivenUpHearsOfItAndComesBack) {
  const auto session = Join(3, {});
  const GroupMember before = session->member();
  ASSERT_TRUE(groups_->Leave(before).ok());

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
  EXPECT_EQ(groups_->GroupStats("g")->dropped, 1);
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
  EXPECT_EQ(GroupSession::Join(groups_, "g", other, 1).status().code(),
            absl::StatusCode::kAlreadyExists);
}

}  // namespace
}  // namespace tfswitch
