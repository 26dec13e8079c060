// The spans of this process's pulls, pushes and calls to servers, while tracing
// is on. tfswitch/tracing.py takes them and makes spans of OpenTelemetry, whose
// C++ library is not in the Linux distribution.

#ifndef TFSWITCH_CC_CLIENT_TRACE_LOG_H_
#define TFSWITCH_CC_CLIENT_TRACE_LOG_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"
#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

// Thread-safe.
class TraceLog {
 public:
  // The log of the process.
  static TraceLog& Get();

  bool is_on() const { return is_on_.load(std::memory_order_relaxed); }
  // Spans that begin from now on have this parent.
  void Set(bool is_on, uint64_t parent);
  uint64_t parent() const { return parent_; }

  // Adds a span that has ended: to the TraceScope of this thread if there is
  // one. Drops the span if there is no room.
  void Add(v1::TraceSpan span);
  // Returns the spans since the last call.
  v1::TakeTracesResponse Take();

 private:
  TraceLog() = default;

  std::atomic<bool> is_on_{false};
  std::atomic<uint64_t> parent_{0};
  Mutex mutex_;
  v1::TakeTracesResponse ended_ ABSL_GUARDED_BY(mutex_);
  int num_ended_ ABSL_GUARDED_BY(mutex_) = 0;  // With their calls.
};

// A span that has begun.
//
// Not thread-safe.
class OpenSpan {
 public:
  // The fields, except those of the end.
  v1::TraceSpan fields;

  // Null if tracing is off.
  static std::optional<OpenSpan> Begin(absl::string_view name);

  // Sets the end.
  void NoteEnd();
  // Sets the end, unless it is set, and adds the span to the log.
  void End();

 private:
  OpenSpan() = default;

  absl::Time begin_ = SteadyNow();
};

// The span of a pull or push, which ends with the scope. The spans that this
// thread adds meanwhile become its calls. A span without tables and without an
// error is not added.
//
// Not thread-safe.
class TraceScope {
 public:
  explicit TraceScope(absl::string_view name);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;
  TraceScope& operator=(const TraceScope&) = delete;

  // Null if tracing is off.
  v1::TraceSpan* span() { return span_.has_value() ? &span_->fields : nullptr; }

 private:
  std::optional<OpenSpan> span_;
  // The scope of a call that a signal handler of Python has interrupted.
  v1::TraceSpan* outer_ = nullptr;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_TRACE_LOG_H_
