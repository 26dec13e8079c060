#include "cc/serving/remote_model.h"

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/client/done_call.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/forwarding_client.h"

namespace tfswitch {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

// Notes what is asked for, and fails when it is told to.
class WatchedClient final : public ForwardingClient {
 public:
  using ForwardingClient::ForwardingClient;

  std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) override {
    MutexLock lock(&mutex_);
    if (!failure_.ok()) return Done(failure_);
    ++num_calls_;
    for (const PullPart& part : parts) {
      asked_.push_back(
          absl::StrCat(part.args.table, ":", part.args.keys.size()));
      EXPECT_FALSE(part.args.insert_missing);
    }
    return ForwardingClient::StartPull(parts);
  }

  void Fail(absl::Status failure) {
    MutexLock lock(&mutex_);
    failure_ = std::move(failure);
  }
  // Tables and numbers of keys of the calls since it was asked last.
  std::vector<std::string> TakeAsked() {
    MutexLock lock(&mutex_);
    return std::exchange(asked_, {});
  }
  int num_calls() const {
    MutexLock lock(&mutex_);
    return num_calls_;
  }

 private:
  mutable Mutex mutex_;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> asked_ ABSL_GUARDED_BY(mutex_);
  int num_calls_ ABSL_GUARDED_BY(mutex_) = 0;
};

// With one shard, and with three. Tables "t" of dim 2 and "u" of dim 3.
class RemoteModelTest : public testing::TestWithParam<int> {
 protected:
  RemoteModelTest() {
    std::vector<std::unique_ptr<ParameterClient>> shards;
    for (int i = 0; i < GetParam(); ++i) {
      ShardOptions options;
      options.shard_index = static_cast<uint32_t>(i);
      options.num_shards = static_cast<uint32_t>(GetParam());
      shards_.push_back(std::make_shared<Shard>(options));
      shards.push_back(NewLocalClient(shards_.back()));
    }
    client_ =
        std::make_shared<WatchedClient>(NewShardedClient(std::move(shards)));
    options_.addresses = "grpc://servers:1";
    EXPECT_TRUE(client_->CreateTable(Config("t", 2)).ok());
    EXPECT_TRUE(client_->CreateTable(Config("u", 3)).ok());
    for (Key key = 0; key < 100; ++key) Set(key, static_cast<float>(key));
  }

  static TableConfig Config(const std::string& name, int dim) {
    TableConfig config;
    config.name = name;
    config.dim = dim;
    config.optimizer = SgdConfig{};
    config.initializer = ConstantInitializer{1.0f};
    config.admission = {MinCountAdmission{2},
                        {NotAdmittedKind::kConstant, 0.5f}};
    return config;
  }

  void Set(Key key, float value) {
    const std::vector<float> row = {value, -value};
    AssignArgs args;
    args.table = "t";
    args.dim = 2;
    args.keys = absl::MakeConstSpan(&key, 1);
    args.embeddings = row;
    EXPECT_TRUE(client_->Assign(args).ok());
  }

  std::vector<std::shared_ptr<Shard>> shards_;

  std::shared_ptr<ServedModel> Open() {
    auto model = OpenRemoteModel(options_, {{"t", 2}, {"u", 3}}, client_);
    EXPECT_TRUE(model.ok()) << model.status();
    return model.ok() ? *model : nullptr;
  }

  // First of the two floats of each key.
  static std::vector<float> Lookup(const ServedModel& model,
                                   const std::vector<Key>& keys) {
    std::vector<float> rows(keys.size() * 2, -1.0f);
    const absl::Status status =
        model.Pin()->Lookup({{"t", 2, keys, rows.data()}}, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    std::vector<float> firsts;
    for (size_t i = 0; i < keys.size(); ++i) {
      firsts.push_back(rows[2 * i]);
      // A key without a row has one number in all its places.
      const float sign = rows[2 * i] == 0.5f ? 1.0f : -1.0f;
      EXPECT_EQ(rows[2 * i + 1], sign * rows[2 * i]);
    }
    return firsts;
  }

  static absl::Status StatusOfLookup(const ServedModel& model,
                                     const std::string& table, int dim) {
    const std::vector<Key> keys = {1};
    std::vector<float> rows(static_cast<size_t>(dim));
    return model.Pin()->Lookup({{table, dim, keys, rows.data()}}, nullptr);
  }

  RemoteRowsOptions options_;
  std::shared_ptr<WatchedClient> client_;
};

TEST_P(RemoteModelTest, ATableThatOneServerHasLostIsNotServed) {
  ASSERT_TRUE(shards_.back()->tables().Drop("u"));
  const absl::Status refused =
      OpenRemoteModel(options_, {{"t", 2}, {"u", 3}}, client_).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("'u'"));
  EXPECT_TRUE(OpenRemoteModel(options_, {{"t", 2}}, client_).ok());
}

TEST_P(RemoteModelTest, ReadsWhatTheServersHaveAndMakesNothing) {
  const auto model = Open();
  EXPECT_TRUE(model->is_remote());
  EXPECT_THAT(Lookup(*model, {3, 1000, 7, 3}), ElementsAre(3, 0.5f, 7, 3));
  Set(3, 30.0f);
  EXPECT_THAT(Lookup(*model, {3}), ElementsAre(30));
  EXPECT_THAT(Lookup(*model, {}), IsEmpty());
  EXPECT_EQ(client_->ListTables("t").value()[0].stats.num_rows, 100);
  EXPECT_EQ(client_->ListTables("t").value()[0].stats.num_candidates, 0);
}

TEST_P(RemoteModelTest, ManyTablesAreOneCallAndRepeatedKeysGoOnce) {
  const auto model = Open();
  const std::vector<Key> first = {1, 2, 1, 1};
  const std::vector<Key> second = {5, 5};
  const std::vector<Key> third = {9, 8};
  std::vector<float> a(8);
  std::vector<float> b(6);
  std::vector<float> c(4);
  ASSERT_TRUE(model->Pin()
                  ->Lookup({{"t", 2, first, a.data()},
                            {"u", 3, second, b.data()},
                            {"u", 3, {}, nullptr},
                            {"t", 2, third, c.data()}},
                           nullptr)
                  .ok());
  EXPECT_THAT(a, ElementsAre(1, -1, 2, -2, 1, -1, 1, -1));
  EXPECT_THAT(b, Each(0.5f));
  EXPECT_THAT(c, ElementsAre(9, -9, 8, -8));
  EXPECT_EQ(client_->num_calls(), 1);
  EXPECT_THAT(client_->TakeAsked(), ElementsAre("t:2", "u:1", "t:2"));
}

TEST_P(RemoteModelTest, KeepsRowsAndKeysWithoutOneForTheirTime) {
  options_.cache_rows = 1000;
  options_.cache_lifetime = absl::Hours(1);
  const auto model = Open();
  EXPECT_THAT(Lookup(*model, {3, 1000, 3}), ElementsAre(3, 0.5f, 3));
  EXPECT_THAT(client_->TakeAsked(), ElementsAre("t:2"));
  Set(3, 30.0f);
  Set(1000, 40.0f);
  EXPECT_THAT(Lookup(*model, {4, 3, 4, 1000}), ElementsAre(4, 3, 4, 0.5f));
  EXPECT_THAT(client_->TakeAsked(), ElementsAre("t:1"));
  EXPECT_THAT(Lookup(*model, {1000, 4, 3}), ElementsAre(0.5f, 4, 3));
  EXPECT_THAT(client_->TakeAsked(), IsEmpty());
  EXPECT_EQ(model->state().cached_rows, 3);
  EXPECT_EQ(model->state().num_cache_hits, 5);
  EXPECT_EQ(model->state().num_cache_misses, 5);
}

TEST_P(RemoteModelTest, AsksAgainWhenTheirTimeIsOver) {
  options_.cache_rows = 1000;
  options_.cache_lifetime = absl::Milliseconds(20);
  const auto model = Open();
  EXPECT_THAT(Lookup(*model, {3, 1000}), ElementsAre(3, 0.5f));
  Set(3, 30.0f);
  Set(1000, 40.0f);
  const absl::Time give_up = absl::Now() + absl::Seconds(30);
  std::vector<float> read;
  do {
    absl::SleepFor(absl::Milliseconds(5));
    read = Lookup(*model, {1000, 3});
  } while ((read[0] != 40.0f || read[1] != 30.0f) && absl::Now() < give_up);
  EXPECT_THAT(read, ElementsAre(40, 30));
}

TEST_P(RemoteModelTest, AnErrorSaysWhatToDoAndTheNextLookupTriesAgain) {
  options_.cache_rows = 10;
  const auto model = Open();
  client_->Fail(absl::UnavailableError("shard 0 did not answer."));
  const absl::Status status = StatusOfLookup(*model, "t", 2);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              testing::AllOf(HasSubstr("shard 0 did not answer."),
                             HasSubstr("looks up at grpc://servers:1"),
                             HasSubstr("TFSWITCH_SERVING_ADDRESSES")));
  EXPECT_EQ(model->state().rows.error, status);
  EXPECT_EQ(model->state().rows.num_refused, 1);

  client_->Fail(absl::OkStatus());
  EXPECT_THAT(Lookup(*model, {1}), ElementsAre(1));
  EXPECT_TRUE(model->state().rows.error.ok());
  EXPECT_EQ(model->state().rows.num_refused, 1);
}

TEST_P(RemoteModelTest, TablesAreCheckedWhenItIsOpenedAndLater) {
  const auto missing = OpenRemoteModel(options_, {{"v", 2}}, client_);
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(missing.status().message()),
              HasSubstr("no table 'v' at grpc://servers:1"));
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("are: t, u"));
  const auto wide = OpenRemoteModel(options_, {{"t", 4}}, client_);
  EXPECT_EQ(wide.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(wide.status().message()),
              HasSubstr("'t' has dim 2 at grpc://servers:1, the model has dim "
                        "4"));

  const auto model = Open();
  EXPECT_EQ(StatusOfLookup(*model, "v", 2).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(StatusOfLookup(*model, "t", 3).code(),
            absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(client_->DropTable("t").ok());
  const absl::Status dropped = StatusOfLookup(*model, "t", 2);
  EXPECT_EQ(dropped.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(dropped.message()), HasSubstr("no table 't'"));
  EXPECT_THAT(std::string(dropped.message()), HasSubstr("restore the table"));
}

TEST_P(RemoteModelTest, ThereAreNoExportsToSteer) {
  const auto model = Open();
  for (const absl::Status& status :
       {model->Refresh(), model->Watch(absl::Seconds(1)), model->RollBack(1),
        model->Resume()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("grpc://servers:1"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("embedded"));
  }
  EXPECT_TRUE(model->state().is_remote);
  EXPECT_EQ(model->state().addresses, "grpc://servers:1");
}

TEST_P(RemoteModelTest, WhatIsPinnedOutlivesTheModel) {
  auto model = Open();
  const auto pinned = model->Pin();
  model.reset();
  const std::vector<Key> keys = {5};
  std::vector<float> row(2);
  ASSERT_TRUE(pinned->Lookup({{"t", 2, keys, row.data()}}, nullptr).ok());
  EXPECT_THAT(row, ElementsAre(5, -5));
}

TEST_P(RemoteModelTest, ThreadsShareTheCache) {
  options_.cache_rows = 60;
  options_.cache_lifetime = absl::Milliseconds(1);
  const auto model = Open();
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (int seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&model, seed] {
      for (int i = 0; i < 500; ++i) {
        const std::vector<Key> keys = {(i + seed) % 100, i % 7, i % 100};
        EXPECT_THAT(Lookup(*model, keys),
                    ElementsAre(keys[0], keys[1], keys[2]));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(model->state().cached_rows, 60);
}

INSTANTIATE_TEST_SUITE_P(Shards, RemoteModelTest, testing::Values(1, 3));

}  // namespace
}  // namespace tfswitch
