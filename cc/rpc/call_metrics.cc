#include "cc/rpc/call_metrics.h"

#include <string>

namespace tfswitch {

CallMetrics::Method* CallMetrics::Find(const char* name) {
  for (std::atomic<Method*>& slot : methods_) {
    Method* method = slot.load(std::memory_order_acquire);
    if (method == nullptr) {
      MutexLock lock(&mutex_);
      method = slot.load(std::memory_order_relaxed);
      if (method == nullptr) {
        owned_.push_back(std::make_unique<Method>());
        method = owned_.back().get();
        method->name = name;
        slot.store(method, std::memory_order_release);
      }
    }
    if (method->name == name) return method;
  }
  return nullptr;
}

void CallMetrics::Record(const char* name, absl::StatusCode code,
                         absl::Duration duration) {
  Method* const method = Find(name);
  const auto number = static_cast<size_t>(code);
  if (method == nullptr || number >= kNumCodes) return;
  method->codes.Add(number, 1);
  if (duration > absl::ZeroDuration()) method->durations.Record(duration);
}

void CallMetrics::RecordBytes(const char* name, size_t received, size_t sent) {
  Method* const method = Find(name);
  if (method == nullptr) return;
  method->bytes.Add(0, received);
  method->bytes.Add(1, sent);
}

void CallMetrics::AddTo(MetricList* list) const {
  for (const std::atomic<Method*>& slot : methods_) {
    const Method* method = slot.load(std::memory_order_acquire);
    if (method == nullptr) return;
    for (size_t code = 0; code < kNumCodes; ++code) {
      const uint64_t calls = method->codes.Sum(code);
      if (calls == 0) continue;
      list->Counter("tfswitch_calls_total", "Ended calls by status code.",
                    static_cast<double>(calls),
                    {{"call", method->name},
                     {"code", absl::StatusCodeToString(
                                  static_cast<absl::StatusCode>(code))}});
    }
    list->Histogram("tfswitch_call_duration_seconds",
                    "From the admission of a call until its answer is ready, "
                    "in seconds.",
                    method->durations, {{"call", method->name}});
    if (method->bytes.Sum(0) == 0) continue;
    for (const int direction : {0, 1}) {
      list->Counter("tfswitch_call_bytes_total",
                    "Messages of row calls, in bytes.",
                    static_cast<double>(method->bytes.Sum(direction)),
                    {{"call", method->name},
                     {"direction", direction == 0 ? "received" : "sent"}});
    }
  }
}

}  // namespace tfswitch
