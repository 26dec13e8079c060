#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "cc/capi/tfswitch.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace {

using nlohmann::json;
using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

class CapiTest : public testing::TestWithParam<bool> {
 protected:
  CapiTest() : api_(Tfswitch_GetApi(TFSWITCH_API_VERSION)) {
    std::string address =
        std::string("local://") +
        testing::UnitTest::GetInstance()->current_test_info()->name();
    if (GetParam()) {
      Tfswitch_ServerOptions options = {};
      options.address = "127.0.0.1:0";
      options.num_shards = 1;
      options.num_threads = 2;
      EXPECT_EQ(api_->start_server(&options, &server_, error_), 0) << error_;
      address = std::string("grpc://") + api_->server_address(server_);
    }
    EXPECT_EQ(api_->open_cluster(address.c_str(), 10.0, nullptr, 0, &cluster_,
                                 error_),
              0)
        << error_;
  }
  ~CapiTest() override {
    api_->close_table(table_);
    api_->close_cluster(cluster_);
    if (server_ != nullptr) {
      api_->stop_server(server_, 1.0);
      api_->delete_server(server_);
    }
  }

  void OpenTable(const std::string& segment = R"({"sgd": {}})") {
    const std::string config =
        R"({"name": "t", "dim": 2, "optimizer": {"segments": [)" + segment +
        "]}}";
    ASSERT_EQ(api_->open_table(cluster_, config.c_str(), &table_, error_), 0)
        << error_;
  }

  std::vector<float> Pull(const std::vector<int64_t>& keys, int insert = 0) {
    std::vector<float> out(keys.size() * 2, -9.0f);
    const Tfswitch_PullPart part = PullPart(keys, &out);
    EXPECT_EQ(api_->pull(&part, 1, insert, nullptr, error_), 0) << error_;
    return out;
  }

  Tfswitch_PullPart PullPart(const std::vector<int64_t>& keys,
                             std::vector<float>* out) const {
    return {table_, keys.data(), keys.size(), out->data()};
  }

  Tfswitch_PushPart PushPart(const std::vector<int64_t>& keys,
                             const std::vector<float>& gradients,
                             const Tfswitch_PushOptions& options) const {
    return {table_, keys.data(), keys.size(), gradients.data(), options, {}};
  }

  json Call(const char* method, const char* request) {
    char* text = nullptr;
    EXPECT_EQ(api_->call(cluster_, method, request, &text, error_), 0)
        << error_;
    const json response = json::parse(text);
    api_->free_string(text);
    return response;
  }

  std::string CallError(const char* method, const char* request) {
    char* text = nullptr;
    EXPECT_NE(api_->call(cluster_, method, request, &text, error_), 0);
    return error_;
  }

  const Tfswitch_Api* const api_;
  char error_[TFSWITCH_ERROR_SIZE] = "";
  Tfswitch_Cluster* cluster_ = nullptr;
  Tfswitch_Table* table_ = nullptr;
  Tfswitch_Server* server_ = nullptr;
};

INSTANTIATE_TEST_SUITE_P(LocalAndGrpc, CapiTest, testing::Bool(),
                         [](const testing::TestParamInfo<bool>& info) {
                           return info.param ? "grpc" : "local";
                         });

TEST(CapiVersionTest, AnotherApiVersionIsRefused) {
  EXPECT_EQ(Tfswitch_GetApi(TFSWITCH_API_VERSION + 1), nullptr);
  EXPECT_EQ(Tfswitch_GetApi(TFSWITCH_API_VERSION - 1), nullptr);
  EXPECT_STREQ(Tfswitch_GetApi(TFSWITCH_API_VERSION)->version(),
               TFSWITCH_VERSION);
}

// A core of the same version must have all functions that a caller knows.
TEST(CapiVersionTest, AFunctionMoreIsAnotherVersion) {
  EXPECT_EQ(TFSWITCH_API_VERSION, 17);
  EXPECT_EQ(sizeof(Tfswitch_Api), 47 * sizeof(void*));
}

TEST_P(CapiTest, ManyTablesArePulledAndPushedInOneCall) {
  OpenTable();
  Tfswitch_Table* other = nullptr;
  ASSERT_EQ(
      api_->open_table(
          cluster_,
          R"({"name": "u", "dim": 1, "optimizer": {"segments": [{"sgd": {}}]}})",
          &other, error_),
      0)
      << error_;
  const std::vector<int64_t> keys = {5, 6, 5};
  std::vector<float> rows(6);
  std::vector<float> other_rows(3);
  const Tfswitch_PullPart pulls[] = {{table_, keys.data(), 3, rows.data()},
                                     {other, keys.data(), 3, other_rows.data()},
                                     {table_, keys.data(), 0, nullptr}};

  ASSERT_EQ(api_->pull(pulls, 3, 1, nullptr, error_), 0) << error_;

  EXPECT_THAT(Pull({5, 6, 5}), testing::ElementsAreArray(rows));
  EXPECT_EQ(other_rows[0], other_rows[2]);

  const std::vector<float> gradients(6, 1.0f);
  const Tfswitch_PushOptions options = {1.0f, 0, nullptr, nullptr, 0, 1};
  Tfswitch_PushPart pushes[] = {
      {table_, keys.data(), 3, gradients.data(), options, {}},
      {other, keys.data(), 3, gradients.data(), options, {}}};
  ASSERT_EQ(api_->push(pushes, 2, 0, nullptr, error_), 0) << error_;
  EXPECT_EQ(pushes[0].result.updated_rows, 2);
  EXPECT_EQ(pushes[1].result.skipped, 0);
  // One step for each key, with the sum of its gradients.
  const std::vector<float> stepped = {rows[0] - 2, rows[1] - 2, rows[2] - 1,
                                      rows[3] - 1};
  EXPECT_THAT(Pull({5, 6}), testing::ElementsAreArray(stepped));

  // One with Inf has all skipped; one that is wrong has none applied.
  const std::vector<float> infinite(3, std::numeric_limits<float>::infinity());
  pushes[1].gradients = infinite.data();
  ASSERT_EQ(api_->push(pushes, 2, 0, nullptr, error_), 0) << error_;
  EXPECT_EQ(pushes[0].result.skipped, 1);
  EXPECT_EQ(pushes[1].result.skipped, 1);
  pushes[0].options.skip_non_finite = pushes[1].options.skip_non_finite = 0;
  EXPECT_NE(api_->push(pushes, 2, 0, nullptr, error_), 0);
  EXPECT_THAT(error_, testing::AllOf(HasSubstr("'u'"), HasSubstr("id 5")));
  EXPECT_THAT(Pull({5, 6}), testing::ElementsAreArray(stepped));
  EXPECT_EQ(api_->pull(nullptr, 0, 1, nullptr, error_), 0);
  api_->close_table(other);
}

TEST_P(CapiTest, LentThreadsGiveTheSameResult) {
  OpenTable(R"({"adagrad": {}})");
  std::vector<std::thread> lent;
  Tfswitch_Threads threads;
  threads.num_threads = 2;
  threads.context = &lent;
  threads.schedule = [](void* context, void (*task)(void*),
                        void* task_context) {
    static_cast<std::vector<std::thread>*>(context)->emplace_back(task,
                                                                  task_context);
  };
  // They repeat often enough for the distinct keys to be sent.
  std::vector<int64_t> keys(60000);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(i * 7919 % 211);
  }
  std::vector<float> gradients(keys.size() * 2);
  for (size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = static_cast<float>(i % 13) - 6.0f;
  }
  std::vector<float> results[2];
  for (const Tfswitch_Threads* used :
       {static_cast<const Tfswitch_Threads*>(nullptr),
        static_cast<const Tfswitch_Threads*>(&threads)}) {
    std::vector<float>& out = results[used == nullptr ? 0 : 1];
    out.resize(keys.size() * 2);
    Tfswitch_PullPart pull = PullPart(keys, &out);
    ASSERT_EQ(api_->pull(&pull, 1, 1, used, error_), 0) << error_;
    const Tfswitch_PushOptions options = {0.1f, 0, nullptr, nullptr, 0, 0};
    Tfswitch_PushPart push = PushPart(keys, gradients, options);
    ASSERT_EQ(api_->push(&push, 1, 0, used, error_), 0) << error_;
    EXPECT_EQ(push.result.updated_rows, 211);
    ASSERT_EQ(api_->pull(&pull, 1, 0, used, error_), 0) << error_;
    // The same rows again from the start.
    int64_t erased = 0;
    ASSERT_EQ(api_->erase(table_, keys.data(), keys.size(), &erased, error_),
              0);
  }
  for (std::thread& thread : lent) thread.join();
  EXPECT_FALSE(lent.empty());
  EXPECT_EQ(results[0], results[1]);
}

TEST_P(CapiTest, PullOfRepeatedKeysReadsEachPlace) {
  OpenTable();
  // Long enough, and repeating enough, for the distinct keys to be sent.
  std::vector<int64_t> keys(5000);
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[i] = static_cast<int64_t>(i % 7);
  }

  const std::vector<float> out = Pull(keys, 1);

  for (size_t i = 7; i < keys.size(); ++i) {
    ASSERT_EQ(out[2 * i], out[2 * (i % 7)]);
  }
  int64_t size = 0;
  ASSERT_EQ(api_->table_size(table_, &size, error_), 0);
  EXPECT_EQ(size, 7);
}

TEST_P(CapiTest, TablesAreListedAndDropped) {
  OpenTable(R"({"adam": {}})");
  Pull({1, 2, 3}, 1);
  EXPECT_EQ(api_->table_slot_floats(table_), 5);
  EXPECT_EQ(api_->table_dim(table_), 2);
  EXPECT_STREQ(api_->table_name(table_), "t");
  EXPECT_EQ(api_->table_is_remote(table_), GetParam() ? 1 : 0);

  const json tables = Call("ListTables", "{}")["tables"];
  ASSERT_EQ(tables.size(), 1u);
  EXPECT_EQ(tables[0]["config"]["name"], "t");
  EXPECT_EQ(tables[0]["num_rows"], "3");
  EXPECT_EQ(Call("DropTable", R"({"table": "t"})")["dropped"], true);
  EXPECT_THAT(CallError("DropTable", R"({"table": "t"})"), HasSubstr("'t'"));
}

TEST_P(CapiTest, ACallThatIsNoneSaysWhatThereIs) {
  EXPECT_THAT(CallError("ListTable", "{}"),
              AllOf(HasSubstr("'ListTable'"), HasSubstr("ListTables, ")));
  EXPECT_THAT(CallError("Save", R"({"pth": "x"})"),
              AllOf(HasSubstr("Save: "), HasSubstr("pth")));
  EXPECT_THAT(CallError("Save", "{"), HasSubstr("Save: "));
  EXPECT_THAT(CallError("TakeWorkItem", R"({"queue": "q"})"),
              HasSubstr("no worker of a group"));
  char* text = nullptr;
  EXPECT_NE(api_->call(nullptr, "Save", "{}", &text, error_), 0);
  EXPECT_THAT(error_, HasSubstr("call of a cluster"));
}

TEST_P(CapiTest, ExportHandsOutSlotsWhenAsked) {
  OpenTable(R"({"adagrad": {"initial_accumulator_value": 0.25}})");
  Pull({1, 2, 3}, 1);
  struct Seen {
    size_t rows = 0;
    std::vector<float> slots;
  } seen;
  const auto visit = [](void* context, const int64_t* keys,
                        const float* embeddings, const float* slots,
                        size_t num_rows) {
    auto* seen = static_cast<Seen*>(context);
    seen->rows += num_rows;
    if (slots != nullptr) {
      seen->slots.insert(seen->slots.end(), slots, slots + 2 * num_rows);
    }
    return 0;
  };

  ASSERT_EQ(api_->export_rows(table_, 1, visit, &seen, error_), 0) << error_;
  EXPECT_EQ(seen.rows, 3u);
  EXPECT_THAT(seen.slots, Each(0.25f));
  EXPECT_EQ(seen.slots.size(), 6u);

  seen = Seen();
  ASSERT_EQ(api_->export_rows(table_, 0, visit, &seen, error_), 0);
  EXPECT_EQ(seen.rows, 3u);
  EXPECT_TRUE(seen.slots.empty());
}

TEST_P(CapiTest, BadConfigAndBadTimeoutAreNamed) {
  EXPECT_NE(api_->open_table(cluster_, R"({"name": "t", "dim": -1})", &table_,
                             error_),
            0);
  EXPECT_THAT(error_, HasSubstr("dim"));
  EXPECT_EQ(table_, nullptr);
  Tfswitch_Cluster* other = nullptr;
  EXPECT_NE(api_->open_cluster("local://", 0.0, nullptr, 0, &other, error_), 0);
  EXPECT_THAT(error_, HasSubstr("timeout"));
  EXPECT_NE(api_->open_cluster("nowhere", 1.0, nullptr, 0, &other, error_), 0);
  EXPECT_THAT(error_, HasSubstr("'nowhere'"));
}

#if !defined(__SANITIZE_THREAD__)
TEST_P(CapiTest, AForkIsRefusedAndLeavesWhatItsParentHas) {
  OpenTable();
  const std::vector<float> before = Pull({1}, /*insert=*/1);

  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(60);
    constexpr int kFailedPrecondition = 9;
    int64_t num_rows = 0;
    Tfswitch_Cluster* cluster = nullptr;
    const bool is_refused =
        api_->table_size(table_, &num_rows, error_) == kFailedPrecondition &&
        api_->open_cluster("local://of_the_fork", 1.0, nullptr, 0, &cluster,
                           error_) == kFailedPrecondition;
    api_->close_table(table_);
    api_->close_cluster(cluster_);
    if (server_ != nullptr) {
      api_->stop_server(server_, 1.0);
      api_->delete_server(server_);
    }
    _exit(is_refused ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);

  EXPECT_EQ(Pull({1}), before);
  // Its server takes new connections, too.
  if (server_ != nullptr) {
    Tfswitch_Cluster* cluster = nullptr;
    const std::string address =
        std::string("grpc://") + api_->server_address(server_);
    ASSERT_EQ(
        api_->open_cluster(address.c_str(), 5.0, nullptr, 0, &cluster, error_),
        0)
        << error_;
    api_->close_cluster(cluster);
  }
}

#if !defined(__SANITIZE_ADDRESS__)  // It would look for leaks in the forks.
TEST_P(CapiTest, ForksExitWhileTheirParentIsAtWork) {
  OpenTable();
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      char error[TFSWITCH_ERROR_SIZE];
      const std::vector<int64_t> keys(1000);
      std::vector<float> out(2000);
      while (!is_over) {
        const Tfswitch_PullPart part = PullPart(keys, &out);
        EXPECT_EQ(api_->pull(&part, 1, 0, nullptr, error), 0) << error;
      }
    });
  }

  int status = 0;
  for (int i = 0; i < 100 && status == 0; ++i) {
    Pull({1});  // This thread has something of gRPC, too.
    const pid_t child = fork();
    if (child == 0) {
      alarm(60);
      std::exit(0);  // With the destructors of this thread and the process.
    }
    if (waitpid(child, &status, 0) != child) status = -1;
  }

  is_over = true;
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(status, 0);
}
#endif
#endif

}  // namespace
