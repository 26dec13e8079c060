// Measures the memory and the cost of 16-bit rows.
//
//   storage_dtype_bench [--keys=N] [--dim=D] [--reps=R] [--batch=B] [--adam]
// Tables with the same N keys, one for each row type, are filled one after the
// other, and the program prints the resident memory of each. Then they take
// turns batch by batch. Figures are the CPU time of the thread in ns per key,
// as medians, and the median of the ratio to float32 in the same repetition.
// Keys are zipf 1.05, scattered. Rows have an Adagrad slot, or the slots of
// Adam.

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "benchmarks/bench_support.h"
#include "benchmarks/table_race.h"
#include "cc/base/cpu_features.h"
#include "cc/base/page_keeper.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {
namespace {

struct NamedType {
  const char* name;
  StorageDtypeConfig type;
};

constexpr auto kF32 = FloatType::kFloat32;
constexpr auto kF16 = FloatType::kFloat16;
constexpr auto kBf16 = FloatType::kBfloat16;
constexpr auto kChance = Rounding::kStochastic;
constexpr auto kNearest = Rounding::kNearest;

const NamedType kTypes[] = {
    {"float32", {kF32, kF32, kChance}},
    // A table against an equal one: this ratio shows the noise of the
    // measurement.
    {"float32 again", {kF32, kF32, kChance}},
    {"bfloat16 + float32", {kBf16, kF32, kChance}},
    {"float16 + float32", {kF16, kF32, kChance}},
    {"bfloat16 + bfloat16", {kBf16, kBf16, kChance}},
    {"float16 + bfloat16", {kF16, kBf16, kChance}},
    {"bfloat16 + bfloat16, nearest", {kBf16, kBf16, kNearest}},
};

void Measure(const OptimizerConfig& optimizer, const std::string& title) {
  std::vector<Variant> variants;
  printf(
      "embeddings + slots: row stride; resident bytes per key, with index\n");
  for (const NamedType& named : kTypes) {
    TableConfig config = MakeConfig();
    config.optimizer = optimizer;
    config.storage_dtype = named.type;
    PageKeeper::Get().WaitUntilIdle();
    const int64_t before = ResidentBytes();
    auto table = MakeTable(config);
    Fill(table.get(), 0, num_keys);
    PageKeeper::Get().WaitUntilIdle();
    const int64_t stride = table->stats().row_stride_bytes;
    const double resident = static_cast<double>(ResidentBytes() - before) /
                            static_cast<double>(num_keys);
    printf("  %-28s %4ld  %6.1f\n", named.name, stride, resident);
    const std::string row =
        std::string("speed | ") + named.name + " | " + title;
    Report(row + "stride", "B", {static_cast<double>(stride)});
    Report(row + "resident", "B", {resident});
    variants.push_back({named.name, std::move(table)});
  }
  ZipfPositions source;
  std::vector<float> out(static_cast<size_t>(batch_size * dim));
  const std::vector<float> gradients(out.size(), 0.01f);
  Batches reads = MakeBatches(&source, /*is_unique=*/false);
  RaceTables(
      "speed", title + "lookup", &variants, &reads, [] {},
      [&](EmbeddingTable* table, const std::vector<Key>& keys) {
        Check(table->Find(keys, absl::MakeSpan(out)).status());
      });
  Batches pushes = MakeBatches(&source, /*is_unique=*/true);
  RaceTables(
      "speed", title + "push", &variants, &pushes, [] {},
      [&](EmbeddingTable* table, const std::vector<Key>& keys) {
        Check(table->ApplyGradients({keys, gradients, 0.01f, true}).status());
      });
}

int Main(int argc, char** argv) {
  OptimizerConfig optimizer = AdagradConfig{};
  std::string title = "Adagrad: ";
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (TakeFlag(arg)) continue;
    if (arg == "--adam") {
      optimizer = AdamConfig{};
      title = "Adam: ";
    } else {
      fprintf(stderr,
              "usage: storage_dtype_bench [--keys=N] [--dim=D] [--reps=R] "
              "[--batch=B] [--adam]; got '%s'\n",
              argv[i]);
      return 2;
    }
  }
  const std::string level(SimdLevelName(ActiveSimdLevel()));
  printf("keys %ld, dim %d, batch %ld, reps %d, %s\n", num_keys, dim,
         batch_size, reps, level.c_str());
  Measure(optimizer, title);
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Main(argc, argv); }
