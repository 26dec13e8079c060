// Calls a function for each of a set of names at intervals, for example to
// shrink tables or to drop staged restores.

#ifndef TFSWITCH_CC_SHARD_INTERVAL_TIMER_H_
#define TFSWITCH_CC_SHARD_INTERVAL_TIMER_H_

#include <functional>
#include <map>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// Thread-safe. Set() starts the thread with the first name. The destructor
// waits until `work` has returned.
class IntervalTimer {
 public:
  // Called on the timer's thread. It may call Set().
  using Work = std::function<void(const std::string& name)>;
  explicit IntervalTimer(Work work) : work_(std::move(work)) {}
  ~IntervalTimer();

  IntervalTimer(const IntervalTimer&) = delete;
  IntervalTimer& operator=(const IntervalTimer&) = delete;

  // From now on calls `work` for the name at intervals of `every`; 0 stops the
  // calls.
  void Set(const std::string& name, absl::Duration every);

 private:
  struct Entry {
    absl::Duration every;
    absl::Time next;
  };

  void Run();

  const Work work_;
  Mutex mutex_;
  CondVar changed_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SHARD_INTERVAL_TIMER_H_
