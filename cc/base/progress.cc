#include "cc/base/progress.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/base/log_writer.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

Progress::Progress(std::string task, int64_t total_rows, Options options)
    : task_(std::move(task)), options_(std::move(options)) {
  AddTotal(total_rows);
  if (options_.is_silent) return;
  if (!options_.print) {
    options_.print = [](const std::string& line) {
      LogMessageInOrder(LogLevel::kInfo, {"progress"}, line);
    };
  }
  try {
    thread_ = std::thread(&Progress::Run, this);
  } catch (const std::system_error&) {
    // The call goes on without reports.
  }
}

Progress::~Progress() {
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    ends_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
}

void Progress::Run() {
  const absl::Time begin = SteadyNow();
  absl::Time next = begin + options_.first;
  MutexLock lock(&mutex_);
  while (!is_ending_) {
    const absl::Time now = SteadyNow();
    if (now < next) {
      ends_.WaitFor(&mutex_, next - now);
      continue;
    }
    Print(now - begin);
    next = now + options_.every;
  }
}

void Progress::Print(absl::Duration since_begin) const {
  const int64_t rows = counts_->done.load(std::memory_order_relaxed);
  const int64_t total = counts_->total.load(std::memory_order_relaxed);
  std::string line = absl::StrFormat("%s: %.0f s so far", task_,
                                     absl::ToDoubleSeconds(since_begin));
  if (rows > 0 && total > 0) {
    // The total was counted at the start, so rows that were added later can
    // make more rows than the total.
    absl::StrAppendFormat(&line, ", %d of %d rows (%d%%)", rows, total,
                          100 * std::min(rows, total) / total);
  } else if (rows > 0 || total > 0) {
    absl::StrAppendFormat(&line, ", %d rows", rows > 0 ? rows : total);
  }
  options_.print(line);
}

}  // namespace tfswitch
