#include "cc/base/metric_list.h"

#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"
#include "cc/base/process_metrics.h"
#include "cc/base/steady_clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace tfswitch {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(MetricListTest, WritesPrometheusTextWithCommonLabels) {
  MetricSources sources;
  const int removed =
      sources.Add([](MetricList* list) { list->Gauge("gone", "", 1); });
  sources.Add([](MetricList* list) {
    list->Gauge("rows", "Rows.", 3, {{"table", "a\"b"}});
    list->Counter("pulls_total", "Pulls.", 7);
    list->Gauge("rows", "", 4, {{"table", "c"}});
  });
  sources.Remove(removed);
  EXPECT_EQ(sources.Text({{"shard", "1"}}),
            "# HELP rows Rows.\n# TYPE rows gauge\n"
            "rows{shard=\"1\",table=\"a\\\"b\"} 3\n"
            "rows{shard=\"1\",table=\"c\"} 4\n"
            "# HELP pulls_total Pulls.\n# TYPE pulls_total counter\n"
            "pulls_total{shard=\"1\"} 7\n");
}

TEST(MetricListTest, HistogramsCountAllDurationsOfAllThreads) {
  LatencyHistogram histogram;
  MetricList empty;
  empty.Histogram("wait_seconds", "", histogram);
  EXPECT_EQ(empty.Text(), "");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&histogram] {
      for (int i = 0; i < 1000; ++i) {
        histogram.Record(absl::Microseconds(50));  // A bound belongs below.
        histogram.Record(absl::Milliseconds(1500));
        histogram.Record(absl::Minutes(2));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  MetricList list;
  list.Histogram("wait_seconds", "", histogram);
  const std::string text = list.Text();
  EXPECT_THAT(text, HasSubstr("wait_seconds_count 12000\n"));
  EXPECT_THAT(text, HasSubstr("wait_seconds_bucket{le=\"5e-05\"} 4000\n"));
  EXPECT_THAT(text, HasSubstr("wait_seconds_bucket{le=\"1\"} 4000\n"));
  EXPECT_THAT(text, HasSubstr("wait_seconds_bucket{le=\"2\"} 8000\n"));
  EXPECT_THAT(text, HasSubstr("wait_seconds_bucket{le=\"60\"} 8000\n"));
  EXPECT_THAT(text, HasSubstr("wait_seconds_bucket{le=\"+Inf\"} 12000\n"));
  EXPECT_NEAR(histogram.SumSeconds(), 4000 * (50e-6 + 1.5 + 120), 1e-3);
}

TEST(ProcessMetricsTest, ReadsThisProcess) {
  MetricList list;
  AddProcessMetrics("1.2", SteadyNow() - absl::Seconds(7), &list);
  EXPECT_THAT(list.Text(), HasSubstr("info{version=\"1.2\"} 1\n"));
  EXPECT_THAT(list.Text(), HasSubstr("\ntfswitch_uptime_seconds 7."));
  for (const char* name :
       {"process_cpu_seconds_total", "process_resident_memory_bytes",
        "process_virtual_memory_bytes", "process_start_time_seconds",
        "process_open_fds", "process_max_fds", "tfswitch_memory_limit_bytes"}) {
    EXPECT_THAT(list.Text(), HasSubstr(std::string("\n") + name + " "));
    EXPECT_THAT(list.Text(), Not(HasSubstr(std::string("\n") + name + " 0\n")));
  }
}

}  // namespace
}  // namespace tfswitch
