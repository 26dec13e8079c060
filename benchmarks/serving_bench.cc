// Measures serving an export: opening it, lookups, deltas, and the memory of
// two processes.
//
//   serving_bench [--keys=N] [--dim=D] [--requests=R] [--delta=K] [--format=F]
// A request looks up 128 x 26 ids, of which 9 in 10 have a row, uniform or by
// zipf 1.05. Times are wall time in ms: the median, and the 99th percentile.
// The first lookups use the export as it was opened, where each block is
// checked when it is first used; the next ones use an export that was checked
// before. For the time while another thread applies deltas, a request counts if
// it overlaps with a delta. The floor is the time to read one cache line of the
// file at a random known address for each id: no table of rows can read less
// memory.
// PSS is the memory that Linux counts for a process, where shared pages are
// divided among the processes that share them.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "benchmarks/bench_support.h"
#include "cc/serving/export_folder.h"
#include "cc/serving/served_rows.h"

namespace tfswitch {
namespace {

constexpr size_t kIdsPerRequest = 128 * 26;

struct Options {
  int64_t keys = 10'000'000;
  int dim = 16;
  int requests = 2000;
  int64_t delta = 100'000;
  std::string format = "float32";
};

// Makes ids that are not small numbers.
Key KeyOf(uint64_t i) { return static_cast<Key>(i * 0x9e3779b97f4a7c15ULL); }

void Export(const std::string& path, const Options& options, bool is_delta,
            uint64_t first, int64_t num_rows, float value) {
  auto writer = ExportWriter::Begin(path, is_delta);
  Check(writer.status());
  RowFileKind kind;
  kind.table = "t";
  kind.dim = options.dim;
  kind.format = RowFormatOf(options.format).value();
  kind.default_row.assign(static_cast<size_t>(options.dim), 0.0f);
  auto file = (*writer)->AddTable(kind);
  Check(file.status());
  constexpr int64_t kBatch = 4096;
  std::vector<Key> keys;
  std::vector<float> rows;
  for (int64_t begin = 0; begin < num_rows; begin += kBatch) {
    keys.clear();
    for (int64_t i = begin; i < std::min(num_rows, begin + kBatch); ++i) {
      keys.push_back(KeyOf((first + static_cast<uint64_t>(i)) %
                           static_cast<uint64_t>(options.keys)));
    }
    rows.assign(keys.size() * static_cast<size_t>(options.dim), value);
    Check((*file)->Add(keys, rows));
  }
  const auto info = (*file)->Finish();
  Check(info.status());
  (*writer)->FinishTable("t", *info, {});
  Check((*writer)->Publish());
}

// Draws the ids of requests.
class Requests {
 public:
  Requests(const Options& options, bool is_zipf, uint64_t seed)
      : options_(options), is_zipf_(is_zipf), random_(seed) {}

  void Next(std::vector<Key>* ids) {
    ids->resize(kIdsPerRequest);
    const auto num_keys = static_cast<double>(options_.keys);
    for (Key& id : *ids) {
      const double u = uniform_(random_);
      // The inverse of the continuous distribution with the same tail.
      const double rank =
          is_zipf_ ? std::pow(1.0 + u * (std::pow(num_keys, -0.05) - 1.0),
                              -1.0 / 0.05) -
                         1.0
                   : u * num_keys;
      auto i = static_cast<uint64_t>(rank);
      // One id in ten has no row.
      if (uniform_(random_) < 0.1) i += static_cast<uint64_t>(options_.keys);
      id = KeyOf(i);
    }
  }

 private:
  const Options options_;
  const bool is_zipf_;
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> uniform_;
};

struct Times {
  std::vector<double> ms;

  // Prints and reports; returns the p99.
  double Tell(const std::string& what, const char* to_reach = "") {
    if (ms.empty()) return 0.0;
    std::sort(ms.begin(), ms.end());
    const double p99 = ms[ms.size() * 99 / 100];
    std::printf("%s, ms: median %.3f  p99 %.3f  worst %.3f  (%zu requests)\n",
                what.c_str(), Median(ms), p99, ms.back(), ms.size());
    Report("serving | lookup, " + what + " | median", "ms", {Median(ms)});
    Report("serving | lookup, " + what + " | p99", "ms", {p99}, to_reach);
    return p99;
  }
};

void ReportServing(const std::string& row, const char* unit, double value,
                   const char* to_reach = "") {
  Report("serving | " + row + " | median", unit, {value}, to_reach);
}

double RequestMs(const ServedRows& served, const std::vector<Key>& ids,
                 std::vector<float>* rows) {
  const double begin = WallSeconds();
  Check(served.Pin()->tables()[0].Lookup(ids, rows->data()));
  return (WallSeconds() - begin) * 1e3;
}

Times Run(const ServedRows& served, const Options& options, bool is_zipf,
          int num_requests, uint64_t seed) {
  Requests requests(options, is_zipf, seed);
  std::vector<Key> ids;
  std::vector<float> rows(kIdsPerRequest * static_cast<size_t>(options.dim));
  Times times;
  for (int i = 0; i < num_requests; ++i) {
    requests.Next(&ids);
    times.ms.push_back(RequestMs(served, ids, &rows));
  }
  return times;
}

// Reads the file with the rows, so that it is in memory.
Times RunFloor(const MappedFile& file, int num_requests) {
  constexpr size_t kLineBytes = 64;
  constexpr size_t kAhead = 32;
  std::mt19937_64 random(2);
  std::uniform_int_distribution<size_t> line(0, file.size() / kLineBytes - 1);
  std::vector<const char*> places(kIdsPerRequest + kAhead, file.data());
  Times times;
  int64_t sum = 0;
  for (int i = 0; i < num_requests; ++i) {
    for (size_t n = 0; n < kIdsPerRequest; ++n) {
      places[n] = file.data() + line(random) * kLineBytes;
    }
    const double begin = WallSeconds();
    for (size_t n = 0; n < kIdsPerRequest; ++n) {
      __builtin_prefetch(places[n + kAhead], /*rw=*/0, /*locality=*/2);
      sum += *places[n];
    }
    times.ms.push_back((WallSeconds() - begin) * 1e3);
  }
  // Otherwise the compiler would remove the loop.
  if (sum == -1) std::printf("\n");
  return times;
}

std::shared_ptr<ServedRows> Open(const std::string& path,
                                 const Options& options, bool verify_first) {
  ServedRowsOptions served;
  served.path = path;
  served.tables = {{"t", options.dim}};
  served.verify_first = verify_first;
  auto opened = ServedRows::Open(served);
  Check(opened.status());
  return *opened;
}

// In MiB, of this process.
double PssMib() {
  std::ifstream file("/proc/self/smaps_rollup");
  std::string line;
  while (std::getline(file, line)) {
    absl::string_view rest = line;
    int64_t kib = 0;
    if (absl::ConsumePrefix(&rest, "Pss:") &&
        absl::ConsumeSuffix(&rest, "kB") && absl::SimpleAtoi(rest, &kib)) {
      return static_cast<double>(kib) / 1024.0;
    }
  }
  Die("no PSS in /proc/self/smaps_rollup");
}

// Returns the PSS of each of several serving processes, in MiB.
std::vector<double> PssOf(int num_processes, const std::string& path,
                          const Options& options) {
  int ready[2];
  // Each step has its own pipe, so that no process takes the message of another
  // step.
  int go[2];
  int end[2];
  if (pipe(ready) != 0 || pipe(go) != 0 || pipe(end) != 0) Die("pipe");
  std::vector<pid_t> processes;
  for (int i = 0; i < num_processes; ++i) {
    const pid_t process = fork();
    if (process < 0) Die("fork");
    if (process == 0) {
      const auto served = Open(path, options, /*verify_first=*/true);
      char byte = 0;
      if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) != 1) {
        _exit(1);
      }
      const double pss = PssMib();
      if (write(ready[1], &pss, sizeof(pss)) != sizeof(pss)) _exit(1);
      // Until all have counted.
      if (read(end[0], &byte, 1) != 1) _exit(1);
      _exit(0);
    }
    processes.push_back(process);
  }
  const auto release = [&](int fd) {
    const std::string bytes(processes.size(), '.');
    if (write(fd, bytes.data(), bytes.size()) < 0) Die("write");
  };
  char byte;
  for (int i = 0; i < num_processes; ++i) {
    if (read(ready[0], &byte, 1) != 1) Die("a process has ended");
  }
  release(go[1]);
  std::vector<double> pss(processes.size());
  for (double& each : pss) {
    if (read(ready[0], &each, sizeof(each)) != sizeof(each)) {
      Die("a process has ended");
    }
  }
  release(end[1]);
  for (const pid_t process : processes) waitpid(process, nullptr, 0);
  for (const int fd : {ready[0], ready[1], go[0], go[1], end[0], end[1]})
    close(fd);
  return pss;
}

void Main(const Options& options) {
  std::string pattern =
      (std::filesystem::temp_directory_path() / "serving_benchXXXXXX").string();
  const std::string path = mkdtemp(pattern.data());
  double begin = WallSeconds();
  Export(path, options, /*is_delta=*/false, 0, options.keys, 1.0f);
  const double write_seconds = WallSeconds() - begin;
  std::printf("%" PRId64 " rows, dim %d, %s: written in %.1f s\n", options.keys,
              options.dim, options.format.c_str(), write_seconds);
  ReportServing("writing the export", "s", write_seconds);

  std::vector<double> open_ms;
  std::shared_ptr<ServedRows> served;
  for (int i = 0; i < 9; ++i) {
    served.reset();
    begin = WallSeconds();
    served = Open(path, options, /*verify_first=*/false);
    open_ms.push_back((WallSeconds() - begin) * 1e3);
  }
  std::printf("open, ms: median %.2f\n", Median(open_ms));
  ReportServing("opening it", "ms", Median(open_ms), "under 100 ms");
  for (const bool is_zipf : {false, true}) {
    const auto fresh = Open(path, options, /*verify_first=*/false);
    Run(*fresh, options, is_zipf, options.requests / 4, 1)
        .Tell(is_zipf ? "unchecked, zipf" : "unchecked, uniform");
  }
  begin = WallSeconds();
  served = Open(path, options, /*verify_first=*/true);
  const double check_seconds = WallSeconds() - begin;
  std::printf("open and check all: %.2f s\n", check_seconds);
  ReportServing("opening it, all rows checked before", "s", check_seconds);
  double p99_before = 0.0;
  for (const bool is_zipf : {false, true}) {
    p99_before = Run(*served, options, is_zipf, options.requests, 2)
                     .Tell(is_zipf ? "checked, zipf" : "checked, uniform",
                           "at most 0.3 ms");
  }
  {
    const auto manifest = ReadExport(path, {1, /*is_delta=*/false});
    Check(manifest.status());
    const std::string rows =
        RowFilePath(path, NameOf(*manifest), manifest->tables().at("t"));
    const auto fd = OpenRegularFile(rows);
    Check(fd.status());
    const auto file = MappedFile::Map(*fd, rows);
    close(*fd);
    Check(file.status());
    RunFloor(**file, options.requests).Tell("floor, uniform");
  }

  constexpr int kDeltas = 20;
  std::atomic<bool> is_over{false};
  std::atomic<int> num_applying{0};
  std::vector<double> apply_ms;
  std::thread applier([&] {
    for (int i = 0; i < kDeltas; ++i) {
      Export(path, options, /*is_delta=*/true,
             static_cast<uint64_t>(i * options.delta / 2), options.delta,
             2.0f + static_cast<float>(i));
      num_applying = 1;
      const double from = WallSeconds();
      Check(served->Refresh());
      apply_ms.push_back((WallSeconds() - from) * 1e3);
      num_applying = 0;
    }
    is_over = true;
  });
  Requests requests(options, /*is_zipf=*/true, 3);
  std::vector<Key> ids;
  std::vector<float> rows(kIdsPerRequest * static_cast<size_t>(options.dim));
  Times during;
  while (!is_over) {
    requests.Next(&ids);
    const bool before = num_applying != 0;
    const double ms = RequestMs(*served, ids, &rows);
    if (before || num_applying != 0) during.ms.push_back(ms);
  }
  applier.join();
  std::printf("applying a delta of %" PRId64 " rows, ms: median %.1f\n",
              options.delta, Median(apply_ms));
  ReportServing("applying a delta", "ms", Median(apply_ms));
  const double p99_during = during.Tell("while a delta is applied, zipf");
  if (p99_during > 0.0) {
    Report("serving | the same, times that before | p99", "",
           {p99_during / p99_before}, "at most 2");
  }
  std::printf("%zu files\n", served->Pin()->tables()[0].files.size());
  Run(*served, options, true, options.requests, 4)
      .Tell(absl::StrCat("after ", kDeltas, " deltas, zipf"));
  served.reset();

  for (const int num_processes : {1, 2}) {
    double sum = 0.0;
    for (const double pss : PssOf(num_processes, path, options)) sum += pss;
    std::printf("PSS of %d serving, MiB: %.0f in all\n", num_processes, sum);
    ReportServing(
        absl::StrCat("memory (PSS), serving processes: ", num_processes), "MiB",
        sum, num_processes == 1 ? "" : "one copy of the rows");
  }
  std::error_code error;
  std::filesystem::remove_all(path, error);
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) {
  tfswitch::Options options;
  for (int i = 1; i < argc; ++i) {
    absl::string_view flag = argv[i];
    const bool is_known =
        (absl::ConsumePrefix(&flag, "--keys=") &&
         absl::SimpleAtoi(flag, &options.keys) && options.keys > 0) ||
        (absl::ConsumePrefix(&flag, "--dim=") &&
         absl::SimpleAtoi(flag, &options.dim) && options.dim > 0) ||
        (absl::ConsumePrefix(&flag, "--requests=") &&
         absl::SimpleAtoi(flag, &options.requests) && options.requests > 3) ||
        (absl::ConsumePrefix(&flag, "--delta=") &&
         absl::SimpleAtoi(flag, &options.delta) && options.delta > 0);
    if (is_known) continue;
    if (absl::ConsumePrefix(&flag, "--format=")) {
      options.format = std::string(flag);
      continue;
    }
    tfswitch::Die(absl::StrCat(
        "usage: serving_bench [--keys=N] [--dim=D] [--requests=R] [--delta=K] "
        "[--format=float32|float16|int8]; got '",
        argv[i], "'"));
  }
  tfswitch::Main(options);
  return 0;
}
