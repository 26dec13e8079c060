#include "cc/serving/exporter.h"

#include <poll.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cc/base/interrupt.h"
#include "cc/client/local_client.h"
#include "cc/client/sharded_client.h"
#include "cc/serving/served_rows.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/cc/testing/forwarding_client.h"

namespace tfswitch {
namespace {

using testing::AllOf;
using testing::HasSubstr;

// While rows are read, puts a file where the export is to come.
class ObstructingClient final : public ForwardingClient {
 public:
  ObstructingClient(std::shared_ptr<ParameterClient> client, std::string file)
      : ForwardingClient(std::move(client)), file_(std::move(file)) {}

  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override {
    std::ofstream(file_) << "in the way";
    return client_->ExportChanges(args, visit);
  }

 private:
  const std::string file_;
};

class CountingClient final : public ForwardingClient {
 public:
  using ForwardingClient::ForwardingClient;

  int num_exports() const { return num_exports_; }

  absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) override {
    ++num_exports_;
    return client_->ExportChanges(args, visit);
  }

 private:
  int num_exports_ = 0;
};

v1::ScoreRule RuleOf(float base_threshold, float delta_threshold,
                     float delta_keep_days) {
  v1::ScoreRule rule;
  rule.set_base_threshold(base_threshold);
  rule.set_delta_threshold(delta_threshold);
  rule.set_delta_keep_days(delta_keep_days);
  return rule;
}

// With one shard, and with three.
class ExporterTest : public testing::TestWithParam<int> {
 protected:
  ExporterTest() : shards_(MakeShards(GetParam())), client_(MakeClient()) {
    std::string pattern = testing::TempDir() + "/exporterXXXXXX";
    path_ = mkdtemp(pattern.data());
    options_.set_path(path_);
    options_.add_tables("t");
  }
  ~ExporterTest() override {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
  }

  static std::vector<std::shared_ptr<Shard>> MakeShards(int num_shards) {
    std::vector<std::shared_ptr<Shard>> shards;
    for (int i = 0; i < num_shards; ++i) {
      ShardOptions options;
      options.shard_index = static_cast<uint32_t>(i);
      options.num_shards = static_cast<uint32_t>(num_shards);
      shards.push_back(std::make_shared<Shard>(options));
    }
    return shards;
  }

  std::shared_ptr<ParameterClient> MakeClient() {
    std::vector<std::unique_ptr<ParameterClient>> clients;
    for (const auto& shard : shards_) clients.push_back(NewLocalClient(shard));
    return NewShardedClient(std::move(clients));
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
  void Push(const std::vector<Key>& keys, const std::string& table = "t") {
    const std::vector<float> gradients(keys.size() * 2, 1.0f);
    PushArgs args;
    args.table = table;
    args.dim = 2;
    args.keys = keys;
    args.gradients = gradients;
    args.learning_rate = 1.0f;
    args.insert_missing = true;
    const auto pushed = client_->Push(args);
    ASSERT_TRUE(pushed.ok()) << pushed.status();
  }

  v1::PublishExportResponse Publish(bool is_delta) {
    options_.set_delta(is_delta);
    const auto report = PublishExport(*client_, options_);
    EXPECT_TRUE(report.ok()) << report.status();
    return report.value_or(v1::PublishExportResponse());
  }

  // Expects that the served exports have the same rows as the client's table.
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

  const std::vector<std::shared_ptr<Shard>> shards_;
  std::shared_ptr<ParameterClient> client_;
  std::string path_;
  v1::PublishExportRequest options_;
};

// A call that hears of its own progress goes on, and no other does.
int progress_lines = -1;
int GoOnWithProgress() {
  static std::string* const text = new std::string;
  constexpr int kHangMillis = 60'000;
  pollfd end = {progress_lines, POLLIN, 0};
  while (text->find("tfswitch: exporting to '") == std::string::npos) {
    char buffer[256];
    if (poll(&end, 1, kHangMillis) <= 0) return 1;  // It ends the export.
    text->append(buffer, read(progress_lines, buffer, sizeof(buffer)));
  }
  return 0;
}

using ExporterProgressTest = ExporterTest;

TEST_P(ExporterProgressTest, ALongExportSaysThatItIsUnderWay) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  Push({1, 2, 3});
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  progress_lines = ends[0];
  const int terminal = dup(STDERR_FILENO);
  dup2(ends[1], STDERR_FILENO);
  SetInterruptCheck(GoOnWithProgress);

  const auto report = PublishExport(*client_, options_);

  SetInterruptCheck(nullptr);
  dup2(terminal, STDERR_FILENO);
  for (const int file : {ends[0], ends[1], terminal}) close(file);
  EXPECT_TRUE(report.ok()) << report.status();
}

INSTANTIATE_TEST_SUITE_P(OneShard, ExporterProgressTest, testing::Values(1));

TEST_P(ExporterTest, WhatIsServedIsWhatWasTrained) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  std::vector<Key> keys;
  for (Key key = 0; key < 400; ++key) keys.push_back(key);
  Push(keys);
  const v1::PublishExportResponse base = Publish(false);
  EXPECT_EQ(base.number(), 1);
  EXPECT_EQ(base.num_rows(), 400);
  ExpectServedAsTrained();

  Push({3, 4, 450});
  ASSERT_TRUE(client_->Erase("t", std::vector<Key>{5, 6}).ok());
  const v1::PublishExportResponse delta = Publish(true);
  EXPECT_EQ(delta.number(), 2);
  EXPECT_EQ(delta.num_rows(), 3);
  EXPECT_EQ(delta.num_removed(), 2);
  ExpectServedAsTrained();

  const v1::PublishExportResponse nothing = Publish(true);
  EXPECT_FALSE(nothing.published());
  EXPECT_EQ(nothing.number(), 2);
  EXPECT_EQ(ListExports(path_).value().size(), 2);

  Push({7});
  options_.set_keep_bases(1);
  EXPECT_EQ(Publish(false).number(), 3);
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
  options_.set_delta(true);
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kNotFound);
  // One that was not restored would take the rows away from readers.
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  Push({2, 3});
  const absl::Status unknown = PublishExport(*client_, options_).status();
  EXPECT_EQ(unknown.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(unknown.message()),
              AllOf(HasSubstr("only 0 of the 1 ids"),
                    HasSubstr("restore the table"), HasSubstr("a base")));
  ASSERT_TRUE(client_->DropTable("t").ok());
  TableConfig other = Config();
  other.statistics.kind = StatisticsKind::kUsage;
  other.admission = {MinCountAdmission{2}, {NotAdmittedKind::kConstant, 0.5f}};
  ASSERT_TRUE(client_->CreateTable(other).ok());
  EXPECT_THAT(std::string(PublishExport(*client_, options_).status().message()),
              HasSubstr("another value for an id without a row"));
  EXPECT_EQ(ListExports(path_).value().size(), 1);
  EXPECT_EQ(Publish(false).number(), 2);
}

// As after a restore: the rows are there, and nobody knows what has changed.
TEST_P(ExporterTest, ADeltaOfUnknownChangesIsTheDifferenceToTheFiles) {
  for (const RowFormat format : {RowFormat::kFloat32, RowFormat::kInt8}) {
    options_.set_row_format(std::string(NameOf(format)));
    const auto change = [this] {
      ASSERT_TRUE(client_->CreateTable(Config()).ok());
      std::vector<Key> keys;
      for (Key key = 0; key < 400; ++key) keys.push_back(key);
      Push(keys);
    };
    change();
    Publish(false);
    Push({3, 450, 451});
    ASSERT_TRUE(client_->Erase("t", std::vector<Key>{5, 6}).ok());
    Publish(true);
    Push({451});
    Publish(true);

    ASSERT_TRUE(client_->DropTable("t").ok());
    change();
    Push({4, 450, 460});
    ASSERT_TRUE(client_->Erase("t", std::vector<Key>{6, 7}).ok());
    const v1::PublishExportResponse delta = Publish(true);
    EXPECT_TRUE(delta.delta());
    // 3 is as in the base again, 4 and 460 are new, 5 has come back.
    EXPECT_EQ(delta.num_rows(), 4);
    // 6 has gone before, and 451 and 7 have gone now.
    EXPECT_EQ(delta.num_removed(), 2);
    if (format == RowFormat::kFloat32) ExpectServedAsTrained();
    EXPECT_FALSE(Publish(true).published());

    // The table knows the changes again.
    Push({8});
    EXPECT_EQ(Publish(true).num_rows(), 1);
    if (format == RowFormat::kFloat32) ExpectServedAsTrained();
    ASSERT_TRUE(client_->DropTable("t").ok());
  }
}

TEST_P(ExporterTest, ADifferenceByARuleIsWhatABaseWouldBring) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  *options_.mutable_rule() = RuleOf(2.0f, 10.0f, 16.0f);
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 3});
  Push({1, 2, 3});
  EXPECT_EQ(Publish(false).num_rows(), 3);
  ASSERT_TRUE(client_->DropTable("t").ok());
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 4, 5});
  Push({1, 2, 4});
  Push({2});
  const v1::PublishExportResponse delta = Publish(true);
  EXPECT_EQ(delta.num_rows(), 2);  // 2 is another, 4 is new, 5 is not worth it.
  EXPECT_EQ(delta.num_removed(), 1);  // 3.
}

TEST_P(ExporterTest, ScoresAreCommittedOnlyWhenTheExportIsThere) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 3});
  *options_.mutable_rule() = RuleOf(1.0f, 1.0f, 16.0f);
  EXPECT_EQ(Publish(false).num_rows(), 3);
  Push({2});
  const std::string file = path_ + "/delta-00000002";
  ObstructingClient obstructing(client_, file);
  options_.set_delta(true);
  const absl::Status status = PublishExport(obstructing, options_).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot publish"));
  std::filesystem::remove(file);
  EXPECT_EQ(Publish(true).num_rows(), 1);
  EXPECT_FALSE(Publish(true).published());
}

TEST_P(ExporterTest, ScoresOfATableThatAnotherClientHasMadeAnewAreCommitted) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  ASSERT_TRUE(client_->CreateTable(config).ok());
  const auto exporting = client_;
  client_ = MakeClient();
  ASSERT_TRUE(client_->DropTable("t").ok());
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 3});
  *options_.mutable_rule() = RuleOf(1.0f, 1.0f, 16.0f);
  client_ = exporting;
  EXPECT_EQ(Publish(false).num_rows(), 3);
  EXPECT_FALSE(Publish(true).published());
}

TEST_P(ExporterTest, ScoresOfManyTablesAreCommitted) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  options_.clear_tables();
  // In all, as each takes address space, of which TSan has little.
  const int num_tables = 20 / GetParam();
  for (int i = 0; i < num_tables; ++i) {
    config.name = absl::StrCat("t", i);
    options_.add_tables(config.name);
    const auto created = client_->CreateTable(config);
    ASSERT_TRUE(created.ok()) << created;
    Push({1, 2, 3}, config.name);
  }
  *options_.mutable_rule() = RuleOf(1.0f, 1.0f, 16.0f);
  EXPECT_EQ(Publish(false).num_rows(), 3 * num_tables);
  EXPECT_FALSE(Publish(true).published());
}

TEST_P(ExporterTest, FormatAndRuleAreThoseOfTheExportBefore) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  config.statistics.nonclk_coeff = 1.0f;
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1, 2, 3});
  Push({3});
  *options_.mutable_rule() = RuleOf(2.0f, 0.125f, 16.0f);
  options_.set_row_format("int8");
  EXPECT_EQ(Publish(false).num_rows(), 1);
  options_.clear_rule();
  options_.clear_row_format();
  Push({2});
  EXPECT_EQ(Publish(true).num_rows(), 1);
  EXPECT_EQ(Publish(false).num_rows(), 2);
  const v1::ExportContent base = ReadExport(path_, {3, false}).value();
  ASSERT_TRUE(base.has_rule());
  EXPECT_EQ(base.rule().base_threshold(), 2.0f);
  EXPECT_EQ(base.rule().delta_threshold(), 0.125f);
  EXPECT_EQ(base.rule().delta_keep_days(), 16.0f);
  EXPECT_EQ(base.tables().at("t").row_format(), "int8");

  // Also of one that is older, if the last cannot be read.
  std::ofstream(path_ + "/base-00000003/manifest.json") << "damaged";
  EXPECT_EQ(Publish(false).num_rows(), 2);
  EXPECT_EQ(ReadExport(path_, {4, false})->tables().at("t").row_format(),
            "int8");
  options_.set_all_rows(true);
  options_.set_row_format("float16");
  EXPECT_EQ(Publish(false).num_rows(), 3);
  options_.set_all_rows(false);
  EXPECT_EQ(Publish(false).num_rows(), 3);
  EXPECT_FALSE(ReadExport(path_, {6, false})->has_rule());
}

TEST_P(ExporterTest, ABaseFollowsWhereADeltaCannotIfThatIsWanted) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  Push({1});
  options_.set_base_if_broken(true);
  const v1::PublishExportResponse first = Publish(true);
  EXPECT_FALSE(first.delta());
  EXPECT_THAT(first.why_base(), HasSubstr("there is no export"));
  Push({2});
  const v1::PublishExportResponse delta = Publish(true);
  EXPECT_TRUE(delta.delta());
  EXPECT_EQ(delta.why_base(), "");

  ASSERT_TRUE(client_->DropTable("t").ok());
  // A table that has gone may come back, and is not left out.
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  Push({3, 4, 5});
  const v1::PublishExportResponse again = Publish(true);
  EXPECT_FALSE(again.delta());
  EXPECT_EQ(again.number(), 3);
  EXPECT_EQ(again.num_rows(), 3);
  EXPECT_THAT(again.why_base(), HasSubstr("only 0 of the 2 ids"));

  std::ofstream(path_ + "/base-00000003/manifest.json") << "damaged";
  EXPECT_EQ(Publish(true).number(), 4);
  ExpectServedAsTrained();
}

TEST_P(ExporterTest, ATableThatIsGoneIsNotLeftOutOfAnExportOfAll) {
  options_.clear_tables();
  options_.set_all_tables(true);
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kNotFound);
  TableConfig other = Config();
  other.name = "u";
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  ASSERT_TRUE(client_->CreateTable(other).ok());
  Push({1});
  Publish(false);
  ASSERT_TRUE(client_->DropTable("u").ok());
  Push({2});
  options_.set_base_if_broken(true);
  CountingClient client(client_);
  for (const bool is_delta : {false, true}) {
    options_.set_delta(is_delta);
    const absl::Status status = PublishExport(client, options_).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("'u'"), HasSubstr("base-00000001")));
  }
  // Nor if the last export that tells of it is not the last one.
  std::filesystem::create_directory(path_ + "/base-00000002");
  EXPECT_EQ(PublishExport(client, options_).status().code(),
            absl::StatusCode::kNotFound);
  // No table was read in vain.
  EXPECT_EQ(client.num_exports(), 0);

  options_.set_all_tables(false);
  options_.clear_tables();
  options_.add_tables("t");
  EXPECT_EQ(Publish(false).num_rows(), 2);
}

TEST_P(ExporterTest, ADeltaDoesNotFollowAnotherExportThanIsAskedFor) {
  TableConfig config = Config();
  config.statistics.kind = StatisticsKind::kShowClick;
  ASSERT_TRUE(client_->CreateTable(config).ok());
  Push({1});
  options_.set_base_if_broken(true);
  options_.set_row_format("float32");
  Publish(false);
  const auto why = [this] { return Publish(true).why_base(); };
  EXPECT_EQ(why(), "");

  options_.set_row_format("int8");
  EXPECT_THAT(why(), HasSubstr("int8, and are float32 in base-00000001"));
  EXPECT_EQ(why(), "");
  *options_.mutable_rule() = RuleOf(0.1f, 0.2f, 3.0f);
  EXPECT_THAT(why(), HasSubstr("another rule"));
  EXPECT_EQ(why(), "");
  options_.mutable_rule()->set_delta_threshold(0.3f);
  EXPECT_THAT(why(), HasSubstr("another rule"));
  options_.clear_rule();
  EXPECT_EQ(why(), "");
  options_.set_all_rows(true);
  EXPECT_THAT(why(), HasSubstr("all rows"));
  EXPECT_EQ(why(), "");

  config.name = "u";
  ASSERT_TRUE(client_->CreateTable(config).ok());
  EXPECT_EQ(why(), "");
  options_.clear_tables();
  options_.add_tables("u");
  options_.add_tables("t");
  EXPECT_THAT(why(), HasSubstr("'u' is not in"));
  EXPECT_EQ(why(), "");
  options_.clear_tables();
  options_.add_tables("u");
  EXPECT_THAT(why(), HasSubstr("'t' is not asked for"));
  options_.clear_tables();
  EXPECT_EQ(why(), "");
  options_.set_all_tables(true);
  EXPECT_THAT(why(), HasSubstr("'t' is not in"));
  EXPECT_EQ(why(), "");

  options_.set_base_if_broken(false);
  options_.set_row_format("float16");
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_P(ExporterTest, ABusyFolderLeadsToNoBase) {
  ASSERT_TRUE(client_->CreateTable(Config()).ok());
  options_.set_base_if_broken(true);
  Publish(true);
  const auto busy = ExportWriter::Begin(path_, /*is_delta=*/true).value();
  EXPECT_EQ(PublishExport(*client_, options_).status().code(),
            absl::StatusCode::kAborted);
}

INSTANTIATE_TEST_SUITE_P(Shards, ExporterTest, testing::Values(1, 3));

}  // namespace
}  // namespace tfswitch
