// WorkerSession with tables in this process, on one server, and on three.

#include "cc/client/worker_session.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/interrupt.h"
#include "cc/base/steady_clock.h"
#include "cc/client/done_call.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/rpc/server_under_test.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/forwarding_client.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr int kDim = 4;

// Passes calls on until it dies: from then on nobody hears of it.
class MortalGroups final : public GroupClient {
 public:
  explicit MortalGroups(GroupClient* groups) : GroupClient(*groups) {}

  void Die() { is_dead_ = true; }
  void FailNextArrival(bool is_heard) {
    fails_next_arrival_ = true;
    is_heard_ = is_heard;
  }
  void FailLeaving() { fails_leaving_ = true; }

  absl::StatusOr<v1::ArriveResponse> ArriveAndWait(
      const GroupMember& member, int64_t clock, int64_t round, double weight,
      const std::vector<WorkProgress>& progress, int64_t staleness,
      absl::Time deadline) override {
    const bool fails = std::exchange(fails_next_arrival_, false);
    if (fails && !is_heard_) return absl::UnavailableError("not heard");
    auto arrival = GroupClient::ArriveAndWait(member, clock, round, weight,
                                              progress, staleness, deadline);
    if (fails) return absl::UnavailableError("the answer got lost");
    return arrival;
  }
  absl::Status Heartbeat(const GroupMember& member,
                         absl::Duration timeout) override {
    return is_dead_ ? absl::OkStatus()
                    : GroupClient::Heartbeat(member, timeout);
  }
  absl::Status Leave(const GroupMember& member,
                     absl::Duration timeout) override {
    if (fails_leaving_) return absl::UnavailableError("the server is away");
    return is_dead_ ? absl::OkStatus() : GroupClient::Leave(member, timeout);
  }

 private:
  std::atomic<bool> is_dead_{false};
  std::atomic<bool> fails_leaving_{false};
  bool fails_next_arrival_ = false;
  bool is_heard_ = false;
};

class MortalClient final : public ForwardingClient {
 public:
  explicit MortalClient(std::shared_ptr<ParameterClient> client)
      : ForwardingClient(std::move(client)), groups_(&client_->groups()) {}

  void Die() { groups_.Die(); }
  void FailNextCommits(int count, absl::Status status = absl::UnavailableError(
                                      "the server is away")) {
    failing_commits_ = count;
    failure_ = std::move(status);
  }
  MortalGroups& mortal_groups() { return groups_; }

  std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged) override {
    if (failing_commits_ > 0) {
      --failing_commits_;
      return Done(failure_);
    }
    return ForwardingClient::StartCommitRound(shard, group, round, committed,
                                              staged);
  }
  GroupClient& groups() override { return groups_; }

 private:
  MortalGroups groups_;
  int failing_commits_ = 0;
  absl::Status failure_;
};

constexpr ConsistencyConfig kBsp = {ConsistencyKind::kBsp, 0, Reduction::kMean};

ConsistencyConfig Ssp(uint32_t staleness) {
  return {ConsistencyKind::kSsp, staleness, Reduction::kMean};
}

WorkerOptions OptionsOf(uint32_t worker, uint32_t num_workers,
                        const ConsistencyConfig& consistency = kBsp) {
  WorkerOptions options;
  options.group = "g";
  options.worker = worker;
  options.group_options.num_workers = num_workers;
  options.group_options.settings = consistency.ToString();
  options.consistency = consistency;
  options.wait_timeout = absl::Seconds(60);
  return options;
}

TableConfig TableOf(const ConsistencyConfig& consistency = kBsp) {
  TableConfig config;
  config.name = "t";
  config.dim = kDim;
  config.initializer = UniformInitializer{-1.0f, 1.0f};
  config.seed = 3;
  config.consistency = consistency;
  return config;
}

std::unique_ptr<WorkerSession> Join(std::shared_ptr<ParameterClient> client,
                                    const WorkerOptions& options) {
  auto session = WorkerSession::Join(std::move(client), options);
  EXPECT_TRUE(session.ok()) << session.status();
  return std::move(session).value();
}

// Under the worker's step, learning rate 1.
absl::Status Push(ParameterClient& client, const StepTag& step,
                  const std::vector<Key>& keys,
                  const std::vector<float>& gradients) {
  PushArgs args;
  args.table = "t";
  args.dim = kDim;
  args.keys = keys;
  args.gradients = gradients;
  args.learning_rate = 1.0f;
  args.insert_missing = true;
  args.step = step;
  return client.Push(args).status();
}

const std::vector<Key> kSomeKeys = {1, 2, 3, 4, 5, 6, 7, 8};

// A step that takes `gradient` from each value of some rows, if it were alone.
absl::Status TrainStep(ParameterClient& client, WorkerSession& session,
                       float gradient, double weight = 1.0) {
  const absl::StatusOr<StepTag> step = session.CurrentStep();
  if (!step.ok()) return step.status();
  const absl::Status pushed =
      Push(client, *step, kSomeKeys,
           std::vector<float>(kSomeKeys.size() * kDim, gradient));
  if (!pushed.ok()) return pushed;
  return session.EndStep(weight);
}

// The table, and some rows of it of one value.
void CreateRows(ParameterClient& client, float value,
                const ConsistencyConfig& consistency = kBsp) {
  ASSERT_TRUE(client.CreateTable(TableOf(consistency)).ok());
  const std::vector<float> values(kSomeKeys.size() * kDim, value);
  AssignArgs args;
  args.table = "t";
  args.dim = kDim;
  args.keys = kSomeKeys;
  args.embeddings = values;
  ASSERT_TRUE(client.Assign(args).ok());
}

std::vector<float> SomeRows(ParameterClient& client) {
  const auto rows = PullRows(client, "t", kDim, kSomeKeys);
  EXPECT_TRUE(rows.ok()) << rows.status();
  return rows.value_or(std::vector<float>());
}

// The samples of one step of a worker.
struct Batch {
  std::vector<Key> keys;
  std::vector<float> targets;
  double weight = 0.0;
};

Batch BatchOf(uint32_t worker, int64_t step) {
  std::mt19937 random(1000 * worker + static_cast<uint32_t>(step));
  std::uniform_real_distribution<float> target(-1.0f, 1.0f);
  Batch batch;
  for (Key key = 0; key < 60; ++key) {
    if (random() % 3 == 0) continue;
    batch.keys.push_back(key);
    for (int d = 0; d < kDim; ++d) batch.targets.push_back(target(random));
  }
  batch.weight = 1.0 + random() % 5;
  return batch;
}

// The gradients of the squared distance between rows and targets.
std::vector<float> GradientsOf(const Batch& batch,
                               const std::vector<float>& rows) {
  std::vector<float> gradients(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    gradients[i] = 0.2f * (rows[i] - batch.targets[i]);
  }
  return gradients;
}

constexpr uint32_t kWorkers = 3;
int64_t StepsOf(uint32_t worker) { return 8 + 4 * worker; }

using Rows = std::map<Key, std::vector<float>>;

Rows ExportRows(ParameterClient& client) {
  Rows rows;
  const absl::Status status =
      client.Export("t", /*with_slots=*/true, [&](const RowChunk& chunk) {
        const size_t width = chunk.slots.size() / chunk.keys.size();
        for (size_t i = 0; i < chunk.keys.size(); ++i) {
          std::vector<float>& row = rows[chunk.keys[i]];
          row.assign(chunk.embeddings.begin() + i * kDim,
                     chunk.embeddings.begin() + (i + 1) * kDim);
          row.insert(row.end(), chunk.slots.begin() + i * width,
                     chunk.slots.begin() + (i + 1) * width);
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
  return rows;
}

// Workers with uneven numbers of steps, each in a thread.
Rows TrainInRounds(const ClusterUnderTest& cluster) {
  TableConfig config = TableOf();
  config.optimizer = AdagradConfig{};
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&cluster, &config, w] {
      const auto client = cluster.Connect();
      ASSERT_TRUE(client->CreateTable(config).ok());
      const auto session = Join(client, OptionsOf(w, kWorkers));
      for (int64_t step = 0; step < StepsOf(w); ++step) {
        const Batch batch = BatchOf(w, step);
        const auto rows = PullRows(*client, "t", kDim, batch.keys, true);
        ASSERT_TRUE(rows.ok()) << rows.status();
        const absl::StatusOr<StepTag> tag = session->CurrentStep();
        ASSERT_TRUE(tag.ok());
        EXPECT_EQ(tag->clock, step);
        ASSERT_TRUE(
            Push(*client, *tag, batch.keys, GradientsOf(batch, *rows)).ok());
        const absl::Status ended = session->EndStep(batch.weight);
        ASSERT_TRUE(ended.ok()) << ended;
      }
      ASSERT_TRUE(session->Leave().ok());
      const auto report = session->GetReport();
      ASSERT_TRUE(report.ok());
      EXPECT_EQ(report->clock(), StepsOf(w));
      EXPECT_EQ(report->dropped_steps(), 0);
      EXPECT_EQ(report->num_waits(), StepsOf(w));
    });
  }
  for (std::thread& thread : threads) thread.join();
  return ExportRows(*cluster.Connect());
}

// One worker, whose batches are the unions of theirs.
Rows TrainAlone() {
  const auto client = ClusterUnderTest(0).Connect();
  TableConfig config = TableOf({});
  config.optimizer = AdagradConfig{};
  EXPECT_TRUE(client->CreateTable(config).ok());
  for (int64_t step = 0; step < StepsOf(kWorkers - 1); ++step) {
    double total_weight = 0.0;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (step < StepsOf(w)) total_weight += BatchOf(w, step).weight;
    }
    std::vector<Key> keys;
    std::vector<float> gradients;
    for (uint32_t w = 0; w < kWorkers; ++w) {
      if (step >= StepsOf(w)) continue;
      const Batch batch = BatchOf(w, step);
      const auto rows = PullRows(*client, "t", kDim, batch.keys, true);
      keys.insert(keys.end(), batch.keys.begin(), batch.keys.end());
      for (const float gradient : GradientsOf(batch, rows.value())) {
        gradients.push_back(
            static_cast<float>(gradient * batch.weight / total_weight));
      }
    }
    EXPECT_TRUE(Push(*client, {}, keys, gradients).ok());
  }
  return ExportRows(*client);
}

// The parameter is the number of servers; 0: tables in this process.
class WorkerSessionTest : public testing::TestWithParam<int> {
 protected:
  const ClusterUnderTest cluster_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Servers, WorkerSessionTest, testing::Values(0, 1, 3));

TEST_P(WorkerSessionTest, UnevenWorkersLearnWhatOneWouldFromTheUnion) {
  const Rows trained = TrainInRounds(cluster_);

  const Rows expected = TrainAlone();
  ASSERT_EQ(trained.size(), expected.size());
  for (const auto& [key, row] : expected) {
    EXPECT_THAT(trained.at(key),
                testing::Pointwise(testing::FloatNear(1e-6f), row))
        << "key " << key;
  }
  // The results are equal to the last bit, in any order of the workers.
  EXPECT_EQ(TrainInRounds(ClusterUnderTest(GetParam())), trained);
}

TEST_P(WorkerSessionTest, OneThatDiesIsDroppedAndTheRestGoOn) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto mortal = std::make_shared<MortalClient>(cluster_.Connect());
  WorkerOptions options = OptionsOf(0, 2);
  options.group_options.lease = absl::Seconds(2);
  const auto session = Join(client, options);
  options.worker = 1;
  const auto dying = Join(mortal, options);
  std::thread last_steps([&] {
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(TrainStep(*mortal, *dying, 3.0f).ok());
    }
    // In the middle of its third step.
    EXPECT_TRUE(Push(*mortal, *dying->CurrentStep(), {1, 2},
                     std::vector<float>(2 * kDim, 100.0f))
                    .ok());
    mortal->Die();
  });

  for (int step = 0; step < 4; ++step) {
    const absl::Status ended = TrainStep(*client, *session, 1.0f);
    ASSERT_TRUE(ended.ok()) << ended;
  }
  last_steps.join();

  EXPECT_THAT(SomeRows(*client), Each(10.0f - 2 * 2.0f - 2 * 1.0f));
  const auto report = session->GetReport();
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->workers().expired(), 1);
  EXPECT_EQ(report->workers().num_active(), 1);
  EXPECT_EQ(report->dropped_steps(), 0);
}

// Goes on from a checkpoint of its own, of its second step.
TEST_P(WorkerSessionTest, AStepThatCountsIsNotTakenAgain) {
  const std::shared_ptr<ParameterClient> client = cluster_.Connect();
  CreateRows(*client, 0.0f);
  WorkerOptions options = OptionsOf(0, 1);
  {
    const auto killed = Join(client, options);
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(TrainStep(*client, *killed, 1.0f).ok());
    }
    EXPECT_EQ(killed->GetReport()->num_steps(), 4);
  }
  options.first_step = 2;
  const auto again = Join(client, options);
  std::vector<bool> repeated;
  for (int i = 2; i < 6; ++i) {
    EXPECT_EQ(again->GetReport()->num_steps(), i);
    repeated.push_back(again->is_repeating());
    // Nobody waits there, as it was there before.
    if (repeated.back()) {
      ASSERT_TRUE(again->WaitAtBarrier("b", absl::Seconds(60)).ok());
      ASSERT_TRUE(again->EndStep(1.0).ok());
    } else {
      ASSERT_TRUE(TrainStep(*client, *again, 1.0f).ok());
    }
  }

  EXPECT_THAT(repeated, testing::ElementsAre(true, true, false, false));
  EXPECT_THAT(SomeRows(*client), testing::Each(-6.0f));
  EXPECT_EQ(again->GetReport()->workers().rounds(), 6);
}

TEST_P(WorkerSessionTest, OneGivenUpJoinsAgainAndItsStepDoesNotCount) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  const GroupMember before = session->member();
  ASSERT_TRUE(client->groups()
                  .Leave(before, absl::Seconds(10))
                  .ok());  // As when a lease ends.

  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
  const auto report = session->GetReport();
  ASSERT_TRUE(report.ok());
  EXPECT_EQ(report->dropped_steps(), 1);
  EXPECT_EQ(report->workers().rejoined(), 1);
  EXPECT_GT(session->member().incarnation(), before.incarnation());

  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(8.0f));
  EXPECT_EQ(session->GetReport()->dropped_steps(), 1);
}

TEST_P(WorkerSessionTest, AnUnboundWorkerGivenUpLosesNothing) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f, Ssp(2));
  const auto session = Join(client, OptionsOf(0, 1, Ssp(2)));
  ASSERT_TRUE(
      client->groups().Leave(session->member(), absl::Seconds(10)).ok());
  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
  EXPECT_EQ(session->GetReport()->dropped_steps(), 0);
  EXPECT_EQ(session->GetReport()->workers().num_active(), 1);
}

TEST_P(WorkerSessionTest, NobodyIsFurtherAheadThanTheStaleness) {
  constexpr int kStaleness = 2;
  constexpr int kSteps = 60;
  CreateRows(*cluster_.Connect(), 0.0f, Ssp(kStaleness));
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([this, w] {
      const auto client = cluster_.Connect();
      const auto session =
          Join(client, OptionsOf(w, kWorkers, Ssp(kStaleness)));
      for (int step = 0; step < kSteps; ++step) {
        const absl::Status ended = TrainStep(*client, *session, -1.0f);
        ASSERT_TRUE(ended.ok()) << ended;
      }
      EXPECT_TRUE(session->Leave().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();

  const auto client = cluster_.Connect();
  EXPECT_THAT(SomeRows(*client), Each(float{kWorkers * kSteps}));
  const auto stats = client->groups().GroupStats("g", absl::Minutes(1));
  EXPECT_EQ(stats->staleness(0) + stats->staleness(1) + stats->staleness(2),
            kWorkers * kSteps);
}

thread_local bool user_ends_waits = false;

TEST_P(WorkerSessionTest, AStepWhoseWaitTheUserEndsHasEnded) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 2));
  SetInterruptCheck([] { return user_ends_waits ? 1 : 0; });
  user_ends_waits = true;
  const absl::Status ended = TrainStep(*client, *session, 1.0f);
  user_ends_waits = false;
  SetInterruptCheck(nullptr);
  EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled) << ended;

  std::thread other([this] {
    const auto other_client = cluster_.Connect();
    const auto other_session = Join(other_client, OptionsOf(1, 2));
    for (int step = 0; step < 2; ++step) {
      EXPECT_TRUE(TrainStep(*other_client, *other_session, 1.0f).ok());
    }
  });
  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  other.join();

  EXPECT_THAT(SomeRows(*client), Each(8.0f));
  EXPECT_EQ(client->groups().GroupStats("g", absl::Minutes(1))->contributions(),
            4);
}

TEST_P(WorkerSessionTest, AWaitThatTakesTooLongSaysForWhom) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  for (const ConsistencyConfig& consistency : {kBsp, Ssp(1)}) {
    WorkerOptions options = OptionsOf(0, 2, consistency);
    options.group = consistency.ToString();
    options.wait_timeout = absl::Milliseconds(50);
    const auto session = Join(client, options);
    options.worker = 4;
    const auto slow = Join(client, options);
    if (consistency.kind == ConsistencyKind::kSsp) {
      EXPECT_TRUE(session->EndStep(1.0).ok());  // One ahead is allowed.
    }

    const absl::Status status = session->EndStep(1.0);

    EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("group '", options.group, "'")),
                      HasSubstr("worker 4 (at step 0, last heard 0 s ago)"),
                      HasSubstr("gave up after")));
  }
}

TEST_P(WorkerSessionTest, AStepWhoseCommitFailedIsFinishedOnce) {
  const auto client =
      std::make_shared<MortalClient>(std::shared_ptr(cluster_.Connect()));
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));

  // The step is finished by ending it again.
  client->FailNextCommits(1);
  EXPECT_EQ(TrainStep(*client, *session, 1.0f).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(session->EndStep(1.0).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
  EXPECT_EQ(session->GetReport()->workers().rounds(), 1);

  // The step is finished by the next push.
  client->FailNextCommits(1);
  EXPECT_EQ(TrainStep(*client, *session, 1.0f).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(TrainStep(*client, *session, 2.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(6.0f));
  EXPECT_EQ(session->GetReport()->workers().rounds(), 3);
  EXPECT_EQ(session->GetReport()->dropped_steps(), 0);
}

TEST_P(WorkerSessionTest, ARoundThatCannotBeAppliedFailsOneStepOnly) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  const std::vector<float> big(kSomeKeys.size() * kDim, 3e38f);
  const absl::StatusOr<StepTag> step = session->CurrentStep();
  ASSERT_TRUE(step.ok());
  ASSERT_TRUE(Push(*client, *step, kSomeKeys, big).ok());
  ASSERT_TRUE(Push(*client, *step, kSomeKeys, big).ok());

  const absl::Status ended = session->EndStep(1.0);

  EXPECT_EQ(ended.code(), absl::StatusCode::kInvalidArgument) << ended;
  EXPECT_THAT(std::string(ended.message()), HasSubstr("is Inf"));
  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
  // Nor does it keep others from joining.
  ASSERT_TRUE(Push(*client, *session->CurrentStep(), kSomeKeys, big).ok());
  ASSERT_TRUE(Push(*client, *session->CurrentStep(), kSomeKeys, big).ok());
  EXPECT_FALSE(session->EndStep(1.0).ok());
  const auto late = Join(client, OptionsOf(1, 1));
  ASSERT_TRUE(session->Leave().ok());
  EXPECT_TRUE(TrainStep(*client, *late, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(8.0f));
}

TEST_P(WorkerSessionTest, ARoundOfACoordinatorThatHasGoneIsGivenUp) {
  const auto client =
      std::make_shared<MortalClient>(std::shared_ptr(cluster_.Connect()));
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));

  client->FailNextCommits(client->num_shards(),
                          absl::AbortedError("started again; join again"));
  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());

  EXPECT_TRUE(TrainStep(*client, *session, 2.0f).ok());
  EXPECT_EQ(session->GetReport()->workers().rejoined(), 1);
}

TEST_P(WorkerSessionTest, AGroupOfAClockThatWasSetBackIsNotTakenForAnOlderOne) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  // The last server knows an instance from before the restart of the
  // coordinator, whose clock was a day ahead.
  Round before;
  before.set_group_instance(
      static_cast<uint64_t>(absl::ToUnixNanos(absl::Now() + absl::Hours(24))));
  before.set_next_incarnation(before.group_instance() + 5);
  const auto commit = [&] {
    int64_t committed = -7;
    return client
        ->StartCommitRound(client->num_shards() - 1, "g", before, &committed,
                           {})
        ->Wait();
  };
  ASSERT_TRUE(commit().ok());

  const auto session = Join(client, OptionsOf(0, 2));
  const auto other_client = cluster_.Connect();
  const auto other = Join(other_client, OptionsOf(1, 2));
  for (int step = 0; step < 2; ++step) {
    std::thread trains(
        [&] { EXPECT_TRUE(TrainStep(*other_client, *other, 2.0f).ok()); });
    EXPECT_TRUE(TrainStep(*client, *session, 4.0f).ok());
    trains.join();
    EXPECT_THAT(SomeRows(*client), Each(7.0f - 3.0f * step));
  }

  const auto report = session->GetReport();
  ASSERT_TRUE(report.ok());
  EXPECT_GT(session->member().incarnation(), before.next_incarnation());
  EXPECT_EQ(report->dropped_steps(), 0);
  EXPECT_EQ(report->workers().rounds(), 2);
  before.set_number(1);
  EXPECT_EQ(commit().code(), absl::StatusCode::kAborted);
  EXPECT_THAT(SomeRows(*client), Each(4.0f));
}

TEST_P(WorkerSessionTest, AStepWhoseEndWasPerhapsNotHeardEndsOnce) {
  for (const bool is_heard : {false, true}) {
    const auto client =
        std::make_shared<MortalClient>(std::shared_ptr(cluster_.Connect()));
    CreateRows(*client, 10.0f);
    const auto session = Join(client, OptionsOf(0, 1));
    const auto fail_a_step = [&] {
      client->mortal_groups().FailNextArrival(is_heard);
      EXPECT_EQ(TrainStep(*client, *session, 1.0f).code(),
                absl::StatusCode::kUnavailable);
      EXPECT_TRUE(session->GetReport()->in_step());
    };
    const int64_t rounds = session->GetReport()->workers().rounds();

    fail_a_step();
    EXPECT_TRUE(session->EndStep(1.0).ok());
    EXPECT_THAT(SomeRows(*client), Each(9.0f));
    fail_a_step();
    EXPECT_TRUE(TrainStep(*client, *session, 2.0f).ok());
    EXPECT_THAT(SomeRows(*client), Each(6.0f));
    fail_a_step();
    EXPECT_TRUE(session->WaitAtBarrier("b", absl::Seconds(60)).ok());
    EXPECT_THAT(SomeRows(*client), Each(5.0f));

    EXPECT_EQ(session->GetReport()->workers().rounds() - rounds, 4);
    EXPECT_EQ(session->GetReport()->dropped_steps(), 0);
    ASSERT_TRUE(session->Leave().ok());
  }
}

TEST_P(WorkerSessionTest, OneWhoCouldNotTellThatItLeavesIsNotWaitedForLong) {
  const auto leaving_client =
      std::make_shared<MortalClient>(std::shared_ptr(cluster_.Connect()));
  CreateRows(*leaving_client, 10.0f);
  WorkerOptions options = OptionsOf(0, 2);
  options.group_options.lease = absl::Milliseconds(300);
  const auto leaving = Join(leaving_client, options);
  const auto client = cluster_.Connect();
  options.worker = 1;
  const auto session = Join(client, options);
  leaving_client->mortal_groups().FailLeaving();

  EXPECT_EQ(leaving->Leave().code(), absl::StatusCode::kUnavailable);

  EXPECT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
}

TEST_P(WorkerSessionTest, OneThatWasStartedAgainElsewhereIsTold) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto first = Join(client, OptionsOf(3, 1));
  const auto other_client = cluster_.Connect();
  const auto second = Join(other_client, OptionsOf(3, 1));

  const absl::Status status = TrainStep(*client, *first, 1.0f);

  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("worker 3"), HasSubstr("worker_id")));
  EXPECT_TRUE(TrainStep(*other_client, *second, 2.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(8.0f));
}

TEST_P(WorkerSessionTest, WhatOneStartedAgainHasNotSeenAppliedIsWithdrawn) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 100.0f);
  const auto other = Join(client, OptionsOf(0, 2));
  const auto first_client = cluster_.Connect();
  const auto first = Join(first_client, OptionsOf(1, 2));
  std::thread dying([&] {
    EXPECT_EQ(TrainStep(*first_client, *first, 50.0f).code(),
              absl::StatusCode::kFailedPrecondition);
  });
  while (client->groups().GroupStats("g", absl::Minutes(1))->staleness(0) ==
         0) {
    std::this_thread::yield();
  }

  const auto second_client = cluster_.Connect();
  const auto second = Join(second_client, OptionsOf(1, 2));
  dying.join();

  // It takes the step once more.
  std::thread step(
      [&] { EXPECT_TRUE(TrainStep(*second_client, *second, 2.0f).ok()); });
  EXPECT_TRUE(TrainStep(*client, *other, 4.0f).ok());
  step.join();
  EXPECT_THAT(SomeRows(*client), Each(100.0f - 3.0f));
  EXPECT_EQ(second->GetReport()->dropped_steps(), 0);
  EXPECT_EQ(second->GetReport()->workers().dropped(), 1);
}

TEST_P(WorkerSessionTest, OneThatComesBackToItsOpenRoundWaitsForIt) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 100.0f);
  const auto other = Join(client, OptionsOf(0, 2));
  const auto own_client = cluster_.Connect();
  WorkerOptions options = OptionsOf(1, 2);
  options.wait_timeout = absl::Milliseconds(50);
  const auto session = Join(own_client, options);
  EXPECT_EQ(TrainStep(*own_client, *session, 2.0f).code(),
            absl::StatusCode::kDeadlineExceeded);

  // However often it asks, it does not contribute once more.
  for (int i = 0; i < 2; ++i) {
    // Given up, as when its process had been stopped for longer than its lease.
    ASSERT_TRUE(
        client->groups().Leave(session->member(), absl::Seconds(10)).ok());
    EXPECT_EQ(session->EndStep(1.0).code(),
              absl::StatusCode::kDeadlineExceeded);
  }
  ASSERT_TRUE(TrainStep(*client, *other, 4.0f).ok());
  EXPECT_TRUE(session->EndStep(1.0).ok());

  EXPECT_THAT(SomeRows(*own_client), Each(97.0f));
  EXPECT_EQ(session->GetReport()->workers().contributions(), 2);
}

TEST_P(WorkerSessionTest, LeavingEndsAWaitOfAnotherThread) {
  const auto client = cluster_.Connect();
  const auto session = Join(client, OptionsOf(0, 2));
  const auto other_client = cluster_.Connect();
  const auto other = Join(other_client, OptionsOf(1, 2));
  for (const bool at_barrier : {false, true}) {
    absl::Status ended;
    std::thread waiting([&] {
      ended = at_barrier ? session->WaitAtBarrier("b", absl::Seconds(60))
                         : session->EndStep(1.0);
    });
    for (;;) {
      const auto stats = client->groups().GroupStats("g", absl::Minutes(1));
      if (at_barrier ? stats->num_waiting() == 1 : stats->staleness(0) == 1) {
        break;
      }
      std::this_thread::yield();
    }

    EXPECT_TRUE(session->Leave().ok());

    waiting.join();
    EXPECT_EQ(ended.code(), absl::StatusCode::kCancelled) << ended;
    EXPECT_EQ(session->GetReport()->workers().num_active(), 1);
  }
}

TEST_P(WorkerSessionTest, WorkersOfAGroupHaveOneConsistency) {
  const auto client = cluster_.Connect();
  const auto session = Join(client, OptionsOf(0, 2));
  const absl::Status status =
      WorkerSession::Join(client, OptionsOf(1, 2, Ssp(3))).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("bsp(mean)"), HasSubstr("ssp(3)")));
}

TEST_P(WorkerSessionTest, OneThatHasLeftJoinsAgainWithItsNextStep) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  const uint64_t before = session->CurrentStep()->incarnation;
  ASSERT_TRUE(session->Leave().ok());
  EXPECT_TRUE(session->Leave().ok());
  EXPECT_EQ(session->GetReport()->workers().num_active(), 0);
  // Somebody else goes on meanwhile.
  const auto other_client = cluster_.Connect();
  const auto other = Join(other_client, OptionsOf(1, 1));
  ASSERT_TRUE(TrainStep(*other_client, *other, 2.0f).ok());
  ASSERT_TRUE(other->Leave().ok());

  EXPECT_TRUE(TrainStep(*client, *session, 3.0f).ok());

  EXPECT_GT(session->CurrentStep()->incarnation, before);
  EXPECT_THAT(SomeRows(*client), Each(10.0f - 1.0f - 2.0f - 3.0f));
  EXPECT_EQ(session->GetReport()->dropped_steps(), 0);
  EXPECT_EQ(session->GetReport()->workers().num_active(), 1);
}

TEST_P(WorkerSessionTest, ANewWorkerBringsInTheRoundsThatNobodyDid) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const WorkerOptions options = OptionsOf(0, 1);
  ASSERT_TRUE(TrainStep(*client, *Join(client, options), 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
  // Workers that die between their arrival and the commit.
  GroupClient& groups = client->groups();
  const WorkerGroup::Place place = *groups.Join(
      "g", 1, /*previous_incarnation=*/0, /*newer_instance=*/0, 0, "");
  const GroupMember dying = MemberOf("g", 1, place.incarnation());
  for (int64_t i = 0; i < 3; ++i) {
    ASSERT_TRUE(Push(*client, {"g", 1, place.incarnation(), place.clock() + i},
                     kSomeKeys,
                     std::vector<float>(kSomeKeys.size() * kDim, 2.0f))
                    .ok());
    ASSERT_TRUE(
        groups.Arrive(dying, place.clock() + i, place.round() + i, 1.0, {})
            .ok());
  }
  ASSERT_TRUE(groups.Leave(dying, absl::Seconds(10)).ok());
  EXPECT_EQ(groups.GroupStats("g", absl::Minutes(1))->rounds(), 4);
  EXPECT_THAT(SomeRows(*client), Each(9.0f));

  const auto late_client = cluster_.Connect();
  const auto late = Join(late_client, OptionsOf(2, 1));

  EXPECT_THAT(SomeRows(*late_client), Each(9.0f - 3 * 2.0f));
  EXPECT_TRUE(TrainStep(*late_client, *late, 1.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(2.0f));
}

TEST_P(WorkerSessionTest, ARoundThatReachedSomeServersOnlyReachesTheOthers) {
  // As when a worker dies while it commits.
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  GroupClient& groups = client->groups();
  const GroupMember member = session->member();
  ASSERT_TRUE(Push(*client, *session->CurrentStep(), kSomeKeys,
                   std::vector<float>(kSomeKeys.size() * kDim, 2.0f))
                  .ok());
  ASSERT_TRUE(groups.Arrive(member, 1, 1, 1.0, {}).ok());
  const auto round =
      groups.WaitForRound(member, 1, SteadyNow() + absl::Seconds(60));
  ASSERT_TRUE(round.ok());
  int64_t committed = -7;
  ASSERT_TRUE(client
                  ->StartCommitRound(client->num_shards() - 1, "g", *round,
                                     &committed, {})
                  ->Wait()
                  .ok());
  EXPECT_EQ(committed, 1);

  const auto late = Join(cluster_.Connect(), OptionsOf(1, 1));

  EXPECT_THAT(SomeRows(*client), Each(7.0f));
}

TEST_P(WorkerSessionTest, EpochsOfUnevenLengthEndTogether) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 100.0f);
  constexpr int kEpochs = 3;
  std::vector<std::thread> threads;
  for (uint32_t w = 0; w < kWorkers; ++w) {
    threads.emplace_back([&, w] {
      const auto own = cluster_.Connect();
      const auto session = Join(own, OptionsOf(w, kWorkers));
      for (int epoch = 0; epoch < kEpochs; ++epoch) {
        // Worker 0 has no data at all.
        for (uint32_t step = 0; step < 2 * w; ++step) {
          ASSERT_TRUE(TrainStep(*own, *session, 1.0f).ok());
        }
        const absl::Status ended =
            session->WaitAtBarrier("end", absl::Seconds(60));
        ASSERT_TRUE(ended.ok()) << ended;
        // Each round takes the mean, 1, away; the longest has 4 of them.
        EXPECT_THAT(SomeRows(*own), Each(100.0f - 4.0f * (epoch + 1)));
        ASSERT_TRUE(session->WaitAtBarrier("seen", absl::Seconds(60)).ok());
      }
      EXPECT_EQ(session->GetReport()->dropped_steps(), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(client->groups().GroupStats("g", absl::Minutes(1))->rounds(),
            4 * kEpochs);
}

TEST_P(WorkerSessionTest, BehindABarrierIsWhatTheDeadHaveNotBroughtIn) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  // One that dies between its arrival and the commit.
  GroupClient& groups = client->groups();
  const WorkerGroup::Place place = *groups.Join("g", 1, 0, 0, 0, "");
  const GroupMember dying = MemberOf("g", 1, place.incarnation());
  ASSERT_TRUE(Push(*client, {"g", 1, place.incarnation(), place.clock()},
                   kSomeKeys, std::vector<float>(kSomeKeys.size() * kDim, 2.0f))
                  .ok());
  ASSERT_TRUE(groups.Arrive(dying, place.clock(), place.round(), 1.0, {}).ok());
  ASSERT_TRUE(groups.Leave(dying, absl::Seconds(10)).ok());

  ASSERT_TRUE(session->WaitAtBarrier("end", absl::Seconds(60)).ok());

  EXPECT_THAT(SomeRows(*client), Each(8.0f));
}

TEST_P(WorkerSessionTest, ABarrierInTheMidstOfAStepIsRefused) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(Push(*client, *session->CurrentStep(), kSomeKeys,
                   std::vector<float>(kSomeKeys.size() * kDim, 1.0f))
                  .ok());
  const absl::Status status = session->WaitAtBarrier("b", absl::Seconds(60));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("end the step first"));
  EXPECT_TRUE(session->EndStep(1.0).ok());
  EXPECT_TRUE(session->WaitAtBarrier("b", absl::Seconds(60)).ok());
  EXPECT_THAT(SomeRows(*client), Each(9.0f));
}

TEST_P(WorkerSessionTest, ABarrierThatHasOpenedIsFinishedOnce) {
  const auto client =
      std::make_shared<MortalClient>(std::shared_ptr(cluster_.Connect()));
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(TrainStep(*client, *session, 1.0f).ok());

  client->FailNextCommits(1);
  EXPECT_EQ(session->WaitAtBarrier("a", absl::Seconds(60)).code(),
            absl::StatusCode::kUnavailable);
  const auto other_client = cluster_.Connect();
  const auto other = Join(other_client, OptionsOf(1, 1));
  // It does not wait there once more, which the other one never would come to.
  EXPECT_TRUE(session->WaitAtBarrier("a", absl::Seconds(60)).ok());

  // Or the next step finishes it.
  ASSERT_TRUE(other->Leave().ok());
  client->FailNextCommits(1);
  EXPECT_EQ(session->WaitAtBarrier("b", absl::Seconds(60)).code(),
            absl::StatusCode::kUnavailable);
  EXPECT_TRUE(TrainStep(*client, *session, 2.0f).ok());
  EXPECT_THAT(SomeRows(*client), Each(7.0f));
}

TEST_P(WorkerSessionTest, AfterAWaitThatFailedOnlyTheSameBarrierWillDo) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f);
  const auto session = Join(client, OptionsOf(0, 2));
  EXPECT_EQ(session->WaitAtBarrier("a", absl::Milliseconds(20)).code(),
            absl::StatusCode::kDeadlineExceeded);
  for (const absl::Status& status :
       {session->EndStep(1.0), session->CurrentStep().status(),
        session->WaitAtBarrier("b", absl::Seconds(60))}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("barrier 'a'"));
  }
  // Or leaving.
  ASSERT_TRUE(session->Leave().ok());
  const auto alone = Join(client, OptionsOf(0, 2));
  ASSERT_TRUE(alone->Leave().ok());
}

TEST_P(WorkerSessionTest, OneGivenUpAndOneThatHasLeftComeToABarrier) {
  const auto client = cluster_.Connect();
  const auto session = Join(client, OptionsOf(0, 1));
  ASSERT_TRUE(
      client->groups().Leave(session->member(), absl::Seconds(10)).ok());
  EXPECT_TRUE(session->WaitAtBarrier("b", absl::Seconds(60)).ok());
  ASSERT_TRUE(session->Leave().ok());
  EXPECT_TRUE(session->WaitAtBarrier("b", absl::Seconds(60)).ok());
  EXPECT_EQ(session->GetReport()->workers().num_active(), 1);
}

TEST_P(WorkerSessionTest, StepsWithoutWaitingEndAtOnce) {
  const auto client = cluster_.Connect();
  CreateRows(*client, 10.0f, {});
  const auto session = Join(client, OptionsOf(0, 2, {}));
  for (int step = 0; step < 5; ++step) {
    ASSERT_TRUE(TrainStep(*client, *session, 1.0f).ok());
  }
  EXPECT_THAT(SomeRows(*client), Each(5.0f));
  EXPECT_EQ(session->GetReport()->num_waits(), 0);
}

TEST_P(WorkerSessionTest, ATableMustNotBeStricterThanItsWorker) {
  const ConsistencyConfig sum = {ConsistencyKind::kBsp, 0, Reduction::kSum};
  const std::vector<ConsistencyConfig> tables = {{},     Ssp(1), Ssp(2),
                                                 Ssp(3), kBsp,   sum};
  const auto client = cluster_.Connect();
  const auto fits = [&](const ConsistencyConfig& ours) {
    WorkerOptions options = OptionsOf(0, 1, ours);
    options.group = ours.ToString();
    const auto session = Join(client, options);
    std::vector<bool> result;
    for (const ConsistencyConfig& theirs : tables) {
      const absl::Status status = session->CheckTable(TableOf(theirs));
      result.push_back(status.ok());
      if (status.ok()) continue;
      EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("'t'"), HasSubstr(theirs.ToString()),
                        HasSubstr(ours.ToString()), HasSubstr("strictest")));
    }
    return result;
  };
  EXPECT_THAT(fits({}), ElementsAre(true, false, false, false, false, false));
  EXPECT_THAT(fits(Ssp(2)), ElementsAre(true, false, true, true, false, false));
  EXPECT_THAT(fits(kBsp), Each(true));
}

TEST_P(WorkerSessionTest, SenselessOptionsAreRefused) {
  const auto client = cluster_.Connect();
  WorkerOptions options = OptionsOf(0, 1);
  options.wait_timeout = absl::ZeroDuration();
  EXPECT_EQ(WorkerSession::Join(client, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = OptionsOf(0, 1);
  options.group = "";
  EXPECT_EQ(WorkerSession::Join(client, options).status().code(),
            absl::StatusCode::kInvalidArgument);
  options = OptionsOf(0, 1);
  const auto session = Join(client, options);
  EXPECT_EQ(session->EndStep(-1.0).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(session->EndStep(0.0).ok());
}

}  // namespace
}  // namespace tfswitch
