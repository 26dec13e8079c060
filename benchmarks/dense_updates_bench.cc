// Measures dense updates: the training step (lookup and push of a batch) of a
// table that updates only the rows of the batch, and of a table that updates
// all rows.
//
//   build/benchmarks/dense_updates_bench [keys] [batch] [runs]
// Ids are drawn by Zipf's law, so some ids are in each batch and most miss
// hundreds of steps. The tables take turns after each step. Times are for the
// whole step and per id, as the median of runs; ratios are within one run.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/bench_support.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {
namespace {

constexpr int kDim = 16;
constexpr int kStepsPerRun = 200;

struct Variant {
  std::string name;
  OptimizerConfig optimizer;
};

std::unique_ptr<EmbeddingTable> MakeTable(OptimizerConfig optimizer,
                                          bool is_dense) {
  TableConfig config;
  config.name = "bench";
  config.dim = kDim;
  optimizer.is_dense = is_dense;
  config.optimizer = std::move(optimizer);
  auto table = EmbeddingTable::Create(config);
  Check(table.status());
  return *std::move(table);
}

// Distinct ids of one batch.
std::vector<Key> DrawBatch(int64_t num_keys, size_t size,
                           std::mt19937* random) {
  std::uniform_real_distribution<double> uniform(0.0, 1.0);
  std::vector<Key> batch;
  while (batch.size() < size) {
    // Ranks whose logarithm is uniform: Zipf's law with exponent 1.
    const double rank =
        std::exp(uniform(*random) * std::log(static_cast<double>(num_keys)));
    batch.push_back(static_cast<Key>(rank));
  }
  std::sort(batch.begin(), batch.end());
  batch.erase(std::unique(batch.begin(), batch.end()), batch.end());
  return batch;
}

// Seconds of one step.
double Run(EmbeddingTable* table, const std::vector<Key>& batch,
           const std::vector<float>& gradients, std::vector<float>* rows) {
  const size_t num_floats = batch.size() * kDim;
  const double begin = WallSeconds();
  Check(table->FindOrInsert(batch, absl::MakeSpan(rows->data(), num_floats))
            .status());
  Check(
      table
          ->ApplyGradients({batch, absl::MakeSpan(gradients.data(), num_floats),
                            0.001f, /*insert_missing=*/true})
          .status());
  return WallSeconds() - begin;
}

void Main(int64_t num_keys, size_t batch_size, int num_runs) {
  StepOptions l2;
  l2.l2 = 1e-5f;
  const std::vector<Variant> variants = {
      {"sgd", SgdConfig{}},
      {"momentum", SgdConfig{0.9f}},
      {"adagrad", AdagradConfig{}},
      {"adam", AdamConfig{}},
      {"adagrad, l2", {AdagradConfig{}, l2}},
      {"adam, l2", {AdamConfig{}, l2}},
      {"adamw", AdamWConfig{}},
  };
  std::mt19937 random(1);
  std::vector<float> gradients(batch_size * kDim);
  std::normal_distribution<float> normal(0.0f, 0.01f);
  for (float& g : gradients) g = normal(random);
  std::vector<float> rows(gradients.size());
  std::printf("%-12s %10s %10s %24s\n", "optimizer", "sparse ns", "dense ns",
              "dense / sparse");
  for (const Variant& variant : variants) {
    const auto sparse = MakeTable(variant.optimizer, false);
    const auto dense = MakeTable(variant.optimizer, true);
    std::vector<double> times[2];
    std::vector<double> ratios;
    for (int run = 0; run <= num_runs; ++run) {
      double a = 0.0;
      double b = 0.0;
      size_t num_ids = 0;
      for (int i = 0; i < kStepsPerRun; ++i) {
        const std::vector<Key> batch = DrawBatch(num_keys, batch_size, &random);
        a += Run(sparse.get(), batch, gradients, &rows);
        b += Run(dense.get(), batch, gradients, &rows);
        num_ids += batch.size();
      }
      a /= static_cast<double>(num_ids);
      b /= static_cast<double>(num_ids);
      if (run == 0) continue;  // Makes most of the rows.
      times[0].push_back(a * 1e9);
      times[1].push_back(b * 1e9);
      ratios.push_back(b / a);
    }
    std::printf("%-12s %10.1f %10.1f %8.2f (%.2f to %.2f)\n",
                variant.name.c_str(), Median(times[0]), Median(times[1]),
                Median(ratios), *std::min_element(ratios.begin(), ratios.end()),
                *std::max_element(ratios.begin(), ratios.end()));
    const std::string row = "speed | " + variant.name + " | ";
    Report(row + "sparse", "ns", times[0]);
    Report(row + "dense", "ns", times[1]);
    Report(row + "dense / sparse", "", ratios);
    std::fflush(stdout);
  }
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) {
  tfswitch::Main(argc > 1 ? std::atoll(argv[1]) : 1000000,
                 argc > 2 ? static_cast<size_t>(std::atoll(argv[2])) : 4096,
                 argc > 3 ? std::atoi(argv[3]) : 5);
  return 0;
}
