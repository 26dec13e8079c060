// Work queues of groups: what joining, arriving, dying and barriers lead to.

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "cc/sync/coordinator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/deadlines.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::Pair;

WorkQueueOptions QueueOptions(int num_items, int64_t num_epochs = 1) {
  std::vector<std::string> items;
  for (int i = 0; i < num_items; ++i) items.push_back(std::to_string(i));
  return ItemsOf(items, num_epochs);
}

// Waits until so many do at barriers.
void WaitForWaiting(Coordinator* coordinator, int64_t count) {
  while (coordinator->GroupStats("g")->num_waiting() != count) {
    std::this_thread::yield();
  }
}

// Group "g" of two workers with queue "q", whose rounds need both.
class WorkQueueCoordinationTest : public testing::Test {
 protected:
  struct Worker {
    uint32_t id = 0;
    WorkerGroup::Place place;
  };

  void SetUp() override {
    WorkerGroupOptions options;
    options.num_workers = 2;
    ASSERT_TRUE(coordinator_.CreateGroup("g", options).ok());
  }

  void CreateQueue(int num_items, int64_t num_epochs = 1) {
    ASSERT_TRUE(coordinator_
                    .CreateWorkQueue(
                        QueueOf("g", "q", QueueOptions(num_items, num_epochs)))
                    .ok());
  }

  Worker Join(uint32_t id, uint64_t previous = 0) {
    return {id, *coordinator_.Join(JoinOf("g", id, previous))};
  }

  std::optional<WorkItem> Take(const Worker& worker) {
    const auto item = coordinator_.TakeWorkItem(
        TakeOf(MemberOf("g", worker.id, worker.place.incarnation()), "q"));
    EXPECT_TRUE(item.ok()) << item.status();
    return item.value_or(std::nullopt);
  }

  absl::Status Finish(const Worker& worker, const WorkItem& item) {
    return coordinator_.FinishWorkItem(
        FinishOf(MemberOf("g", worker.id, worker.place.incarnation()), "q",
                 item.epoch(), item.index()));
  }

  // Ends the worker's next step, with its item advanced to `offset`.
  absl::Status Advance(Worker* worker, const WorkItem& item, int64_t offset) {
    absl::Status status =
        coordinator_
            .Arrive(ArrivalOf(
                MemberOf("g", worker->id, worker->place.incarnation()),
                worker->place.clock(), worker->place.round(), 1.0,
                {ProgressOf("q", item.epoch(), item.index(), offset)}))
            .status();
    if (status.ok()) worker->place.set_clock(worker->place.clock() + 1);
    return status;
  }

  void Leave(const Worker& worker) {
    ASSERT_TRUE(
        coordinator_.Leave(MemberOf("g", worker.id, worker.place.incarnation()))
            .ok());
  }

  absl::Status WaitAtBarrier(const Worker& worker,
                             int64_t barrier_generation = 0) {
    return coordinator_
        .WaitAtBarrier(
            VisitOf(MemberOf("g", worker.id, worker.place.incarnation()),
                    WorkQueueBarrier("q"), barrier_generation),
            Soon())
        .status();
  }

  int64_t Epoch() { return coordinator_.WorkQueueStats("g", "q")->epoch(); }

  Coordinator coordinator_;
};

TEST(WorkQueueLimitsTest, QueuesAndItemsTooManyAreRefusedAndNamed) {
  WorkQueueOptions queue = ItemsOf({std::string(1000, 'x')});
  CoordinatorLimits limits;
  limits.max_work_queues = 2;
  limits.max_work_queue_bytes = 2 * ItemBytes(queue) - 1;
  Coordinator coordinator(limits);
  for (const char* group : {"g", "h"}) {
    ASSERT_TRUE(coordinator.CreateGroup(group, WorkerGroupOptions()).ok());
  }
  ASSERT_TRUE(coordinator.CreateWorkQueue(QueueOf("g", "q", queue)).ok());

  // Queues of other groups count, too.
  const absl::Status bytes =
      coordinator.CreateWorkQueue(QueueOf("h", "r", queue));
  queue = ItemsOf({"x"});
  ASSERT_TRUE(coordinator.CreateWorkQueue(QueueOf("h", "r", queue)).ok());
  const absl::Status number =
      coordinator.CreateWorkQueue(QueueOf("h", "s", queue));

  for (const auto& [status, named] :
       {std::pair{bytes, "work queue 'r'"}, {number, "work queue 's'"}}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(named));
  }
  EXPECT_THAT(std::string(bytes.message()),
              HasSubstr("--max_work_queue_bytes"));
  EXPECT_THAT(std::string(number.message()), HasSubstr("--max_work_queues"));
  EXPECT_TRUE(coordinator.CreateWorkQueue(QueueOf("h", "r", queue)).ok());
  // Those that are there already need no more room.
  v1::SavedWorkQueues saved = coordinator.SaveWorkQueues();
  EXPECT_TRUE(coordinator.CheckRestore(saved).ok());
  SavedWorkQueue& added = *saved.add_queues();
  added.set_group("h");
  added.set_queue("s");
  *added.mutable_options() = queue;
  EXPECT_EQ(coordinator.CheckRestore(saved).code(),
            absl::StatusCode::kResourceExhausted);
}

TEST_F(WorkQueueCoordinationTest, ProgressInMoreQueuesThanThereAreIsRefused) {
  Worker a = Join(0);
  CreateQueue(1);
  const WorkItem item = *Take(a);
  const std::vector<WorkProgress> twice(
      2, ProgressOf("q", item.epoch(), item.index(), 1));

  const absl::Status status =
      coordinator_
          .Arrive(ArrivalOf(MemberOf("g", a.id, a.place.incarnation()),
                            a.place.clock(), a.place.round(), 1.0, twice))
          .status();

  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 work queues"));
}

TEST_F(WorkQueueCoordinationTest, OneThatLeavesReturnsItsItemAtItsLastStep) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1);
  const WorkItem item = *Take(a);
  ASSERT_TRUE(Advance(&a, item, 4).ok());
  EXPECT_FALSE(Take(b).has_value());
  Leave(a);
  EXPECT_EQ(Take(b)->offset(), 4);
}

TEST_F(WorkQueueCoordinationTest, OneWhoseLeaseEndsReturnsItsItem) {
  WorkerGroupOptions options;
  options.lease = absl::Milliseconds(20);
  ASSERT_TRUE(coordinator_.CreateGroup("g", options).ok());
  const Worker a = Join(0);
  CreateQueue(1);
  ASSERT_TRUE(Take(a).has_value());
  const Worker b = Join(1);
  // Its waiting keeps its own lease.
  ASSERT_TRUE(WaitAtBarrier(b).ok());
  EXPECT_EQ(Epoch(), 0);
  EXPECT_TRUE(Take(b).has_value());
}

TEST_F(WorkQueueCoordinationTest, ARepeatedArrivalAdvancesOnce) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(2);
  const WorkItem item = *Take(a);
  ASSERT_TRUE(Advance(&a, item, 4).ok());
  a.place.set_clock(a.place.clock() - 1);
  ASSERT_TRUE(Advance(&a, item, 9).ok());  // The first one's counts.
  Leave(a);
  EXPECT_EQ(Take(b)->offset(), 4);
}

TEST_F(WorkQueueCoordinationTest, AnItemOfAnotherLetsNobodyArrive) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(2);
  const WorkItem of_b = *Take(b);
  EXPECT_EQ(Advance(&a, of_b, 4).code(), absl::StatusCode::kNotFound);
  const WorkItem of_a = *Take(a);
  EXPECT_TRUE(Advance(&a, of_a, 4).ok());
}

TEST_F(WorkQueueCoordinationTest, AContributionThatAdvancesStands) {
  Worker a = Join(0);
  Worker b = Join(1);
  CreateQueue(2);
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  // It continues after the samples that it has contributed.
  const Worker again = Join(0);
  EXPECT_EQ(Take(again)->offset(), 4);
  EXPECT_EQ(again.place.round(), 1);
  ASSERT_TRUE(Advance(&b, *Take(b), 4).ok());
  const auto round = coordinator_.WaitForRound(
      MemberOf("g", 1, b.place.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok());
  ASSERT_EQ(round->contributions_size(), 2);
  EXPECT_EQ(round->contributions(0).incarnation(), a.place.incarnation());
  EXPECT_EQ(coordinator_.GroupStats("g")->dropped(), 0);
}

TEST_F(WorkQueueCoordinationTest, AContributionStandsThoughAllHaveGone) {
  Worker a = Join(0);
  CreateQueue(1);
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  Leave(a);
  const Worker again = Join(0);
  EXPECT_EQ(Take(again)->offset(), 4);
  const Worker b = Join(1);
  ASSERT_TRUE(coordinator_
                  .Arrive(ArrivalOf(MemberOf("g", 1, b.place.incarnation()),
                                    b.place.clock(), b.place.round(), 1.0))
                  .ok());
  const auto round = coordinator_.WaitForRound(
      MemberOf("g", 1, b.place.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->contributions_size(), 2);
}

TEST_F(WorkQueueCoordinationTest, WhatARoundThatNeverClosesHasIsTakenAgain) {
  Worker a = Join(0);
  CreateQueue(1);
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  Leave(a);
  // Another job of this name, for which the open round is gone.
  ASSERT_TRUE(coordinator_.CreateGroup("g", {}).ok());
  EXPECT_EQ(Take(Join(0))->offset(), 0);
}

TEST_F(WorkQueueCoordinationTest, WhatARoundThatHasClosedHasIsNotLost) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1);
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  Leave(a);
  Leave(b);  // Closes the round, and nobody is left to have it applied.
  WorkerGroupOptions others;
  others.num_workers = 3;
  ASSERT_TRUE(coordinator_.CreateGroup("g", others).ok());

  const Worker again = Join(0);
  EXPECT_EQ(again.place.round(), 1);
  const auto round = coordinator_.WaitForRound(
      MemberOf("g", 0, again.place.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok()) << round.status();
  ASSERT_EQ(round->contributions_size(), 1);
  EXPECT_EQ(round->contributions(0).incarnation(), a.place.incarnation());
  // The servers take it for a round of the same coordinator.
  EXPECT_EQ(round->group_instance(), a.place.incarnation());
  EXPECT_EQ(Take(again)->offset(), 4);
}

TEST_F(WorkQueueCoordinationTest,
       AGroupThatBeginsAnewReturnsItemsAndOpenSteps) {
  Worker a = Join(0);
  CreateQueue(1);
  Join(1);
  const WorkItem item = *Take(a);
  ASSERT_TRUE(Advance(&a, item, 4).ok());

  const auto anew =
      coordinator_.Join(JoinOf("g", 1, 0, a.place.group_instance() + 1000));

  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_EQ(Take({1, *anew})->offset(), 0);
}

TEST_F(WorkQueueCoordinationTest, TheEpochEndsWhenAllWaitAndAllIsFinished) {
  const Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1, 2);
  const WorkItem item = *Take(a);
  std::thread waiting([&] { EXPECT_TRUE(WaitAtBarrier(b).ok()); });
  ASSERT_TRUE(Finish(a, item).ok());
  EXPECT_FALSE(Take(a).has_value());
  EXPECT_EQ(Epoch(), 0);
  EXPECT_TRUE(WaitAtBarrier(a).ok());
  waiting.join();
  EXPECT_EQ(Epoch(), 1);
  // A lost answer: nobody decides again.
  EXPECT_TRUE(WaitAtBarrier(a).ok());
  EXPECT_EQ(Epoch(), 1);
  EXPECT_TRUE(Take(b).has_value());
}

TEST_F(WorkQueueCoordinationTest, TheEpochGoesOnIfTheLastOneDies) {
  const Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1, 2);
  ASSERT_TRUE(Take(a).has_value());
  std::thread waiting([&] { EXPECT_TRUE(WaitAtBarrier(b).ok()); });
  WaitForWaiting(&coordinator_, 1);
  Leave(a);  // The same event opens the barrier and returns the item.
  waiting.join();
  EXPECT_EQ(Epoch(), 0);
  EXPECT_TRUE(Take(b).has_value());
}

TEST_F(WorkQueueCoordinationTest, WhoWaitsTakesOverWhileOthersStillWork) {
  const Worker a = Join(0);
  Worker b = Join(1);
  const Worker c = Join(2);
  CreateQueue(2);
  const WorkItem of_b = *Take(b);
  ASSERT_TRUE(Take(c).has_value());
  EXPECT_FALSE(Take(a).has_value());
  std::optional<WorkerGroup::Place> after;
  std::thread waiting([&] {
    const auto place = coordinator_.WaitAtBarrier(
        VisitOf(MemberOf("g", 0, a.place.incarnation()), WorkQueueBarrier("q"),
                0),
        Soon());
    EXPECT_TRUE(place.ok()) << place.status();
    if (place.ok()) after = *place;
  });
  WaitForWaiting(&coordinator_, 1);
  EXPECT_TRUE(coordinator_
                  .Arrive(ArrivalOf(MemberOf("g", 1, b.place.incarnation()), 0,
                                    WorkerGroup::kNoRound, 1.0,
                                    {ProgressOf("q", 0, of_b.index(), 3)}))
                  .ok());
  Leave(c);  // B goes on with its own item.
  waiting.join();
  EXPECT_EQ(Take(a)->index(), 1);
  ASSERT_TRUE(after.has_value());
  EXPECT_EQ(after->clock(), 1);
  EXPECT_EQ(after->round(), 0);
}

TEST_F(WorkQueueCoordinationTest, OneFromAnEpochThatIsOverDoesNotWait) {
  const Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1, 2);
  ASSERT_TRUE(Finish(a, *Take(a)).ok());
  std::thread waiting([&] { EXPECT_TRUE(WaitAtBarrier(b).ok()); });
  EXPECT_TRUE(WaitAtBarrier(a).ok());
  waiting.join();
  ASSERT_EQ(Epoch(), 1);
  // It was away for its lease, and has not heard that the barrier opened.
  const Worker again = Join(1);
  EXPECT_TRUE(WaitAtBarrier(again).ok());
  EXPECT_EQ(coordinator_.GroupStats("g")->num_waiting(), 0);
}

TEST_F(WorkQueueCoordinationTest, AnotherBarrierEndsNoEpoch) {
  const Worker a = Join(0);
  Leave(Join(1));
  CreateQueue(1, 2);
  ASSERT_TRUE(Finish(a, *Take(a)).ok());
  ASSERT_TRUE(
      coordinator_
          .WaitAtBarrier(
              VisitOf(MemberOf("g", 0, a.place.incarnation()), "saved", 0),
              Soon())
          .ok());
  EXPECT_EQ(Epoch(), 0);
  ASSERT_TRUE(WaitAtBarrier(a, 1).ok());
  EXPECT_EQ(Epoch(), 1);
}

TEST_F(WorkQueueCoordinationTest, ASaveHasNothingOfOpenRounds) {
  Worker a = Join(0);
  Worker b = Join(1);
  CreateQueue(2);
  const WorkItem of_a = *Take(a);
  const WorkItem of_b = *Take(b);
  ASSERT_TRUE(Advance(&a, of_a, 4).ok());
  const auto unfinished = [this] {
    const SavedWorkQueue saved = coordinator_.SaveWorkQueues().queues(0);
    return std::map<int64_t, int64_t>(saved.unfinished().begin(),
                                      saved.unfinished().end());
  };
  EXPECT_THAT(unfinished(), ElementsAre(Pair(0, 0), Pair(1, 0)));
  ASSERT_TRUE(Advance(&b, of_b, 3).ok());  // Closes the round.
  EXPECT_THAT(unfinished(), ElementsAre(Pair(0, 4), Pair(1, 3)));
}

TEST_F(WorkQueueCoordinationTest, ARestoredQueueGoesOnInANewServer) {
  Worker a = Join(0);
  Worker b = Join(1);
  CreateQueue(3, 2);
  ASSERT_TRUE(Finish(a, *Take(a)).ok());
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  ASSERT_TRUE(Advance(&b, *Take(b), 0).ok());
  const auto saved = coordinator_.SaveWorkQueues();

  Coordinator other;
  ASSERT_TRUE(other.CheckRestore(saved).ok());
  other.RestoreWorkQueues(saved, /*voids_open_steps=*/false);
  EXPECT_EQ(other.WorkQueueStats("g", "q")->num_finished(), 1);
  ASSERT_TRUE(other.CreateGroup("g", {}).ok());
  const absl::Status differs =
      other.CreateWorkQueue(QueueOf("g", "q", QueueOptions(3, 1)));
  EXPECT_EQ(differs.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(differs.message(), HasSubstr("epochs: 2 here, 1 asked"));
  ASSERT_TRUE(
      other.CreateWorkQueue(QueueOf("g", "q", QueueOptions(3, 2))).ok());
  const uint64_t incarnation = other.Join(JoinOf("g", 5))->incarnation();
  const WorkItem item =
      **other.TakeWorkItem(TakeOf(MemberOf("g", 5, incarnation), "q"));
  EXPECT_EQ(item.index(), 1);
  EXPECT_EQ(item.offset(), 4);
  EXPECT_EQ(other.WorkQueueStats("g", "q")->num_finished(), 1);
}

TEST_F(WorkQueueCoordinationTest, ARestoreTakesItemsFromTheirWorkers) {
  Worker a = Join(0);
  Join(1);
  CreateQueue(1);
  const auto saved = coordinator_.SaveWorkQueues();
  const WorkItem item = *Take(a);
  coordinator_.RestoreWorkQueues(saved, /*voids_open_steps=*/false);
  // Its step does not count, as somebody takes all of it again.
  EXPECT_EQ(Advance(&a, item, 4).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Finish(a, item).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Take(a)->offset(), 0);
}

TEST_F(WorkQueueCoordinationTest, WhatARestoreHandsOutAgainCountsForNothing) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1);
  ASSERT_TRUE(
      coordinator_.CreateWorkQueue(QueueOf("g", "other", QueueOptions(1)))
          .ok());
  const auto saved = coordinator_.SaveWorkQueues();
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());  // And waits for B's step.
  coordinator_.RestoreWorkQueues(saved, /*voids_open_steps=*/false);
  ASSERT_TRUE(coordinator_
                  .Arrive(ArrivalOf(MemberOf("g", 1, b.place.incarnation()),
                                    b.place.clock(), b.place.round(), 3.0))
                  .ok());
  const auto round = coordinator_.WaitForRound(
      MemberOf("g", 0, a.place.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok()) << round.status();
  ASSERT_EQ(round->contributions_size(), 2);
  EXPECT_EQ(round->contributions(0).weight(), 0.0);
  EXPECT_EQ(round->total_weight(), 3.0);
  EXPECT_EQ(Take(b)->offset(), 0);
}

TEST_F(WorkQueueCoordinationTest, AVoidStepsItemIsTakenFromWhoeverHasIt) {
  Worker a = Join(0);
  Join(1);
  CreateQueue(1);
  const WorkItem item = *Take(a);
  ASSERT_TRUE(Advance(&a, item, 5).ok());

  coordinator_.RestoreWorkQueues({}, /*voids_open_steps=*/true);

  EXPECT_EQ(Finish(a, item).code(), absl::StatusCode::kFailedPrecondition);
  const WorkItem again = *Take(a);
  EXPECT_EQ(again.offset(), 0);
  EXPECT_TRUE(Finish(a, again).ok());
  EXPECT_EQ(coordinator_.WorkQueueStats("g", "q")->num_finished(), 1);
}

TEST_F(WorkQueueCoordinationTest, ARestoreOfOtherQueuesLeavesAStepAlone) {
  Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1);
  ASSERT_TRUE(
      coordinator_.CreateWorkQueue(QueueOf("g", "other", QueueOptions(1)))
          .ok());
  auto saved = coordinator_.SaveWorkQueues();
  ASSERT_EQ(saved.queues(0).queue(), "other");
  saved.mutable_queues()->RemoveLast();
  ASSERT_TRUE(Advance(&a, *Take(a), 4).ok());
  coordinator_.RestoreWorkQueues(saved, /*voids_open_steps=*/false);
  ASSERT_TRUE(coordinator_
                  .Arrive(ArrivalOf(MemberOf("g", 1, b.place.incarnation()),
                                    b.place.clock(), b.place.round(), 3.0))
                  .ok());
  const auto round = coordinator_.WaitForRound(
      MemberOf("g", 0, a.place.incarnation()), 0, Soon());
  ASSERT_TRUE(round.ok()) << round.status();
  EXPECT_EQ(round->total_weight(), 4.0);
}

TEST_F(WorkQueueCoordinationTest, ARestoreWakesThoseWhoWaitForTheEpochsEnd) {
  const Worker a = Join(0);
  const Worker b = Join(1);
  CreateQueue(1);
  const auto saved = coordinator_.SaveWorkQueues();
  ASSERT_TRUE(Take(a).has_value());
  std::thread waiting([&] { EXPECT_TRUE(WaitAtBarrier(b).ok()); });
  WaitForWaiting(&coordinator_, 1);
  coordinator_.RestoreWorkQueues(saved, /*voids_open_steps=*/false);
  waiting.join();
  EXPECT_TRUE(Take(b).has_value());
}

TEST_F(WorkQueueCoordinationTest, AQueueThatIsThereWithOtherItemsIsKept) {
  CreateQueue(2);
  auto saved = coordinator_.SaveWorkQueues();
  SavedWorkQueue& first = *saved.mutable_queues(0);
  first.mutable_options()->set_items(1, "x");
  const absl::Status status = coordinator_.CheckRestore(saved);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("item 1: '1' here, 'x'"));
  first.set_queue("other");
  EXPECT_TRUE(coordinator_.CheckRestore(saved).ok());
  first.set_num_taken(3);
  EXPECT_EQ(coordinator_.CheckRestore(saved).code(),
            absl::StatusCode::kDataLoss);
  first.set_num_taken(0);
  first.mutable_options()->clear_items();
  const absl::Status damaged = coordinator_.CheckRestore(saved);
  EXPECT_EQ(damaged.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(damaged.message(),
              HasSubstr("saved work queue 'other' of group 'g': "));
}

TEST_F(WorkQueueCoordinationTest, ErrorsNameWhatIsMissing) {
  const Worker a = Join(0);
  EXPECT_EQ(coordinator_.CreateWorkQueue(QueueOf("other", "q", QueueOptions(1)))
                .code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(
      coordinator_.CreateWorkQueue(QueueOf("g", "", QueueOptions(1))).code(),
      absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(coordinator_.CreateWorkQueue(QueueOf("g", "q", {})).code(),
            absl::StatusCode::kInvalidArgument);
  const absl::Status no_queue =
      coordinator_
          .TakeWorkItem(TakeOf(MemberOf("g", 0, a.place.incarnation()), "q"))
          .status();
  EXPECT_EQ(no_queue.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(no_queue.message(), HasSubstr("no work queue 'q'"));
  // As after a restart, when the group is not there either.
  EXPECT_EQ(Coordinator().WorkQueueStats("g", "q").status(), no_queue);
  CreateQueue(1);
  EXPECT_EQ(coordinator_.TakeWorkItem(TakeOf(MemberOf("g", 7, 1), "q"))
                .status()
                .code(),
            absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace tfswitch
