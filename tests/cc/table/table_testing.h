// Helpers of the table tests.

#ifndef TFSWITCH_TESTS_CC_TABLE_TABLE_TESTING_H_
#define TFSWITCH_TESTS_CC_TABLE_TABLE_TESTING_H_

#include <memory>
#include <utility>
#include <vector>

#include "cc/base/keyed_hash.h"
#include "cc/base/racy_memory.h"
#include "cc/table/embedding_table.h"
#include "gtest/gtest.h"

namespace tfswitch {

// With sanitizers tests are slow, so they use less data.
#if TFSWITCH_THREAD_SANITIZER
inline constexpr int kSlowdown = 10;
#else
inline constexpr int kSlowdown = 1;
#endif

inline TableConfig MakeConfig(
    int dim, OptimizerConfig optimizer = SgdConfig{},
    InitializerConfig initializer = UniformInitializer{}) {
  TableConfig config;
  config.name = "user";
  config.dim = dim;
  config.optimizer = optimizer;
  config.initializer = initializer;
  return config;
}

inline std::unique_ptr<EmbeddingTable> MakeTable(
    const TableConfig& config, const KeyedHash& hash = KeyedHash::Draw()) {
  auto table = EmbeddingTable::Create(config, hash);
  EXPECT_TRUE(table.ok()) << table.status();
  return std::move(table).value();
}

inline std::unique_ptr<EmbeddingTable> MakeTable(
    int dim, OptimizerConfig optimizer = SgdConfig{},
    InitializerConfig initializer = UniformInitializer{}) {
  return MakeTable(MakeConfig(dim, optimizer, initializer));
}

inline std::vector<float> FindAll(const EmbeddingTable& table,
                                  const std::vector<Key>& keys) {
  std::vector<float> embeddings(keys.size() * table.dim(), -1.0f);
  EXPECT_TRUE(table.Find(keys, absl::MakeSpan(embeddings)).ok());
  return embeddings;
}

inline std::vector<float> FindOrInsertAll(EmbeddingTable* table,
                                          const std::vector<Key>& keys) {
  std::vector<float> embeddings(keys.size() * table->dim(), -1.0f);
  EXPECT_TRUE(table->FindOrInsert(keys, absl::MakeSpan(embeddings)).ok());
  return embeddings;
}

// Sets embeddings. Present rows keep their slots.
inline absl::Status Assign(EmbeddingTable& table, absl::Span<const Key> keys,
                           absl::Span<const float> embeddings) {
  return table.AssignRows({keys, embeddings, {}}, AssignMode::kSaved).status();
}

// first, first + 1, ...
inline std::vector<Key> KeyRange(Key first, int64_t count) {
  std::vector<Key> keys(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) keys[i] = first + i;
  return keys;
}

// A hash that places keys by their own high bits.
inline KeyedHash PlacesByTheirBits() { return {0, 1, 1}; }

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TABLE_TABLE_TESTING_H_
