// A coordinator's log: with a save and the records after it another coordinator
// is as the first one was.

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/steady_clock.h"
#include "cc/sync/coordinator.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"

namespace tfswitch {
namespace {

// All that can be told about a coordinator.
std::string StateOf(Coordinator& coordinator) {
  return absl::StrCat(coordinator.SaveWorkQueues().DebugString(), "\n",
                      coordinator.SaveGroups().DebugString());
}

// Keeps the records of a coordinator, and a save.
class Logged {
 public:
  Logged() {
    coordinator_.StartLog(
        [this](absl::string_view event) {
          if (refuses_) return absl::ResourceExhaustedError("disk full");
          events_.emplace_back(event);
          return absl::OkStatus();
        },
        /*gate=*/nullptr);
  }

  Coordinator* operator->() { return &coordinator_; }
  void Refuse(bool refuses) { refuses_ = refuses; }
  size_t num_events() const { return events_.size(); }

  void Save() {
    queues_ = coordinator_.SaveWorkQueues();
    groups_ = coordinator_.SaveGroups();
    num_saved_ = events_.size();
  }

  // The state that a replay brings must be that of the coordinator.
  void ExpectSameAfterReplay() {
    Coordinator other;
    ASSERT_TRUE(other.CheckRestore(queues_).ok());
    other.RestoreWorkQueues(queues_, /*voids_open_steps=*/false);
    const absl::Status restored = other.RestoreGroups(groups_);
    ASSERT_TRUE(restored.ok()) << restored;
    for (size_t i = num_saved_; i < events_.size(); ++i) {
      const absl::Status replayed = other.Replay(events_[i]);
      ASSERT_FALSE(absl::IsDataLoss(replayed)) << replayed << events_[i];
    }
    EXPECT_EQ(StateOf(other), StateOf(coordinator_));
  }

 private:
  bool refuses_ = false;
  std::vector<std::string> events_;
  v1::SavedWorkQueues queues_;
  v1::SavedGroups groups_;
  size_t num_saved_ = 0;
  Coordinator coordinator_;
};

// A worker that does what comes to its mind.
struct RandomWorker {
  GroupMember member;
  int64_t clock = 0;
  int64_t round = 0;
  int64_t barrier_generation = 0;
  std::optional<WorkItem> item;

  void Place(const WorkerGroup::Place& place) {
    member.set_incarnation(place.incarnation());
    clock = place.clock();
    round = place.round();
    barrier_generation = 0;
    item.reset();
  }
};

TEST(CoordinatorReplayTest, AnyCallsBringTheSameStateAgain) {
  const auto seed = std::random_device()();
  SCOPED_TRACE(absl::StrCat("seed ", seed));
  std::mt19937 random(seed);
  const auto draw = [&](int below) {
    return static_cast<int>(random() % static_cast<unsigned>(below));
  };
  for (int run = 0; run < 60; ++run) {
    Logged logged;
    WorkerGroupOptions options;
    options.num_workers = static_cast<uint32_t>(draw(4));
    if (options.num_workers > 0 && draw(2) == 0) {
      options.contributions_per_round = static_cast<uint32_t>(draw(6));
      options.carries_late_contributions = draw(2) == 0;
    }
    // Leases end within a run; and the time for others to join.
    options.lease = absl::Milliseconds(1 + draw(3));
    options.join_timeout = absl::Milliseconds(draw(3));
    ASSERT_TRUE(logged->CreateGroup("g", options).ok());
    WorkQueueOptions queue = ItemsOf({"a", "b", "c", "d"}, 3);
    queue.set_shuffle(draw(2) == 0);
    ASSERT_TRUE(logged->CreateWorkQueue(QueueOf("g", "q", queue)).ok());
    std::vector<RandomWorker> workers(3);
    for (uint32_t i = 0; i < workers.size(); ++i) {
      workers[i].member = MemberOf("g", i, 0);
    }
    const int save_at = draw(200);
    for (int i = 0; i < 200; ++i) {
      if (i == save_at) logged.Save();
      RandomWorker& worker = workers[static_cast<size_t>(draw(3))];
      const GroupMember member = worker.member;
      switch (draw(12)) {
        case 0: {
          const auto place = logged->Join(JoinOf(
              "g", member.worker(), draw(2) == 0 ? member.incarnation() : 0,
              draw(20) == 0 ? member.incarnation() : 0, draw(5),
              draw(20) == 0 ? "k" : "j"));
          if (absl::IsAlreadyExists(place.status())) break;
          ASSERT_TRUE(place.ok()) << place.status();
          worker.Place(*place);
          break;
        }
        case 1:
          if (draw(4) == 0) {
            ASSERT_TRUE(logged->Leave(member).ok());
          }
          break;
        case 2: {
          const std::string barrier =
              draw(2) == 0 ? WorkerGroup::kEndOfEpoch : WorkQueueBarrier("q");
          const auto place = logged->WaitAtBarrier(
              VisitOf(member, barrier, worker.barrier_generation),
              absl::InfinitePast());
          if (place.ok()) {
            ++worker.barrier_generation;
            worker.clock = place->clock();
            worker.round = place->round();
          }
          break;
        }
        case 3:
        case 4: {
          const auto item = logged->TakeWorkItem(TakeOf(member, "q"));
          if (item.ok()) worker.item = *item;
          break;
        }
        case 5:
          if (!worker.item.has_value()) break;
          (void)logged->FinishWorkItem(FinishOf(
              member, "q", worker.item->epoch(), worker.item->index()));
          worker.item.reset();
          break;
        case 6:
          absl::SleepFor(absl::Microseconds(draw(300)));
          (void)logged->Heartbeat(member);
          break;
        case 7: {
          WorkerGroupOptions others = options;
          others.settings = absl::StrCat(draw(3));
          (void)logged->CreateGroup("g", others);
          break;
        }
        default: {
          std::vector<WorkProgress> progress;
          if (worker.item.has_value() && draw(2) == 0) {
            worker.item->set_offset(worker.item->offset() + 1 + draw(3));
            progress.push_back(ProgressOf("q", worker.item->epoch(),
                                          worker.item->index(),
                                          worker.item->offset()));
          }
          worker.member.set_mark(worker.member.mark() + draw(2));
          const auto open = logged->Arrive(
              ArrivalOf(worker.member, worker.clock,
                        draw(5) == 0 ? WorkerGroup::kNoRound : worker.round,
                        1.0 / (1 + draw(5)), progress));
          if (!open.ok()) break;
          ++worker.clock;
          worker.round = *open;
        }
      }
    }
    ASSERT_NO_FATAL_FAILURE(logged.ExpectSameAfterReplay());
  }
}

TEST(CoordinatorReplayTest, WhatTheLogRefusesHasNotHappened) {
  Logged logged;
  ASSERT_TRUE(logged->CreateGroup("g", {}).ok());
  const auto place = logged->Join(JoinOf("g", 0));
  ASSERT_TRUE(place.ok());
  const GroupMember member = MemberOf("g", 0, place->incarnation());
  const WorkQueueOptions queue = ItemsOf({"a", "b"});
  ASSERT_TRUE(logged->CreateWorkQueue(QueueOf("g", "q", queue)).ok());
  const auto item = logged->TakeWorkItem(TakeOf(member, "q"));
  ASSERT_TRUE(item.ok() && item->has_value());
  const std::string before = StateOf(*logged.operator->());

  logged.Refuse(true);
  const auto refused = [](const absl::Status& status) {
    return absl::IsResourceExhausted(status);
  };
  EXPECT_TRUE(refused(logged->CreateGroup("h", {})));
  EXPECT_TRUE(refused(logged->Join(JoinOf("g", 1)).status()));
  EXPECT_TRUE(refused(logged->Arrive(ArrivalOf(member, 0, 0, 1.0)).status()));
  EXPECT_TRUE(refused(logged->FinishWorkItem(FinishOf(member, "q", 0, 0))));
  EXPECT_TRUE(refused(logged->TakeWorkItem(TakeOf(member, "q")).status()));
  EXPECT_TRUE(refused(logged->CreateWorkQueue(QueueOf("g", "r", queue))));
  EXPECT_TRUE(refused(
      logged->WaitAtBarrier(VisitOf(member, "b", 0), absl::InfinitePast())
          .status()));
  EXPECT_TRUE(refused(logged->Leave(member)));
  EXPECT_EQ(StateOf(*logged.operator->()), before);

  logged.Refuse(false);
  EXPECT_TRUE(logged->Arrive(ArrivalOf(member, 0, 0, 1.0)).ok());
  EXPECT_TRUE(logged->FinishWorkItem(FinishOf(member, "q", 0, 0)).ok());
  logged.ExpectSameAfterReplay();
}

TEST(CoordinatorReplayTest, RepetitionsAndHeartbeatsAreNotLogged) {
  Logged logged;
  ASSERT_TRUE(logged->CreateGroup("g", {}).ok());
  const auto place = logged->Join(JoinOf("g", 0));
  const GroupMember member = MemberOf("g", 0, place->incarnation());
  ASSERT_TRUE(logged->Arrive(ArrivalOf(member, 0, 0, 1.0)).ok());
  const size_t num_events = logged.num_events();

  for (int i = 0; i < 5; ++i) {
    EXPECT_TRUE(logged->CreateGroup("g", {}).ok());
    EXPECT_TRUE(logged->Heartbeat(member).ok());
    EXPECT_TRUE(logged->Arrive(ArrivalOf(member, 0, 0, 1.0)).ok());
    EXPECT_TRUE(
        logged->WaitForRound(member, 0, absl::InfinitePast()).status().ok());
  }

  EXPECT_EQ(logged.num_events(), num_events);
}

TEST(CoordinatorReplayTest, ARecordThatNoCallHasWrittenIsAnError) {
  Coordinator coordinator;
  ASSERT_TRUE(coordinator.CreateGroup("g", {}).ok());

  std::vector<v1::CoordinationRecord> records(3);  // The first has no change.
  // A queue of no epochs, and a group without a lease.
  *records[1].mutable_create_work_queue() =
      QueueOf("g", "q", ItemsOf({"a"}, 0));
  records[2].mutable_create_group()->set_group("h");
  for (const v1::CoordinationRecord& record : records) {
    EXPECT_TRUE(
        absl::IsDataLoss(coordinator.Replay(record.SerializeAsString())))
        << record.DebugString();
  }
  EXPECT_TRUE(absl::IsDataLoss(coordinator.Replay("no message")));
}

}  // namespace
}  // namespace tfswitch
