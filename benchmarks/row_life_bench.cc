// Measures admission, statistics and eviction, and whether memory is released.
//
//   row_life_bench [--keys=N] [--dim=D] [--reps=R] [--batch=B] [--capacity=C]
//                  [--only=speed|churn]
// Speed: tables with the same N keys take turns batch by batch, one without a
// policy and one for each policy. Figures are the CPU time of the thread in ns
// per key, as medians, and the median of the ratio to the table without a
// policy in the same repetition. Keys are zipf 1.05, scattered. Rows have an
// Adagrad slot.
// Churn: windows of C / 4 new keys are pushed into a table, which is shrunk to
// C rows after each window, until 10 C keys were pushed; meanwhile another
// thread pushes. The resident memory is compared with that of a table of 1.25 C
// rows. At the end the table is shrunk to a tenth.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "benchmarks/bench_support.h"
#include "benchmarks/table_race.h"
#include "cc/base/cpu_features.h"
#include "cc/base/page_keeper.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {
namespace {

constexpr double kMegabyte = 1e6;
// One key in so many of the mixed pushes is new.
constexpr int64_t kNewEvery = 10;

int64_t capacity = 2000000;

// The most that was resident since ForgetPeak().
int64_t PeakBytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  int64_t kilobytes = 0;
  while (status >> word) {
    if (word == "VmHWM:") status >> kilobytes;
  }
  return kilobytes * 1024;
}
void ForgetPeak() { std::ofstream("/proc/self/clear_refs") << "5"; }

// --- Speed ------------------------------------------------------------------

std::vector<Variant> MakeVariants() {
  std::vector<Variant> variants;
  const auto add = [&](const char* name, const AdmissionPolicy& admission,
                       StatisticsKind statistics) {
    TableConfig config = MakeConfig();
    config.admission.policy = admission;
    config.statistics.kind = statistics;
    variants.push_back({name, MakeTable(config)});
  };
  MinCountAdmission min_count;
  min_count.min_count = 2;
  BloomMinCountAdmission bloom;
  bloom.min_count = 2;
  bloom.capacity = static_cast<uint64_t>(2 * num_keys);
  ProbabilityAdmission probability;
  probability.probability = 0.5f;
  ShowClickAdmission show_click;
  show_click.embedx_threshold = 0.2f;  // Two shows.
  add("plain", AlwaysAdmission{}, StatisticsKind::kNone);
  // A table against an equal one: this ratio shows the noise of the
  // measurement.
  add("plain again", AlwaysAdmission{}, StatisticsKind::kNone);
  add("statistics Usage", AlwaysAdmission{}, StatisticsKind::kUsage);
  add("statistics ShowClick", AlwaysAdmission{}, StatisticsKind::kShowClick);
  add("MinCount(2)", min_count, StatisticsKind::kNone);
  add("BloomMinCount(2)", bloom, StatisticsKind::kNone);
  add("Probability(0.5)", probability, StatisticsKind::kNone);
  add("ShowClick(0.2)", show_click, StatisticsKind::kShowClick);
  // A weight first, then the row: two segments.
  TableConfig weight = MakeConfig();
  weight.optimizer = OptimizerConfig(
      {{1, 1.0f, AdagradConfig{}, {}}, {0, 1.0f, AdagradConfig{}, {}}});
  weight.admission.policy = show_click;
  weight.admission.not_admitted.kind = NotAdmittedKind::kWeight;
  weight.statistics.kind = StatisticsKind::kShowClick;
  variants.push_back({"ShowClick(0.2), weight", MakeTable(weight)});
  return variants;
}

// Every kNewEvery-th key is replaced by a key that no table has seen; each new
// key comes twice, in one batch and in the next.
void PutNewKeys(Batches* batches, int64_t* next_new) {
  int64_t last_begin = 0;
  for (size_t b = 0; b < batches->size(); ++b) {
    if (b % 2 == 0) last_begin = *next_new;
    int64_t at = last_begin;
    std::vector<Key>& keys = (*batches)[b];
    for (size_t i = 0; i < keys.size(); i += kNewEvery) keys[i] = KeyAt(at++);
    *next_new = at;
  }
}

void Push(EmbeddingTable* table, int64_t begin, int64_t end, float day) {
  const int64_t block = 10000;
  const std::vector<float> gradients(static_cast<size_t>(block * dim), 0.01f);
  std::vector<Key> keys;
  for (int64_t at = begin; at < end; at += block) {
    const int64_t n = std::min(block, end - at);
    keys.clear();
    for (int64_t i = 0; i < n; ++i) keys.push_back(KeyAt(at + i));
    GradientBatch batch;
    batch.keys = keys;
    batch.gradients =
        absl::MakeConstSpan(gradients).first(static_cast<size_t>(n * dim));
    batch.learning_rate = 0.01f;
    batch.insert_missing = true;
    batch.day = day;
    Check(table->ApplyGradients(batch).status());
  }
}

void MeasureSpeed() {
  std::vector<Variant> variants = MakeVariants();
  for (Variant& variant : variants) Fill(variant.table.get(), 0, num_keys);
  PageKeeper::Get().WaitUntilIdle();
  printf("row stride, bytes:");
  for (const Variant& variant : variants) {
    const int64_t stride = variant.table->stats().row_stride_bytes;
    printf("  %s %ld", variant.name.c_str(), stride);
    Report("speed | " + variant.name + " | row", "B",
           {static_cast<double>(stride)});
  }
  printf("\n");
  ZipfPositions source;
  std::vector<float> out(static_cast<size_t>(batch_size * dim));
  const std::vector<float> gradients(out.size(), 0.01f);
  const auto nothing = [] {};
  const auto find = [&](EmbeddingTable* table, const std::vector<Key>& keys) {
    Check(table->Find(keys, absl::MakeSpan(out)).status());
  };
  int64_t next_new = num_keys;

  Batches reads = MakeBatches(&source, /*is_unique=*/false);
  const char* const bar = "at most 1.15";
  RaceTables("speed", "lookup", &variants, &reads, nothing, find, bar);
  RaceTables(
      "speed", "training lookup", &variants, &reads, nothing,
      [&](EmbeddingTable* table, const std::vector<Key>& keys) {
        Check(table->FindOrInsert(keys, absl::MakeSpan(out)).status());
      },
      bar);
  // A million keys wait for admission; half of the unknown keys in lookups are
  // among them.
  const int64_t num_waiting = kQueries;
  for (Variant& variant : variants) {
    if (!variant.table->config().admission.has_candidates()) continue;
    Push(variant.table.get(), next_new, next_new + num_waiting, 0.0f);
  }
  next_new += num_waiting - kQueries / kNewEvery / 4;
  PutNewKeys(&reads, &next_new);
  RaceTables("speed", "lookup, a tenth unknown", &variants, &reads, nothing,
             find, bar);

  Batches pushes = MakeBatches(&source, /*is_unique=*/true);
  const auto push = [&](EmbeddingTable* table, const std::vector<Key>& keys) {
    GradientBatch batch;
    batch.keys = keys;
    batch.gradients = gradients;
    batch.learning_rate = 0.01f;
    batch.insert_missing = true;
    Check(table->ApplyGradients(batch).status());
  };
  RaceTables("speed", "push", &variants, &pushes, nothing, push);
  RaceTables(  // Each new key comes twice.
      "speed", "push, a tenth new", &variants, &pushes,
      [&] { PutNewKeys(&pushes, &next_new); }, push);
  printf("\nafter it, MB of what waits for admission:\n");
  for (const Variant& variant : variants) {
    const TableStats stats = variant.table->stats();
    if (stats.admission_bytes == 0) continue;
    printf("  %-18s %.1f, %ld ids wait\n", variant.name.c_str(),
           static_cast<double>(stats.admission_bytes) / kMegabyte,
           stats.num_candidates);
  }
}

// --- Churn ------------------------------------------------------------------

// A thread that pushes 64 keys at a time: 63 keys whose rows stay, and a new
// key, which has to wait for the mutex of its stripe.
class Pusher {
 public:
  Pusher(EmbeddingTable* table, const std::atomic<float>* day)
      : table_(table), day_(day), thread_([this] { Run(); }) {}
  ~Pusher() {
    is_ending_.store(true);
    thread_.join();
  }

  // The longest push since the last call, in ms.
  double TakeLongest() { return longest_.exchange(0.0) * 1e3; }
  int64_t num_pushes() const { return num_pushes_.load(); }

 private:
  void Run() {
    const int64_t num_hot = std::max<int64_t>(capacity / 20, 64);
    std::vector<Key> keys(64);
    const std::vector<float> gradients(keys.size() * static_cast<size_t>(dim),
                                       0.01f);
    GradientBatch batch;
    batch.keys = keys;
    batch.gradients = gradients;
    batch.learning_rate = 0.01f;
    batch.insert_missing = true;
    int64_t next = 0;
    for (int64_t next_new = num_hot; !is_ending_.load(); ++next_new) {
      for (Key& key : keys) key = KeyAt(-1 - (next++ % num_hot));
      keys.back() = KeyAt(-1 - next_new);
      // These keys are seen later than the keys of the window, so that they
      // stay.
      batch.day = day_->load() + 0.5f;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      const double begin = WallSeconds();
      Check(table_->ApplyGradients(batch).status());
      const double taken = WallSeconds() - begin;
      num_pushes_.fetch_add(1);
      double longest = longest_.load();
      while (taken > longest &&
             !longest_.compare_exchange_weak(longest, taken)) {
      }
    }
  }

  EmbeddingTable* const table_;
  const std::atomic<float>* const day_;
  std::atomic<bool> is_ending_{false};
  std::atomic<double> longest_{0.0};  // Seconds.
  std::atomic<int64_t> num_pushes_{0};
  std::thread thread_;
};

void ReportChurn(const std::string& row, const char* unit,
                 const std::vector<double>& values, const char* to_reach = "") {
  Report("churn | " + row + " | measured", unit, values, to_reach);
}

int64_t BytesOf(const EmbeddingTable& table) {
  const TableStats stats = table.stats();
  return stats.index_bytes + stats.row_bytes + stats.reserved_bytes;
}

void MeasureChurn() {
  TableConfig config = MakeConfig();
  config.statistics.kind = StatisticsKind::kUsage;
  const int64_t window = capacity / 4;
  const auto megabytes = [](int64_t bytes) {
    return static_cast<double>(bytes) / kMegabyte;
  };
  // The memory of a table that has never been shrunk, just before its shrink.
  const int64_t before = ResidentBytes();
  auto full = MakeTable(config);
  Push(full.get(), 0, capacity + window, 0.0f);
  PageKeeper::Get().WaitUntilIdle();
  const int64_t full_resident = ResidentBytes() - before;
  const int64_t full_bytes = BytesOf(*full);
  full.reset();
  PageKeeper::Get().WaitUntilIdle();

  const int64_t begin_resident = ResidentBytes();
  ForgetPeak();
  auto table = MakeTable(config);
  std::atomic<float> day{0.0f};
  EvictionConfig rules;
  rules.max_rows = static_cast<uint64_t>(capacity);
  printf(
      "\n%ld rows, stride %ld; windows of %ld new keys. Never shrunk, with "
      "%ld rows: the table says %.1f MB, resident are %.1f\n",
      capacity, table->stats().row_stride_bytes, window, capacity + window,
      megabytes(full_bytes), megabytes(full_resident));
  printf(
      "window  rows before, after  table MB before, after  resident MB "
      "before, after  shrink ms  longest push ms: inserting, shrinking\n");
  int64_t most_resident = 0;
  int64_t num_evicted = 0;
  std::vector<double> shrink_ms;
  std::vector<double> shrink_cpu_ms;
  std::vector<double> pauses_inserting;
  std::vector<double> pauses_shrinking;
  Pusher pusher(table.get(), &day);
  const int64_t num_windows = 10 * capacity / window;
  for (int64_t w = 0; w < num_windows + capacity / window; ++w) {
    day.store(static_cast<float>(w));
    Push(table.get(), w * window, (w + 1) * window, day.load());
    const int64_t rows_before = table->size();
    const int64_t bytes_before = BytesOf(*table);
    const int64_t resident_before = ResidentBytes() - begin_resident;
    pauses_inserting.push_back(pusher.TakeLongest());
    const double begin = WallSeconds();
    const double begin_cpu = CpuSeconds();
    const auto report = table->Shrink(rules, day.load(), /*dry_run=*/false);
    Check(report.status());
    shrink_ms.push_back((WallSeconds() - begin) * 1e3);
    shrink_cpu_ms.push_back((CpuSeconds() - begin_cpu) * 1e3);
    pauses_shrinking.push_back(pusher.TakeLongest());
    num_evicted += report->evicted_rows;
    const int64_t resident = ResidentBytes() - begin_resident;
    most_resident = std::max({most_resident, resident, resident_before});
    if (w % 4 == 3) {
      printf(
          "%6ld  %10ld %10ld  %10.1f %10.1f  %10.1f %10.1f  %8.1f  %10.2f "
          "%10.2f\n",
          w + 1, rows_before, table->size(), megabytes(bytes_before),
          megabytes(BytesOf(*table)), megabytes(resident_before),
          megabytes(resident), shrink_ms.back(), pauses_inserting.back(),
          pauses_shrinking.back());
    }
    fflush(stdout);
  }
  const int64_t peak = std::max(PeakBytes() - begin_resident, most_resident);
  printf("%ld rows evicted, %.1f x the capacity\n", num_evicted,
         static_cast<double>(num_evicted) / static_cast<double>(capacity));
  printf(
      "most resident, between calls %.1f MB, %.2f x one never shrunk; at "
      "any moment %.1f, %.2f x\n",
      megabytes(most_resident),
      static_cast<double>(most_resident) / static_cast<double>(full_resident),
      megabytes(peak),
      static_cast<double>(peak) / static_cast<double>(full_resident));
  ReportChurn(
      "rows evicted, times what the table keeps", "",
      {static_cast<double>(num_evicted) / static_cast<double>(capacity)},
      "at least 10");
  ReportChurn("resident, a table as full that was never shrunk", "MB",
              {megabytes(full_resident)});
  ReportChurn("most resident at any moment, times that", "",
              {static_cast<double>(peak) / static_cast<double>(full_resident)},
              "bounded");
  const auto print_pauses = [](const char* what,
                               const std::vector<double>& pauses) {
    ReportChurn(std::string("longest push while ") + what, "ms", pauses);
    printf(
        "longest push of 64 keys while %s, ms: median of the windows %.2f, "
        "worst %.2f\n",
        what, Median(pauses), *std::max_element(pauses.begin(), pauses.end()));
  };
  print_pauses("keys go in", pauses_inserting);
  print_pauses("the table shrinks", pauses_shrinking);
  printf("a shrink takes %.1f ms, %.1f of CPU (medians)\n", Median(shrink_ms),
         Median(shrink_cpu_ms));
  ReportChurn("a shrink", "s", {Median(shrink_ms) / 1e3});

  pusher.TakeLongest();
  rules.max_rows = static_cast<uint64_t>(capacity / 10);
  const int64_t bytes_before = BytesOf(*table);
  const int64_t resident_before = ResidentBytes() - begin_resident;
  const double begin = WallSeconds();
  Check(table->Shrink(rules, day.load(), /*dry_run=*/false).status());
  const double taken_ms = (WallSeconds() - begin) * 1e3;
  const TableStats stats = table->stats();
  ReportChurn("shrunk to a tenth: resident before", "MB",
              {megabytes(resident_before)});
  ReportChurn("shrunk to a tenth: resident after", "MB",
              {megabytes(ResidentBytes() - begin_resident)});
  ReportChurn("shrunk to a tenth: of these the index", "MB",
              {megabytes(stats.index_bytes)});
  printf(
      "to a tenth, %ld rows, in %.1f ms, longest push %.2f: table %.1f to "
      "%.1f MB (index %.1f), resident %.1f to %.1f\n",
      table->size(), taken_ms, pusher.TakeLongest(), megabytes(bytes_before),
      megabytes(BytesOf(*table)), megabytes(stats.index_bytes),
      megabytes(resident_before), megabytes(ResidentBytes() - begin_resident));
}

int Main(int argc, char** argv) {
  bool with_speed = true;
  bool with_churn = true;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (TakeFlag(arg)) continue;
    if (const int64_t value = FlagValue(arg, "--capacity")) {
      capacity = value;
    } else if (arg == "--only=speed") {
      with_churn = false;
    } else if (arg == "--only=churn") {
      with_speed = false;
    } else {
      fprintf(stderr,
              "usage: row_life_bench [--keys=N] [--dim=D] [--reps=R] "
              "[--batch=B] [--capacity=C] [--only=speed|churn]; got '%s'\n",
              argv[i]);
      return 2;
    }
  }
  const std::string level(SimdLevelName(ActiveSimdLevel()));
  printf("keys %ld, dim %d, batch %ld, reps %d, capacity %ld, %s\n", num_keys,
         dim, batch_size, reps, capacity, level.c_str());
  if (with_churn) MeasureChurn();
  if (with_speed) MeasureSpeed();
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Main(argc, argv); }
