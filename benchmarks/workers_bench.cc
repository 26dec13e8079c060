// Measures how much time several workers spend to wait for each other.
//
//   workers_bench [--workers=N] [--keys=K] [--compute_us=T] [--steps=S]
//                 [--reps=R] [--ssp_steps=P]
// A server runs in its own process on loopback. Workers are threads of another
// process, each with its own connection. A step is a pull, a computation (a
// sleep of T, as on an accelerator), a push of the same keys, and the end of
// the step. Variants take turns within each repetition, in reversed order every
// second time; figures are medians.
//
//   rate        steps per second of all workers with bsp, against asp
//   straggler   the same of the workers at full speed with asp, when one more
//               computes for twice as long, against when it does not
//   ssp         how far ahead of the slowest steps ended, at random speeds
//   clock       what the end of a step takes one worker alone, and in it the
//               round trip that asks for the clock: to arrive, and to hear that
//               the round has closed

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "benchmarks/bench_support.h"
#include "cc/base/malloc_tuning.h"
#include "cc/client/worker_session.h"
#include "cc/rpc/client/grpc_client.h"
#include "cc/rpc/server/grpc_server.h"
#include "cc/shard/shard.h"

namespace tfswitch {
namespace {

constexpr int kDim = 16;
constexpr int64_t kRows = 100000;

int64_t num_workers = 4;
int64_t num_keys = 2048;
int64_t compute_us = 10000;
int64_t steps = 200;
int64_t reps = 7;
int64_t ssp_steps = 25000;

// Forks a server; returns its address. It ends when this process does.
std::string StartServer() {
  int ends[2];
  if (pipe(ends) != 0) Die("pipe");
  int life[2];
  if (pipe(life) != 0) Die("pipe");
  if (fork() == 0) {
    close(life[1]);
    auto server = GrpcServer::Start(GrpcServerOptions{},
                                    std::make_shared<Shard>(ShardOptions{}));
    Check(server.status());
    const std::string address = (*server)->address();
    if (write(ends[1], address.c_str(), address.size() + 1) < 0) Die("write");
    char byte;
    while (read(life[0], &byte, 1) > 0) {
    }
    std::_Exit(0);
  }
  close(life[0]);
  char address[128] = {};
  if (read(ends[0], address, sizeof(address) - 1) <= 0) Die("no server");
  return address;
}

class BenchWorker {
 public:
  BenchWorker(const std::string& address, uint32_t worker,
              const ConsistencyConfig& consistency, const std::string& run,
              uint32_t group_size)
      : random_(worker + 1) {
    GrpcClientOptions options;
    options.address = address;
    auto connected = NewGrpcClient(options);
    Check(connected.status());
    client_ = *std::move(connected);
    TableConfig config;
    config.name = table_ = absl::StrCat("bench_", consistency.ToString());
    config.dim = kDim;
    config.optimizer = AdagradConfig{};
    config.consistency = consistency;
    Check(client_->CreateTable(config));
    WorkerOptions worker_options;
    worker_options.group = run;
    worker_options.worker = worker;
    worker_options.group_options.num_workers = group_size;
    worker_options.consistency = consistency;
    auto session = WorkerSession::Join(client_, worker_options);
    Check(session.status());
    session_ = *std::move(session);
    keys_.resize(num_keys);
    rows_.resize(num_keys * kDim);
    gradients_.assign(num_keys * kDim, 0.01f);
  }

  void Exchange(absl::Duration compute) {
    for (size_t i = 0; i < keys_.size(); ++i) {
      // Distinct: each from its own range.
      keys_[i] = static_cast<Key>(
          static_cast<int64_t>(i) * (kRows / num_keys) +
          static_cast<int64_t>(random_() % (kRows / num_keys)));
    }
    PullArgs pull;
    pull.table = table_;
    pull.dim = kDim;
    pull.keys = keys_;
    pull.insert_missing = true;
    Check(client_->Pull(pull, absl::MakeSpan(rows_)));
    if (compute > absl::ZeroDuration()) absl::SleepFor(compute);
    PushArgs push;
    push.table = table_;
    push.dim = kDim;
    push.keys = keys_;
    push.gradients = gradients_;
    push.learning_rate = 0.01f;
    push.keys_are_unique = true;
    auto step = session_->CurrentStep();
    Check(step.status());
    push.step = *std::move(step);
    Check(client_->Push(push).status());
  }

  void EndStep() { Check(session_->EndStep(1.0)); }
  void Leave() { Check(session_->Leave()); }
  uint32_t Random() { return static_cast<uint32_t>(random_()); }
  WorkerSession::Report Report() {
    auto report = session_->GetReport();
    Check(report.status());
    return *std::move(report);
  }

 private:
  std::mt19937_64 random_;
  std::string table_;
  std::shared_ptr<ParameterClient> client_;
  std::unique_ptr<WorkerSession> session_;
  std::vector<Key> keys_;
  std::vector<float> rows_;
  std::vector<float> gradients_;
};

// Steps per second of the first `num_counted` of `group_size` workers; the last
// one computes `last_factor` times as long.
double Rate(const std::string& address, const ConsistencyConfig& consistency,
            int64_t group_size, int64_t num_counted, double last_factor) {
  static int run = 0;
  const std::string group = absl::StrCat("run_", ++run);
  std::vector<double> rates(group_size);
  std::vector<std::thread> threads;
  for (int64_t w = 0; w < group_size; ++w) {
    threads.emplace_back([&, w] {
      BenchWorker worker(address, static_cast<uint32_t>(w), consistency, group,
                         static_cast<uint32_t>(group_size));
      const bool is_last = w == group_size - 1;
      const auto compute =
          absl::Microseconds(compute_us) * (is_last ? last_factor : 1.0);
      // The variant without a straggler runs for the same time, not for the
      // same number of steps.
      const auto own_steps = static_cast<int64_t>(
          static_cast<double>(steps) / (is_last ? last_factor : 1.0));
      worker.Exchange(compute);  // To warm up.
      worker.EndStep();
      const double begin = WallSeconds();
      for (int64_t step = 0; step < own_steps; ++step) {
        worker.Exchange(compute);
        worker.EndStep();
      }
      rates[w] = static_cast<double>(own_steps) / (WallSeconds() - begin);
      worker.Leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  double sum = 0.0;
  for (int64_t w = 0; w < num_counted; ++w) sum += rates[w];
  return sum;
}

void ReportWorkers(const std::string& row, const char* unit,
                   const std::vector<double>& values,
                   const char* to_reach = "") {
  Report(absl::StrCat("workers | ", row, " | measured"), unit, values,
         to_reach);
}

// Runs two variants interleaved and prints rates and their ratio.
void Compare(const char* title, const char* name_a,
             const std::function<double()>& a, const char* name_b,
             const std::function<double()>& b, const char* to_reach) {
  std::vector<double> rates_a;
  std::vector<double> rates_b;
  std::vector<double> ratios;
  for (int64_t rep = 0; rep < reps; ++rep) {
    double rate_a;
    double rate_b;
    if (rep % 2 == 0) {
      rate_a = a();
      rate_b = b();
    } else {
      rate_b = b();
      rate_a = a();
    }
    rates_a.push_back(rate_a);
    rates_b.push_back(rate_b);
    ratios.push_back(rate_b / rate_a);
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf(
      "%s: %s %.1f steps/s, %s %.1f steps/s; ratio %.3f (%.3f to %.3f)\n",
      title, name_a, Median(rates_a), name_b, Median(rates_b),
      ratios[ratios.size() / 2], ratios.front(), ratios.back());
  std::fflush(stdout);
  ReportWorkers(absl::StrCat(title, ": ", name_b, " / ", name_a), "", ratios,
                to_reach);
  ReportWorkers(absl::StrCat(title, ": ", name_a), "steps/s", rates_a);
  ReportWorkers(absl::StrCat(title, ": ", name_b), "steps/s", rates_b);
}

void MeasureStaleness(const std::string& address, uint32_t staleness) {
  ConsistencyConfig ssp;
  ssp.kind = ConsistencyKind::kSsp;
  ssp.staleness = staleness;
  const std::string group = absl::StrCat("ssp_", staleness);
  std::vector<std::thread> threads;
  const double begin = WallSeconds();
  for (int64_t w = 0; w < num_workers; ++w) {
    threads.emplace_back([&, w] {
      BenchWorker worker(address, static_cast<uint32_t>(w), ssp, group,
                         static_cast<uint32_t>(num_workers));
      for (int64_t step = 0; step < ssp_steps; ++step) {
        // The speeds change, so that every worker is sometimes ahead and
        // sometimes behind.
        if (worker.Random() % 64 == 0) {
          absl::SleepFor(absl::Microseconds(worker.Random() % 2000));
        }
        worker.EndStep();
      }
      worker.Leave();
    });
  }
  for (std::thread& thread : threads) thread.join();
  BenchWorker last(address, 0, ssp, group, static_cast<uint32_t>(num_workers));
  const v1::GetWorkerResponse report = last.Report();
  const auto& counts = report.workers().staleness();
  int64_t total = 0;
  int64_t beyond = 0;
  std::string histogram;
  for (int s = 0; s < counts.size(); ++s) {
    total += counts[s];
    if (static_cast<uint32_t>(s) > staleness) beyond += counts[s];
    if (counts[s] > 0) absl::StrAppend(&histogram, " ", s, ":", counts[s]);
  }
  std::printf(
      "ssp(%u): %ld steps of %ld workers in %.1f s; staleness%s; beyond %u: "
      "%ld\n",
      staleness, static_cast<long>(total), static_cast<long>(num_workers),
      WallSeconds() - begin, histogram.c_str(), staleness,
      static_cast<long>(beyond));
  std::fflush(stdout);
  ReportWorkers(absl::StrCat("ssp(", staleness, "): steps beyond it"), "",
                {static_cast<double>(beyond)}, "0");
}

void MeasureClock(const std::string& address,
                  const ConsistencyConfig& consistency) {
  BenchWorker worker(address, 0, consistency,
                     absl::StrCat("clock_", consistency.ToString()), 1);
  std::vector<double> times;
  std::vector<double> exchanges;
  std::vector<double> wholes;
  for (int step = 0; step < 2000; ++step) {
    const double begin = WallSeconds();
    worker.Exchange(absl::ZeroDuration());
    const double middle = WallSeconds();
    worker.EndStep();
    const double end = WallSeconds();
    exchanges.push_back((middle - begin) * 1e3);
    times.push_back((end - middle) * 1e3);
    wholes.push_back((end - begin) * 1e3);
  }
  worker.Leave();
  std::printf(
      "end of a step with %s: median %.2f ms (pull and push: %.2f ms, all: "
      "%.2f ms)\n",
      consistency.ToString().c_str(), Median(times), Median(exchanges),
      Median(wholes));
  std::fflush(stdout);
  const std::string row = consistency.ToString() + ", one worker: ";
  // With bsp the end of a step includes the step of the table.
  ReportWorkers(
      row + "end of a step", "ms", {Median(times)},
      consistency.kind == ConsistencyKind::kBsp ? "" : "at most 0.3 ms");
  ReportWorkers(row + "pull and push", "ms", {Median(exchanges)});
}

// Uses no table, so that there is nothing to commit.
void MeasureRoundTrip(const std::string& address) {
  GrpcClientOptions options;
  options.address = address;
  auto connected = NewGrpcClient(options);
  Check(connected.status());
  const std::shared_ptr<ParameterClient> client = *std::move(connected);
  auto session = GroupSession::Join(
      std::shared_ptr<GroupClient>(client, &client->groups()), "round_trip",
      WorkerGroupOptions{}, 0);
  Check(session.status());
  std::vector<double> times;
  for (int step = 0; step < 2000; ++step) {
    const double begin = WallSeconds();
    Check((*session)->EndStepAndWaitForRound(1.0, absl::Seconds(60)).status());
    times.push_back((WallSeconds() - begin) * 1e3);
  }
  std::printf("round trip of the clock: median %.2f ms\n", Median(times));
  std::fflush(stdout);
  ReportWorkers("round trip of the clock", "ms", {Median(times)},
                "at most 0.3 ms");
}

bool ReadFlag(const char* argument, const char* name, int64_t* value) {
  const size_t length = std::strlen(name);
  if (std::strncmp(argument, name, length) != 0) return false;
  *value = std::atoll(argument + length);
  return *value > 0;
}

int Main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    if (!ReadFlag(argv[i], "--workers=", &num_workers) &&
        !ReadFlag(argv[i], "--keys=", &num_keys) &&
        !ReadFlag(argv[i], "--compute_us=", &compute_us) &&
        !ReadFlag(argv[i], "--steps=", &steps) &&
        !ReadFlag(argv[i], "--reps=", &reps) &&
        !ReadFlag(argv[i], "--ssp_steps=", &ssp_steps)) {
      Die(absl::StrCat("unknown flag, or not above 0: ", argv[i]));
    }
  }
  // Must come before any thread, because the server is a fork of this process.
  const std::string address = StartServer();
  TuneMalloc();
  std::printf(
      "%ld workers, %ld keys of dim %d per step, %ld us of computation, %ld "
      "steps, %ld repetitions\n",
      static_cast<long>(num_workers), static_cast<long>(num_keys), kDim,
      static_cast<long>(compute_us), static_cast<long>(steps),
      static_cast<long>(reps));
  const ConsistencyConfig asp;
  ConsistencyConfig ssp;
  ssp.kind = ConsistencyKind::kSsp;
  ssp.staleness = 3;
  ConsistencyConfig bsp;
  bsp.kind = ConsistencyKind::kBsp;
  Compare(
      "rate of equal workers", "asp",
      [&] { return Rate(address, asp, num_workers, num_workers, 1.0); }, "bsp",
      [&] { return Rate(address, bsp, num_workers, num_workers, 1.0); },
      "at least 0.8");
  Compare(
      "asp beside a straggler", "equal",
      [&] { return Rate(address, asp, num_workers, num_workers - 1, 1.0); },
      "straggler",
      [&] { return Rate(address, asp, num_workers, num_workers - 1, 2.0); },
      "at least 0.95");
  for (const uint32_t staleness : {0u, 1u, 3u}) {
    MeasureStaleness(address, staleness);
  }
  for (const ConsistencyConfig& each : {asp, ssp, bsp}) {
    MeasureClock(address, each);
  }
  MeasureRoundTrip(address);
  return 0;
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) { return tfswitch::Main(argc, argv); }
