// Collects the values of metrics, and writes them in Prometheus's text format.

#ifndef TFSWITCH_CC_BASE_METRIC_LIST_H_
#define TFSWITCH_CC_BASE_METRIC_LIST_H_

#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "cc/base/latency_histogram.h"
#include "cc/base/mutex.h"
#include "prometheus/metric_family.h"

namespace tfswitch {

// Values with the same name become one family, in the order of their first
// values. docs/metrics_reference.md lists all names.
//
// Not thread-safe.
class MetricList {
 public:
  using Labels = std::vector<std::pair<std::string, std::string>>;

  // Adds these labels to every later value.
  void SetCommonLabels(Labels labels) { common_ = std::move(labels); }

  void Gauge(absl::string_view name, absl::string_view help, double value,
             const Labels& labels = {});
  // A sum that never falls; its name ends with "_total".
  void Counter(absl::string_view name, absl::string_view help, double value,
               const Labels& labels = {});
  // Adds nothing if nothing was recorded.
  void Histogram(absl::string_view name, absl::string_view help,
                 const LatencyHistogram& values, const Labels& labels = {});

  std::string Text() const;

 private:
  prometheus::ClientMetric* Add(prometheus::MetricType type,
                                absl::string_view name, absl::string_view help,
                                const Labels& labels);

  Labels common_;
  std::vector<prometheus::MetricFamily> families_;
};

// The parts of a process that have metrics.
//
// Thread-safe.
class MetricSources {
 public:
  using Source = std::function<void(MetricList*)>;

  // Calls `source` in each Text() until Remove(). `source` must not call this
  // object. Returns the key for Remove().
  int Add(Source source);
  // Waits for a running Text().
  void Remove(int key);

  // The metrics of all sources, with `labels`, in Prometheus's text format.
  std::string Text(const MetricList::Labels& labels) const;

 private:
  mutable Mutex mutex_;
  int last_key_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<int, Source> sources_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_METRIC_LIST_H_
