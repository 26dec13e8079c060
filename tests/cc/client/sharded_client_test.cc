#include "cc/client/sharded_client.h"

#include <memory>
#include <utility>
#include <vector>

#include "cc/base/steady_clock.h"
#include "cc/client/checkpoints.h"
#include "cc/client/done_call.h"
#include "cc/client/local_client.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/coordination.h"
#include "tests/cc/testing/forwarding_client.h"
#include "tests/cc/testing/parameter_client_suite.h"
#include "tests/cc/testing/saves.h"
#include "tests/cc/testing/scoped_folder.h"

namespace tfswitch {
namespace {

class ShardedUnderTest : public ClientUnderTest {
 public:
  explicit ShardedUnderTest(uint32_t num_shards) {
    std::vector<std::unique_ptr<ParameterClient>> clients;
    for (uint32_t i = 0; i < num_shards; ++i) {
      shards_.push_back(std::make_shared<Shard>(ShardOptions{i, num_shards}));
      clients.push_back(NewLocalClient(shards_.back()));
    }
    client_ = NewShardedClient(std::move(clients));
  }
  ParameterClient& client() override { return *client_; }
  Shard& shard(int i) { return *shards_[i]; }

 private:
  std::vector<std::shared_ptr<Shard>> shards_;
  std::unique_ptr<ParameterClient> client_;
};

ClientFactory Sharded(uint32_t num_shards) {
  return {absl::StrCat("shards", num_shards), [num_shards] {
            return std::make_unique<ShardedUnderTest>(num_shards);
          }};
}

INSTANTIATE_TEST_SUITE_P(Sharded, ParameterClientSuite,
                         testing::Values(Sharded(1), Sharded(3), Sharded(7)),
                         NameOfFactory);

TableConfig Config() {
  TableConfig config;
  config.name = "t";
  config.dim = 2;
  config.optimizer = AdagradConfig{};
  return config;
}

void Fill(ParameterClient& client, const std::vector<Key>& keys) {
  std::vector<float> out(keys.size() * 2);
  PullArgs args;
  args.table = "t";
  args.dim = 2;
  args.keys = keys;
  args.insert_missing = true;
  ASSERT_TRUE(client.Pull(args, absl::MakeSpan(out)).ok());
}

std::map<Key, float> FirstFloats(ParameterClient& client) {
  std::map<Key, float> rows;
  EXPECT_TRUE(client
                  .Export("t", true,
                          [&](const RowChunk& chunk) {
                            for (size_t i = 0; i < chunk.keys.size(); ++i) {
                              rows[chunk.keys[i]] = chunk.embeddings[2 * i];
                            }
                            return absl::OkStatus();
                          })
                  .ok());
  return rows;
}

TEST(ShardedClientTest, KeysSpreadEvenlyOverShards) {
  ShardedUnderTest cluster(4);
  ASSERT_TRUE(cluster.client().CreateTable(Config()).ok());

  Fill(cluster.client(), ManyKeys(40000));

  for (int i = 0; i < 4; ++i) {
    EXPECT_NEAR(cluster.shard(i).FindTable("t").value()->size(), 10000, 600);
  }
}

TEST(ShardedClientTest, CheckpointRestoresToAnyNumberOfShards) {
  const std::vector<Key> keys = ManyKeys(5000);
  for (const uint32_t saved_with : {1u, 2u, 5u}) {
    ShardedUnderTest writer(saved_with);
    ASSERT_TRUE(writer.client().CreateTable(Config()).ok());
    Fill(writer.client(), keys);
    const auto rows = FirstFloats(writer.client());
    const ScopedFolder folder;
    ASSERT_TRUE(SaveCheckpoint(writer.client(), SaveTo(folder.path())).ok());
    for (const uint32_t restored_with : {1u, 2u, 3u, 8u}) {
      ShardedUnderTest reader(restored_with);

      const auto report =
          RestoreCheckpoint(reader.client(), RestoreFrom(folder.path()));

      ASSERT_TRUE(report.ok()) << report.status();
      EXPECT_EQ(report->num_rows(), 5000);
      EXPECT_EQ(FirstFloats(reader.client()), rows);
      // Every row is where its owner looks for it.
      std::vector<float> out(keys.size() * 2);
      PullArgs args;
      args.table = "t";
      args.dim = 2;
      args.keys = keys;
      ASSERT_TRUE(reader.client().Pull(args, absl::MakeSpan(out)).ok());
      for (size_t i = 0; i < keys.size(); ++i) {
        ASSERT_EQ(out[2 * i], rows.at(keys[i]));
      }
    }
  }
}

TEST(ShardedClientTest, AFailedSaveOrRestoreNamesWhatStays) {
  class Failing final : public ForwardingClient {
   public:
    using ForwardingClient::ForwardingClient;
    std::unique_ptr<PendingCall> StartCall(
        const google::protobuf::Message& request,
        google::protobuf::Message* response, absl::Duration timeout) override {
      const std::string& name = request.GetDescriptor()->name();
      if (name == "AbortSaveRequest") {
        return Done(absl::UnavailableError("no abort"));
      }
      if (name == "CommitCheckpointRequest") {
        return Done(absl::ResourceExhaustedError("disk full"));
      }
      return ForwardingClient::StartCall(request, response, timeout);
    }
    absl::Status CommitRestore(const std::string&, bool) override {
      return absl::UnavailableError("no drop");
    }
  };
  Failing client(NewLocalClient(std::make_shared<Shard>(ShardOptions{})));
  ASSERT_TRUE(client.CreateTable(Config()).ok());
  const ScopedFolder folder;

  EXPECT_EQ(
      SaveCheckpoint(client, SaveTo(folder.path())).status(),
      absl::ResourceExhaustedError(
          "disk full; and files of this save stay in the folder: no abort"));
  const absl::Status status =
      RestoreCheckpoint(client, RestoreFrom(folder.path())).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()),
              testing::EndsWith("; and servers keep rows of this restore until "
                                "the next: no drop"));
}

TEST(ShardedClientTest, AShardThatWasStartedAnewComesToTheRoundOfTheOthers) {
  ShardedUnderTest cluster(2);
  ASSERT_TRUE(cluster.client().CreateTable(Config()).ok());
  GroupClient& groups = cluster.client().groups();
  ASSERT_TRUE(groups.CreateGroup("g", {}).ok());
  const WorkerGroup::Place place = groups.Join("g", 0, 0, 0, 0, "").value();
  const GroupMember worker = MemberOf("g", 0, place.incarnation());
  Round none = RoundOf(WorkerGroup::kNoRound, {}, place.group_instance() - 1);
  ASSERT_TRUE(cluster.shard(1).rounds().Commit("g", none).ok());
  for (int64_t clock = 0; clock < 3; ++clock) {
    ASSERT_TRUE(groups.Arrive(worker, clock, clock, 1.0, {}).ok());
    const Round round = *groups.WaitForRound(worker, clock, SteadyNow());
    ASSERT_EQ(cluster.shard(0).rounds().Commit("g", round).value(), clock);
  }
  const ScopedFolder folder;

  const auto report = SaveCheckpoint(cluster.client(), SaveTo(folder.path()));

  ASSERT_TRUE(report.ok()) << report.status();
  none.set_group_instance(place.group_instance());
  EXPECT_EQ(cluster.shard(1).rounds().Commit("g", none).value(), 2);
}

TEST(ShardedClientTest, BadGradientReachesNoShard) {
  ShardedUnderTest cluster(3);
  ASSERT_TRUE(cluster.client().CreateTable(Config()).ok());
  const std::vector<Key> keys = ManyKeys(30);
  std::vector<float> gradients(60, 1.0f);
  gradients[59] = std::nanf("");
  PushArgs args;
  args.table = "t";
  args.dim = 2;
  args.keys = keys;
  args.gradients = gradients;
  args.learning_rate = 1.0f;
  args.insert_missing = true;

  EXPECT_FALSE(cluster.client().Push(args).ok());

  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(cluster.shard(i).FindTable("t").value()->size(), 0);
  }
}

}  // namespace
}  // namespace tfswitch
