#include "cc/serving/served_model.h"

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/notification.h"
#include "cc/base/thread_pool.h"
#include "cc/client/local_client.h"
#include "cc/serving/exporter.h"
#include "cc/serving/model_file.h"
#include "cc/shard/shard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using testing::HasSubstr;

namespace fs = std::filesystem;

constexpr char kRemote[] = R"({
  "format": "tfswitch-model", "version": 2, "id": "ID", "tables": {"t": 1},
  "remote": {"addresses": "grpc://a:1,b:2", "deadline_secs": 2.5,
             "cache_rows": 100, "cache_secs": 0.5}})";
constexpr char kEmbedded[] = R"({
  "format": "tfswitch-model", "version": 2, "id": "ID", "tables": {"t": 1},
  "embedded": {"rows": "../rows"}})";

// Sets a variable of the environment for as long as it lives.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    setenv(name, value, 1);
  }
  ~Variable() { unsetenv(name_); }

 private:
  const char* const name_;
};

class ServedModelTest : public testing::Test {
 protected:
  ServedModelTest()
      : client_(NewLocalClient(std::make_shared<Shard>(ShardOptions{}))) {
    std::string pattern = testing::TempDir() + "/served_modelXXXXXX";
    folder_ = mkdtemp(pattern.data());
    path_ = folder_;
    TableConfig config;
    config.name = "t";
    config.dim = 1;
    config.optimizer = SgdConfig{};
    EXPECT_TRUE(client_->CreateTable(config).ok());
  }
  ~ServedModelTest() override {
    std::error_code error;
    fs::remove_all(folder_, error);
  }

  std::string file() const {
    return absl::StrCat(path_, "/m/", kModelFilePath);
  }

  // Writes a model file with this id, and its rows, where key 1 has `value`.
  void Save(const std::string& id, float value = 0.0f) {
    fs::remove_all(path_ + "/m");
    Write(absl::StrReplaceAll(kEmbedded, {{"ID", id}}));
    const Key key = 1;
    AssignArgs args;
    args.table = "t";
    args.dim = 1;
    args.keys = absl::MakeConstSpan(&key, 1);
    args.embeddings = absl::MakeConstSpan(&value, 1);
    ASSERT_TRUE(client_->Assign(args).ok());
    v1::PublishExportRequest request;
    request.set_path(path_ + "/m/rows");
    request.add_tables("t");
    ASSERT_TRUE(PublishExport(*client_, request).ok());
  }

  void Write(const std::string& text) {
    fs::create_directories(fs::path(file()).parent_path());
    std::ofstream(file()) << text;
  }

  static float ValueOf(const ServedModel& model) {
    const std::vector<Key> keys = {1};
    float value = -1.0f;
    const absl::Status status =
        model.Pin()->Lookup({{"t", 1, keys, &value}}, nullptr);
    EXPECT_TRUE(status.ok()) << status;
    return value;
  }

  absl::StatusOr<std::shared_ptr<ServedModel>> Open() {
    return OpenServedModel(file(), [](const std::string&, absl::Duration) {
      return absl::UnimplementedError("no servers");
    });
  }

  const std::shared_ptr<ParameterClient> client_;
  std::string folder_;
  std::string path_;  // In it.
};

TEST_F(ServedModelTest, GraphsOfOneModelShareItsRows) {
  Save("a", 1.0f);
  const auto first = Open();
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(*Open(), *first);
  EXPECT_EQ(*FindServedModel(path_ + "/m"), *first);
  EXPECT_EQ(*FindServedModel(file()), *first);
  EXPECT_FALSE((*first)->is_remote());
}

TEST_F(ServedModelTest, APathMeansTheModelThatWasOpenedLast) {
  Save("a", 1.0f);
  const auto first = Open().value();
  fs::rename(path_ + "/m", path_ + "/first");
  Save("b", 2.0f);
  const auto second = Open().value();
  EXPECT_EQ(*FindServedModel(file()), second);
  fs::remove_all(path_ + "/m");
  fs::rename(path_ + "/first", path_ + "/m");
  EXPECT_EQ(Open().value(), first);
  EXPECT_EQ(*FindServedModel(file()), first);
}

TEST_F(ServedModelTest, ThreadsThatAreLentReadTheSame) {
  std::vector<Key> keys(5000);
  std::vector<float> values(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<Key>(i) * 7;
    values[i] = static_cast<float>(i);
  }
  AssignArgs args;
  args.table = "t";
  args.dim = 1;
  args.keys = keys;
  args.embeddings = values;
  ASSERT_TRUE(client_->Assign(args).ok());
  Save("a", 1.0f);
  const auto model = Open();
  ASSERT_TRUE(model.ok()) << model.status();
  const ThreadPool threads(3);
  // Parts of which some are empty and some shorter than a range.
  for (const size_t size : {0, 1, 511, 2000, 5000}) {
    std::vector<float> alone(size + 100, -1.0f);
    std::vector<float> together(size + 100, -2.0f);
    const auto parts = [&](std::vector<float>* to) {
      const auto all = absl::MakeConstSpan(keys);
      return std::vector<LookupPart>{
          {"t", 1, all.subspan(0, size), to->data()},
          {"t", 1, {}, nullptr},
          {"t", 1, all.subspan(0, 100), to->data() + size}};
    };
    ASSERT_TRUE((*model)->Pin()->Lookup(parts(&alone), nullptr).ok());
    ASSERT_TRUE((*model)->Pin()->Lookup(parts(&together), &threads).ok());
    EXPECT_EQ(alone, together);
    EXPECT_EQ(together[size + 99], 99.0f);
  }
}

TEST_F(ServedModelTest, AModelSavedAnewAtAPathIsAnotherOne) {
  Save("a", 1.0f);
  auto old = Open().value();
  Save("b", 2.0f);
  auto present = Open().value();

  EXPECT_EQ(ValueOf(*old), 1.0f);
  EXPECT_EQ(ValueOf(*present), 2.0f);
  EXPECT_EQ(FindServedModel(path_ + "/m").value(), present);
  present.reset();
  EXPECT_EQ(FindServedModel(path_ + "/m").value(), old);
  old.reset();
  EXPECT_EQ(FindServedModel(path_ + "/m").status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(ServedModelTest, ThreadsThatOpenOneModelShareIt) {
  Write(absl::StrReplaceAll(kRemote, {{"ID", "a"}}));
  std::atomic<int> num_opened{0};
  absl::Notification is_opening;
  absl::Notification may_go_on;
  const OpenClient open_client = [&](const std::string&, absl::Duration) {
    ++num_opened;
    is_opening.Notify();
    may_go_on.WaitForNotification();
    return client_;
  };
  const std::string remote = file();
  std::vector<std::shared_ptr<ServedModel>> models(4);
  std::vector<std::thread> threads;
  threads.reserve(4);
  for (auto& model : models) {
    threads.emplace_back(
        [&] { model = OpenServedModel(remote, open_client).value(); });
  }
  is_opening.WaitForNotification();
  // Neither who looks for it nor who opens another waits for the servers.
  EXPECT_FALSE(FindServedModel(remote).ok());
  path_ += "/other";
  Save("b");
  EXPECT_TRUE(Open().ok());
  may_go_on.Notify();
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_opened, 1);
  EXPECT_THAT(models, testing::Each(models[0]));
  EXPECT_EQ(FindServedModel(remote).value(), models[0]);
}

TEST_F(ServedModelTest, WhatCouldNotBeOpenedIsTriedAgain) {
  Write(absl::StrReplaceAll(kRemote, {{"ID", "a"}}));
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kUnimplemented);
  const auto opened = OpenServedModel(
      file(), [&](const std::string& addresses, absl::Duration timeout) {
        EXPECT_EQ(addresses, "grpc://a:1,b:2");
        EXPECT_EQ(timeout, absl::Seconds(2.5));
        return client_;
      });
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_TRUE((*opened)->is_remote());
}

TEST_F(ServedModelTest, TheEnvironmentGoesBeforeTheFile) {
  Write(absl::StrReplaceAll(kRemote, {{"ID", "a"}}));
  const Variable addresses("TFSWITCH_SERVING_ADDRESSES", "grpc://c:3");
  const Variable deadline("TFSWITCH_SERVING_DEADLINE_SECS", "0.25");
  const Variable rows("TFSWITCH_SERVING_CACHE_ROWS", "0");
  const Variable seconds("TFSWITCH_SERVING_CACHE_SECS", "7");
  RemoteRowsOptions options = OptionsOf(ReadModelFile(file()).value().remote());
  EXPECT_EQ(options.cache_rows, 100);
  EXPECT_EQ(options.cache_lifetime, absl::Seconds(0.5));
  ASSERT_TRUE(ReadServingEnvironment(&options).ok());
  EXPECT_EQ(options.addresses, "grpc://c:3");
  EXPECT_EQ(options.deadline, absl::Seconds(0.25));
  EXPECT_EQ(options.cache_rows, 0);
  EXPECT_EQ(options.cache_lifetime, absl::Seconds(7));

  for (const char* name :
       {"TFSWITCH_SERVING_DEADLINE_SECS", "TFSWITCH_SERVING_CACHE_ROWS",
        "TFSWITCH_SERVING_CACHE_SECS", "TFSWITCH_SERVING_WATCH_SECS",
        "TFSWITCH_SERVING_VERIFY_FIRST"}) {
    for (const char* value : {"soon", "-1", "", "nan"}) {
      const Variable variable(name, value);
      const absl::Status status = ReadServingEnvironment(&options).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument)
          << name << " " << value;
      EXPECT_THAT(std::string(status.message()), HasSubstr(name));
    }
  }
}

}  // namespace
}  // namespace tfswitch
