#include "cc/client/trace_log.h"

#include <string>
#include <utility>

#include "absl/time/clock.h"

namespace tfswitch {
namespace {

// Python takes the spans every half second. A span takes some 500 bytes.
constexpr int kMaxSpans = 16'384;

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
  if (open_scope != nullptr) {
    *open_scope->add_calls() = std::move(span);
    return;
  }
  const int num_spans = 1 + span.calls_size();
  MutexLock lock(&mutex_);
  if (num_ended_ >= kMaxSpans) {
    ended_.set_num_dropped(ended_.num_dropped() + num_spans);
    return;
  }
  num_ended_ += num_spans;
  *ended_.add_spans() = std::move(span);
}

v1::TakeTracesResponse TraceLog::Take() {
  MutexLock lock(&mutex_);
  num_ended_ = 0;
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

void OpenSpan::NoteEnd() {
  // The time of day may be set back meanwhile.
  fields.set_end_ns(fields.begin_ns() +
                    absl::ToInt64Nanoseconds(SteadyNow() - begin_));
}

void OpenSpan::End() {
  if (fields.end_ns() == 0) NoteEnd();
  TraceLog::Get().Add(std::move(fields));
}

TraceScope::TraceScope(absl::string_view name) : span_(OpenSpan::Begin(name)) {
  if (span_.has_value()) outer_ = std::exchange(open_scope, &span_->fields);
}

TraceScope::~TraceScope() {
  if (!span_.has_value()) return;
  open_scope = outer_;
  // Keras calls layers with empty batches while it builds a model.
  const bool is_empty = span_->fields.tables().empty();
  if (!is_empty || !span_->fields.error().empty()) span_->End();
}

}  // namespace tfswitch
