#include "cc/client/trace_log.h"

#include <utility>

#include "absl/time/clock.h"

namespace tfswitch {
namespace {

// Python takes the spans every half second. A span takes up to 1 KiB.
constexpr int kMaxSpans = 16'384;
constexpr int kMaxCalls = 1'024;  // In one pull or push.

thread_local v1::TraceSpan* open_scope = nullptr;

}  // namespace

TraceLog& TraceLog::Get() {
  static auto* const log = new TraceLog();
  return *log;
}

void TraceLog::Set(bool is_on, uint64_t parent) {
  parent_ = parent;
  is_on_ = is_on;
}

void TraceLog::Add(v1::TraceSpan span) {
  if (open_scope != nullptr && open_scope->calls_size() < kMaxCalls) {
    *open_scope->add_calls() = std::move(span);
    return;
  }
  MutexLock lock(&mutex_);
  if (open_scope != nullptr || ended_.spans_size() >= kMaxSpans) {
    ended_.set_num_dropped(ended_.num_dropped() + 1);
    return;
  }
  *ended_.add_spans() = std::move(span);
}

v1::TakeTracesResponse TraceLog::Take() {
  MutexLock lock(&mutex_);
  return std::exchange(ended_, {});
}

std::optional<OpenSpan> OpenSpan::Begin(absl::string_view name) {
  const TraceLog& log = TraceLog::Get();
  if (!log.is_on()) return std::nullopt;
  OpenSpan span;
  span.fields.set_name(std::string(name));
  span.fields.set_begin_ns(absl::GetCurrentTimeNanos());
  span.fields.set_parent(log.parent());
  return span;
}

void OpenSpan::End() {
  // The time of day may be set back meanwhile.
  fields.set_end_ns(fields.begin_ns() +
                    absl::ToInt64Nanoseconds(SteadyNow() - begin_));
  TraceLog::Get().Add(std::move(fields));
}

TraceScope::TraceScope(absl::string_view name) : span_(OpenSpan::Begin(name)) {
  if (span_.has_value()) open_scope = &span_->fields;
}

TraceScope::~TraceScope() {
  if (!span_.has_value()) return;
  open_scope = nullptr;
  // Keras calls layers with empty batches while it builds a model.
  const bool is_empty = span_->fields.tables().empty();
  if (!is_empty || !span_->fields.error().empty()) span_->End();
}

}  // namespace tfswitch
