#include "cc/shard/shrink_timer.h"

#include <system_error>
#include <utility>

#include "absl/base/internal/raw_logging.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

ShrinkTimer::~ShrinkTimer() {
  std::thread thread;
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    thread = std::move(thread_);
    changed_.NotifyAll();
  }
  if (thread.joinable()) thread.join();
}

void ShrinkTimer::Set(const std::string& table, absl::Duration every) {
  MutexLock lock(&mutex_);
  if (every <= absl::ZeroDuration()) {
    entries_.erase(table);
    return;
  }
  entries_[table] = {every, SteadyNow() + every};
  if (!thread_.joinable()) {
    try {
      thread_ = std::thread(&ShrinkTimer::Run, this);
    } catch (const std::system_error& error) {
      // The table is there all the same, and can be shrunk by a call.
      ABSL_RAW_LOG(ERROR, "table '%s' is not shrunk on time: %s", table.c_str(),
                   error.what());
    }
  }
  changed_.NotifyAll();
}

void ShrinkTimer::Run() {
  mutex_.Lock();
  while (!is_ending_) {
    absl::Time next = absl::InfiniteFuture();
    std::string due;
    for (const auto& [table, entry] : entries_) {
      if (entry.next >= next) continue;
      next = entry.next;
      due = table;
    }
    const absl::Duration wait = next - SteadyNow();
    if (wait > absl::ZeroDuration()) {
      changed_.WaitFor(&mutex_, wait);
      continue;
    }
    mutex_.Unlock();
    shrink_(due);
    mutex_.Lock();
    // Counted from the end: a slow shrink must not follow itself at once.
    const auto it = entries_.find(due);
    if (it != entries_.end()) it->second.next = SteadyNow() + it->second.every;
  }
  mutex_.Unlock();
}

}  // namespace tfswitch
