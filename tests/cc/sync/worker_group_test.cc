#include "cc/sync/worker_group.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1'000'000);

WorkerGroupOptions Options(uint32_t num_workers = 0) {
  WorkerGroupOptions options;
  options.lease = absl::Seconds(10);
  options.num_workers = num_workers;
  options.join_timeout = absl::Seconds(60);
  return options;
}

void Tick(WorkerGroup* group, absl::Time now) {
  if (const auto expiry = group->ExpiryAt(now)) group->Expire(*expiry);
}

bool IsMember(const WorkerGroup& group, uint32_t worker, uint64_t incarnation) {
  return group.FindMember(worker, incarnation) != nullptr;
}

bool CanJoin(const WorkerGroup& group, uint32_t worker,
             const std::string& job) {
  v1::JoinRequest request;
  request.set_worker(worker);
  request.set_job(job);
  return group.CheckJoin(request, /*max_workers=*/16).ok();
}

v1::ArriveRequest Arrival(uint32_t worker, uint64_t incarnation, int64_t clock,
                          int64_t round, double weight, int64_t mark = 0) {
  v1::ArriveRequest request;
  request.mutable_member()->set_worker(worker);
  request.mutable_member()->set_incarnation(incarnation);
  request.mutable_member()->set_mark(mark);
  request.set_clock(clock);
  request.set_round(round);
  request.set_weight(weight);
  return request;
}

// A worker of the tests: does what a real one would do.
struct Player {
  Player(WorkerGroup* of_group, uint32_t its_id)  // It has not joined.
      : group(of_group), id(its_id) {}
  Player(WorkerGroup* of_group, uint32_t its_id, absl::Time now,
         uint64_t previous = 0)
      : group(of_group), id(its_id) {
    const WorkerGroup::Place member = group->Join(id, now, previous);
    incarnation = member.incarnation();
    clock = member.clock();
    round = member.round();
  }

  absl::Status Arrive(absl::Time now, double weight = 1.0, int64_t mark = 0) {
    const absl::Status status = group->Arrive(
        Arrival(id, incarnation, clock, round, weight, mark), now);
    if (status.ok()) ++clock;
    return status;
  }

  // Goes on with the round that is open now.
  void Proceed() { round = group->open_round(); }

  WorkerGroup* group;
  uint32_t id;
  uint64_t incarnation = 0;
  int64_t clock = 0;
  int64_t round = 0;
};

std::vector<uint32_t> WorkersOf(const Round& round) {
  std::vector<uint32_t> workers;
  for (const Contribution& each : round.contributions()) {
    workers.push_back(each.worker());
  }
  return workers;
}

TEST(WorkerGroupTest, ARoundClosesWhenEachWorkerHasContributed) {
  WorkerGroup group(Options(3));
  Player a(&group, 2, kStart), b(&group, 0, kStart), c(&group, 1, kStart);

  EXPECT_TRUE(a.Arrive(kStart, 4.0).ok());
  EXPECT_TRUE(b.Arrive(kStart, 2.0).ok());
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_EQ(DescribeMissing(group, 0), "worker 1 of 3 (at step 0)");
  EXPECT_TRUE(c.Arrive(kStart, 1.0).ok());

  EXPECT_EQ(group.open_round(), 1);
  const absl::StatusOr<Round> round = group.ClosedRound(0);
  ASSERT_TRUE(round.ok());
  // Contributions are in order of the workers, not of arrival.
  EXPECT_THAT(WorkersOf(*round), testing::ElementsAre(0, 1, 2));
  EXPECT_EQ(round->total_weight(), 7.0);
  EXPECT_EQ(round->contributions(2).weight(), 4.0);
}

TEST(WorkerGroupTest, LeavingClosesTheRoundThatWaitsForTheLeaver) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());

  group.Leave(b.id, b.incarnation);

  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)), testing::ElementsAre(0));
  // Nobody is waited for any more: each step is a round.
  a.Proceed();
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 2);
  group.Leave(b.id, b.incarnation);  // Again, which is OK.
  group.Leave(a.id, a.incarnation);
  EXPECT_EQ(group.open_round(), 2);
  EXPECT_EQ(group.stats().num_active(), 0);
}

TEST(WorkerGroupTest, AContributionOfOneWhoLeftStillCounts) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(b.Arrive(kStart).ok());
  group.Leave(b.id, b.incarnation);
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)), testing::ElementsAre(0, 1));
}

TEST(WorkerGroupTest, TheLastToLeaveFlushesTheRound) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  group.Leave(a.id, a.incarnation);
  EXPECT_EQ(group.open_round(), 0);
  group.Leave(b.id, b.incarnation);
  EXPECT_EQ(group.open_round(), 1);
}

TEST(WorkerGroupTest, AWorkerThatDiesIsDroppedWhenItsLeaseEnds) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_EQ(group.NextExpiry(), kStart + absl::Seconds(10));
  EXPECT_TRUE(a.Arrive(kStart + absl::Seconds(9)).ok());

  Tick(&group, kStart + absl::Seconds(9.9));
  EXPECT_EQ(group.open_round(), 0);
  Tick(&group, kStart + absl::Seconds(10));

  EXPECT_EQ(group.open_round(), 1);
  EXPECT_EQ(group.stats().expired(), 1);
  const absl::Status status =
      group.Heartbeat(b.id, b.incarnation, kStart + absl::Seconds(11));
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("worker 1"));
  EXPECT_THAT(status.message(), HasSubstr("join again"));
}

TEST(WorkerGroupTest, BeatingKeepsALease) {
  WorkerGroup group(Options(1));
  Player a(&group, 0, kStart);
  for (int second = 1; second < 100; second += 9) {
    const absl::Time now = kStart + absl::Seconds(second);
    Tick(&group, now);
    ASSERT_TRUE(group.Heartbeat(a.id, a.incarnation, now).ok());
  }
}

TEST(WorkerGroupTest, NobodyRunsAheadBeforeAllHaveJoined) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_FALSE(group.MayProceed(1, 5));
  EXPECT_EQ(DescribeMissing(group, 0), "1 of 2 workers that have not joined");

  Player b(&group, 1, kStart);
  EXPECT_EQ(b.clock, 0);
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_TRUE(group.MayProceed(1, 5));
  EXPECT_TRUE(b.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
}

TEST(WorkerGroupTest, ThoseWhoNeverJoinAreGivenUp) {
  WorkerGroupOptions options = Options(2);
  options.lease = absl::Hours(1);
  WorkerGroup group(options);
  Player a(&group, 0, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.NextExpiry(), kStart + absl::Seconds(60));
  Tick(&group, kStart + absl::Seconds(60));
  EXPECT_EQ(group.open_round(), 1);
}

TEST(WorkerGroupTest, AGroupThatAllHaveLeftBeginsAnew) {
  WorkerGroup group(Options(2));
  Player first(&group, 0, kStart);
  Player second(&group, 1, kStart);
  ASSERT_TRUE(first.Arrive(kStart).ok());
  ASSERT_TRUE(second.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
  group.Leave(0, first.incarnation);
  group.Leave(1, second.incarnation);

  // The next run: both are waited for, and clocks count from 0; rounds go on.
  Player again(&group, 0, kStart);
  EXPECT_EQ(again.clock, 0);
  ASSERT_TRUE(again.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(DescribeMissing(group, 1), HasSubstr("not joined"));
  Player other(&group, 1, kStart);
  ASSERT_TRUE(other.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 2);
}

TEST(WorkerGroupTest, OneGivenUpThatComesBackDoesNotWaitForThoseWhoHaveEnded) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart + absl::Seconds(9)).ok());
  Tick(&group, kStart + absl::Seconds(10));  // b is given up.
  EXPECT_EQ(group.open_round(), 1);
  group.Leave(a.id, a.incarnation);
  EXPECT_EQ(group.stats().num_active(), 0);

  const absl::Time later = kStart + absl::Seconds(20);
  Player back(&group, 1, later, b.incarnation);

  EXPECT_EQ(back.clock, 1);  // Where the others were.
  EXPECT_TRUE(group.MayProceed(back.clock, 0));
  ASSERT_TRUE(back.Arrive(later).ok());
  EXPECT_EQ(group.open_round(), 2);
  group.Leave(1, back.incarnation);

  // A new process starts the next run, and a process of the former run belongs
  // to it.
  Player anew(&group, 0, later);
  EXPECT_THAT(DescribeMissing(group, 2), HasSubstr("not joined"));
  group.Leave(0, anew.incarnation);
  Player stray(&group, 1, later, back.incarnation);
  EXPECT_THAT(DescribeMissing(group, 2), HasSubstr("not joined"));
}

TEST(WorkerGroupTest, ALateWorkerJoinsTheOpenRound) {
  WorkerGroup group(Options(1));
  Player a(&group, 0, kStart);
  for (int i = 0; i < 5; ++i) {
    a.Proceed();
    ASSERT_TRUE(a.Arrive(kStart).ok());
  }
  Player late(&group, 7, kStart);
  EXPECT_EQ(late.round, 5);
  EXPECT_EQ(late.clock, 5);
  a.Proceed();
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 5);
  EXPECT_TRUE(late.Arrive(kStart).ok());
  EXPECT_THAT(WorkersOf(*group.ClosedRound(5)), testing::ElementsAre(0, 7));
}

TEST(WorkerGroupTest, AWorkerStartedAgainTakesItsOldPlace) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());

  Player again(&group, 0, kStart);

  const absl::Status old = group.Heartbeat(0, a.incarnation, kStart);
  EXPECT_EQ(old.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(old.message(), HasSubstr("worker_id"));
  group.Leave(0, a.incarnation);  // Means the one that is gone.
  EXPECT_TRUE(IsMember(group, 0, again.incarnation));
  EXPECT_EQ(group.stats().rejoined(), 1);
  // It has not heard that its contribution counts, and makes another one.
  EXPECT_EQ(again.round, 0);
  EXPECT_EQ(group.stats().dropped(), 1);
  EXPECT_TRUE(b.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_TRUE(again.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
  const Round counted = group.ClosedRound(0).value();
  ASSERT_EQ(counted.contributions_size(), 2);
  EXPECT_EQ(counted.contributions(0).incarnation(), again.incarnation);
}

TEST(WorkerGroupTest, WhatOneHasContributedThatComesBackStands) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  const absl::Time later = kStart + absl::Seconds(9);
  ASSERT_TRUE(group.Heartbeat(b.id, b.incarnation, later).ok());
  Tick(&group, kStart + absl::Seconds(10));
  EXPECT_EQ(group.stats().expired(), 1);

  Player back(&group, 0, later, a.incarnation);

  // It waits for that round and goes on with the next one.
  EXPECT_EQ(back.round, 1);
  EXPECT_EQ(back.Arrive(later).code(), absl::StatusCode::kOutOfRange);
  EXPECT_TRUE(b.Arrive(later).ok());
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)), testing::ElementsAre(0, 1));
  EXPECT_TRUE(back.Arrive(later).ok());
  EXPECT_EQ(DescribeMissing(group, 1), "worker 1 of 2 (at step 1)");
}

TEST(WorkerGroupTest, NothingIsLeftOverForTheNextRun) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  group.Leave(0, a.incarnation);  // The other one never came.
  EXPECT_EQ(group.open_round(), 0);

  Player again(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_EQ(again.clock, 0);
  EXPECT_EQ(again.round, 0);
  EXPECT_EQ(group.stats().dropped(), 1);
  ASSERT_TRUE(b.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 0);
  ASSERT_TRUE(again.Arrive(kStart).ok());
  EXPECT_EQ(group.ClosedRound(0)->contributions_size(), 2);
}

TEST(WorkerGroupTest, OneStartedAgainStaysInARoundThatTakesManyContributions) {
  WorkerGroupOptions options = Options(1);
  options.contributions_per_round = 3;
  WorkerGroup group(options);
  Player a(&group, 0, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  Player again(&group, 0, kStart);
  EXPECT_EQ(again.round, 0);
  EXPECT_TRUE(again.Arrive(kStart).ok());
  EXPECT_TRUE(again.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
}

TEST(WorkerGroupTest, ClosedRoundsSayWhichAreStillKept) {
  WorkerGroup group(Options(1));
  Player a(&group, 0, kStart);
  constexpr int64_t kKept = WorkerGroup::kKeptRounds;
  for (int64_t i = 0; i < kKept + 7; ++i) {
    a.Proceed();
    ASSERT_TRUE(a.Arrive(kStart).ok());
  }
  EXPECT_EQ(group.ClosedRound(kKept)->first_kept(), 7);
  EXPECT_EQ(group.ClosedRound(6).status().code(),
            absl::StatusCode::kOutOfRange);
  EXPECT_EQ(group.ClosedRound(group.open_round()).status().code(),
            absl::StatusCode::kNotFound);
}

// Whether a worker waits at a barrier.
bool Waits(WorkerGroup* group, const Player& player) {
  const auto place = group->PlaceAfterBarrier(player.id, player.incarnation);
  EXPECT_TRUE(place.ok()) << place.status();
  return place.ok() && !place->has_value();
}

absl::Status Enter(Player* player, const std::string& barrier,
                   int64_t barrier_generation = 0, absl::Time now = kStart) {
  return player->group->Enter(player->id, player->incarnation, barrier,
                              barrier_generation, now);
}

TEST(WorkerGroupTest, ABarrierOpensWhenAllHaveCome) {
  WorkerGroup group(Options(3));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(Enter(&a, "end").ok());
  ASSERT_TRUE(Enter(&b, "end").ok());
  EXPECT_TRUE(Waits(&group, a));
  EXPECT_EQ(group.stats().num_waiting(), 2);
  EXPECT_EQ(DescribeAbsent(group, "end"),
            "1 of 3 workers that have not joined");
  Player c(&group, 2, kStart);
  EXPECT_EQ(DescribeAbsent(group, "end"), "worker 2 of 3 (at step 0)");
  EXPECT_TRUE(Waits(&group, b));
  ASSERT_TRUE(Enter(&c, "end").ok());
  for (Player* player : {&a, &b, &c}) EXPECT_FALSE(Waits(&group, *player));
  // It closes behind them.
  ASSERT_TRUE(Enter(&a, "end", 1).ok());
  EXPECT_TRUE(Waits(&group, a));
}

TEST(WorkerGroupTest, NobodyWaitsForOneAtABarrierElsewhere) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&b, "end").ok());  // Closes the round of a.
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_TRUE(group.MayProceed(1, 0));
  EXPECT_EQ(DescribeBehind(group, 1), "");
  for (int i = 0; i < 3; ++i) {
    a.Proceed();
    ASSERT_TRUE(a.Arrive(kStart).ok());
  }
  EXPECT_EQ(group.open_round(), 4);
  ASSERT_TRUE(Enter(&a, "end").ok());

  // They go on together: at one clock, and each is missing in the next round.
  const auto place = group.PlaceAfterBarrier(b.id, b.incarnation);
  ASSERT_TRUE(place.ok() && place->has_value());
  EXPECT_EQ((*place)->clock(), 4);
  EXPECT_EQ((*place)->round(), 4);
  a.Proceed();
  ASSERT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(DescribeMissing(group, 4, kStart + absl::Seconds(5)),
            "worker 1 of 2 (at step 4, last heard 5 s ago)");
}

TEST(WorkerGroupTest, LeavingAndDyingOpenABarrier) {
  WorkerGroup group(Options(3));
  Player a(&group, 0, kStart), b(&group, 1, kStart), c(&group, 2, kStart);
  ASSERT_TRUE(Enter(&a, "end", 0, kStart + absl::Seconds(5)).ok());
  group.Leave(b.id, b.incarnation);
  EXPECT_TRUE(Waits(&group, a));
  Tick(&group, kStart + absl::Seconds(10));
  EXPECT_FALSE(Waits(&group, a));
}

TEST(WorkerGroupTest, ALateWorkerIsWaitedForAtABarrier) {
  WorkerGroup group(Options(1));
  Player a(&group, 0, kStart), late(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&a, "end").ok());
  Player later(&group, 2, kStart);
  EXPECT_EQ(later.clock, 0);  // That of the slowest.
  ASSERT_TRUE(Enter(&late, "end").ok());
  EXPECT_TRUE(Waits(&group, a));
  ASSERT_TRUE(Enter(&later, "end").ok());
  EXPECT_FALSE(Waits(&group, a));
}

TEST(WorkerGroupTest, OneWhoJoinsWhileAllAreAtABarrierBeginsWhereTheyAre) {
  WorkerGroup group(Options(1));
  Player a(&group, 0, kStart);
  Player b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&a, "end").ok());
  group.Leave(b.id, b.incarnation);       // It opens.
  ASSERT_TRUE(Enter(&a, "end", 1).ok());  // And opens for one alone.
  EXPECT_FALSE(Waits(&group, a));
  Player late(&group, 2, kStart);
  EXPECT_EQ(late.clock, 1);
}

TEST(WorkerGroupTest, ARepeatedVisitChangesNothing) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(Enter(&a, "end").ok());
  ASSERT_TRUE(Enter(&a, "end").ok());
  ASSERT_TRUE(Enter(&b, "end").ok());
  ASSERT_TRUE(Enter(&a, "end").ok());  // The answer got lost.
  EXPECT_FALSE(Waits(&group, a));
}

TEST(WorkerGroupTest, SenselessVisitsAreRefused) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_EQ(Enter(&a, "").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Enter(&a, "end", 1).code(), absl::StatusCode::kOutOfRange);
  ASSERT_TRUE(Enter(&a, "end").ok());
  for (const absl::Status& status : {Enter(&a, "other"), a.Arrive(kStart)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("worker 0"));
    EXPECT_THAT(status.message(), HasSubstr("'end'"));
  }
  // All would wait without end.
  ASSERT_TRUE(Enter(&b, "other").ok());
  const auto place = group.PlaceAfterBarrier(0, a.incarnation);
  EXPECT_EQ(place.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(place.status().message(),
              HasSubstr("worker 0 at 'end', worker 1 at 'other'"));
  // Until one of them gives up.
  group.Leave(b.id, b.incarnation);
  EXPECT_FALSE(Waits(&group, a));
}

TEST(WorkerGroupTest, ANewcomerElsewhereInTheProgramStopsNobody) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&a, "end").ok());
  ASSERT_TRUE(Enter(&b, "end").ok());
  // While a saves, b is started again, and trains from the beginning.
  Player again(&group, 1, kStart);
  ASSERT_TRUE(Enter(&a, "saved", 1).ok());
  EXPECT_TRUE(Waits(&group, a));
  ASSERT_TRUE(Enter(&again, "end").ok());

  EXPECT_FALSE(Waits(&group, a));
  EXPECT_TRUE(Waits(&group, again));
  // Nor at the next one.
  ASSERT_TRUE(Enter(&a, "seen", 2).ok());
  EXPECT_FALSE(Waits(&group, a));
  EXPECT_TRUE(Waits(&group, again));
  ASSERT_TRUE(Enter(&a, "end", 3).ok());
  EXPECT_FALSE(Waits(&group, again));
  // Who has been there since the last barrier is not a newcomer any more.
  ASSERT_TRUE(Enter(&a, "saved", 4).ok());
  ASSERT_TRUE(Enter(&again, "end", 1).ok());
  EXPECT_EQ(group.PlaceAfterBarrier(0, a.incarnation).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(WorkerGroupTest, OneThatIsBackBeforeAllHaveLeftWaitsForTheNextRun) {
  WorkerGroup group(Options(3));
  Player a(&group, 0, kStart), b(&group, 1, kStart), c(&group, 2, kStart);
  for (Player* each : {&a, &b, &c}) ASSERT_TRUE(each->Arrive(kStart).ok());
  group.Leave(a.id, a.incarnation);
  group.Leave(b.id, b.incarnation);
  Player back(&group, 0, kStart);
  Player also_back(&group, 1, kStart);
  ASSERT_TRUE(Enter(&back, "saved", 0, kStart).ok());
  ASSERT_TRUE(also_back.Arrive(kStart).ok());

  group.Leave(c.id, c.incarnation);

  // Neither the barrier opens nor the round closes without it.
  EXPECT_TRUE(Waits(&group, back));
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(DescribeAbsent(group, "saved"), HasSubstr("not joined"));
  Player last(&group, 2, kStart);
  EXPECT_EQ(last.clock, 1);  // Where the others began.
  ASSERT_TRUE(last.Arrive(kStart).ok());
  EXPECT_THAT(WorkersOf(*group.ClosedRound(1)), testing::ElementsAre(1, 2));
  ASSERT_TRUE(Enter(&also_back, "saved", 0, kStart).ok());
  ASSERT_TRUE(Enter(&last, "saved", 0, kStart).ok());
  EXPECT_FALSE(Waits(&group, back));

  // Those that die then, or do not come, are waited for no longer than usual.
  group.Leave(back.id, back.incarnation);
  group.Leave(also_back.id, also_back.incarnation);
  Player again(&group, 0, kStart + absl::Seconds(9));
  Tick(&group, kStart + absl::Seconds(10));  // The last one is given up.
  ASSERT_TRUE(Enter(&again, "saved", 0, kStart + absl::Seconds(15)).ok());
  for (int second = 20; second < 69; second += 5) {
    EXPECT_TRUE(Waits(&group, again)) << second;
    Tick(&group, kStart + absl::Seconds(second));
    ASSERT_TRUE(group
                    .Heartbeat(again.id, again.incarnation,
                               kStart + absl::Seconds(second))
                    .ok());
  }
  Tick(&group, kStart + absl::Seconds(69));
  EXPECT_FALSE(Waits(&group, again));
}

TEST(WorkerGroupTest, OneThatIsBackAndGoesOnWithTheOthersIsOfTheirRun) {
  for (const bool meet_at_barrier : {false, true}) {
    WorkerGroup group(Options(2));
    Player a(&group, 0, kStart), b(&group, 1, kStart);
    ASSERT_TRUE(a.Arrive(kStart).ok());
    ASSERT_TRUE(b.Arrive(kStart).ok());
    group.Leave(b.id, b.incarnation);
    Player back(&group, 1, kStart);
    if (meet_at_barrier) {
      ASSERT_TRUE(Enter(&back, "epoch").ok());
      ASSERT_TRUE(Enter(&a, "epoch").ok());
    } else {
      a.Proceed();
      ASSERT_TRUE(a.Arrive(kStart).ok());
      ASSERT_TRUE(back.Arrive(kStart).ok());
    }
    back.Proceed();
    ASSERT_TRUE(back.Arrive(kStart).ok());
    const int64_t waits_for_a = group.open_round();

    group.Leave(a.id, a.incarnation);

    EXPECT_EQ(group.open_round(), waits_for_a + 1);
  }
}

TEST(WorkerGroupTest, AStepThatTheNextRunWouldHaveTakenIsALastRound) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  group.Leave(b.id, b.incarnation);
  Player back(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  group.Leave(a.id, a.incarnation);
  EXPECT_EQ(group.open_round(), 0);  // The next run waits for it to come back.

  group.Leave(back.id, back.incarnation);

  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)), testing::ElementsAre(0));
}

TEST(WorkerGroupTest, OneAwaitedByOthersThatHaveGoneOnBeginsWhereTheyAre) {
  WorkerGroup group(Options(3));
  Player a(&group, 0, kStart), b(&group, 1, kStart), c(&group, 2, kStart);
  group.Leave(b.id, b.incarnation);
  group.Leave(c.id, c.incarnation);
  Player at_barrier(&group, 1, kStart), ahead(&group, 2, kStart);
  ASSERT_TRUE(Enter(&at_barrier, "b").ok());
  ahead.round = WorkerGroup::kNoRound;
  for (int i = 0; i < 10; ++i) ASSERT_TRUE(ahead.Arrive(kStart).ok());

  group.Leave(a.id, a.incarnation);

  EXPECT_EQ(Player(&group, 0, kStart).clock, 10);
}

TEST(WorkerGroupTest, ABarrierFlushesARoundOfManyContributions) {
  WorkerGroupOptions options = Options(2);
  options.contributions_per_round = 5;
  WorkerGroup group(options);
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&a, "end").ok());
  EXPECT_EQ(group.open_round(), 0);
  ASSERT_TRUE(b.Arrive(kStart).ok());
  ASSERT_TRUE(Enter(&b, "end").ok());
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)), testing::ElementsAre(0, 1));
}

TEST(WorkerGroupTest, ARepeatedArrivalChangesNothing) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart, 3.0).ok());
  EXPECT_TRUE(group.Arrive(Arrival(0, a.incarnation, 0, 0, 3.0), kStart).ok());
  EXPECT_TRUE(b.Arrive(kStart).ok());
  EXPECT_TRUE(group.Arrive(Arrival(0, a.incarnation, 0, 0, 3.0), kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_EQ(group.ClosedRound(0)->total_weight(), 4.0);
}

TEST(WorkerGroupTest, WrongArrivalsAreRefused) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  const auto arrive = [&](int64_t clock, int64_t round, double weight) {
    return group.Arrive(Arrival(0, a.incarnation, clock, round, weight), kStart)
        .code();
  };
  EXPECT_EQ(arrive(1, 0, 1.0), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(arrive(0, 1, 1.0), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(arrive(0, -2, 1.0), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(arrive(0, 0, -1.0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arrive(0, 0, std::nan("")), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(arrive(0, 0, std::numeric_limits<double>::infinity()),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(group.Arrive(Arrival(5, 1, 0, 0, 1.0), kStart).code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(arrive(0, 0, 1.0), absl::StatusCode::kOk);
}

TEST(WorkerGroupTest, BackupWorkersAreNotWaitedFor) {
  for (const bool carries : {false, true}) {
    WorkerGroupOptions options = Options(3);
    options.contributions_per_round = 2;
    options.carries_late_contributions = carries;
    WorkerGroup group(options);
    Player a(&group, 0, kStart), b(&group, 1, kStart), slow(&group, 2, kStart);
    EXPECT_TRUE(a.Arrive(kStart).ok());
    EXPECT_TRUE(b.Arrive(kStart).ok());
    EXPECT_EQ(group.open_round(), 1);

    EXPECT_TRUE(slow.Arrive(kStart).ok());

    EXPECT_EQ(group.stats().dropped(), carries ? 0 : 1);
    EXPECT_EQ(group.stats().carried(), carries ? 1 : 0);
    a.Proceed();
    EXPECT_TRUE(a.Arrive(kStart).ok());
    EXPECT_EQ(group.open_round(), carries ? 2 : 1);
    if (carries) {
      EXPECT_THAT(WorkersOf(*group.ClosedRound(1)), testing::ElementsAre(0, 2));
    }
  }
}

TEST(WorkerGroupTest, WithFewerWorkersThanARoundTakesTheTailStillEnds) {
  WorkerGroupOptions options = Options(3);
  options.contributions_per_round = 2;
  WorkerGroup group(options);
  Player a(&group, 0, kStart), b(&group, 1, kStart), c(&group, 2, kStart);
  group.Leave(b.id, b.incarnation);
  group.Leave(c.id, c.incarnation);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
}

TEST(WorkerGroupTest, ARoundMayTakeSeveralContributionsOfAWorker) {
  WorkerGroupOptions options = Options(2);
  options.contributions_per_round = 4;
  WorkerGroup group(options);
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_TRUE(b.Arrive(kStart).ok());
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 0);
  EXPECT_TRUE(a.Arrive(kStart).ok());
  EXPECT_EQ(group.open_round(), 1);
  EXPECT_THAT(WorkersOf(*group.ClosedRound(0)),
              testing::ElementsAre(0, 0, 0, 1));
  // The partial last one, when all have gone.
  b.Proceed();
  EXPECT_TRUE(b.Arrive(kStart).ok());
  group.Leave(a.id, a.incarnation);
  EXPECT_EQ(group.open_round(), 1);
  group.Leave(b.id, b.incarnation);
  EXPECT_EQ(group.open_round(), 2);
}

TEST(WorkerGroupTest, StepsThatCountAreKnownWhoeverTookThem) {
  WorkerGroup group(Options(2));
  Player a(&group, 0, kStart), b(&group, 1, kStart);
  ASSERT_TRUE(a.Arrive(kStart).ok());
  ASSERT_TRUE(b.Arrive(kStart).ok());
  a.Proceed();
  ASSERT_TRUE(a.Arrive(kStart).ok());
  // Its second step waits for the other worker, and is withdrawn.
  EXPECT_EQ(group.Join(0, kStart).num_steps(), 1);
  EXPECT_EQ(group.Join(1, kStart).num_steps(), 1);
  // All have gone, and another run begins.
  Tick(&group, kStart + Options(2).lease);
  const WorkerGroup::Place c = group.Join(0, kStart);
  EXPECT_EQ(c.clock(), 0);
  EXPECT_EQ(c.num_steps(), 1);
  v1::ArriveRequest step =
      Arrival(0, c.incarnation(), c.clock(), c.round(), 1.0);
  step.add_progress();  // So it survives its worker.
  ASSERT_TRUE(group.Arrive(step, kStart).ok());
  EXPECT_EQ(group.Join(0, kStart).num_steps(), 2);
  // A coordinator without them takes over those of the worker's checkpoint.
  EXPECT_EQ(group.Join(0, kStart, 0, /*first_step=*/1).num_steps(), 2);
  EXPECT_EQ(group.Join(0, kStart, 0, /*first_step=*/7).num_steps(), 7);
  // All tables were restored, and each worker says where it continues.
  group.VoidAll();
  EXPECT_EQ(group.Join(0, kStart, 0, /*first_step=*/1).num_steps(), 1);
}

TEST(WorkerGroupTest, OptionsThatMakeNoSenseAreNamed) {
  WorkerGroupOptions options = Options();
  options.lease = absl::ZeroDuration();
  EXPECT_THAT(options.Validate().message(), HasSubstr("lease"));
  options = Options();
  options.join_timeout = -absl::Seconds(1);
  EXPECT_THAT(options.Validate().message(), HasSubstr("join_timeout"));
  options = Options();
  options.contributions_per_round = 2;
  EXPECT_THAT(options.Validate().message(), HasSubstr("num_workers"));
}

// Plays random events and checks what must hold after each.
class RandomGroupTest : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, RandomGroupTest, testing::Range(0, 40));

TEST_P(RandomGroupTest, NobodyIsForgottenAndNothingCountsTwice) {
  std::mt19937 random(GetParam());
  const auto draw = [&](int n) { return static_cast<int>(random() % n); };
  WorkerGroup group(Options(draw(4)));
  absl::Time now = kStart;
  std::map<uint32_t, Player> alive;  // As they believe.
  std::set<std::tuple<uint32_t, uint64_t, int64_t>> offered;
  std::map<uint64_t, int64_t> barrier_generation;  // Keys are incarnations.
  std::set<uint32_t> at_barrier;  // Workers that have not been told it opened.
  const auto waits_for_round = [&](const Player& player) {
    return player.round > group.open_round() ||
           (player.round == group.open_round() &&
            offered.count({player.id, player.incarnation, player.clock - 1}) !=
                0);
  };
  for (int event = 0; event < 600; ++event) {
    const uint32_t id = draw(5);
    const auto it = alive.find(id);
    if (it == alive.end()) at_barrier.erase(id);
    switch (draw(9)) {
      case 0:
        if (it == alive.end() || draw(5) == 0) {  // Or started again.
          alive.erase(id);
          at_barrier.erase(id);
          alive.emplace(id, Player(&group, id, now));
        }
        break;
      case 1:
        if (it != alive.end() && draw(3) == 0) {
          group.Leave(id, it->second.incarnation);
          alive.erase(it);
        }
        break;
      case 2:
        now += absl::Seconds(draw(4));
        Tick(&group, now);
        break;
      case 3:
        if (it != alive.end() && draw(6) == 0) alive.erase(it);  // Dies.
        break;
      case 4:
        if (it == alive.end() || at_barrier.count(id) != 0 ||
            waits_for_round(it->second) || draw(2) == 0) {
          break;
        }
        if (Enter(&it->second, "b", barrier_generation[it->second.incarnation],
                  now)
                .ok()) {
          ++barrier_generation[it->second.incarnation];
          at_barrier.insert(id);
        }
        break;
      default:
        if (it == alive.end()) break;
        Player& player = it->second;
        if (!group.Heartbeat(id, player.incarnation, now).ok()) {
          alive.erase(it);
          break;
        }
        if (at_barrier.count(id) != 0) {
          const auto place = group.PlaceAfterBarrier(id, player.incarnation);
          ASSERT_TRUE(place.ok()) << place.status();
          if (!place->has_value()) break;
          ASSERT_GE((*place)->clock(), player.clock);
          player.clock = (*place)->clock();
          player.round = (*place)->round();
          at_barrier.erase(id);
        }
        // It waits while its round is open and has its contribution.
        if (waits_for_round(player)) break;
        player.Proceed();
        ASSERT_TRUE(player.Arrive(now, 1 + draw(3)).ok());
        offered.insert({id, player.incarnation, player.clock - 1});
        if (draw(4) == 0) {  // An answer got lost.
          ASSERT_TRUE(group
                          .Arrive(Arrival(id, player.incarnation,
                                          player.clock - 1, player.round, 1.0),
                                  now)
                          .ok());
        }
    }
    // If no worker is missing at the barrier, no worker still waits there.
    if (DescribeAbsent(group, "b").empty()) {
      for (const auto& [other, player] : alive) {
        ASSERT_FALSE(IsMember(group, other, player.incarnation) &&
                     Waits(&group, player));
      }
    }
    if (!DescribeMissing(group, group.open_round()).empty()) continue;
    for (const auto& [other, player] : alive) {
      ASSERT_FALSE(IsMember(group, other, player.incarnation) &&
                   at_barrier.count(other) == 0 && waits_for_round(player))
          << "worker " << other << " waits for nobody";
    }
  }
  // All who are left go: everything offered has counted once,
  for (const auto& [id, player] : alive) group.Leave(id, player.incarnation);
  Tick(&group, now + absl::Hours(1));
  std::set<std::tuple<uint32_t, uint64_t, int64_t>> counted;
  for (int64_t round = 0; round < group.open_round(); ++round) {
    const absl::StatusOr<Round> closed = group.ClosedRound(round);
    ASSERT_TRUE(closed.ok());
    EXPECT_EQ(closed->number(), round);
    for (const Contribution& each : closed->contributions()) {
      EXPECT_TRUE(
          counted.emplace(each.worker(), each.incarnation(), each.clock())
              .second);
    }
  }
  // or was withdrawn when its worker was started again.
  EXPECT_TRUE(std::includes(offered.begin(), offered.end(), counted.begin(),
                            counted.end()));
  EXPECT_EQ(counted.size() + group.stats().dropped(), offered.size());
}

TEST_P(RandomGroupTest, NoStepIsFurtherAheadThanTheStaleness) {
  std::mt19937 random(GetParam());
  const auto draw = [&](int n) { return static_cast<int>(random() % n); };
  const int64_t staleness = GetParam() % 4;
  WorkerGroup group(Options(3));
  std::map<uint32_t, Player> alive;
  for (uint32_t id = 0; id < 3; ++id) {
    alive.emplace(id, Player(&group, id, kStart));
  }
  for (int event = 0; event < 3000; ++event) {
    const uint32_t id = draw(3) == 0 ? 0 : draw(4);
    const auto it = alive.find(id);
    if (it == alive.end()) {
      if (draw(10) == 0) alive.emplace(id, Player(&group, id, kStart));
    } else if (draw(100) == 0) {
      group.Leave(id, it->second.incarnation);
      alive.erase(it);
    } else if (group.MayProceed(it->second.clock, staleness)) {
      it->second.round = WorkerGroup::kNoRound;
      ASSERT_TRUE(it->second.Arrive(kStart).ok());
    }
    // Some worker can always continue, unless a new run waits for workers to
    // join.
    bool can_proceed =
        alive.empty() ||
        absl::StrContains(DescribeBehind(group, 0), "not joined");
    for (const auto& [other, player] : alive) {
      can_proceed |= group.MayProceed(player.clock, staleness);
    }
    ASSERT_TRUE(can_proceed);
  }
  const auto stats = group.stats();
  const std::vector<int64_t> counts(stats.staleness().begin(),
                                    stats.staleness().end());
  int64_t total = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    if (static_cast<int64_t>(s) > staleness) {
      EXPECT_EQ(counts[s], 0) << s;
    }
    total += counts[s];
  }
  EXPECT_GT(total, 500);
  EXPECT_EQ(group.open_round(), 0);
}

// A worker of a job, whose steps have marks.
struct JobPlayer : Player {
  JobPlayer(WorkerGroup* of_group, uint32_t its_id, absl::Time now,
            const std::string& job)
      : Player(of_group, its_id) {
    const WorkerGroup::Place place =
        group->Join(id, now, /*previous=*/0, /*first_step=*/0, job);
    incarnation = place.incarnation();
    clock = place.clock();
    round = place.round();
    position = {place.mark(), place.steps_since_mark()};
  }

  void Step(int64_t mark) {
    Proceed();
    EXPECT_TRUE(Arrive(kStart, 1.0, mark).ok());
  }
  void Leave(int64_t mark) { group->Leave(id, incarnation, mark); }

  std::pair<int64_t, int64_t> position;  // The mark, and the steps since.
};

void ExpectPosition(std::pair<int64_t, int64_t> found, int64_t mark,
                    int64_t steps) {
  EXPECT_EQ(found, std::pair(mark, steps));
}

void GiveUp(WorkerGroup* group, const std::vector<uint32_t>& workers) {
  WorkerGroup::Expiry expiry;
  expiry.mutable_workers()->Add(workers.begin(), workers.end());
  group->Expire(expiry);
}

TEST(WorkerGroupTest, AWorkerOfAJobGoesOnWhereItWasWhileTheOthersWait) {
  WorkerGroup group(Options(2));
  JobPlayer a(&group, 0, kStart, "j"), b(&group, 1, kStart, "j");
  ExpectPosition(b.position, 0, 0);
  for (int step = 0; step < 3; ++step) {
    a.Step(5);
    b.Step(5);
  }
  a.Step(5);  // And waits for B, which is killed.

  JobPlayer again(&group, 1, kStart, "j");
  ExpectPosition(again.position, 5, 3);
  again.Step(5);
  EXPECT_EQ(group.open_round(), 4);

  // Its contribution that it did not see applied is withdrawn.
  again.Step(5);
  ExpectPosition(JobPlayer(&group, 1, kStart, "j").position, 5, 4);
}

TEST(WorkerGroupTest, AWorkerOfAJobThatWasGivenUpGoesOnWhereTheSlowestIs) {
  WorkerGroup group(Options(3));
  JobPlayer a(&group, 0, kStart, "j"), b(&group, 1, kStart, "j"),
      c(&group, 2, kStart, "j");
  c.Step(5);
  GiveUp(&group, {2});
  EXPECT_EQ(group.stats().losses().at(2).num_steps(), 1);
  for (int step = 0; step < 2; ++step) {
    a.Step(6);
    b.Step(6);
  }
  a.Step(7);
  ExpectPosition(JobPlayer(&group, 2, kStart, "j").position, 6, 2);
  EXPECT_TRUE(group.stats().losses().at(2).is_back());
}

TEST(WorkerGroupTest, AnEpochThatEndedForAllHasEndedForOneThatComesBack) {
  WorkerGroup group(Options(2));
  JobPlayer a(&group, 0, kStart, "j"), b(&group, 1, kStart, "j");
  a.Step(5);
  b.Step(5);
  ASSERT_TRUE(
      group.Enter(0, a.incarnation, WorkerGroup::kEndOfEpoch, 0, kStart).ok());
  // Started again while the other one waits for the rest of its epoch.
  ExpectPosition(JobPlayer(&group, 1, kStart, "j").position, 5, 1);
  GiveUp(&group, {1});
  // Before a step of the next epoch.
  ExpectPosition(JobPlayer(&group, 1, kStart, "j").position, 6, 0);
}

TEST(WorkerGroupTest, AWorkerOfAJobThatHasEndedHearsOfIt) {
  WorkerGroup group(Options(2));
  JobPlayer a(&group, 0, kStart, "j"), b(&group, 1, kStart, "j");
  a.Step(5);
  b.Step(5);
  GiveUp(&group, {1});
  a.Step(5);
  a.Leave(9);
  JobPlayer late(&group, 1, kStart, "j");
  ExpectPosition(late.position, 9, 0);
  EXPECT_EQ(late.clock, 2);  // Schedules go on if it trains nevertheless.
  late.Leave(9);

  // If all processes of a job were killed, each goes on by itself.
  WorkerGroup killed(Options(2));
  JobPlayer c(&killed, 0, kStart, "j"), d(&killed, 1, kStart, "j");
  c.Step(5);
  d.Step(5);
  GiveUp(&killed, {0, 1});
  ExpectPosition(JobPlayer(&killed, 1, kStart, "j").position, 5, 1);
  ExpectPosition(JobPlayer(&killed, 0, kStart, "j").position, 5, 1);
}

TEST(WorkerGroupTest, AnotherJobBeginsAnewOnceNobodyTrainsTheFormerOne) {
  WorkerGroup group(Options(2));
  JobPlayer a(&group, 0, kStart, "j"), b(&group, 1, kStart, "j");
  a.Step(5);
  b.Step(5);
  EXPECT_TRUE(CanJoin(group, 0, "j"));
  EXPECT_FALSE(CanJoin(group, 0, "k"));
  EXPECT_FALSE(CanJoin(group, 0, ""));
  GiveUp(&group, {0});
  // Its own former process, which was killed, is no hindrance.
  EXPECT_TRUE(CanJoin(group, 1, "k"));
  JobPlayer next(&group, 1, kStart, "k");
  ExpectPosition(next.position, 0, 0);
  EXPECT_EQ(next.clock, 0);
  EXPECT_EQ(group.Join(0, kStart, 0, 0, "k").num_steps(), 0);
}

TEST(WorkerGroupTest, LossesHaveNumbersAndThoseWhoNeverJoinedAreAmongThem) {
  WorkerGroup group(Options(3));
  Player a(&group, 0, kStart);
  Tick(&group, kStart + absl::Seconds(5));
  EXPECT_EQ(group.stats().num_losses(), 0);
  ASSERT_TRUE(
      group.Heartbeat(0, a.incarnation, kStart + absl::Seconds(60)).ok());
  Tick(&group, kStart + absl::Seconds(60));
  const v1::GetGroupStatsResponse stats = group.stats();
  EXPECT_EQ(stats.num_losses(), 2);
  EXPECT_EQ(stats.losses().at(1).number(), 1);
  EXPECT_FALSE(stats.losses().at(2).has_joined());
  EXPECT_EQ(stats.expired(), 0);
}

}  // namespace
}  // namespace tfswitch
