// Work queues as workers see them, in this process, over one server, and over
// three.

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"
#include "cc/client/checkpoints.h"
#include "cc/client/group_session.h"
#include "cc/client/worker_session.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/deadlines.h"
#include "tests/cc/testing/saves.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

using ItemState = WorkerSession::ItemState;

WorkerOptions SessionOptions(uint32_t worker, uint32_t num_workers,
                             ConsistencyKind kind = ConsistencyKind::kBsp) {
  WorkerOptions options;
  options.group = "g";
  options.worker = worker;
  options.group_options.num_workers = num_workers;
  options.consistency = {kind, 0, Reduction::kMean};
  options.group_options.settings = options.consistency.ToString();
  options.wait_timeout = kLong;
  return options;
}

WorkQueueOptions QueueOptions(int num_items, int64_t num_epochs = 1) {
  std::vector<std::string> items;
  for (int i = 0; i < num_items; ++i) {
    items.push_back(std::string(1, static_cast<char>('a' + i)));
  }
  return ItemsOf(items, num_epochs);
}

// The parameter is the number of servers; 0: tables in this process.
class WorkQueueTest : public testing::TestWithParam<int> {
 protected:
  std::unique_ptr<WorkerSession> Join(const WorkerOptions& options) const {
    auto session = WorkerSession::Join(cluster_.Connect(), options);
    EXPECT_TRUE(session.ok()) << session.status();
    return std::move(session).value();
  }

  // The group forgets worker `id`, which does not know.
  void GiveUp(const WorkerSession& session) {
    const auto client = cluster_.Connect();
    GroupClient& groups = client->groups();
    const uint32_t id = session.options().worker;
    const uint64_t incarnation =
        groups.Join("g", id, 0, 0, 0, "")->incarnation();
    ASSERT_TRUE(groups.Leave(MemberOf("g", id, incarnation), kLong).ok());
  }

  const ClusterUnderTest cluster_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Servers, WorkQueueTest, testing::Values(0, 1, 3));

WorkItem Take(WorkerSession& session, const std::string& queue = "q") {
  const auto item = session.TakeWorkItem(queue);
  EXPECT_TRUE(item.ok()) << item.status();
  EXPECT_TRUE(item.ok() && item->has_value());
  return item.ok() && item->has_value() ? **item : WorkItem();
}

TEST_P(WorkQueueTest, ItemsPassOverTheWireWhole) {
  const auto session = Join(SessionOptions(0, 1));
  WorkQueueOptions options = QueueOptions(2, 3);
  options.set_items(0, "gs://bucket/caf\xc3\xa9 %20.csv");
  ASSERT_TRUE(session->CreateWorkQueue("q", options).ok());
  ASSERT_TRUE(session->CreateWorkQueue("q", options).ok());

  const WorkItem item = Take(*session);
  EXPECT_EQ(item.epoch(), 0);
  EXPECT_EQ(item.index(), 0);
  EXPECT_EQ(item.value(), options.items(0));
  EXPECT_EQ(item.offset(), 0);
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 3).ok());
  ASSERT_TRUE(session->EndStep(1.0).ok());
  ASSERT_TRUE(session->FinishWorkItem("q", 0, 0).ok());
  EXPECT_EQ(Take(*session).index(), 1);

  const auto stats = session->WorkQueueStats("q");
  ASSERT_TRUE(stats.ok());
  EXPECT_EQ(stats->epoch(), 0);
  EXPECT_EQ(stats->num_epochs(), 3);
  EXPECT_EQ(stats->num_items(), 2);
  EXPECT_EQ(stats->num_finished(), 1);
  EXPECT_EQ(stats->num_leased(), 1);
  EXPECT_EQ(stats->num_returned(), 0);
  EXPECT_EQ(stats->reissued(), 0);
}

TEST_P(WorkQueueTest, ProgressCountsWithTheEndOfTheStep) {
  for (const ConsistencyKind kind :
       {ConsistencyKind::kAsp, ConsistencyKind::kSsp, ConsistencyKind::kBsp}) {
    const auto session = Join(SessionOptions(0, 1, kind));
    const std::string queue = session->options().consistency.ToString();
    ASSERT_TRUE(session->CreateWorkQueue(queue, QueueOptions(1)).ok());
    Take(*session, queue);
    ASSERT_TRUE(session->AdvanceWorkItem(queue, 0, 0, 3).ok());
    EXPECT_EQ(session->GetItemState(queue, 0, 0), ItemState::kInStep);
    // The step has trained it.
    EXPECT_EQ(Take(*session, queue).offset(), 3);
    const absl::Status early = session->FinishWorkItem(queue, 0, 0);
    EXPECT_EQ(early.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(early.message(), HasSubstr("end the step first"));

    ASSERT_TRUE(session->EndStep(1.0).ok());
    EXPECT_EQ(session->GetItemState(queue, 0, 0), ItemState::kOwn);
    ASSERT_TRUE(session->AdvanceWorkItem(queue, 0, 0, 5).ok());
    ASSERT_TRUE(session->Leave().ok());  // In the midst of a step.
    EXPECT_EQ(session->GetItemState(queue, 0, 0), ItemState::kLost);
    EXPECT_EQ(Take(*session, queue).offset(), 3);
  }
}

TEST_P(WorkQueueTest, AStepThatHasPushedNothingIsTakenBack) {
  const auto session = Join(SessionOptions(0, 1));
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(1)).ok());
  Take(*session);
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 3).ok());
  ASSERT_TRUE(session->EndStep(1.0).ok());
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 5).ok());
  EXPECT_FALSE(session->AdvanceWorkItem("q", 0, 0, 4).ok());
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 3).ok());
  EXPECT_EQ(session->GetItemState("q", 0, 0), ItemState::kOwn);
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 6).ok());
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(1)).ok());
  EXPECT_EQ(Take(*session).offset(), 3);

  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 7).ok());
  ASSERT_TRUE(session->CurrentStep().ok());  // Pushes.
  EXPECT_FALSE(session->AdvanceWorkItem("q", 0, 0, 3).ok());
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(1)).ok());
  EXPECT_EQ(Take(*session).offset(), 7);
}

TEST_P(WorkQueueTest, OneThatWasGivenUpHasLostItsItem) {
  const auto session = Join(SessionOptions(0, 1));
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(2)).ok());
  Take(*session);
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 0, 3).ok());
  GiveUp(*session);

  ASSERT_TRUE(session->EndStep(1.0).ok());  // It does not count.

  EXPECT_EQ(session->GetReport()->dropped_steps(), 1);
  EXPECT_EQ(session->GetItemState("q", 0, 0), ItemState::kLost);
  for (const absl::Status& status : {session->AdvanceWorkItem("q", 0, 0, 4),
                                     session->FinishWorkItem("q", 0, 0)}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(status.message(), HasSubstr("take another one"));
  }
  EXPECT_EQ(Take(*session).offset(), 0);
}

TEST_P(WorkQueueTest, OneThatWasGivenUpComesBackToTakeAndToFinish) {
  const auto session = Join(SessionOptions(0, 1));
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(2)).ok());
  GiveUp(*session);
  EXPECT_EQ(Take(*session).index(), 0);
  GiveUp(*session);
  EXPECT_EQ(session->FinishWorkItem("q", 0, 0).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(session->WorkQueueStats("q")->num_finished(), 0);
  EXPECT_EQ(Take(*session).index(), 0);
}

TEST_P(WorkQueueTest, TablesAndQueuesAreSavedTogether) {
  const std::string path = testing::TempDir() + "/work_queues_" +
                           std::to_string(GetParam()) + "_checkpoint";
  std::filesystem::remove_all(path);
  const auto session = Join(SessionOptions(0, 1));
  const auto client = cluster_.Connect();
  ASSERT_TRUE(session->CreateWorkQueue("q", QueueOptions(3, 2)).ok());
  Take(*session);
  ASSERT_TRUE(session->FinishWorkItem("q", 0, 0).ok());
  Take(*session);
  ASSERT_TRUE(session->AdvanceWorkItem("q", 0, 1, 7).ok());
  ASSERT_TRUE(session->EndStep(1.0).ok());
  ASSERT_TRUE(SaveCheckpoint(*client, SaveTo(path)).ok());
  ASSERT_TRUE(session->FinishWorkItem("q", 0, 1).ok());
  TableConfig config;
  config.name = "t";
  config.dim = 2;
  ASSERT_TRUE(client->CreateTable(config).ok());
  // One of some tables keeps the queues of before.
  ASSERT_TRUE(SaveCheckpoint(*client, SaveTo(path, {"t"})).ok());

  // Other servers, the last of which has no part of the queue.
  const ClusterUnderTest others{GetParam() == 0 ? 0 : 2};
  const auto other_client = others.Connect();
  ASSERT_TRUE(RestoreCheckpoint(*other_client, RestoreFrom(path, {"t"})).ok());
  auto other = *WorkerSession::Join(others.Connect(), SessionOptions(3, 1));
  EXPECT_EQ(other->TakeWorkItem("q").status().code(),
            absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(RestoreCheckpoint(*other_client, RestoreFrom(path)).ok());
  EXPECT_EQ(other->CreateWorkQueue("q", QueueOptions(3, 1)).code(),
            absl::StatusCode::kAlreadyExists);
  ASSERT_TRUE(other->CreateWorkQueue("q", QueueOptions(3, 2)).ok());
  const WorkItem item = Take(*other);
  EXPECT_EQ(item.index(), 1);
  EXPECT_EQ(item.offset(), 7);

  // Back in time in the same servers: the worker begins with what was saved.
  ASSERT_TRUE(other->FinishWorkItem("q", 0, 1).ok());
  Take(*other);
  ASSERT_TRUE(other->AdvanceWorkItem("q", 0, 2, 1).ok());
  ASSERT_TRUE(RestoreCheckpoint(*other_client, RestoreFrom(path)).ok());
  ASSERT_TRUE(other->EndStep(1.0).ok());
  EXPECT_EQ(other->GetItemState("q", 0, 2), ItemState::kLost);
  EXPECT_EQ(Take(*other).index(), 1);

  // Where the queue has other items nothing is restored.
  const ClusterUnderTest third{GetParam()};
  const auto third_client = third.Connect();
  const auto worker =
      *WorkerSession::Join(third.Connect(), SessionOptions(0, 1));
  ASSERT_TRUE(worker->CreateWorkQueue("q", QueueOptions(4, 2)).ok());
  const absl::Status refused =
      RestoreCheckpoint(*third_client, RestoreFrom(path)).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(refused.message(), HasSubstr("number of items: 4 here, 3"));
  EXPECT_TRUE(third_client->ListTables("")->empty());
  std::filesystem::remove_all(path);
}

// Loses arrivals, or their answers, and forgets workers, at random.
class UnreliableGroups final : public GroupClient {
 public:
  UnreliableGroups(GroupClient* groups, uint32_t seed)
      : GroupClient(*groups), random_(seed) {}

  absl::StatusOr<v1::ArriveResponse> ArriveAndWait(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress, int64_t staleness,
      absl::Time deadline) override {
    const uint32_t draw = random_() % 10;
    if (draw == 0) return absl::UnavailableError("not heard");
    if (draw == 1) Leave(member, kLong).IgnoreError();  // Given up.
    auto arrival = GroupClient::ArriveAndWait(member, clock, round, weight,
                                              progress, staleness, deadline);
    if (draw == 2) return absl::UnavailableError("the answer got lost");
    if (draw == 3) Leave(member, kLong).IgnoreError();
    return arrival;
  }
  absl::StatusOr<std::optional<WorkItem>> TakeWorkItem(
      const GroupMember& member, const std::string& queue) override {
    auto item = GroupClient::TakeWorkItem(member, queue);
    if (random_() % 5 == 0) return absl::UnavailableError("lost");
    return item;
  }
  absl::Status FinishWorkItem(const GroupMember& member,
                              const std::string& queue, int64_t epoch,
                              int64_t index) override {
    if (random_() % 10 == 0) Leave(member, kLong).IgnoreError();
    absl::Status status =
        GroupClient::FinishWorkItem(member, queue, epoch, index);
    if (random_() % 5 == 0) return absl::UnavailableError("lost");
    return status;
  }

 private:
  std::mt19937 random_;
};

// Steps by the incarnation and clock that rounds name, and what they train.
using Step = std::pair<uint64_t, int64_t>;
struct Samples {
  int64_t epoch = 0;
  int64_t index = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

TEST(WorkQueueOfUnreliableWorkersTest,
     EverySampleIsInOneRoundThoughCallsAndWorkersGetLost) {
  constexpr int kItems = 5;
  constexpr int64_t kEpochs = 2;
  constexpr int64_t kSamples = 12;
  constexpr uint32_t kWorkers = 3;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    const ClusterUnderTest cluster(0);
    Mutex mutex;
    std::map<Step, std::pair<Samples, double>> steps;
    std::vector<std::thread> threads;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      threads.emplace_back([&, w] {
        std::mt19937 random(100 * seed + w);
        const auto client = cluster.Connect();
        UnreliableGroups unreliable(&client->groups(), 10 * seed + w);
        const std::shared_ptr<GroupClient> groups(client, &unreliable);
        const WorkerOptions options = SessionOptions(w, kWorkers);
        auto session =
            *GroupSession::Join(groups, "g", options.group_options, w);
        ASSERT_TRUE(
            groups->CreateWorkQueue("g", "q", QueueOptions(kItems, kEpochs))
                .ok());
        const auto come_back = [&] {
          absl::Status joined;
          do {
            joined = session->Rejoin();
            const int64_t last = session->state().round - 1;
            if (joined.ok() && last >= 0) {
              joined = session->FetchRound(last, kLong).status();
            }
          } while (absl::IsNotFound(joined));
          ASSERT_TRUE(joined.ok()) << joined;
        };
        std::optional<WorkItem> item;
        for (;;) {
          if (!item.has_value()) {
            const auto taken =
                groups->TakeWorkItem(session->state().member, "q");
            if (absl::IsNotFound(taken.status())) {
              come_back();
              continue;
            }
            if (!taken.ok()) continue;
            item = *taken;
            if (item.has_value()) continue;
            if (groups->WorkQueueStats("g", "q")->epoch() == kEpochs) break;
            const absl::Status waited =
                session->WaitAtBarrier(WorkQueueBarrier("q"), kLong);
            if (absl::IsNotFound(waited)) {
              come_back();
            } else {
              ASSERT_TRUE(waited.ok()) << waited;
            }
            continue;
          }
          if (item->offset() == kSamples) {
            const absl::Status finished = groups->FinishWorkItem(
                session->state().member, "q", item->epoch(), item->index());
            if (absl::IsNotFound(finished)) come_back();
            if (!absl::IsUnavailable(finished)) item.reset();
            continue;
          }
          const int64_t end =
              std::min<int64_t>(kSamples, item->offset() + 1 + random() % 5);
          const double weight = static_cast<double>(end - item->offset());
          {
            MutexLock lock(&mutex);
            steps[{session->state().member.incarnation(),
                   session->state().clock}] = {
                {item->epoch(), item->index(), item->offset(), end}, weight};
          }
          absl::StatusOr<Round> round;
          do {
            round = session->EndStepAndWaitForRound(
                weight, kLong,
                {ProgressOf("q", item->epoch(), item->index(), end)});
          } while (absl::IsUnavailable(round.status()));
          if (absl::IsNotFound(round.status())) {
            come_back();
            item.reset();
            continue;
          }
          ASSERT_TRUE(round.ok()) << round.status();
          item->set_offset(end);
        }
        ASSERT_TRUE(session->Leave().ok());
      });
    }
    for (std::thread& thread : threads) thread.join();

    // Rounds that nobody has seen close are asked for.
    const auto client = cluster.Connect();
    GroupClient& groups = client->groups();
    const GroupMember member =
        MemberOf("g", 9, groups.Join("g", 9, 0, 0, 0, "")->incarnation());
    const int64_t num_rounds =
        groups.GroupStats("g", absl::Minutes(1))->rounds();
    std::map<std::pair<int64_t, int64_t>, std::vector<int>> counts;
    for (int64_t number = 0; number < num_rounds; ++number) {
      const auto round =
          groups.WaitForRound(member, number, SteadyNow() + kLong);
      ASSERT_TRUE(round.ok()) << round.status();
      for (const Contribution& each : round->contributions()) {
        const auto [samples, weight] =
            steps.at({each.incarnation(), each.clock()});
        EXPECT_EQ(each.weight(), weight);
        std::vector<int>& count = counts[{samples.epoch, samples.index}];
        count.resize(kSamples);
        for (int64_t i = samples.begin; i < samples.end; ++i) ++count[i];
      }
    }
    EXPECT_EQ(groups.GroupStats("g", absl::Minutes(1))->dropped(), 0);
    ASSERT_EQ(counts.size(), static_cast<size_t>(kItems * kEpochs));
    for (const auto& [item, count] : counts) {
      EXPECT_THAT(count, testing::Each(1))
          << "epoch " << item.first << ", item " << item.second;
    }
  }
}

}  // namespace
}  // namespace tfswitch
