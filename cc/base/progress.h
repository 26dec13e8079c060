// Reports the progress of a long call.

#ifndef TFSWITCH_CC_BASE_PROGRESS_H_
#define TFSWITCH_CC_BASE_PROGRESS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/time/time.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// The progress of a call. Thread-safe.
struct RowCounts {
  std::atomic<int64_t> done{0};
  std::atomic<int64_t> total{0};  // 0: not known.
};

// While the object lives, it prints a line to stderr after a second, and then
// every ten seconds.
//
// Thread-safe.
class Progress {
 public:
  struct Options {
    absl::Duration first = absl::Seconds(1);
    absl::Duration every = absl::Seconds(10);
    std::function<void(const std::string& line)> print;  // Unset: to stderr.
    bool is_silent = false;
  };

  // `task` is for example "saving to 'ckpt'"; a `total_rows` of 0 means that
  // the total is not known.
  Progress(std::string task, int64_t total_rows)
      : Progress(std::move(task), total_rows, Options()) {}
  Progress(std::string task, int64_t total_rows, Options options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void Add(int64_t rows) {
    counts_->done.fetch_add(rows, std::memory_order_relaxed);
  }
  void AddTotal(int64_t rows) {
    counts_->total.fetch_add(rows, std::memory_order_relaxed);
  }
  // The counts outlive this object.
  std::shared_ptr<const RowCounts> counts() const { return counts_; }

 private:
  void Run();
  void Print(absl::Duration since_begin) const;

  // Constant after construction.
  const std::string task_;
  const std::shared_ptr<RowCounts> counts_ = std::make_shared<RowCounts>();
  Options options_;

  Mutex mutex_;
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar ends_;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_PROGRESS_H_
