#include "cc/shard/gradient_accumulator.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cc/base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr uint64_t kInstance = 10;

uint64_t IncarnationOf(uint32_t worker) { return kInstance + worker; }

StepTag StepOf(uint32_t worker, int64_t clock, const std::string& group = "g") {
  return {group, worker, IncarnationOf(worker), clock};
}

struct PushOf {
  PushOf(std::vector<Key> keys, std::vector<float> gradients)
      : keys(std::move(keys)), gradients(std::move(gradients)) {}
  // One key, one float.
  explicit PushOf(float gradient) : PushOf({1}, {gradient}) {}

  // NOLINTNEXTLINE(google-explicit-constructor): what a stage takes.
  operator StagedPush() const {
    GradientBatch batch;
    batch.keys = keys;
    batch.gradients = gradients;
    batch.learning_rate = 0.5f;
    return StagedPush(batch);
  }

  std::vector<Key> keys;
  std::vector<float> gradients;
};

// The steps of workers, each a (worker, clock), with weights 1, 2, ...; the
// other workers below 50 have gone.
Round RoundOfSteps(int64_t number,
                   const std::vector<std::pair<uint32_t, int64_t>>& steps) {
  std::vector<Contribution> contributions;
  for (const auto& [worker, clock] : steps) {
    contributions.push_back(
        ContributionOf(worker, IncarnationOf(worker), clock,
                       static_cast<double>(contributions.size()) + 1.0));
  }
  Round round = RoundOf(number, contributions, kInstance);
  round.set_next_incarnation(IncarnationOf(50));
  return round;
}

// The round that a worker sends after it has joined, before all other rounds.
Round BeginningOf(uint64_t instance) {
  return RoundOf(WorkerGroup::kNoRound, {}, instance);
}

// Commits, and writes down what is applied: "t/6: 1*[7,8](0.5,0.25) ..." is
// table t, total weight 6, and each push as weight*[keys](gradients).
class Committer {
 public:
  explicit Committer(GradientAccumulator* stage) : stage_(stage) {}

  absl::StatusOr<int64_t> Commit(const Round& round,
                                 const std::string& group = "g") {
    applied_.clear();
    return stage_->Commit(
        group, round,
        [&](const std::string& table, const std::vector<WeightedPush>& pushes,
            double total_weight) {
          std::string line = absl::StrCat(table, "/", total_weight, ":");
          for (const WeightedPush& each : pushes) {
            absl::StrAppend(&line, " ", each.weight, "*[",
                            absl::StrJoin(each.push->keys, ","), "](",
                            absl::StrJoin(each.push->gradients, ","), ")");
          }
          applied_.push_back(line);
          return absl::OkStatus();
        });
  }

  // By the last Commit(), a line for each table.
  const std::vector<std::string>& applied() const { return applied_; }

 private:
  GradientAccumulator* const stage_;
  std::vector<std::string> applied_;
};

TEST(GradientAccumulatorTest, AGroupTooManyIsRefusedAndNamed) {
  GradientAccumulator stage(1);
  ASSERT_TRUE(stage.Add(StepOf(0, 0, "g"), "t", PushOf(1.0f)).ok());

  const absl::Status status = stage.Add(StepOf(0, 0, "h"), "t", PushOf(1.0f));

  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("'h'"), HasSubstr("--max_groups")));
  EXPECT_TRUE(stage.Add(StepOf(1, 0, "g"), "t", PushOf(1.0f)).ok());
}

TEST(GradientAccumulatorTest, ARoundIsAppliedOnceHoweverOftenItIsCommitted) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 0), "t", PushOf(0.5f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(1, 0), "t", PushOf(0.25f)).ok());
  const Round round = RoundOfSteps(0, {{0, 0}, {1, 0}});

  EXPECT_EQ(committer.Commit(round).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/3: 1*[1](0.5) 2*[1](0.25)"));
  EXPECT_EQ(committer.Commit(round).value(), 0);
  EXPECT_THAT(committer.applied(), IsEmpty());
  EXPECT_EQ(stage.num_staged_steps(), 0);

  // A repetition that comes when a later round has been committed.
  EXPECT_EQ(committer.Commit(RoundOfSteps(1, {{0, 1}})).value(), 1);
  EXPECT_EQ(committer.Commit(round).value(), 1);
  EXPECT_THAT(committer.applied(), IsEmpty());
}

TEST(GradientAccumulatorTest, RoundsOfTheLeastNumbersThereAreChangeNothing) {
  constexpr int64_t kLeast = std::numeric_limits<int64_t>::min();
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 0), "t", PushOf(0.5f)).ok());
  Round round = RoundOfSteps(kLeast, {{0, 0}});
  round.set_first_kept(kLeast);

  EXPECT_EQ(committer.Commit(round).value(), WorkerGroup::kNoRound);
  EXPECT_THAT(committer.applied(), IsEmpty());
  EXPECT_EQ(committer.Commit(RoundOfSteps(0, {{0, 0}})).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](0.5)"));
}

TEST(GradientAccumulatorTest, NoRoundFollowsTheLastNumberThereIs) {
  constexpr int64_t kLast = std::numeric_limits<int64_t>::max();
  GradientAccumulator stage;
  Committer committer(&stage);
  Round round = RoundOfSteps(kLast, {});
  round.set_first_kept(kLast);

  EXPECT_EQ(committer.Commit(round).value(), kLast);
  EXPECT_EQ(committer.Commit(RoundOfSteps(0, {})).value(), kLast);
}

TEST(GradientAccumulatorTest, ApplySeesWorkersInOrderWhateverArrivesFirst) {
  struct Arrival {
    StepTag step;
    std::string table;
    PushOf push;
  };
  // Worker 2 pushes twice to one table within a step, as two layers that share
  // it do; the two differ in their keys, then in gradients only.
  const std::vector<Arrival> arrivals = {
      {StepOf(0, 4), "t", PushOf({7, 8}, {0.5f, 0.25f})},
      {StepOf(1, 9), "t", PushOf({7}, {3.0f})},
      {StepOf(2, 0), "t", PushOf({5, 9}, {1.0f, 1.0f})},
      {StepOf(2, 0), "t", PushOf({5, 8}, {1.0f, 1.0f})},
      {StepOf(2, 0), "u", PushOf({5}, {2.0f})},
      {StepOf(2, 0), "u", PushOf({5}, {4.0f})}};
  std::vector<size_t> order = {0, 1, 2, 3, 4, 5};
  std::vector<std::string> expected;
  do {
    GradientAccumulator stage;
    Committer committer(&stage);
    for (const size_t i : order) {
      const Arrival& arrival = arrivals[i];
      ASSERT_TRUE(stage.Add(arrival.step, arrival.table, arrival.push).ok());
    }
    ASSERT_TRUE(
        committer.Commit(RoundOfSteps(0, {{0, 4}, {1, 9}, {2, 0}})).ok());
    if (expected.empty()) {
      expected = committer.applied();
      ASSERT_EQ(expected.size(), 2u);
      EXPECT_THAT(expected[0], HasSubstr("t/6: 1*[7,8](0.5,0.25) 2*[7](3) "
                                         "3*[5,8](1,1) 3*[5,9](1,1)"));
      EXPECT_THAT(expected[1], AllOf(HasSubstr("u/6: "), HasSubstr("3*[5](2)"),
                                     HasSubstr("3*[5](4)")));
    }
    ASSERT_EQ(committer.applied(), expected);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(GradientAccumulatorTest, TwoStepsOfOneWorkerInARoundGoByClock) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 6), "t", PushOf(6.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(0, 5), "t", PushOf(5.0f)).ok());
  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 5}, {0, 6}})).ok());
  EXPECT_THAT(committer.applied(), ElementsAre("t/3: 1*[1](5) 2*[1](6)"));
}

TEST(GradientAccumulatorTest, AStepThatPushedNothingStillWeighs) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(1, 0), "t", PushOf(1.0f)).ok());
  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 0}, {1, 0}})).ok());
  EXPECT_THAT(committer.applied(), ElementsAre("t/3: 2*[1](1)"));
}

TEST(GradientAccumulatorTest, AStepOfWeightZeroCountsForNothing) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 0), "t", PushOf(1.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(1, 0), "t", PushOf(2.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(1, 0), "u", PushOf(3.0f)).ok());
  Round round = RoundOfSteps(0, {{0, 0}, {1, 0}});
  round.mutable_contributions(1)->set_weight(0.0);
  round.set_total_weight(1.0);
  EXPECT_EQ(committer.Commit(round).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
  EXPECT_EQ(stage.num_staged_steps(), 0);
}

TEST(GradientAccumulatorTest, MissingRoundsAreReportedAndComeFirst) {
  GradientAccumulator stage;
  Committer committer(&stage);
  for (int64_t clock = 0; clock < 4; ++clock) {
    ASSERT_TRUE(stage.Add(StepOf(0, clock), "t", PushOf(1.0f)).ok());
  }
  ASSERT_EQ(committer.Commit(RoundOfSteps(0, {{0, 0}})).value(), 0);

  EXPECT_EQ(committer.Commit(RoundOfSteps(3, {{0, 3}})).value(), 0);
  EXPECT_THAT(committer.applied(), IsEmpty());
  EXPECT_EQ(stage.num_staged_steps(), 3);

  for (int64_t number = 1; number < 4; ++number) {
    EXPECT_EQ(committer.Commit(RoundOfSteps(number, {{0, number}})).value(),
              number);
    EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
  }
}

TEST(GradientAccumulatorTest, AServerThatKnowsNoRoundTakesUpTheOneThatIsThere) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 17), "t", PushOf(1.0f)).ok());
  Round round = RoundOfSteps(17, {{0, 17}});
  // First come those that somebody might have staged steps for.
  round.set_first_kept(17);
  EXPECT_EQ(committer.Commit(round).value(), 17);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
}

TEST(GradientAccumulatorTest, TheFirstRoundThatComesNeedNotBeTheFirst) {
  // Who contributed to round 1 was quicker than those of round 0.
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 0), "t", PushOf(1.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(1, 0), "t", PushOf(2.0f)).ok());
  EXPECT_EQ(committer.Commit(RoundOfSteps(1, {{1, 0}})).value(),
            WorkerGroup::kNoRound);
  EXPECT_THAT(committer.applied(), ElementsAre());
  Round first = RoundOfSteps(0, {{0, 0}});
  first.add_active(IncarnationOf(1));
  EXPECT_EQ(committer.Commit(first).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
  EXPECT_EQ(committer.Commit(RoundOfSteps(1, {{1, 0}})).value(), 1);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](2)"));
}

TEST(GradientAccumulatorTest, APushAtAClosedClockIsRefusedWithWorkerAndClock) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(4, 7), "t", PushOf(1.0f)).ok());
  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{4, 7}})).ok());

  for (const int64_t clock : {6, 7}) {
    const absl::Status status = stage.Add(StepOf(4, clock), "t", PushOf(1.0f));
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'t'"), HasSubstr("worker 4"),
                      HasSubstr(absl::StrCat("clock ", clock))));
  }
  EXPECT_EQ(stage.num_staged_steps(), 0);
  EXPECT_TRUE(stage.Add(StepOf(4, 8), "t", PushOf(1.0f)).ok());
}

TEST(GradientAccumulatorTest, AStepThatCameTooLateForItsRoundIsGivenUp) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 3), "t", PushOf(3.0f)).ok());  // Dropped.
  ASSERT_TRUE(stage.Add(StepOf(0, 4), "t", PushOf(4.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(0, 5), "t", PushOf(5.0f)).ok());  // Next round.

  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 4}})).ok());

  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](4)"));
  EXPECT_EQ(stage.num_staged_steps(), 1);
}

TEST(GradientAccumulatorTest, StepsOfWorkersThatHaveGoneAreGivenUp) {
  GradientAccumulator stage;
  Committer committer(&stage);
  const StepTag newcomer = StepOf(50, 0);  // Joined after the round closed.
  for (const StepTag& step : {StepOf(0, 0), StepOf(3, 0), newcomer}) {
    ASSERT_TRUE(stage.Add(step, "t", PushOf(1.0f)).ok());
  }

  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 0}})).ok());

  EXPECT_EQ(stage.num_staged_steps(), 1);
  // Pushes of the worker that has gone are dropped without an error: it learns
  // of its end when its step ends.
  EXPECT_TRUE(stage.Add(StepOf(3, 1), "t", PushOf(1.0f)).ok());
  EXPECT_EQ(stage.num_staged_steps(), 1);
  Round next = RoundOfSteps(1, {{50, 0}});
  next.set_next_incarnation(IncarnationOf(51));
  EXPECT_EQ(committer.Commit(next).value(), 1);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
}

TEST(GradientAccumulatorTest, OneThatIsThereAndDidNotContributeKeepsItsStep) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(3, 0), "t", PushOf(1.0f)).ok());
  Round round = RoundOfSteps(0, {{0, 0}});
  round.add_active(IncarnationOf(3));
  ASSERT_TRUE(committer.Commit(round).ok());
  EXPECT_EQ(stage.num_staged_steps(), 1);
}

TEST(GradientAccumulatorTest, ACoordinatorThatWasStartedAgainCountsFromZero) {
  GradientAccumulator stage;
  Committer committer(&stage);
  for (int64_t number = 0; number < 3; ++number) {
    ASSERT_TRUE(committer.Commit(RoundOfSteps(number, {{0, number}})).ok());
  }
  ASSERT_TRUE(stage.Add(StepOf(0, 3), "t", PushOf(1.0f)).ok());  // Never ends.
  StepTag step = StepOf(0, 0);
  step.incarnation = 1000;
  ASSERT_TRUE(stage.Add(step, "t", PushOf(2.0f)).ok());
  Round anew = RoundOf(0, {ContributionOf(0, 1000, 0, 1.0)}, 1000);

  EXPECT_EQ(committer.Commit(BeginningOf(1000)).value(), WorkerGroup::kNoRound);
  EXPECT_EQ(committer.Commit(anew).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](2)"));
  EXPECT_EQ(stage.num_staged_steps(), 0);

  // A worker of before, that has not heard of it.
  const absl::Status old = committer.Commit(RoundOfSteps(3, {{0, 3}})).status();
  EXPECT_EQ(old.code(), absl::StatusCode::kAborted);
  EXPECT_THAT(std::string(old.message()),
              AllOf(HasSubstr("'g'"), HasSubstr("join again")));
  EXPECT_THAT(committer.applied(), IsEmpty());
  anew.set_number(1);
  EXPECT_EQ(committer.Commit(anew).value(), 1);
  // Each worker that joins sends one.
  EXPECT_EQ(committer.Commit(BeginningOf(1000)).value(), 1);
}

TEST(GradientAccumulatorTest, AGroupThatIsOlderThanTheOneKnownIsToldSo) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 0}})).ok());

  // The clock of a coordinator that was started again was set back.
  const absl::Status refused =
      committer.Commit(BeginningOf(kInstance - 1)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(NewerInstanceOf(refused), kInstance);

  // The group starts again, and staged pushes are kept.
  constexpr uint64_t kNewer = 1000;
  EXPECT_EQ(committer.Commit(BeginningOf(kNewer)).value(),
            WorkerGroup::kNoRound);
  StepTag step = StepOf(0, 0);
  step.incarnation = kNewer;
  ASSERT_TRUE(stage.Add(step, "t", PushOf(2.0f)).ok());
  EXPECT_EQ(stage.num_staged_steps(), 1);
}

TEST(GradientAccumulatorTest, ALateRoundIsRefusedThoughItsInstanceIsGreater) {
  // This server was started again as well, and remembers no other group.
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(committer.Commit(BeginningOf(kInstance)).ok());
  ASSERT_TRUE(stage.Add(StepOf(0, 0), "t", PushOf(1.0f)).ok());

  Round late = RoundOfSteps(0, {{0, 0}});
  late.set_group_instance(1000);
  const absl::Status refused = committer.Commit(late).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(NewerInstanceOf(refused), 0u);

  EXPECT_EQ(committer.Commit(RoundOfSteps(0, {{0, 0}})).value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](1)"));
}

TEST(GradientAccumulatorTest, AllWorkersOfARoundGetItsFirstError) {
  GradientAccumulator stage;
  for (const char* table : {"a", "b", "c"}) {
    ASSERT_TRUE(stage.Add(StepOf(0, 0), table, PushOf(1.0f)).ok());
  }
  std::vector<std::string> applied;
  const auto fail = [&](const std::string& table,
                        const std::vector<WeightedPush>& pushes,
                        double total_weight) {
    applied.push_back(table);
    return table == "a" ? absl::OkStatus() : absl::InternalError(table);
  };
  const Round round = RoundOfSteps(0, {{0, 0}});
  for (int worker = 0; worker < 3; ++worker) {
    const absl::Status status = stage.Commit("g", round, fail).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_EQ(status.message(), "b");
  }
  EXPECT_THAT(applied, ElementsAre("a", "b", "c"));

  // It counts as committed: the next one may come.
  EXPECT_EQ(stage.Commit("g", RoundOfSteps(1, {{0, 1}}), fail).value(), 1);
  EXPECT_EQ(stage.Commit("g", round, fail).value(), 1);
}

TEST(GradientAccumulatorTest, GroupsDoNotDisturbEachOther) {
  GradientAccumulator stage;
  Committer committer(&stage);
  ASSERT_TRUE(stage.Add(StepOf(0, 0, "g"), "t", PushOf(1.0f)).ok());
  ASSERT_TRUE(stage.Add(StepOf(0, 0, "h"), "t", PushOf(2.0f)).ok());

  ASSERT_TRUE(committer.Commit(RoundOfSteps(0, {{0, 0}}), "g").ok());

  EXPECT_EQ(stage.num_staged_steps(), 1);
  EXPECT_FALSE(stage.Add(StepOf(0, 0, "g"), "t", PushOf(1.0f)).ok());
  EXPECT_TRUE(stage.Add(StepOf(0, 1, "h"), "t", PushOf(1.0f)).ok());
  EXPECT_EQ(committer.Commit(RoundOfSteps(0, {{0, 0}}), "h").value(), 0);
  EXPECT_THAT(committer.applied(), ElementsAre("t/1: 1*[1](2)"));
}

// All threads come to Wait() before any goes on.
class Barrier {
 public:
  explicit Barrier(int num_threads) : num_threads_(num_threads) {}

  void Wait() {
    MutexLock lock(&mutex_);
    const int64_t turn = turn_;
    if (++num_waiting_ == num_threads_) {
      num_waiting_ = 0;
      ++turn_;
      changed_.NotifyAll();
    }
    while (turn_ == turn) changed_.Wait(&mutex_);
  }

 private:
  const int num_threads_;
  Mutex mutex_;
  CondVar changed_;
  int num_waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t turn_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(GradientAccumulatorTest, ManyThreadsAddAndCommit) {
  constexpr uint32_t kWorkers = 4;
  constexpr int64_t kRounds = 200;
  GradientAccumulator stage;
  // There are two groups, for which the same threads work in turn.
  const std::string groups[] = {"g", "h"};
  Barrier barrier(kWorkers);
  std::atomic<int64_t> num_applied{0};
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      for (int64_t number = 0; number < kRounds; ++number) {
        for (const std::string& group : groups) {
          EXPECT_TRUE(
              stage.Add(StepOf(w, number, group), "t", PushOf(1.0f)).ok());
        }
        // Nobody commits before all have arrived; then all do, while the quick
        // ones add to the next round.
        barrier.Wait();
        const Round round = RoundOfSteps(
            number, {{0, number}, {1, number}, {2, number}, {3, number}});
        for (const std::string& group : groups) {
          const absl::StatusOr<int64_t> committed =
              stage.Commit(group, round,
                           [&](const std::string& table,
                               const std::vector<WeightedPush>& pushes,
                               double total_weight) {
                             EXPECT_EQ(pushes.size(), kWorkers);
                             ++num_applied;
                             return absl::OkStatus();
                           });
          ASSERT_TRUE(committed.ok()) << committed.status();
          EXPECT_EQ(*committed, number);
        }
        EXPECT_GE(stage.num_staged_steps(), 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_applied.load(), 2 * kRounds);
  EXPECT_EQ(stage.num_staged_steps(), 0);
}

}  // namespace
}  // namespace tfswitch
