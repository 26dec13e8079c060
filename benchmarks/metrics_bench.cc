// Measures what the metrics of a pull cost: the counters of the call and of the
// table, and the sample of its keys.
//
// The bar: at most 50 ns a call, without the two readings of the clock.

#include <cstdio>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "benchmarks/bench_support.h"
#include "cc/rpc/call_metrics.h"
#include "cc/table/key_heat.h"
#include "cc/table/table_counters.h"

namespace tfswitch {
namespace {

constexpr int kCalls = 2'000'000;
constexpr int kReps = 9;
constexpr char kMethod[] = "PullMany";

struct Metrics {
  CallMetrics calls;
  TableCounters table;
  KeyHeat heat{1024};
};

// Returns the nanoseconds of a call.
double Measure(Metrics* metrics, const std::vector<Key>& keys) {
  const double start = WallSeconds();
  for (int i = 0; i < kCalls; ++i) {
    metrics->table.Add(TableCounter::num_pulls, 1);
    metrics->table.Add(TableCounter::pulled_keys,
                       static_cast<int64_t>(keys.size()));
    metrics->table.Add(TableCounter::missing_keys, 0);
    metrics->heat.Note(keys);
    metrics->calls.Record(kMethod, absl::StatusCode::kOk,
                          absl::Microseconds(300));
  }
  return (WallSeconds() - start) / kCalls * 1e9;
}

int Run() {
  for (const int num_keys : {1, 10, 1000}) {
    std::vector<Key> keys(num_keys);
    for (int i = 0; i < num_keys; ++i) keys[i] = i;
    Metrics metrics;
    std::vector<double> alone, beside;
    for (int r = 0; r < kReps; ++r) {
      alone.push_back(Measure(&metrics, keys));
      std::thread other([&] { Measure(&metrics, keys); });
      beside.push_back(Measure(&metrics, keys));
      other.join();
    }
    std::printf("pull of %4d keys: %.1f ns, beside another thread %.1f ns\n",
                num_keys, Median(alone), Median(beside));
  }
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main() { return tfswitch::Run(); }
