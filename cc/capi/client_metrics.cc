#include "cc/capi/client_metrics.h"

#include <array>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "cc/base/latency_histogram.h"
#include "cc/base/striped_counters.h"
#include "cc/capi/cluster.h"

namespace tfswitch {
namespace {

constexpr size_t kNumCalls = static_cast<size_t>(ClientCall::kSize);
constexpr std::array<const char*, kNumCalls> kNames = {"pull", "push"};

enum Counter : size_t { kIds, kKeys, kFailed, kNumCounters };

struct Totals {
  StripedCounters<kNumCounters> counters;
  LatencyHistogram durations;
};

Totals& TotalsOf(size_t call) {
  static auto* const totals = new std::array<Totals, kNumCalls>();
  return (*totals)[call];
}

}  // namespace

MeasuredCall::MeasuredCall(ClientCall call)
    : call_(call), trace_(kNames[static_cast<size_t>(call)]) {}

MeasuredCall::~MeasuredCall() {
  if (v1::TraceSpan* const span = trace_.span(); span != nullptr) {
    span->set_num_ids(ids_);
    span->set_num_keys(keys_);
    if (!has_succeeded_) span->set_error("the call failed");
  }
  Totals& totals = TotalsOf(static_cast<size_t>(call_));
  totals.counters.Add(kIds, ids_);
  totals.counters.Add(kKeys, keys_);
  if (!has_succeeded_) totals.counters.Add(kFailed, 1);
  totals.durations.Record(SteadyNow() - begin_);
}

void AddClientMetrics(MetricList* list) {
  for (size_t i = 0; i < kNumCalls; ++i) {
    const Totals& totals = TotalsOf(i);
    const MetricList::Labels call = {{"call", kNames[i]}};
    const auto sum = [&totals](Counter counter) {
      return static_cast<double>(totals.counters.Sum(counter));
    };
    list->Counter("tfswitch_worker_ids_total",
                  "Ids of the batches of this process.", sum(kIds), call);
    list->Counter("tfswitch_worker_keys_total",
                  "Keys that were sent for these ids: repeated ids count once, "
                  "except in pulls of tables in this process.",
                  sum(kKeys), call);
    list->Counter("tfswitch_worker_failed_calls_total",
                  "Pulls and pushes that failed.", sum(kFailed), call);
    list->Histogram("tfswitch_worker_call_duration_seconds",
                    "Duration of a pull or push of one or more tables, in "
                    "seconds.",
                    totals.durations, call);
  }
  int in_flight = 0;
  std::map<std::string, Prefetches::Stats> tables;
  for (const std::shared_ptr<Cluster>& cluster : OpenClusters()) {
    in_flight += cluster->pushes().num_in_flight();
    for (const auto& [table, stats] : cluster->prefetches().stats()) {
      tables[table].Add(stats);
    }
  }
  list->Gauge("tfswitch_worker_pushes_in_flight",
              "Pushes of earlier steps that are not applied yet.", in_flight);
  for (const auto& [table, stats] : tables) {
    const std::pair<const char*, int64_t> results[] = {
        {"hit", stats.num_hits - stats.num_late},
        {"late", stats.num_late},
        {"miss", stats.num_misses},
        {"unused", stats.num_unused}};
    for (const auto& [result, count] : results) {
      list->Counter("tfswitch_worker_prefetches_total",
                    "Lookups of tables with prefetch by where their rows came "
                    "from, and batches that were read ahead in vain.",
                    static_cast<double>(count),
                    {{"table", table}, {"result", result}});
    }
    for (const auto& [by, pushes] : {std::pair{"own", stats.own_pushes},
                                     std::pair{"others", stats.other_pushes}}) {
      list->Counter("tfswitch_worker_prefetch_age_pushes_total",
                    "Pushes between the time when rows were read ahead and "
                    "their lookup, summed over lookups.",
                    static_cast<double>(pushes),
                    {{"table", table}, {"by", by}});
    }
  }
}

}  // namespace tfswitch
