#include "cc/base/metric_list.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "prometheus/text_serializer.h"

namespace tfswitch {

prometheus::ClientMetric* MetricList::Add(prometheus::MetricType type,
                                          absl::string_view name,
                                          absl::string_view help,
                                          const Labels& labels) {
  auto family =
      std::find_if(families_.begin(), families_.end(),
                   [name](const auto& known) { return known.name == name; });
  if (family == families_.end()) {
    families_.push_back({std::string(name), std::string(help), type, {}});
    family = families_.end() - 1;
  }
  prometheus::ClientMetric& metric = family->metric.emplace_back();
  for (const Labels* list :
       std::initializer_list<const Labels*>{&common_, &labels}) {
    for (const auto& [key, value] : *list) metric.label.push_back({key, value});
  }
  return &metric;
}

void MetricList::Gauge(absl::string_view name, absl::string_view help,
                       double value, const Labels& labels) {
  Add(prometheus::MetricType::Gauge, name, help, labels)->gauge.value = value;
}

void MetricList::Counter(absl::string_view name, absl::string_view help,
                         double value, const Labels& labels) {
  Add(prometheus::MetricType::Counter, name, help, labels)->counter.value =
      value;
}

void MetricList::Histogram(absl::string_view name, absl::string_view help,
                           const LatencyHistogram& values,
                           const Labels& labels) {
  constexpr size_t kNumBounds = LatencyHistogram::kBounds.size();
  uint64_t count = 0;
  prometheus::ClientMetric::Histogram histogram;
  for (size_t i = 0; i <= kNumBounds; ++i) {
    count += values.InBucket(i);
    histogram.bucket.push_back(
        {count, i < kNumBounds ? LatencyHistogram::kBounds[i]
                               : std::numeric_limits<double>::infinity()});
  }
  if (count == 0) return;
  histogram.sample_count = count;
  histogram.sample_sum = values.SumSeconds();
  Add(prometheus::MetricType::Histogram, name, help, labels)->histogram =
      std::move(histogram);
}

std::string MetricList::Text() const {
  return prometheus::TextSerializer().Serialize(families_);
}

int MetricSources::Add(Source source) {
  MutexLock lock(&mutex_);
  sources_[++last_key_] = std::move(source);
  return last_key_;
}

void MetricSources::Remove(int key) {
  MutexLock lock(&mutex_);
  sources_.erase(key);
}

std::string MetricSources::Text(const MetricList::Labels& labels) const {
  MetricList list;
  list.SetCommonLabels(labels);
  MutexLock lock(&mutex_);
  for (const auto& [key, source] : sources_) source(&list);
  return list.Text();
}

}  // namespace tfswitch
