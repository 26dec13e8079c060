// Common parts of the benchmarks of tables: keys, and tables that take turns on
// the same batches.

#ifndef TFSWITCH_BENCHMARKS_TABLE_RACE_H_
#define TFSWITCH_BENCHMARKS_TABLE_RACE_H_

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "benchmarks/bench_support.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {

inline constexpr int64_t kQueries = 1000000;  // Per repetition and variant.
inline constexpr double kZipfExponent = 1.05;

// Flags.
inline int64_t num_keys = 5000000;
inline int dim = 16;
inline int reps = 9;
inline int64_t batch_size = 50000;

// Returns the number N if `arg` is --name=N and N is positive; otherwise 0.
inline int64_t FlagValue(const std::string& arg, const char* name) {
  const std::string prefix = std::string(name) + "=";
  if (arg.compare(0, prefix.size(), prefix) != 0) return 0;
  return std::max<int64_t>(atoll(arg.c_str() + prefix.size()), 0);
}

// Reads one of the flags above. Returns false if `arg` is none of them.
inline bool TakeFlag(const std::string& arg) {
  if (const int64_t keys = FlagValue(arg, "--keys")) {
    num_keys = keys;
  } else if (const int64_t floats = FlagValue(arg, "--dim")) {
    dim = static_cast<int>(floats);
  } else if (const int64_t repetitions = FlagValue(arg, "--reps")) {
    reps = static_cast<int>(repetitions);
  } else if (const int64_t size = FlagValue(arg, "--batch")) {
    batch_size = size;
  } else {
    return false;
  }
  return true;
}

inline double CpuSeconds() { return Seconds(CLOCK_THREAD_CPUTIME_ID); }

inline int64_t ResidentBytes() {
  std::ifstream statm("/proc/self/statm");
  int64_t total = 0;
  int64_t resident = 0;
  statm >> total >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

// Returns the i-th key. Keys are scrambled, so that keys with neighbouring
// numbers are not neighbours.
inline Key KeyAt(int64_t i) {
  return static_cast<Key>(static_cast<uint64_t>(i) * 0x9e3779b97f4a7c15ULL);
}

inline TableConfig MakeConfig() {
  TableConfig config;
  config.name = "bench";
  config.dim = dim;
  config.optimizer = AdagradConfig{};
  return config;
}

inline std::unique_ptr<EmbeddingTable> MakeTable(const TableConfig& config) {
  auto table = EmbeddingTable::Create(config);
  Check(table.status());
  return std::move(table).value();
}

// Gives keys [begin, end) a row.
inline void Fill(EmbeddingTable* table, int64_t begin, int64_t end) {
  const int64_t block = 50000;
  std::vector<float> values(static_cast<size_t>(block * dim), 0.1f);
  std::vector<Key> keys;
  for (int64_t at = begin; at < end; at += block) {
    const int64_t n = std::min(block, end - at);
    keys.clear();
    for (int64_t i = 0; i < n; ++i) keys.push_back(KeyAt(at + i));
    Check(table
              ->AssignRows({keys,
                            absl::MakeConstSpan(values).first(
                                static_cast<size_t>(n * dim)),
                            {}},
                           AssignMode::kSaved)
              .status());
  }
}

// Zipf, scattered over [0, num_keys).
class ZipfPositions {
 public:
  ZipfPositions() : cumulative_(static_cast<size_t>(num_keys)) {
    double sum = 0.0;
    for (int64_t r = 0; r < num_keys; ++r) {
      sum += std::pow(static_cast<double>(r + 1), -kZipfExponent);
      cumulative_[static_cast<size_t>(r)] = sum;
    }
  }

  int64_t Next() {
    const double u = std::uniform_real_distribution<double>(
        0.0, cumulative_.back())(random_);
    const auto rank = static_cast<uint64_t>(
        std::lower_bound(cumulative_.begin(), cumulative_.end(), u) -
        cumulative_.begin());
    return static_cast<int64_t>(rank * 0x9e3779b97f4a7c15ULL %
                                static_cast<uint64_t>(num_keys));
  }

 private:
  std::vector<double> cumulative_;
  std::mt19937_64 random_{12345};
};

using Batches = std::vector<std::vector<Key>>;

inline Batches MakeBatches(ZipfPositions* source, bool is_unique) {
  Batches batches;
  for (int64_t begin = 0; begin < kQueries; begin += batch_size) {
    std::unordered_set<int64_t> seen;
    std::vector<Key> keys;
    while (static_cast<int64_t>(keys.size()) < batch_size) {
      const int64_t position = source->Next();
      if (is_unique && !seen.insert(position).second) continue;
      keys.push_back(KeyAt(position));
    }
    batches.push_back(std::move(keys));
  }
  return batches;
}

struct Variant {
  std::string name;
  std::unique_ptr<EmbeddingTable> table;
};

using Work = std::function<void(EmbeddingTable*, const std::vector<Key>&)>;

// The variants take turns batch by batch, and each begins as often as the
// others. Ratios are to the first variant. `prepare` is called before each
// repetition. Figures are reported in the column `title` of `page_table`.
inline void RaceTables(const std::string& page_table, const std::string& title,
                       std::vector<Variant>* variants, Batches* batches,
                       const std::function<void()>& prepare, const Work& work,
                       const char* to_reach = "") {
  const size_t num_variants = variants->size();
  std::vector<std::vector<double>> ns(num_variants);
  size_t first = 0;
  for (int rep = -1; rep < reps; ++rep) {  // One to warm up.
    prepare();
    std::vector<double> seconds(num_variants);
    for (const std::vector<Key>& keys : *batches) {
      ++first;
      for (size_t i = 0; i < num_variants; ++i) {
        const size_t v = (first + i) % num_variants;
        const double begin = CpuSeconds();
        work((*variants)[v].table.get(), keys);
        seconds[v] += CpuSeconds() - begin;
      }
    }
    if (rep < 0) continue;
    for (size_t v = 0; v < num_variants; ++v) {
      ns[v].push_back(seconds[v] * 1e9 /
                      static_cast<double>(
                          static_cast<int64_t>(batches->size()) * batch_size));
    }
  }
  printf("\n%s, ns per key (x %s, least to most):\n", title.c_str(),
         (*variants)[0].name.c_str());
  for (size_t v = 0; v < variants->size(); ++v) {
    const std::vector<double> ratios = Ratios(ns[v], ns[0]);
    const auto [least, most] =
        std::minmax_element(ratios.begin(), ratios.end());
    const std::string name =
        page_table + " | " + (*variants)[v].name + " | " + title;
    if (v == 0) {
      Report(name, "ns", ns[v]);
    } else {
      Report(name, "", ratios, to_reach);
    }
    printf("  %-28s %6.1f  %.2f (%.2f to %.2f)\n", (*variants)[v].name.c_str(),
           Median(ns[v]), Median(ratios), *least, *most);
  }
  fflush(stdout);
}

}  // namespace tfswitch

#endif  // TFSWITCH_BENCHMARKS_TABLE_RACE_H_
