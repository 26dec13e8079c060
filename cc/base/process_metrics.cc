#include "cc/base/process_metrics.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "cc/base/memory_region.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {
namespace {

std::string ReadText(const char* path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

void AddProcessMetrics(absl::string_view version, absl::Time started,
                       MetricList* list) {
  list->Gauge("tfswitch_build_info", "1; the label is the version.", 1,
              {{"version", std::string(version)}});
  list->Gauge("tfswitch_uptime_seconds", "Since the start, in seconds.",
              absl::ToDoubleSeconds(SteadyNow() - started));
  const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
  const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
  // The program's name, in parentheses, may contain spaces. The fields after it
  // are numbered from 3; see proc(5).
  const std::string stat = ReadText("/proc/self/stat");
  const std::vector<std::string> fields =
      absl::StrSplit(stat.substr(stat.rfind(')') + 1), ' ', absl::SkipEmpty());
  const auto field = [&fields](size_t number) {
    double value = 0;
    (void)(number - 3 < fields.size() &&
           absl::SimpleAtod(fields[number - 3], &value));
    return value;
  };
  if (fields.size() > 21) {
    list->Counter("process_cpu_seconds_total",
                  "CPU time of the process, in seconds.",
                  (field(14) + field(15)) / ticks);
    list->Gauge("process_resident_memory_bytes",
                "Resident memory of the process, in bytes.", field(24) * page);
    list->Gauge("process_virtual_memory_bytes",
                "Address space of the process, in bytes.", field(23));
    for (const absl::string_view line :
         absl::StrSplit(ReadText("/proc/stat"), '\n')) {
      double boot = 0;
      if (line.substr(0, 6) == "btime " &&
          absl::SimpleAtod(line.substr(6), &boot)) {
        list->Gauge("process_start_time_seconds",
                    "Start of the process, in seconds since 1970.",
                    boot + field(22) / ticks);
      }
    }
  }
  std::error_code error;
  std::filesystem::directory_iterator fds("/proc/self/fd", error);
  double num_fds = 0;
  for (; !error && fds != std::filesystem::directory_iterator();
       fds.increment(error)) {
    ++num_fds;
  }
  if (!error) {
    list->Gauge("process_open_fds", "Open file descriptors.", num_fds);
  }
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    list->Gauge("process_max_fds", "Most file descriptors.",
                static_cast<double>(limit.rlim_cur));
  }
  list->Gauge("tfswitch_memory_limit_bytes",
              "Most memory of the process: of its control group, or of the "
              "machine, in bytes.",
              static_cast<double>(MemoryLimitBytes()));
}

}  // namespace tfswitch
