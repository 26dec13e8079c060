// Tests of what every ParameterClient must do, with tables in this process, on
// one server or on several. Build parameter_client_suite.cc into a test
// program, and instantiate it with the clients to test:
//
//   INSTANTIATE_TEST_SUITE_P(Local, ParameterClientSuite,
//                            testing::Values(ClientFactory{"local", MakeIt}),
//                            NameOfFactory);

#ifndef TFSWITCH_TESTS_CC_TESTING_PARAMETER_CLIENT_SUITE_H_
#define TFSWITCH_TESTS_CC_TESTING_PARAMETER_CLIENT_SUITE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc/client/parameter_client.h"
#include "gtest/gtest.h"

namespace tfswitch {

// A client and the objects that it needs, such as servers.
class ClientUnderTest {
 public:
  virtual ~ClientUnderTest() = default;
  virtual ParameterClient& client() = 0;
};

struct ClientFactory {
  std::string name;
  std::function<std::unique_ptr<ClientUnderTest>()> make;
};

inline std::string NameOfFactory(
    const testing::TestParamInfo<ClientFactory>& info) {
  return info.param.name;
}

class ParameterClientSuite : public testing::TestWithParam<ClientFactory> {
 protected:
  ParameterClientSuite() : under_test_(GetParam().make()) {}

  ParameterClient& client() { return under_test_->client(); }

  static TableConfig Config(const std::string& name, int dim) {
    TableConfig config;
    config.name = name;
    config.dim = dim;
    config.optimizer = SgdConfig{};
    config.initializer = UniformInitializer{-1.0f, 1.0f};
    config.seed = 7;
    return config;
  }

  std::vector<float> Pull(const std::string& table, int dim,
                          const std::vector<Key>& keys,
                          bool insert_missing = false) {
    std::vector<float> values(keys.size() * dim, -99.0f);
    PullArgs args;
    args.table = table;
    args.dim = dim;
    args.keys = keys;
    args.insert_missing = insert_missing;
    const absl::Status status = client().Pull(args, absl::MakeSpan(values));
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

  absl::StatusOr<WriteResult> Push(const std::string& table, int dim,
                                   const std::vector<Key>& keys,
                                   const std::vector<float>& gradients,
                                   float learning_rate = 1.0f,
                                   bool insert_missing = true, PushId id = {}) {
    PushArgs args;
    args.table = table;
    args.dim = dim;
    args.keys = keys;
    args.gradients = gradients;
    args.learning_rate = learning_rate;
    args.insert_missing = insert_missing;
    args.id = id;
    return client().Push(args);
  }

  absl::Status Assign(const std::string& table, int dim,
                      const std::vector<Key>& keys,
                      const std::vector<float>& values,
                      const std::vector<float>& slots = {}) {
    AssignArgs args;
    args.table = table;
    args.dim = dim;
    args.keys = keys;
    args.embeddings = values;
    args.slots = slots;
    return client().Assign(args).status();
  }

  int64_t Size(const std::string& table) {
    const auto infos = client().ListTables(table);
    EXPECT_TRUE(infos.ok()) << infos.status();
    return infos.ok() ? infos->at(0).stats.num_rows : -1;
  }

  // The changes of table "t", of dim 2, that ExportChanges has shown.
  struct Changes {
    std::map<Key, std::vector<float>> rows;
    std::set<Key> removed;
    std::vector<ChangeCursor> cursors;
  };
  Changes ExportChanges(const std::vector<ChangeCursor>& since,
                        std::optional<ScoreRule> rule = std::nullopt,
                        const std::string& export_id = "") {
    ExportChangesArgs args;
    args.table = "t";
    args.since = since;
    args.rule = rule;
    args.export_id = export_id;
    Changes changes;
    auto cursors = client().ExportChanges(args, [&](const ChangeChunk& chunk) {
      EXPECT_EQ(chunk.embeddings.size(), 2 * chunk.keys.size());
      for (size_t i = 0; i < chunk.keys.size(); ++i) {
        changes.rows[chunk.keys[i]] = {chunk.embeddings[2 * i],
                                       chunk.embeddings[2 * i + 1]};
      }
      changes.removed.insert(chunk.removed.begin(), chunk.removed.end());
      return absl::OkStatus();
    });
    EXPECT_TRUE(cursors.ok()) << cursors.status();
    if (cursors.ok()) changes.cursors = *std::move(cursors);
    return changes;
  }

  std::map<Key, std::vector<float>> Export(const std::string& table,
                                           bool with_slots) {
    std::map<Key, std::vector<float>> rows;
    const absl::Status status =
        client().Export(table, with_slots, [&](const RowChunk& chunk) {
          const size_t n = chunk.keys.size();
          const size_t dim = chunk.embeddings.size() / n;
          const size_t width = chunk.slots.size() / n;
          for (size_t i = 0; i < n; ++i) {
            std::vector<float> row(chunk.embeddings.begin() + i * dim,
                                   chunk.embeddings.begin() + (i + 1) * dim);
            row.insert(row.end(), chunk.slots.begin() + i * width,
                       chunk.slots.begin() + (i + 1) * width);
            EXPECT_TRUE(rows.emplace(chunk.keys[i], row).second)
                << "key " << chunk.keys[i] << " came twice";
          }
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
    return rows;
  }

  const std::unique_ptr<ClientUnderTest> under_test_;
};

inline std::vector<Key> ManyKeys(int count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::vector<Key> keys(count);
  for (Key& key : keys) key = static_cast<Key>(random());
  return keys;
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_PARAMETER_CLIENT_SUITE_H_
