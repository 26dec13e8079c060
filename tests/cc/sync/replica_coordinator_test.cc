#include "cc/sync/replica_coordinator.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/deadlines.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using testing::Property;

WorkerGroupOptions ReplicasOf(uint32_t num_workers,
                              absl::Duration lease = absl::Seconds(30)) {
  WorkerGroupOptions options;
  options.num_workers = num_workers;
  options.lease = lease;
  return options;
}

// The place of a worker that joins.
absl::StatusOr<ReplicaPlace> Join(ReplicaCoordinator* replicas,
                                  const WorkerGroupOptions& options,
                                  uint32_t worker, uint64_t previous = 0,
                                  absl::Time deadline = Soon(),
                                  uint64_t applier = 0) {
  ReplicaPlace place;
  const absl::Status joined =
      replicas->Join(options, worker, previous, applier, deadline, &place);
  if (!joined.ok()) return joined;
  return place;
}

// Until worker 1, of two, is; worker 0 beats for itself and the applier.
void WaitUntilOneIsGivenUp(ReplicaCoordinator* replicas,
                           const ReplicaPlace& zero, uint64_t applier) {
  while (replicas->stats().num_active() == 2) {
    ASSERT_TRUE(replicas->Heartbeat(0, zero.incarnation(), applier).ok());
    absl::SleepFor(absl::Milliseconds(5));
  }
}

// Applies rounds until all have left; returns them.
std::vector<Round> Apply(ReplicaCoordinator* replicas, uint64_t applier) {
  std::vector<Round> rounds;
  for (;;) {
    absl::StatusOr<Round> round = replicas->NextRound(applier, Soon());
    if (!round.ok()) {
      EXPECT_EQ(round.status().code(), absl::StatusCode::kCancelled)
          << round.status();
      return rounds;
    }
    EXPECT_TRUE(replicas->ConfirmRound(applier, round->number()).ok());
    rounds.push_back(*std::move(round));
  }
}

// A worker's whole session.
void Train(ReplicaCoordinator* replicas, const WorkerGroupOptions& options,
           uint32_t worker, int num_steps) {
  absl::StatusOr<ReplicaPlace> place = Join(replicas, options, worker);
  ASSERT_TRUE(place.ok()) << place.status();
  for (int i = 0; i < num_steps; ++i) {
    bool has_arrived = false;
    const absl::Status ended =
        replicas->EndStep(worker, worker + 1.0, Soon(), &*place, &has_arrived);
    ASSERT_TRUE(ended.ok()) << ended;
  }
  const auto after = replicas->WaitAtBarrier(worker, place->incarnation(),
                                             "end of epoch", 0, Soon());
  ASSERT_TRUE(after.ok()) << after.status();
  const absl::Status left =
      replicas->LeaveTogether(worker, place->incarnation(), 0, 1, Soon());
  EXPECT_TRUE(left.ok()) << left;
}

TEST(ReplicaCoordinatorTest, UnevenWorkersAreAppliedRoundByRoundAndAllEnd) {
  constexpr int kWorkers = 4;
  const WorkerGroupOptions options = ReplicasOf(kWorkers);
  ReplicaCoordinator replicas("g");
  // Two sessions on one coordinator.
  for (int session = 0; session < 2; ++session) {
    const uint64_t applier = *replicas.BeginApplying(options);
    std::vector<Round> rounds;
    std::thread applies([&] { rounds = Apply(&replicas, applier); });
    std::vector<std::thread> workers;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      workers.emplace_back(
          [&, w] { Train(&replicas, options, w, static_cast<int>(50 * w)); });
    }
    for (std::thread& worker : workers) worker.join();
    applies.join();
    ASSERT_EQ(rounds.size(), 150);
    for (size_t i = 0; i < rounds.size(); ++i) {
      EXPECT_EQ(rounds[i].number(), static_cast<int64_t>(i));
      std::vector<uint32_t> wanted;
      for (uint32_t w = 0; w < kWorkers; ++w) {
        if (i < 50 * w) wanted.push_back(w);
      }
      std::vector<uint32_t> found;
      for (const Contribution& c : rounds[i].contributions()) {
        found.push_back(c.worker());
      }
      EXPECT_EQ(found, wanted);
    }
  }
}

TEST(ReplicaCoordinatorTest, AStepIsOverWhenItsRoundHasBeenApplied) {
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(1));
  ReplicaPlace place = *Join(&replicas, ReplicasOf(1), 0);
  bool has_arrived = false;
  const absl::Status early =
      replicas.EndStep(0, 1.0, AtOnce(), &place, &has_arrived);
  EXPECT_EQ(early.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(early.message(), HasSubstr("the worker that takes the steps"));
  EXPECT_TRUE(has_arrived);
  const Round round = *replicas.NextRound(applier, Soon());
  EXPECT_TRUE(replicas.ConfirmRound(applier, round.number()).ok());
  EXPECT_TRUE(
      replicas.ConfirmRound(applier, round.number()).ok());  // Repeated.
  EXPECT_TRUE(replicas.EndStep(0, 1.0, Soon(), &place, &has_arrived).ok());
  EXPECT_EQ(place.clock(), 1);
  EXPECT_EQ(place.round(), 1);
  EXPECT_EQ(replicas.stats().contributions(), 1);
}

TEST(ReplicaCoordinatorTest, AWaitNamesWhomItWaitsFor) {
  ReplicaCoordinator replicas("g");
  const auto early = Join(&replicas, ReplicasOf(2), 1, 0, AtOnce());
  EXPECT_EQ(early.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(early.status().message(), HasSubstr("the chief"));
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(2));
  ReplicaPlace zero = *Join(&replicas, ReplicasOf(2), 0);
  const ReplicaPlace one = *Join(&replicas, ReplicasOf(2), 1);
  bool has_arrived = false;
  EXPECT_THAT(replicas.EndStep(0, 1.0, AtOnce(), &zero, &has_arrived).message(),
              HasSubstr("round 0 waits for worker 1 of 2 (at step 0)"));
  EXPECT_THAT(replicas.WaitAtBarrier(1, one.incarnation(), "b", 0, AtOnce())
                  .status()
                  .message(),
              HasSubstr("the worker that takes the steps"));
  EXPECT_TRUE(replicas.NextRound(applier, Soon()).ok());
  EXPECT_TRUE(replicas.ConfirmRound(applier, 0).ok());
  EXPECT_THAT(replicas.WaitAtBarrier(1, one.incarnation(), "b", 0, AtOnce())
                  .status()
                  .message(),
              HasSubstr("barrier 'b' waits for worker 0"));
  EXPECT_THAT(
      replicas.LeaveTogether(0, zero.incarnation(), 0, 0, AtOnce()).message(),
      HasSubstr("not at the same"));
}

TEST(ReplicaCoordinatorTest, AnApplierThatIsNotHeardOfEndsAll) {
  const WorkerGroupOptions options = ReplicasOf(2, absl::Milliseconds(50));
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  ReplicaPlace place = *Join(&replicas, options, 1);
  bool has_arrived = false;
  const absl::Status ended =
      replicas.EndStep(1, 1.0, Soon(), &place, &has_arrived);
  EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(ended.message(), HasSubstr("was not heard of for 50ms"));
  EXPECT_THAT(ended.message(), HasSubstr("start all workers again"));
  EXPECT_EQ(replicas.Heartbeat(1, place.incarnation(), 0).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(replicas.NextRound(applier, Soon()).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(ReplicaCoordinatorTest, AnApplierThatLeavesOrFailsEndsAll) {
  for (const bool fails : {false, true}) {
    ReplicaCoordinator replicas("g");
    const uint64_t applier = *replicas.BeginApplying(ReplicasOf(2));
    const ReplicaPlace chief = *Join(&replicas, ReplicasOf(2), 0);
    const ReplicaPlace place = *Join(&replicas, ReplicasOf(2), 1);
    if (fails) {
      replicas.FailApplying(applier, "NaN in 'v'");
    } else {
      replicas.Leave(0, chief.incarnation(), applier);
    }
    const absl::Status ended =
        replicas.WaitAtBarrier(1, place.incarnation(), "b", 0, Soon()).status();
    EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(ended.message(),
                HasSubstr(fails ? "NaN in 'v'" : "has left before the others"));
    // The next group works.
    EXPECT_TRUE(replicas.BeginApplying(ReplicasOf(2)).ok());
    EXPECT_TRUE(Join(&replicas, ReplicasOf(2), 1).ok());
  }
}

TEST(ReplicaCoordinatorTest, AnApplierThatFailsFirstEndsTheJoinOfItsWorker) {
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(1));
  replicas.FailApplying(applier, "'v' is not initialized");
  EXPECT_THAT(Join(&replicas, ReplicasOf(1), 0, 0, Soon(), applier).status(),
              AllOf(Property(&absl::Status::code,
                             absl::StatusCode::kFailedPrecondition),
                    Property(&absl::Status::message,
                             HasSubstr("'v' is not initialized"))));
}

TEST(ReplicaCoordinatorTest, AnotherApplierEndsTheWorkersOfTheOneBefore) {
  ReplicaCoordinator replicas("g");
  const uint64_t first = *replicas.BeginApplying(ReplicasOf(1));
  const ReplicaPlace place = *Join(&replicas, ReplicasOf(1), 0);
  EXPECT_TRUE(replicas.BeginApplying(ReplicasOf(1)).ok());
  EXPECT_THAT(replicas.Heartbeat(0, place.incarnation(), first).message(),
              HasSubstr("was started again"));
  EXPECT_THAT(replicas.ConfirmRound(first, 0).message(),
              HasSubstr("was started again, or two processes are chief"));
}

TEST(ReplicaCoordinatorTest, AnApplierWhoseNumberAnotherTakesSaysSoToAll) {
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(2));
  const ReplicaPlace chief = *Join(&replicas, ReplicasOf(2), 0);
  ReplicaPlace other;
  ASSERT_TRUE(
      replicas.Join(ReplicasOf(2), 0, 0, 0, Soon(), &other, "a process").ok());
  EXPECT_EQ(replicas.stats().processes().at(0), "a process");
  replicas.Leave(0, chief.incarnation(), applier);
  EXPECT_THAT(replicas.Heartbeat(0, other.incarnation(), 0).message(),
              AllOf(HasSubstr("two processes have this number"),
                    HasSubstr("`task_index=0`")));
}

TEST(ReplicaCoordinatorTest, AWorkerThatWasGivenUpComesBackWithItsNextStep) {
  const absl::Duration lease = absl::Seconds(2);
  const WorkerGroupOptions options = ReplicasOf(2, lease);
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  std::vector<Round> rounds;
  std::thread applies([&] { rounds = Apply(&replicas, applier); });
  ReplicaPlace zero = *Join(&replicas, options, 0);
  ReplicaPlace one = *Join(&replicas, options, 1);
  const uint64_t before = one.incarnation();
  // Worker 1 is not heard of: worker 0 beats for both it and the applier.
  WaitUntilOneIsGivenUp(&replicas, zero, applier);
  bool has_arrived = false;
  ASSERT_TRUE(replicas.EndStep(0, 1.0, Soon(), &zero, &has_arrived).ok());
  has_arrived = false;
  // Its step does not count; the next does.
  ASSERT_TRUE(replicas.EndStep(1, 1.0, Soon(), &one, &has_arrived).ok());
  EXPECT_NE(one.incarnation(), before);
  EXPECT_EQ(one.round(), 1);
  std::thread other([&] {
    bool arrived = false;
    EXPECT_TRUE(replicas.EndStep(1, 1.0, Soon(), &one, &arrived).ok());
    EXPECT_TRUE(
        replicas.LeaveTogether(1, one.incarnation(), 0, 0, Soon()).ok());
  });
  has_arrived = false;
  EXPECT_TRUE(replicas.EndStep(0, 1.0, Soon(), &zero, &has_arrived).ok());
  EXPECT_TRUE(replicas.LeaveTogether(0, zero.incarnation(), 0, 0, Soon()).ok());
  other.join();
  applies.join();
  ASSERT_EQ(rounds.size(), 2);
  EXPECT_EQ(rounds[0].contributions_size(), 1);
  EXPECT_EQ(rounds[1].contributions_size(), 2);
  EXPECT_EQ(replicas.stats().rejoined(), 1);
}

TEST(ReplicaCoordinatorTest,
     WhatADeadWorkerHasContributedIsAppliedBeforeTheEnd) {
  const absl::Duration lease = absl::Seconds(2);
  const WorkerGroupOptions options = ReplicasOf(2, lease);
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  const ReplicaPlace zero = *Join(&replicas, options, 0);
  ReplicaPlace one = *Join(&replicas, options, 1);
  bool has_arrived = false;
  EXPECT_FALSE(replicas.EndStep(1, 1.0, AtOnce(), &one, &has_arrived).ok());
  // Worker 1 dies in its wait, and worker 0 has no data.
  absl::Status left;
  std::thread other([&] {
    left = replicas.LeaveTogether(0, zero.incarnation(), 0, 0, Soon());
  });
  std::vector<Round> rounds;
  std::thread applies([&] { rounds = Apply(&replicas, applier); });
  while (replicas.Heartbeat(0, zero.incarnation(), applier).ok()) {
    absl::SleepFor(absl::Milliseconds(5));
  }
  other.join();
  applies.join();
  EXPECT_TRUE(left.ok()) << left;
  ASSERT_EQ(rounds.size(), 1);
  EXPECT_EQ(rounds[0].contributions(0).worker(), 1);
}

TEST(ReplicaCoordinatorTest, OtherOptionsAndSenselessEventsAreRefused) {
  ReplicaCoordinator replicas("g");
  EXPECT_EQ(replicas.BeginApplying(ReplicasOf(1, absl::ZeroDuration()))
                .status()
                .code(),
            absl::StatusCode::kInvalidArgument);
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(2));
  EXPECT_EQ(Join(&replicas, ReplicasOf(3), 0).status().code(),
            absl::StatusCode::kAlreadyExists);
  ReplicaPlace place = *Join(&replicas, ReplicasOf(2), 0);
  bool has_arrived = false;
  EXPECT_EQ(replicas.EndStep(0, -1.0, Soon(), &place, &has_arrived).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(has_arrived);
  EXPECT_EQ(replicas.ConfirmRound(applier, 0).code(),
            absl::StatusCode::kOutOfRange);
  // Another process with the same index takes the place.
  const ReplicaPlace same = *Join(&replicas, ReplicasOf(2), 0);
  EXPECT_NE(same.incarnation(), place.incarnation());
  EXPECT_THAT(replicas.EndStep(0, 1.0, Soon(), &place, &has_arrived).message(),
              HasSubstr("`task_index=0` of a SyncReplicasOptimizer"));
}

TEST(ReplicaCoordinatorTest, WhoIsStartedAgainDoesNotJoinADeadApplier) {
  ReplicaCoordinator replicas("g");
  ASSERT_TRUE(replicas.BeginApplying(ReplicasOf(2)).ok());
  const ReplicaPlace before = *Join(&replicas, ReplicasOf(2), 1);
  // All are killed, and come again before the leases have ended.
  absl::SleepFor(absl::Seconds(2.1));
  EXPECT_THAT(Join(&replicas, ReplicasOf(2), 1, 0, AtOnce()).status().message(),
              HasSubstr("the worker that takes the steps is not heard of"));
  absl::StatusOr<ReplicaPlace> place;
  std::thread other([&] { place = Join(&replicas, ReplicasOf(2), 1); });
  EXPECT_TRUE(replicas.BeginApplying(ReplicasOf(2)).ok());
  other.join();
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_GT(place->incarnation(), before.incarnation());
  EXPECT_TRUE(replicas.Heartbeat(1, place->incarnation(), 0).ok());
}

TEST(ReplicaCoordinatorTest, WhoMissesTheEndOfASessionIsNotInTheNext) {
  const WorkerGroupOptions options = ReplicasOf(2, absl::Seconds(2));
  ReplicaCoordinator replicas("g");
  uint64_t applier = *replicas.BeginApplying(options);
  const ReplicaPlace zero = *Join(&replicas, options, 0);
  ReplicaPlace one = *Join(&replicas, options, 1);
  WaitUntilOneIsGivenUp(&replicas, zero, applier);
  ASSERT_TRUE(
      replicas.LeaveTogether(0, zero.incarnation(), applier, 0, Soon()).ok());
  EXPECT_THAT(Join(&replicas, options, 1, one.incarnation()).status().message(),
              HasSubstr("the other workers have ended their session"));
  applier = *replicas.BeginApplying(options);
  ASSERT_TRUE(Join(&replicas, options, 0).ok());
  bool has_arrived = false;
  EXPECT_THAT(replicas.EndStep(1, 1.0, Soon(), &one, &has_arrived).message(),
              HasSubstr("the other workers have ended their session"));
  EXPECT_THAT(Join(&replicas, options, 1, one.incarnation()).status().message(),
              HasSubstr("the other workers have ended their session"));
}

TEST(ReplicaCoordinatorTest, TheApplierLeavesThoughAnotherIsElsewhere) {
  const WorkerGroupOptions options = ReplicasOf(2, absl::Seconds(2));
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  const ReplicaPlace zero = *Join(&replicas, options, 0);
  const ReplicaPlace one = *Join(&replicas, options, 1);
  std::thread other([&] {
    EXPECT_TRUE(
        replicas.WaitAtBarrier(1, one.incarnation(), "e", 0, Soon()).ok());
  });
  EXPECT_TRUE(
      replicas.WaitAtBarrier(0, zero.incarnation(), "e", 0, Soon()).ok());
  other.join();
  WaitUntilOneIsGivenUp(&replicas, zero, applier);
  // It comes back to the end of an epoch that the others have ended.
  const ReplicaPlace again = *Join(&replicas, options, 1, one.incarnation());
  EXPECT_EQ(replicas.WaitAtBarrier(1, again.incarnation(), "e", 0, AtOnce())
                .status()
                .code(),
            absl::StatusCode::kDeadlineExceeded);
  ASSERT_TRUE(
      replicas.LeaveTogether(0, zero.incarnation(), applier, 1, Soon()).ok());
  EXPECT_EQ(replicas.stats().num_active(), 1);
  EXPECT_EQ(replicas.NextRound(applier, Soon()).status().code(),
            absl::StatusCode::kCancelled);
  // Nobody joins the applier that has left.
  EXPECT_THAT(Join(&replicas, options, 0, 0, AtOnce()).status().message(),
              HasSubstr("no worker has begun"));
}

TEST(ReplicaCoordinatorTest, AStepOfOneThatWasGivenUpIsCountedAsDropped) {
  const WorkerGroupOptions options = ReplicasOf(2, absl::Seconds(2));
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  const ReplicaPlace zero = *Join(&replicas, options, 0);
  ReplicaPlace one = *Join(&replicas, options, 1);
  const uint64_t before = one.incarnation();
  WaitUntilOneIsGivenUp(&replicas, zero, applier);
  bool has_arrived = false;
  EXPECT_TRUE(replicas.EndStep(1, 1.0, Soon(), &one, &has_arrived).ok());
  EXPECT_EQ(replicas.stats().dropped(), 1);
  EXPECT_EQ(replicas.stats().expired(), 1);
  // Who beats for it does not know yet what it has become.
  for (int i = 0; i < 500; ++i) {
    ASSERT_TRUE(replicas.Heartbeat(0, zero.incarnation(), applier).ok());
    ASSERT_TRUE(replicas.Heartbeat(1, before, 0).ok());
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_EQ(replicas.stats().expired(), 1);
  EXPECT_EQ(replicas.stats().num_active(), 2);
}

TEST(ReplicaCoordinatorTest, WhoLeavesDuringItsStepStaysAway) {
  ReplicaCoordinator replicas("g");
  ASSERT_TRUE(replicas.BeginApplying(ReplicasOf(2)).ok());
  ReplicaPlace one = *Join(&replicas, ReplicasOf(2), 1);
  ASSERT_TRUE(Join(&replicas, ReplicasOf(2), 0).ok());
  bool has_arrived = false;
  EXPECT_EQ(replicas.EndStep(1, 1.0, AtOnce(), &one, &has_arrived).code(),
            absl::StatusCode::kDeadlineExceeded);
  replicas.Leave(1, one.incarnation(), 0);
  EXPECT_EQ(replicas.EndStep(1, 1.0, Soon(), &one, &has_arrived).code(),
            absl::StatusCode::kCancelled);
  EXPECT_EQ(replicas.stats().num_active(), 1);
}

TEST(ReplicaCoordinatorTest, WhoLeavesMayNotKnowWhatItHasBecome) {
  const WorkerGroupOptions options = ReplicasOf(2, absl::Seconds(2));
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  const ReplicaPlace zero = *Join(&replicas, options, 0);
  ReplicaPlace one = *Join(&replicas, options, 1);
  const uint64_t before = one.incarnation();
  WaitUntilOneIsGivenUp(&replicas, zero, applier);
  bool has_arrived = false;
  EXPECT_TRUE(replicas.EndStep(1, 1.0, Soon(), &one, &has_arrived).ok());
  EXPECT_EQ(replicas.stats().num_active(), 2);
  replicas.Leave(1, before, 0);
  EXPECT_EQ(replicas.stats().num_active(), 1);
}

TEST(ReplicaCoordinatorTest,
     OneOfAProcessBeforeHearsOfTheEndThoughItsClockWasAhead) {
  const WorkerGroupOptions options = ReplicasOf(1);
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(options);
  ReplicaPlace place;
  place.set_incarnation(applier + (uint64_t{1} << 50));
  bool has_arrived = false;

  EXPECT_EQ(replicas.EndStep(0, 1.0, AtOnce(), &place, &has_arrived).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Join(&replicas, options, 0, place.incarnation()).status().code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(replicas.stats().num_active(), 0);
}

TEST(ReplicaCoordinatorTest, AnApplierLivesThoughItHasNotJoined) {
  const WorkerGroupOptions options = ReplicasOf(1, absl::Milliseconds(200));
  ReplicaCoordinator replicas("g");
  replicas.FailApplying(*replicas.BeginApplying(options), "of before");
  const uint64_t applier = *replicas.BeginApplying(options);
  const absl::Time end = absl::Now() + absl::Milliseconds(600);
  while (absl::Now() < end) {
    const absl::Status beat = replicas.Heartbeat(0, /*incarnation=*/0, applier);
    ASSERT_THAT(beat.message(), Not(HasSubstr("was not heard of")));
    absl::SleepFor(absl::Milliseconds(5));
  }
  EXPECT_TRUE(Join(&replicas, options, 0).ok());
}

TEST(ReplicaCoordinatorTest, AJoinThatWaitsOnIsOneJoin) {
  ReplicaCoordinator replicas("g");
  const uint64_t applier = *replicas.BeginApplying(ReplicasOf(1));
  ReplicaPlace zero = *Join(&replicas, ReplicasOf(1), 0);
  bool has_arrived = false;
  EXPECT_FALSE(replicas.EndStep(0, 1.0, AtOnce(), &zero, &has_arrived).ok());
  // Its step has closed the round, which has yet to be applied.
  ReplicaPlace place;
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(
        replicas.Join(ReplicasOf(1), 0, zero.incarnation(), 0, AtOnce(), &place)
            .code(),
        absl::StatusCode::kDeadlineExceeded);
  }
  EXPECT_EQ(replicas.stats().rejoined(), 1);
  ASSERT_TRUE(replicas.ConfirmRound(applier, 0).ok());
  EXPECT_TRUE(
      replicas.Join(ReplicasOf(1), 0, zero.incarnation(), 0, Soon(), &place)
          .ok());
  EXPECT_TRUE(replicas.Heartbeat(0, place.incarnation(), 0).ok());
}

TEST(ReplicaCoordinatorTest, WhoHasNotJoinedIsToldToGiveTheHook) {
  ReplicaCoordinator replicas("g");
  ASSERT_TRUE(replicas.BeginApplying(ReplicasOf(1)).ok());
  ReplicaPlace nowhere;
  bool has_arrived = false;
  EXPECT_THAT(
      replicas.EndStep(0, 1.0, Soon(), &nowhere, &has_arrived).message(),
      HasSubstr("make_session_run_hook"));
}

}  // namespace
}  // namespace tfswitch
