// Has tables shrunk at intervals.

#ifndef TFSWITCH_CC_SHARD_SHRINK_TIMER_H_
#define TFSWITCH_CC_SHARD_SHRINK_TIMER_H_

#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe. The thread starts with the first table; the destructor waits
// until `shrink` has returned.
class ShrinkTimer {
 public:
  // Called from the timer's thread with a table's name.
  using Shrink = std::function<void(const std::string& table)>;
  explicit ShrinkTimer(Shrink shrink) : shrink_(std::move(shrink)) {}
  ~ShrinkTimer();

  ShrinkTimer(const ShrinkTimer&) = delete;
  ShrinkTimer& operator=(const ShrinkTimer&) = delete;

  // From now on each `every`; not at all if that is 0.
  void Set(const std::string& table, absl::Duration every);

 private:
  struct Entry {
    absl::Duration every;
    absl::Time next;
  };

  void Run();

  const Shrink shrink_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_SHRINK_TIMER_H_
