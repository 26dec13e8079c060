// Measures the table on one core, against a floor that no table could beat.
//
//   table_bench [--keys=N] [--dim=D] [--reps=R] [--batch=B]
//               [--changes | --inserts]
// With --changes it measures only how much the tracking of changes for exports
// costs a push: a table with tracking against a table without. With --inserts
// it measures only how long new rows take.
//
// Speed is CPU time of the thread in ns per key. The variants take turns within
// each repetition, in reversed order every second time. Figures are the median,
// and the median of the ratio to the floor in the same repetition.
//
//   floor 1   copy rows whose place is known, prefetched 24 ahead
//   floor 2   the same, and read one random cache line of an array as large as
//             the table's index for each: what any hash table has to do
//   step floor   fused Adagrad on rows whose place is known, prefetched
//   boost     boost::unordered_flat_map<Key, float*> to the floor's rows
//
// Zipf ranks are scattered over the rows. Rows have an Adagrad slot.

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <vector>

#include "benchmarks/bench_support.h"
#include "benchmarks/table_race.h"
#include "cc/base/cpu_features.h"
#include "cc/base/page_keeper.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/embedding_table.h"
#include "cc/table/row_store.h"

#if __has_include(<boost/unordered/unordered_flat_map.hpp>)
#include <boost/unordered/unordered_flat_map.hpp>
#define TFSWITCH_BENCH_BOOST 1
#else
#define TFSWITCH_BENCH_BOOST 0
#endif

namespace tfswitch {
namespace {

constexpr int kPrefetchDistance = 24;

// Memory on huge pages.
class HugeArray {
 public:
  explicit HugeArray(size_t bytes) : bytes_(RoundUpTo(bytes, kHugePageBytes)) {
    data_ = static_cast<char*>(aligned_alloc(kHugePageBytes, bytes_));
    madvise(data_, bytes_, MADV_HUGEPAGE);
    memset(data_, 0, bytes_);
  }
  ~HugeArray() { free(data_); }
  HugeArray(const HugeArray&) = delete;
  HugeArray& operator=(const HugeArray&) = delete;
  char* data() const { return data_; }
  size_t size() const { return bytes_; }

 private:
  const size_t bytes_;
  char* data_;
};

// Involuntary context switches of this thread so far.
int64_t NumPreemptions() {
  rusage usage;
  getrusage(RUSAGE_THREAD, &usage);
  return usage.ru_nivcsw;
}

// The floor of the pauses below: a loop that only reads the clocks, for the
// same time. In a virtual machine the host may take the core away without the
// thread or its kernel noticing, and counts that as CPU time of the thread.
void MeasurePausesOfTheMachine(double seconds) {
  double worst_wall = 0.0;
  double worst_cpu = 0.0;
  int64_t num_slow = 0;
  const double begin = WallSeconds();
  double last_wall = begin;
  double last_cpu = CpuSeconds();
  while (last_wall - begin < seconds) {
    const double cpu = CpuSeconds();
    const double wall = WallSeconds();
    worst_cpu = std::max(worst_cpu, cpu - last_cpu);
    worst_wall = std::max(worst_wall, wall - last_wall);
    num_slow += wall - last_wall > 1e-3;
    last_cpu = cpu;
    last_wall = wall;
  }
  printf(
      "a loop that only reads the clocks, %.1f s, us: worst %.1f wall (%ld "
      "above 1 ms), %.1f cpu\n",
      seconds, worst_wall * 1e6, num_slow, worst_cpu * 1e6);
  Report("growth | worst pause of a loop that only reads the clocks | measured",
         "ms", {worst_wall * 1e3});
}

// Growth by one key at a time measures the pause that an insert may cause. On a
// busy machine the wall time includes pauses of the scheduler, so the program
// also prints the worst insert during which no other thread got the core.
void MeasureSingleInserts() {
  const double begin = WallSeconds();
  auto table = MakeTable(MakeConfig());
  std::vector<float> out(dim);
  std::vector<float> wall_us(num_keys);
  float worst_cpu_us = 0.0f;
  float worst_undisturbed_us = 0.0f;
  int64_t num_slow = 0;
  int64_t preemptions = NumPreemptions();
  for (int64_t i = 0; i < num_keys; ++i) {
    const Key key = KeyAt(i);
    const double cpu = CpuSeconds();
    const double wall = WallSeconds();
    Check(table->FindOrInsert({&key, 1}, absl::MakeSpan(out)).status());
    wall_us[i] = static_cast<float>((WallSeconds() - wall) * 1e6);
    worst_cpu_us =
        std::max(worst_cpu_us, static_cast<float>((CpuSeconds() - cpu) * 1e6));
    const int64_t preemptions_now = NumPreemptions();
    if (preemptions_now == preemptions) {
      worst_undisturbed_us = std::max(worst_undisturbed_us, wall_us[i]);
      num_slow += wall_us[i] > 1000.0f;
    }
    preemptions = preemptions_now;
  }
  std::sort(wall_us.begin(), wall_us.end());
  const auto quantile = [&](double q) {
    return wall_us[static_cast<size_t>(q * static_cast<double>(num_keys - 1))];
  };
  printf(
      "insert one by one, 0 to %ld keys, us: median %.2f  p99.99 %.2f  "
      "worst %.1f wall, %.1f wall if not preempted (%ld above 1 ms), %.1f "
      "cpu\n",
      num_keys, quantile(0.5), quantile(0.9999), wall_us.back(),
      worst_undisturbed_us, num_slow, worst_cpu_us);
  Report("growth | worst pause of a single insert | measured", "ms",
         {wall_us.back() / 1e3}, "under 5 ms");
  Report("growth | p99.99 of a single insert | measured", "ms",
         {quantile(0.9999) / 1e3});
  MeasurePausesOfTheMachine(WallSeconds() - begin);
}

// Growth by batches; the filled table is used by the measurements after it.
std::unique_ptr<EmbeddingTable> MeasureGrowth() {
  const int64_t memory_keys = std::min<int64_t>(5000000, num_keys);
  std::vector<Key> keys(batch_size);
  std::vector<float> out(batch_size * dim);
  std::fill(out.begin(), out.end(), 1.0f);
  const int64_t before = ResidentBytes();
  auto table = MakeTable(MakeConfig());
  double worst_index = 0.0;
  double worst_wall = 0.0;
  double worst_cpu = 0.0;
  double total_cpu = 0.0;
  int64_t peak = 0;
  for (int64_t size = 0; size < num_keys;) {
    const int64_t n = std::min(batch_size, num_keys - size);
    keys.resize(n);
    for (int64_t i = 0; i < n; ++i) keys[i] = KeyAt(size + i);
    const double wall = WallSeconds();
    const double cpu = CpuSeconds();
    Check(
        table->FindOrInsert(keys, absl::MakeSpan(out).first(n * dim)).status());
    const double cpu_taken = CpuSeconds() - cpu;
    worst_wall = std::max(worst_wall, WallSeconds() - wall);
    worst_cpu = std::max(worst_cpu, cpu_taken);
    total_cpu += cpu_taken;
    size += n;
    if (size >= 100000) {
      worst_index = std::max(worst_index,
                             static_cast<double>(table->stats().index_bytes) /
                                 static_cast<double>(size));
    }
    if (size <= memory_keys) {
      peak = std::max(peak, ResidentBytes() - before);
      if (size == memory_keys) {
        PageKeeper::Get().WaitUntilIdle();
        const int64_t resident = ResidentBytes() - before;
        const TableStats stats = table->stats();
        printf(
            "resident at %ld keys: %.1f B per key (index %.1f, rows %.1f, "
            "ahead %.1f); peak while growing %.2f x that\n",
            size, double(resident) / size, double(stats.index_bytes) / size,
            double(stats.row_bytes) / size, double(stats.reserved_bytes) / size,
            double(peak) / resident);
        const auto report = [size](const char* row, int64_t bytes,
                                   const char* to_reach = "") {
          Report(std::string("memory | ") + row + " | measured", "B",
                 {double(bytes) / size}, to_reach);
        };
        report("resident bytes per key", resident, "at most 170");
        report("of these the index", stats.index_bytes);
        report("of these the rows", stats.row_bytes);
        report("of these touched ahead", stats.reserved_bytes);
        Report("memory | peak while growing, times that | measured", "",
               {double(peak) / resident}, "at most 1.3");
      }
    }
  }
  printf(
      "insert in batches of %ld, 0 to %ld keys: %.1f ns cpu per key; worst "
      "batch %.1f ms wall, %.1f ms cpu\n",
      batch_size, num_keys, total_cpu * 1e9 / num_keys, worst_wall * 1e3,
      worst_cpu * 1e3);
  printf("index B per key, worst from 100k keys on: %.1f; now %.1f\n",
         worst_index, double(table->stats().index_bytes) / num_keys);
  return table;
}

// Fills tables of new keys in batches, in turns: a table that grows, and one
// whose rows were reserved. The first turn is not counted, because the host of
// a virtual machine provides memory only when it is first touched.
void MeasureInserts() {
  std::vector<std::vector<Key>> batches;
  for (int64_t begin = 0; begin < num_keys; begin += batch_size) {
    std::vector<Key>& keys = batches.emplace_back();
    for (int64_t i = begin; i < std::min(begin + batch_size, num_keys); ++i) {
      keys.push_back(KeyAt(i));
    }
  }
  std::vector<float> out(static_cast<size_t>(batch_size * dim), 1.0f);
  for (const bool is_reserved : {false, true}) {
    std::vector<double> of_thread;
    std::vector<double> of_process;
    std::vector<double> worst_batch;
    for (int rep = -1; rep < reps; ++rep) {
      auto table = MakeTable(MakeConfig());
      if (is_reserved) table->Reserve(static_cast<uint64_t>(num_keys));
      PageKeeper::Get().WaitUntilIdle();
      const double thread = CpuSeconds();
      const double process = Seconds(CLOCK_PROCESS_CPUTIME_ID);
      double worst = 0.0;
      for (const std::vector<Key>& keys : batches) {
        const double wall = WallSeconds();
        Check(table
                  ->FindOrInsert(keys,
                                 absl::MakeSpan(out).first(keys.size() * dim))
                  .status());
        worst = std::max(worst, WallSeconds() - wall);
      }
      if (rep < 0) continue;
      const double per_key = 1e9 / static_cast<double>(num_keys);
      of_thread.push_back((CpuSeconds() - thread) * per_key);
      of_process.push_back((Seconds(CLOCK_PROCESS_CPUTIME_ID) - process) *
                           per_key);
      worst_batch.push_back(worst * 1e3);
    }
    const std::string name = is_reserved ? "reserved" : "growing";
    printf(
        "insert, %s, batches of %ld: %.1f ns of the thread per key, %.1f of "
        "the process; worst batch %.1f ms\n",
        name.c_str(), batch_size, Median(of_thread), Median(of_process),
        Median(worst_batch));
    fflush(stdout);
    Report("table | " + name + " | CPU of the thread", "ns", of_thread);
    Report("table | " + name + " | CPU of the process", "ns", of_process);
    Report("table | " + name + " | worst batch", "ms", worst_batch);
  }
}

// Positions in [0, num_keys), uniform or zipf.
class PositionSource {
 public:
  explicit PositionSource(bool is_zipf) {
    if (is_zipf) zipf_.emplace();
  }

  uint32_t Next() {
    const int64_t position =
        zipf_.has_value()
            ? zipf_->Next()
            : static_cast<int64_t>(random_() % static_cast<uint64_t>(num_keys));
    return static_cast<uint32_t>(position);
  }

 private:
  std::optional<ZipfPositions> zipf_;
  std::mt19937_64 random_{12345};
};

struct Queries {
  std::vector<uint32_t> positions;
  std::vector<Key> keys;
  std::vector<uint32_t> lines;  // Places in the index-sized array.
};

Queries MakeQueries(PositionSource* source, size_t num_lines, bool is_unique) {
  Queries queries;
  std::mt19937_64 random(99);
  for (int64_t begin = 0; begin < kQueries; begin += batch_size) {
    std::unordered_set<uint32_t> seen;
    for (int64_t i = 0; i < batch_size; ++i) {
      const uint32_t position = source->Next();
      if (is_unique && !seen.insert(position).second) continue;
      queries.positions.push_back(position);
      queries.keys.push_back(KeyAt(position));
      // A key always has the same line.
      queries.lines.push_back(static_cast<uint32_t>(
          HashKey(position) % static_cast<uint64_t>(num_lines)));
    }
  }
  return queries;
}

using Variants = std::vector<std::pair<std::string, std::function<void()>>>;

// Runs the variants interleaved; ratios are to variant `floor`.
std::map<std::string, double> Race(const std::string& title,
                                   const Variants& variants, size_t floor,
                                   size_t num_queries, const char* to_reach) {
  std::vector<std::vector<double>> ns(variants.size());
  for (int rep = -1; rep < reps; ++rep) {  // One to warm up.
    for (size_t i = 0; i < variants.size(); ++i) {
      const size_t v = rep % 2 == 0 ? i : variants.size() - 1 - i;
      const double begin = CpuSeconds();
      variants[v].second();
      const double taken = CpuSeconds() - begin;
      if (rep >= 0) ns[v].push_back(taken * 1e9 / num_queries);
    }
  }
  std::map<std::string, double> medians;
  printf("%s, ns per key (x floor):", title.c_str());
  const std::string row = "speed | " + title + " | ";
  for (size_t v = 0; v < variants.size(); ++v) {
    if (v >= floor) {
      Report(row + (v == floor ? "floor" : variants[v].first), "ns", ns[v]);
    }
    medians[variants[v].first] = Median(ns[v]);
    printf("  %s %.1f (%.2f)", variants[v].first.c_str(), Median(ns[v]),
           Median(Ratios(ns[v], ns[floor])));
  }
  // After the floor come the table and boost, if it is installed.
  Report(row + "table / floor", "", Ratios(ns[floor + 1], ns[floor]), to_reach);
  if (variants.size() > floor + 2) {
    Report(row + "boost / table", "", Ratios(ns.back(), ns[floor + 1]),
           "at least 2");
  }
  printf("\n");
  fflush(stdout);
  return medians;
}

void MeasureBatches(EmbeddingTable* table) {
  PageKeeper::Get().WaitUntilIdle();
  const size_t stride = RowStride(2 * dim);
  const HugeArray rows(static_cast<size_t>(num_keys) * stride);
  const HugeArray index(static_cast<size_t>(table->stats().index_bytes));
  const size_t num_lines = static_cast<size_t>(table->stats().index_bytes) / 64;
  const Optimizer optimizer(AdagradConfig{}, dim);
  const size_t embedding_bytes = dim * sizeof(float);
  std::vector<float> out(batch_size * dim);
  std::vector<float> gradients(batch_size * dim, 0.01f);
  const auto row_at = [&](uint32_t position) {
    return reinterpret_cast<float*>(rows.data() + position * stride);
  };
  for (int64_t i = 0; i < num_keys; ++i) {
    std::fill_n(row_at(static_cast<uint32_t>(i)), 2 * dim, 0.1f);
  }
#if TFSWITCH_BENCH_BOOST
  struct Hash {
    using is_avalanching = void;
    size_t operator()(Key key) const { return HashKey(key); }
  };
  boost::unordered_flat_map<Key, float*, Hash> boost_map;
  for (int64_t i = 0; i < num_keys; ++i) {
    boost_map[KeyAt(i)] = row_at(static_cast<uint32_t>(i));
  }
#else
  printf("boost: skipped, no boost::unordered_flat_map (Boost 1.81) here\n");
#endif

  volatile uint64_t sink = 0;
  const auto prefetch = [](const char* at, size_t bytes) {
    for (size_t b = 0; b < std::min<size_t>(bytes, 512); b += 64) {
      __builtin_prefetch(at + b);
    }
  };
  for (const bool is_zipf : {false, true}) {
    PositionSource source(is_zipf);
    const char* const name = is_zipf ? "zipf 1.05" : "uniform";
    const auto in_batches = [&](const Queries& q, const auto& body) {
      for (size_t begin = 0; begin < q.keys.size(); begin += batch_size) {
        body(begin, std::min<size_t>(batch_size, q.keys.size() - begin));
      }
    };

    const Queries reads = MakeQueries(&source, num_lines, false);
    const auto gather = [&](bool with_index) {
      in_batches(reads, [&](size_t begin, size_t n) {
        const uint32_t* const positions = reads.positions.data() + begin;
        const uint32_t* const lines = reads.lines.data() + begin;
        uint64_t sum = 0;
        for (size_t i = 0; i < n; ++i) {
          if (i + kPrefetchDistance < n) {
            const size_t ahead = i + kPrefetchDistance;
            if (with_index) {
              __builtin_prefetch(index.data() + size_t{64} * lines[ahead]);
            }
            prefetch(reinterpret_cast<char*>(row_at(positions[ahead])),
                     embedding_bytes);
          }
          if (with_index) {
            sum += *reinterpret_cast<const uint64_t*>(index.data() +
                                                      size_t{64} * lines[i]);
          }
          float* const to = out.data() + i * dim;
          if (dim == 16) {
            memcpy(to, row_at(positions[i]), 64);
          } else {
            memcpy(to, row_at(positions[i]), embedding_bytes);
          }
        }
        sink = sink + sum;
      });
    };
    Variants lookups = {
        {"floor 1", [&] { gather(false); }},
        {"floor 2", [&] { gather(true); }},
        {"table", [&] {
           in_batches(reads, [&](size_t begin, size_t n) {
             Check(table
                       ->Find(absl::MakeConstSpan(reads.keys).subspan(begin, n),
                              absl::MakeSpan(out).first(n * dim))
                       .status());
           });
         }}};
#if TFSWITCH_BENCH_BOOST
    lookups.push_back(
        {"boost", [&] {
           in_batches(reads, [&](size_t begin, size_t n) {
             for (size_t i = 0; i < n; ++i) {
               const auto it = boost_map.find(reads.keys[begin + i]);
               memcpy(out.data() + i * dim, it->second, embedding_bytes);
             }
           });
         }});
#endif
    auto medians = Race(std::string("lookup, ") + name, lookups, 1,
                        reads.keys.size(), "at most 2.0");
    if (medians.count("boost") != 0) {
      printf("  boost / table: %.2f\n", medians["boost"] / medians["table"]);
    }

    const Queries steps = MakeQueries(&source, num_lines, true);
    Variants updates = {
        {"step floor",
         [&] {
           in_batches(steps, [&](size_t begin, size_t n) {
             const uint32_t* const positions = steps.positions.data() + begin;
             for (size_t i = 0; i < n; ++i) {
               if (i + kPrefetchDistance < n) {
                 prefetch(reinterpret_cast<char*>(
                              row_at(positions[i + kPrefetchDistance])),
                          2 * embedding_bytes);
               }
               optimizer.Step(row_at(positions[i]), gradients.data() + i * dim,
                              {0.01f});
             }
           });
         }},
        {"table", [&] {
           in_batches(steps, [&](size_t begin, size_t n) {
             Check(table
                       ->ApplyGradients(
                           {absl::MakeConstSpan(steps.keys).subspan(begin, n),
                            absl::MakeConstSpan(gradients).first(n * dim),
                            0.01f, /*insert_missing=*/false})
                       .status());
           });
         }}};
#if TFSWITCH_BENCH_BOOST
    updates.push_back(
        {"boost", [&] {
           in_batches(steps, [&](size_t begin, size_t n) {
             for (size_t i = 0; i < n; ++i) {
               const auto it = boost_map.find(steps.keys[begin + i]);
               optimizer.Step(it->second, gradients.data() + i * dim, {0.01f});
             }
           });
         }});
#endif
    medians = Race(std::string("fused Adagrad, ") + name, updates, 0,
                   steps.keys.size(), "at most 2.2");
    if (medians.count("boost") != 0) {
      printf("  boost / table: %.2f\n", medians["boost"] / medians["table"]);
    }
  }
}

// The push of a trainer that exports: to rows that exist, with Adagrad.
void MeasureTracking() {
  std::vector<Variant> variants;
  // A table against an equal one: this ratio shows the noise of the
  // measurement.
  for (const char* name : {"off", "off again", "on"}) {
    variants.push_back({name, MakeTable(MakeConfig())});
    Fill(variants.back().table.get(), 0, num_keys);
  }
  ChangeFilter filter;
  Check(variants.back()
            .table
            ->ForEachChange(filter, batch_size,
                            [](const ChangeChunk&) { return absl::OkStatus(); })
            .status());
  PageKeeper::Get().WaitUntilIdle();
  const std::vector<float> gradients(static_cast<size_t>(batch_size * dim),
                                     0.01f);
  const auto push = [&](EmbeddingTable* table, const std::vector<Key>& keys) {
    Check(
        table
            ->ApplyGradients({keys, gradients, 0.01f, /*insert_missing=*/false})
            .status());
  };
  for (const bool is_zipf : {false, true}) {
    PositionSource source(is_zipf);
    Batches batches;
    for (int64_t begin = 0; begin < kQueries; begin += batch_size) {
      std::unordered_set<uint32_t> seen;
      std::vector<Key> keys;
      while (static_cast<int64_t>(keys.size()) < batch_size) {
        const uint32_t position = source.Next();
        if (seen.insert(position).second) keys.push_back(KeyAt(position));
      }
      batches.push_back(std::move(keys));
    }
    RaceTables(
        "changes", is_zipf ? "push, zipf 1.05" : "push, uniform", &variants,
        &batches, [] {}, push);
  }
  for (const Variant& variant : variants) {
    printf("%s: %.1f B per key for changes\n", variant.name.c_str(),
           static_cast<double>(variant.table->stats().change_bytes) /
               static_cast<double>(num_keys));
  }
}

int Main(int argc, char** argv) {
  num_keys = 10000000;
  reps = 7;
  bool is_tracking = false;
  bool is_inserting = false;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--changes") {
      is_tracking = true;
    } else if (std::string(argv[i]) == "--inserts") {
      is_inserting = true;
    } else if (!TakeFlag(argv[i])) {
      fprintf(stderr,
              "usage: table_bench [--keys=N] [--dim=D] [--reps=R] "
              "[--batch=B] [--changes | --inserts]; got '%s'\n",
              argv[i]);
      return 2;
    }
  }
  const std::string level(SimdLevelName(ActiveSimdLevel()));
  printf("keys %ld, dim %d, batch %ld, reps %d, %s\n", num_keys, dim,
         batch_size, reps, level.c_str());
  if (is_tracking) {
    MeasureTracking();
    return 0;
  }
  if (is_inserting) {
    MeasureInserts();
    return 0;
  }
  // This measurement comes first, in a process that has freed no memory: the
  // host of a virtual machine may take freed memory away, and then inserts wait
  // until it is there again.
  MeasureSingleInserts();
  fflush(stdout);
  const std::unique_ptr<EmbeddingTable> table = MeasureGrowth();
  fflush(stdout);
  MeasureBatches(table.get());
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Main(argc, argv); }
