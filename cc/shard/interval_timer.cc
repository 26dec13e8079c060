#include "cc/shard/interval_timer.h"

#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

IntervalTimer::~IntervalTimer() {
  std::thread thread;
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    thread = std::move(thread_);
    changed_.NotifyAll();
  }
  if (thread.joinable()) thread.join();
}

void IntervalTimer::Set(const std::string& name, absl::Duration every) {
  MutexLock lock(&mutex_);
  if (is_ending_) return;
  if (every <= absl::ZeroDuration()) {
    entries_.erase(name);
    return;
  }
  entries_[name] = {every, SteadyNow() + every};
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread(&IntervalTimer::Run, this);
    } catch (const std::system_error& error) {
      // The process can do without the timer: calls can still shrink tables,
      // and the next restore drops staged rows.
      LogMessage(LogLevel::kError, {"no_timer"},
                 absl::StrCat("no timer for '", name, "': ", error.what()));
    }
  }
  changed_.NotifyAll();
}

void IntervalTimer::Run() {
  mutex_.Lock();
  while (!is_ending_) {
    absl::Time next = absl::InfiniteFuture();
    std::string due;
    for (const auto& [name, entry] : entries_) {
      if (entry.next >= next) continue;
      next = entry.next;
      due = name;
    }
    const absl::Duration wait = next - SteadyNow();
    if (wait > absl::ZeroDuration()) {
      changed_.WaitFor(&mutex_, wait);
      continue;
    }
    mutex_.Unlock();
    work_(due);
    mutex_.Lock();
    // The next interval begins when the work has ended, so that there is a
    // pause even if the work is slow.
    const auto it = entries_.find(due);
    if (it != entries_.end()) it->second.next = SteadyNow() + it->second.every;
  }
  mutex_.Unlock();
}

}  // namespace tfswitch
