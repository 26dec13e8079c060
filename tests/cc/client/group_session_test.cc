#include "cc/client/group_session.h"

#include <unistd.h>

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/process_identity.h"
#include "cc/client/local_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

constexpr absl::Duration kLong = absl::Seconds(60);

// Writes down how the life of a session is told.
class CountingGroups final : public GroupClient {
 public:
  explicit CountingGroups(std::unique_ptr<ParameterClient> client)
      : GroupClient(client.get()), client_(std::move(client)) {}

  // Waits until `count` more leases have been renewed.
  void WaitForHeartbeats(int count) {
    MutexLock lock(&mutex_);
    const int wanted = num_heartbeats_ + count;
    while (num_heartbeats_ < wanted) changed_.Wait(&mutex_);
  }

  absl::Status Heartbeat(const GroupMember& member,
                         absl::Duration timeout) override {
    absl::Status status = GroupClient::Heartbeat(member, timeout);
    MutexLock lock(&mutex_);
    if (refuses_heartbeats_) status = absl::UnimplementedError("no such call");
    ++num_heartbeats_;
    changed_.NotifyAll();
    return status;
  }
  void RefuseHeartbeats() {
    MutexLock lock(&mutex_);
    refuses_heartbeats_ = true;
  }
  absl::Status Leave(const GroupMember& member,
                     absl::Duration timeout) override {
    {
      MutexLock lock(&mutex_);
      leave_timeouts_.push_back(timeout);
    }
    return GroupClient::Leave(member, timeout);
  }

  // How long each Leave() would have waited for the server.
  std::vector<absl::Duration> leave_timeouts() {
    MutexLock lock(&mutex_);
    return leave_timeouts_;
  }

 private:
  const std::unique_ptr<ParameterClient> client_;
  Mutex mutex_;
  CondVar changed_;
  int num_heartbeats_ ABSL_GUARDED_BY(mutex_) = 0;
  bool refuses_heartbeats_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<absl::Duration> leave_timeouts_ ABSL_GUARDED_BY(mutex_);
};

class GroupSessionTest : public testing::Test {
 protected:
  std::unique_ptr<GroupSession> Join(uint32_t worker,
                                     const WorkerGroupOptions& options) {
    auto session = GroupSession::Join(groups_, "g", options, worker);
    EXPECT_TRUE(session.ok()) << session.status();
    return std::move(session).value();
  }

  const std::shared_ptr<Shard> shard_ = std::make_shared<Shard>(ShardOptions{});
  const std::shared_ptr<CountingGroups> groups_ =
      std::make_shared<CountingGroups>(NewLocalClient(shard_));
};

TEST_F(GroupSessionTest, TheNumberOfARunningProcessIsRefused) {
  const auto joined = Join(0, {});
  v1::JoinRequest other;
  other.set_group("g");
  other.set_worker(1);
  other.set_process(ProcessIdentity(getppid()));
  ASSERT_TRUE((*shard_->FindCoordinator())->Join(other).ok());

  const auto refused = GroupSession::Join(groups_, "g", {}, 1);
  EXPECT_TRUE(absl::IsFailedPrecondition(refused.status()));
  EXPECT_THAT(
      std::string(refused.status().message()),
      AllOf(HasSubstr(absl::StrCat("process ", getppid(), " of this machine")),
            HasSubstr("`task_index=1`")));

  // A process that has ended does not hold its number.
  other.set_process("boot/pid:[1]/1/1");
  ASSERT_TRUE((*shard_->FindCoordinator())->Join(other).ok());
  Join(1, {});
  // Nor does one of this process, which may join again.
  Join(0, {});
}

TEST_F(GroupSessionTest, WorkersContributeRoundByRound) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  std::vector<std::thread> workers;
  for (uint32_t w = 0; w < 2; ++w) {
    workers.emplace_back([&, w] {
      const auto session = Join(w, options);
      for (int64_t step = 0; step < 50 + 20 * w; ++step) {
        EXPECT_EQ(session->state().clock, step);
        EXPECT_EQ(session->state().round, step);
        ASSERT_TRUE(session->EndStep(true, 2.0).ok());
        const auto round = session->WaitForRound(kLong);
        ASSERT_TRUE(round.ok()) << round.status();
        EXPECT_EQ(round->number(), step);
        EXPECT_EQ(round->total_weight(), step < 50 ? 4.0 : 2.0);
      }
      EXPECT_EQ(session->state().waits.count, 50 + 20 * w);
      EXPECT_GE(session->state().waits.total, session->state().waits.longest);
    });
  }
  for (std::thread& worker : workers) worker.join();
  EXPECT_EQ(groups_->GroupStats("g", absl::Minutes(1))->num_active(), 0);
}

TEST_F(GroupSessionTest, AStepLongerThanTheLeaseIsNotDeath) {
  WorkerGroupOptions options;
  options.lease = absl::Seconds(2);
  const auto slow = Join(0, options);
  const auto fast = Join(1, options);
  ASSERT_TRUE(fast->EndStep(true, 1.0).ok());
  // A step of the slow one: the two sessions renew six leases in the time that
  // one lasts.
  groups_->WaitForHeartbeats(8);
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(fast->WaitForRound(kLong)->contributions_size(), 2);
  EXPECT_EQ(groups_->GroupStats("g", absl::Minutes(1))->expired(), 0);
}

TEST_F(GroupSessionTest, ARefusedHeartbeatIsSaidOnce) {
  WorkerGroupOptions options;
  options.lease = absl::Milliseconds(30);
  groups_->RefuseHeartbeats();
  testing::internal::CaptureStderr();
  auto session = Join(3, options);
  groups_->WaitForHeartbeats(3);
  session.reset();

  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "tfswitch: warning: worker 3 cannot renew its lease: no such "
            "call\n");
}

TEST_F(GroupSessionTest, OneGivenUpHearsOfItAndComesBack) {
  const auto session = Join(3, {});
  const GroupMember before = session->state().member;
  ASSERT_TRUE(groups_->Leave(before, kLong).ok());

  EXPECT_EQ(session->EndStep(true, 1.0).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(session->Rejoin().ok());

  EXPECT_NE(session->state().member.incarnation(), before.incarnation());
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
  EXPECT_EQ(slow->WaitForRound(kLong)->number(), 9);
  EXPECT_EQ(slow->state().round, 10);
  EXPECT_EQ(groups_->GroupStats("g", absl::Minutes(1))->dropped(), 1);
  ASSERT_TRUE(slow->EndStep(true, 1.0).ok());
  EXPECT_EQ(slow->WaitForRound(kLong)->contributions(0).worker(), 1u);
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

TEST_F(GroupSessionTest, ASessionThatEndsDoesNotWaitLongForItsServer) {
  Join(0, {}).reset();
  EXPECT_THAT(groups_->leave_timeouts(),
              testing::ElementsAre(GroupSession::kPartingTime));
}

TEST_F(GroupSessionTest, AWaitInTwoPartsSaysHowLongItWasInAll) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  const auto session = Join(0, options);
  const absl::Status first =
      session->EndStepAndWaitForTurn(0, absl::Milliseconds(30));
  // The wait may last longer, but not shorter.
  EXPECT_THAT(std::string(first.message()),
              testing::ContainsRegex("gave up after [3-9][0-9]+|[0-9]{3,}ms"));
  EXPECT_EQ(session->state().waits.count, 1);
  EXPECT_GE(session->state().waits.longest, absl::Milliseconds(30));
  // However short.
  EXPECT_THAT(
      std::string(session->WaitForTurn(0, absl::Microseconds(1)).message()),
      testing::Not(HasSubstr("after 0")));
}

TEST_F(GroupSessionTest, OneGivenUpComesBackToAGroupThatOthersHaveLeft) {
  WorkerGroupOptions options;
  options.num_workers = 2;
  const auto ended = Join(0, options);
  const auto given_up = Join(1, options);
  ASSERT_TRUE(groups_->Leave(given_up->state().member, kLong).ok());
  ASSERT_TRUE(ended->Leave().ok());

  EXPECT_EQ(given_up->EndStep(false, 0.0).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(given_up->Rejoin().ok());

  EXPECT_TRUE(given_up->EndStepAndWaitForTurn(0, kLong).ok());
  // But a worker that has left joins as a new one, and waits for the others.
  ASSERT_TRUE(given_up->Leave().ok());
  ASSERT_TRUE(given_up->Rejoin().ok());
  EXPECT_THAT(
      std::string(
          given_up->EndStepAndWaitForTurn(0, absl::Milliseconds(1)).message()),
      HasSubstr("not joined"));
}

}  // namespace
}  // namespace tfswitch
