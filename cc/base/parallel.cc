#include "cc/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include "cc/base/spin_wait.h"

namespace tfswitch {
namespace {

// Each thread gets several ranges on average, so that a thread that starts late
// or is interrupted delays the others little.
constexpr size_t kRangesPerThread = 4;

// The caller and the tasks share this object, because a task may begin after
// the caller has returned.
struct Job {
  Job(absl::FunctionRef<void(size_t, size_t)> work_of_caller, size_t all,
      size_t ranges)
      : work(work_of_caller), size(all), num_ranges(ranges) {}

  // Works on one range after another, until all have been taken.
  void Help() {
    for (;;) {
      const size_t range = next.fetch_add(1, std::memory_order_relaxed);
      // After all ranges were taken, the caller may have returned, and `work`
      // may no longer exist.
      if (range >= num_ranges) return;
      try {
        work(size * range / num_ranges, size * (range + 1) / num_ranges);
      } catch (...) {
        // The exception is most likely std::bad_alloc. The caller gets it after
        // all threads have ended.
        if (!has_failed.exchange(true)) error = std::current_exception();
      }
      num_done.fetch_add(1, std::memory_order_release);
    }
  }

  const absl::FunctionRef<void(size_t, size_t)> work;
  const size_t size;
  const size_t num_ranges;
  std::atomic<size_t> next{0};
  std::atomic<size_t> num_done{0};
  std::atomic<bool> has_failed{false};
  std::exception_ptr error;  // Written once, before its range is done.
};

}  // namespace

void RunRanges(const LentThreads* threads, size_t size, size_t min_size,
               absl::FunctionRef<void(size_t begin, size_t end)> work) {
  const size_t num_helpers =
      threads == nullptr ? 0 : static_cast<size_t>(threads->num_threads());
  const size_t num_ranges = std::min(size / std::max<size_t>(1, min_size),
                                     (num_helpers + 1) * kRangesPerThread);
  if (num_helpers == 0 || num_ranges < 2) {
    if (size > 0) work(0, size);
    return;
  }
  const auto job = std::make_shared<Job>(work, size, num_ranges);
  for (size_t i = 0; i < std::min(num_helpers, num_ranges - 1); ++i) {
    try {
      threads->Schedule([job] { job->Help(); });
    } catch (...) {
      // Continues with those helpers that could be started.
      break;
    }
  }
  job->Help();
  SpinWait wait;
  while (job->num_done.load(std::memory_order_acquire) < num_ranges) {
    wait.Pause();
  }
  if (job->error != nullptr) std::rethrow_exception(job->error);
}

absl::Status RunEach(const LentThreads* threads, size_t size,
                     absl::FunctionRef<absl::Status(size_t i)> work) {
  if (size == 1) return work(0);
  std::vector<absl::Status> statuses(size);
  RunRanges(threads, size, 1, [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) statuses[i] = work(i);
  });
  absl::Status first;
  for (const absl::Status& status : statuses) first.Update(status);
  return first;
}

}  // namespace tfswitch
