#include "cc/sync/coordinator.h"

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "cc/base/log_writer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/deadlines.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

WorkerGroupOptions GroupOf(uint32_t num_workers) {
  WorkerGroupOptions options;
  options.num_workers = num_workers;
  return options;
}

// Trains `num_steps` steps in rounds; returns the rounds it waited for.
std::vector<Round> TrainInRounds(Coordinator* coordinator, uint32_t worker,
                                 int num_steps) {
  const WorkerGroup::Place member = *coordinator->Join(JoinOf("g", worker));
  std::vector<Round> rounds;
  int64_t round = member.round();
  for (int i = 0; i < num_steps; ++i) {
    EXPECT_TRUE(
        coordinator
            ->Arrive(ArrivalOf(MemberOf("g", worker, member.incarnation()),
                               member.clock() + i, round, worker + 1.0))
            .ok());
    absl::StatusOr<Round> closed = coordinator->WaitForRound(
        MemberOf("g", worker, member.incarnation()), round, Soon());
    EXPECT_TRUE(closed.ok()) << closed.status();
    if (!closed.ok()) break;
    rounds.push_back(*std::move(closed));
    ++round;
  }
  EXPECT_TRUE(
      coordinator->Leave(MemberOf("g", worker, member.incarnation())).ok());
  return rounds;
}

TEST(CoordinatorTest, GroupsAndWorkersTooManyAreRefusedAndNamed) {
  CoordinatorLimits limits;
  limits.max_groups = 1;
  limits.max_workers = 2;
  Coordinator coordinator(limits);
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  ASSERT_TRUE(coordinator.Join(JoinOf("g", 7)).ok());
  const WorkerGroup::Place place = coordinator.Join(JoinOf("g", 8)).value();
  ASSERT_TRUE(coordinator.Leave(MemberOf("g", 8, place.incarnation())).ok());

  const absl::Status group = coordinator.CreateGroup("h", GroupOf(1));
  // Workers that have gone are remembered, too.
  const absl::Status worker = coordinator.Join(JoinOf("g", 9)).status();
  WorkerGroupOptions many = GroupOf(1);
  many.contributions_per_round = 3;
  const absl::Status contributions = coordinator.CreateGroup("g", many);

  EXPECT_EQ(group.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(group.message()),
              AllOf(HasSubstr("'h'"), HasSubstr("--max_groups")));
  EXPECT_EQ(worker.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(worker.message()),
              AllOf(HasSubstr("worker 9"), HasSubstr("'g'"),
                    HasSubstr("--max_workers")));
  EXPECT_EQ(contributions.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(contributions.message()),
              AllOf(HasSubstr("got 3"), HasSubstr("--max_workers")));
  EXPECT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  EXPECT_TRUE(coordinator.Join(JoinOf("g", 8)).ok());
}

TEST(CoordinatorTest, ACutHasTheRoundsThatOneOfTheShardsHasNotApplied) {
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(1)).ok());
  ASSERT_TRUE(coordinator.CreateGroup("idle", GroupOf(1)).ok());
  const uint64_t instance =
      TrainInRounds(&coordinator, 0, 4).at(0).group_instance();
  using Committed = std::tuple<std::string, uint64_t, int64_t>;
  const auto numbers = [&](const std::vector<Committed>& committed) {
    v1::ChooseSnapshotRoundRequest request;
    for (const auto& [group, of_instance, number] : committed) {
      v1::CommittedRound& each = *request.add_committed();
      each.set_group(group);
      each.set_group_instance(of_instance);
      each.set_number(number);
    }
    std::vector<int64_t> numbers;
    const v1::Cut cut =
        coordinator.ChooseSnapshotRound(request, 2, /*work_queues=*/nullptr);
    for (const v1::CommitRoundRequest& each : cut.rounds()) {
      EXPECT_EQ(each.group(), "g");
      EXPECT_EQ(each.round().group_instance(), instance);
      numbers.push_back(each.round().number());
    }
    return numbers;
  };
  constexpr int64_t kNone = WorkerGroup::kNoRound;

  EXPECT_THAT(numbers({{"g", instance, 3}, {"g", instance, 1}}),
              ElementsAre(2, 3));
  EXPECT_THAT(numbers({{"g", instance, 3}, {"g", instance, 3}}),
              ElementsAre(3));
  EXPECT_THAT(numbers({{"g", instance, kNone}, {"g", instance, 3}}),
              ElementsAre(0, 1, 2, 3));
  // A shard that does not know the group hears of it first.
  EXPECT_THAT(numbers({{"g", instance, 3}, {"g", instance - 1, 3}}),
              ElementsAre(kNone, 0, 1, 2, 3));
  EXPECT_THAT(numbers({{"g", instance, 3}, {"idle", instance, 3}}),
              ElementsAre(kNone, 0, 1, 2, 3));
}

TEST(CoordinatorTest, NamesOfAnyLengthAreNotKept) {
  Coordinator coordinator;
  const std::string name(2000, 'x');
  WorkerGroupOptions options;
  ASSERT_TRUE(coordinator.CreateGroup("g", options).ok());
  const uint64_t incarnation = coordinator.Join(JoinOf("g", 0))->incarnation();
  const WorkQueueOptions queue = ItemsOf({"item"});
  options.settings = name;

  for (const absl::Status& status :
       {coordinator.CreateGroup(name, WorkerGroupOptions()),
        coordinator.CreateGroup("h", options),
        coordinator.CreateWorkQueue(QueueOf("g", name, queue)),
        coordinator
            .WaitAtBarrier(VisitOf(MemberOf("g", 0, incarnation), name, 0),
                           Soon())
            .status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("xxx..."), HasSubstr("2000")));
  }
}

TEST(CoordinatorTest, UnevenWorkersSeeTheSameRoundsAndAllEnd) {
  constexpr int kWorkers = 4;
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(kWorkers)).ok());
  std::vector<std::vector<Round>> rounds(kWorkers);
  std::vector<std::thread> threads;
  for (int w = 0; w < kWorkers; ++w) {
    threads.emplace_back(
        [&, w] { rounds[w] = TrainInRounds(&coordinator, w, 100 + 50 * w); });
  }
  for (std::thread& thread : threads) thread.join();

  for (int w = 0; w < kWorkers; ++w) {
    ASSERT_EQ(rounds[w].size(), 100u + 50 * w);
    for (size_t r = 0; r < rounds[w].size(); ++r) {
      EXPECT_EQ(rounds[w][r].number(), static_cast<int64_t>(r));
      EXPECT_EQ(rounds[w][r].SerializeAsString(),
                rounds[kWorkers - 1][r].SerializeAsString());
    }
  }
  const v1::GetGroupStatsResponse stats = *coordinator.GroupStats("g");
  EXPECT_EQ(stats.rounds(), 250);
  EXPECT_EQ(stats.contributions(), 100 + 150 + 200 + 250);
  EXPECT_EQ(stats.num_active(), 0);
}

TEST(CoordinatorTest, AGroupBeginsAnewAboveANewerInstanceThatAWorkerHasMet) {
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  const WorkerGroup::Place first = *coordinator.Join(JoinOf("g", 0));
  const uint64_t newer = first.group_instance() + (uint64_t{1} << 60);
  ASSERT_TRUE(coordinator
                  .Arrive(ArrivalOf(MemberOf("g", 0, first.incarnation()), 0,
                                    first.round(), 1.0))
                  .ok());
  absl::Status waited;
  std::thread waits([&] {
    waited = coordinator
                 .WaitForRound(MemberOf("g", 0, first.incarnation()), 0, Soon())
                 .status();
  });

  const WorkerGroup::Place other = *coordinator.Join(JoinOf("g", 1, 0, newer));
  waits.join();

  EXPECT_EQ(waited.code(), absl::StatusCode::kNotFound) << waited;
  EXPECT_GT(other.group_instance(), newer);
  EXPECT_GE(other.incarnation(), other.group_instance());
  // Another worker that has met it as well joins the group that has started
  // again.
  const WorkerGroup::Place again =
      *coordinator.Join(JoinOf("g", 0, first.incarnation(), newer));
  EXPECT_EQ(again.group_instance(), other.group_instance());
  EXPECT_TRUE(
      coordinator.Heartbeat(MemberOf("g", 1, other.incarnation())).ok());
  EXPECT_EQ(again.round(), 0);
  EXPECT_EQ(coordinator.Join(JoinOf("g", 2, 0, ~uint64_t{0})).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(CoordinatorTest, BoundedStalenessHoldsWithThreads) {
  constexpr int kWorkers = 4;
  constexpr int kSteps = 2000;
  constexpr int64_t kStaleness = 2;
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(kWorkers)).ok());
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      const WorkerGroup::Place member = *coordinator.Join(JoinOf("g", w));
      for (int64_t clock = 0; clock < kSteps; ++clock) {
        const absl::Status turn = coordinator.WaitForTurn(
            MemberOf("g", w, member.incarnation()), clock, kStaleness, Soon());
        ASSERT_TRUE(turn.ok()) << turn;
        ASSERT_TRUE(
            coordinator
                .Arrive(ArrivalOf(MemberOf("g", w, member.incarnation()), clock,
                                  WorkerGroup::kNoRound, 0.0))
                .ok());
      }
      EXPECT_TRUE(
          coordinator.Leave(MemberOf("g", w, member.incarnation())).ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
  const auto stats = coordinator.GroupStats("g").value();
  const std::vector<int64_t> counts(stats.staleness().begin(),
                                    stats.staleness().end());
  int64_t total = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    if (static_cast<int64_t>(s) > kStaleness) {
      EXPECT_EQ(counts[s], 0) << s;
    }
    total += counts[s];
  }
  EXPECT_EQ(total, int64_t{kWorkers} * kSteps);
}

TEST(CoordinatorTest, AWaitThatTakesTooLongSaysForWhom) {
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  const WorkerGroup::Place a = *coordinator.Join(JoinOf("g", 0));
  ASSERT_TRUE(coordinator.Join(JoinOf("g", 4)).ok());
  ASSERT_TRUE(
      coordinator
          .Arrive(ArrivalOf(MemberOf("g", 0, a.incarnation()), 0, 0, 1.0))
          .ok());

  const absl::Status round =
      coordinator.WaitForRound(MemberOf("g", 0, a.incarnation()), 0, AtOnce())
          .status();
  EXPECT_EQ(round.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(round.message(), HasSubstr("group 'g': round 0 waits for"));
  EXPECT_THAT(round.message(),
              HasSubstr("worker 4 (at step 0, last heard 0 s ago)"));

  const absl::Status turn = coordinator.WaitForTurn(
      MemberOf("g", 0, a.incarnation()), 1, 0, AtOnce());
  EXPECT_EQ(turn.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(turn.message(),
              HasSubstr("worker 4 (at step 0, last heard 0 s ago)"));
}

TEST(CoordinatorTest, ADeadWorkerHoldsTheOthersUpForItsLeaseAndTheLogSaysSo) {
  ShowServerEvents();
  testing::internal::CaptureStderr();
  WorkerGroupOptions options = GroupOf(2);
  options.lease = absl::Milliseconds(2200);
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", options).ok());
  const WorkerGroup::Place a = *coordinator.Join(JoinOf("g", 0));
  ASSERT_TRUE(
      coordinator.Join(JoinOf("g", 1)).ok());  // And is never heard of again.
  ASSERT_TRUE(
      coordinator
          .Arrive(ArrivalOf(MemberOf("g", 0, a.incarnation()), 0, 0, 1.0))
          .ok());
  // The one that waits is alive, however long it takes.
  const absl::StatusOr<Round> round =
      coordinator.WaitForRound(MemberOf("g", 0, a.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->contributions_size(), 1);
  EXPECT_EQ(coordinator.GroupStats("g")->expired(), 1);
  ASSERT_TRUE(coordinator.Leave(MemberOf("g", 0, a.incarnation())).ok());
  EXPECT_TRUE(LogWriter::Get().Flush(absl::Minutes(1)));
  EXPECT_THAT(
      testing::internal::GetCapturedStderr(),
      testing::MatchesRegex(
          ".* info worker_joined group=g worker=0 step=0 active=1\n"
          ".* info worker_joined group=g worker=1 step=0 active=2\n"
          ".* info waiting group=g worker=0 what=\"round 0 waits for worker 1 "
          "of 2 .at step 0, last heard 2 s ago.\"\n"
          ".* warning worker_lost group=g worker=1 reason=\"not heard of\" "
          "seconds=2.2 steps=0 active=1\n"
          ".* info worker_left group=g worker=0 active=0\n"));
}

TEST(CoordinatorTest, ShutdownEndsAllWaits) {
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  const WorkerGroup::Place a = *coordinator.Join(JoinOf("g", 0));
  std::thread waiting([&] {
    EXPECT_EQ(
        coordinator.WaitForRound(MemberOf("g", 0, a.incarnation()), 0, Soon())
            .status()
            .code(),
        absl::StatusCode::kCancelled);
  });
  coordinator.Shutdown();
  waiting.join();
}

TEST(CoordinatorTest, GroupsAreCreatedOnceAndUnknownOnesAreNamed) {
  Coordinator coordinator;
  EXPECT_EQ(coordinator.Join(JoinOf("g", 0)).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  EXPECT_TRUE(coordinator.CreateGroup("g", GroupOf(2)).ok());
  const auto member = coordinator.Join(JoinOf("g", 0));
  ASSERT_TRUE(member.ok());
  const absl::Status other = coordinator.CreateGroup("g", GroupOf(3));
  EXPECT_EQ(other.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(other.message(), HasSubstr("num_workers=2"));
  EXPECT_THAT(other.message(), HasSubstr("num_workers=3"));
  EXPECT_EQ(coordinator.CreateGroup("", GroupOf(1)).code(),
            absl::StatusCode::kInvalidArgument);
  WorkerGroupOptions senseless = GroupOf(1);
  senseless.lease = absl::ZeroDuration();
  EXPECT_EQ(coordinator.CreateGroup("h", senseless).code(),
            absl::StatusCode::kInvalidArgument);

  // Nobody trains in it any more: it is free for another job.
  ASSERT_TRUE(coordinator.Leave(MemberOf("g", 0, member->incarnation())).ok());
  EXPECT_TRUE(coordinator.CreateGroup("g", GroupOf(3)).ok());
  const auto anew = coordinator.Join(JoinOf("g", 0));
  ASSERT_TRUE(anew.ok());
  EXPECT_GT(anew->incarnation(), member->incarnation());
}

}  // namespace
}  // namespace tfswitch
