#include "cc/serving/exporter.h"

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "cc/serving/served_rows.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// With one shard, and with three.
class ExporterTest : public testing::TestWithParam<int> {
 protected:
  ExporterTest() : client_(MakeClient(GetParam())) {
    std::string pattern = testing::TempDir() + "/exporterXXXXXX";
    path_ = mkdtemp(pattern.data());
    options_.path = path_;
    options_.tables = {"t"};
  }
  ~ExporterTest() override {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  static std::unique_ptr<ParameterClient> MakeClient(int num_shards) {
    std::vector<std::unique_ptr<ParameterClient>> shards;
    for (int i = 0; i < num_shards; ++i) {
      ShardOptions options;
      options.shard_index = static_cast<uint32_t>(i);
      options.num_shards = static_cast<uint32_t>(num_shards);
      shards.push_back(NewLocalClient(std::make_shared<Shard>(options)));
    }
    return NewShardedClient(std::move(shards));
  }

  static TableConfig Config(int dim = 2) {
    TableConfig config;
    config.name = "t";
    config.dim = dim;
    config.optimizer = SgdConfig{};
    config.initializer = ConstantInitializer{1.0f};
    return config;
  }

  // One step that takes 1 off each float.
  void Push(const std::vector<Key>& keys) {
    const std::vector<float> gradients(keys.size() * 2, 1.0f);
    PushArgs args;
    args.table = "t";
    args.dim = 2;
    args.keys = keys;
    args.gradients = gradients;
    args.learning_rate = 1.0f;
    args.insert_missing = true;
    const auto pushed = client_->Push(args);
    ASSERT_TRUE(pushed.ok()) << pushed.status();
  }

  ExportReport Publish(bool is_delta) {
    options_.is_delta = is_delta;
    const auto report = PublishExport(*client_, options_);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.value_or(ExportReport{});
  }

  // What the client and who serves the exports read.
  void ExpectServedAsTrained(int dim = 2) {
    std::vector<Key> keys;
    for (Key key = -50; key < 500; ++key) keys.push_back(key);
    std::vector<float> trained(keys.size() * dim);
    PullArgs args;
    args.table = "t";
    args.dim = dim;
    args.keys = keys;
    ASSERT_TRUE(client_->Pull(args, absl::MakeSpan(trained)).ok());
    ServedRowsOptions serving;
    serving.path = path_;
    serving.tables = {{"t", dim}};
    const auto served = ServedRows::Open(serving);
    ASSERT_TRUE(served.ok()) << served.status();
    std::vector<float> rows(trained.size());
    ASSERT_TRUE((*served)->Pin()->tables()[0].Lookup(keys, rows.data()).ok());
    EXPECT_EQ(rows, trained);
  }

  const std::unique_ptr<ParameterClient> client_;
  std::string path_;
  ExportOptions options_;
};

TEST_P(ExporterTest, WhatIsServedIsWhatWasTrained) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  std::vector<Key> keys;
  for (Key key = 0; key < 400; ++key) keys.push_back(key);
  Push(keys);
  const ExportReport base = Publish(false);
  EXPECT_EQ(base.number, 1);
  EXPECT_EQ(base.num_rows, 400);
  ExpectServedAsTrained();

  Push({3, 4, 450});
  ASSERT_TRUE(client_->Erase("t", std::vector<Key>{5, 6}).ok());
  const ExportReport delta = Publish(true);
  EXPECT_EQ(delta.number, 2);
  EXPECT_EQ(delta.num_rows, 3);
  EXPECT_EQ(delta.num_removed, 2);
  ExpectServedAsTrained();

  const ExportReport nothing = Publish(true);
  EXPECT_FALSE(nothing.is_published);
  EXPECT_EQ(nothing.number, 2);
  EXPECT_EQ(ListExports(path_).value().size(), 2);

  Push({7});
  options_.keep_bases = 1;
  EXPECT_EQ(Publish(false).number, 3);
  ExpectServedAsTrained();
  EXPECT_EQ(ListExports(path_).value().size(), 1);
}

TEST_P(ExporterTest, KeysWithoutARowReadAsTheConfigHasThem) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kUsage;
  config.optimizer = OptimizerConfig(std::vector<SegmentConfig>{
      {1, 1.0f, SgdConfig{}, {}}, {0, 1.0f, SgdConfig{}, {}}});
  for (const NotAdmittedKind kind :
       {NotAdmittedKind::kConstant, NotAdmittedKind::kShared,
        NotAdmittedKind::kWeight}) {
    config.admission = {MinCountAdmission{2}, {kind, 0.5f}};
    ASSERT_TRUE(client_->CreateTable(config).ok());
    Push({1, 2});
    Push({2});
    Publish(false);
    ExpectServedAsTrained();
    Push({1, 8});
    Publish(true);
    ExpectServedAsTrained();
    ASSERT_TRUE(client_->DropTable("t").ok());
  }
}

TEST_P(ExporterTest, ADeltaOfAnotherTableIsRefusedAndLeavesNothing) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  Push({1});
  Publish(false);
  ASSERT_TRUE(client_->DropTable("t").ok());
  options_.is_delta = true;
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  const absl::Status unknown = PublishExport(*client_, options_).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unknown.message()), HasSubstr("Export a base"));
  EXPECT_EQ(ListExports(path_).value().size(), 1);
  Push({1});
  EXPECT_EQ(Publish(false).number, 2);
}

TEST_P(ExporterTest, ScoresAreSettledOnlyWhenTheExportIsThere) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 3});
  options_.rule = ScoreRule{1.0f, 1.0f, 16.0f};
  EXPECT_EQ(Publish(false).num_rows, 3);
  Push({2});
  // A file where the folder should come: it cannot be published.
  std::ofstream(path_ + "/delta-00000002") << "in the way";
  options_.is_delta = true;
  EXPECT_FALSE(PublishExport(*client_, options_).ok());
  std::filesystem::remove(path_ + "/delta-00000002");
  EXPECT_EQ(Publish(true).num_rows, 1);
  EXPECT_FALSE(Publish(true).is_published);
}

INSTANTIATE_TEST_SUITE_P(Shards, ExporterTest, testing::Values(1, 3));

}  // namespace
}  // namespace tfswitch
