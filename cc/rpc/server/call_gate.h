// Admits calls after Open(). Close() admits no more calls, and waits until the
// last admitted one has ended.
//
// Each control call holds a thread, so the number of control calls is limited.
// Only three quarters of this number may wait for other workers, so that some
// threads remain for other calls.
//
// gRPC's own graceful shutdown waits for connections to close, and an idle
// client that does not poll keeps its connection open for the whole grace
// period. The gate waits only for calls.

#ifndef TFSWITCH_CC_RPC_SERVER_CALL_GATE_H_
#define TFSWITCH_CC_RPC_SERVER_CALL_GATE_H_

#include <cstdint>
#include <limits>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// Thread-safe.
class CallGate {
 public:
  enum class Kind { kData, kControl, kWait };

  explicit CallGate(
      uint64_t max_control_calls = std::numeric_limits<uint64_t>::max(),
      bool is_open = true)
      : max_control_calls_(max_control_calls),
        max_waits_(max_control_calls - max_control_calls / 4),
        opened_(is_open) {}

  // Begins to admit calls, unless the gate was closed before.
  void Open() {
    MutexLock lock(&mutex_);
    opened_ = true;
  }

  // Unavailable if the gate is not open, ResourceExhausted if there are too
  // many calls of this kind. After OK the caller must call Leave().
  absl::Status Enter(Kind kind = Kind::kData) {
    MutexLock lock(&mutex_);
    if (closed_) return absl::UnavailableError("the server is stopping");
    if (!opened_) {
      return absl::UnavailableError("the server is recovering its rows");
    }
    if (kind == Kind::kWait && waiting_ >= max_waits_) {
      return absl::ResourceExhaustedError(absl::StrCat(
          waiting_,
          " calls wait for other workers, three quarters of what "
          "--max_control_calls allows; start the server with a larger one"));
    }
    if (kind != Kind::kData && control_ >= max_control_calls_) {
      return TooManyControlCalls();
    }
    ++inside_;
    control_ += kind != Kind::kData ? 1 : 0;
    waiting_ += kind == Kind::kWait ? 1 : 0;
    return absl::OkStatus();
  }

  // Call it before the message of a control call is read, because the call
  // holds a thread from then on. ResourceExhausted if there are too many
  // control calls. After OK the caller must call EndReading().
  absl::Status BeginReading() {
    MutexLock lock(&mutex_);
    if (control_ + reading_ >= max_control_calls_) return TooManyControlCalls();
    ++reading_;
    return absl::OkStatus();
  }
  void EndReading() {
    MutexLock lock(&mutex_);
    --reading_;
  }

  void Leave(Kind kind = Kind::kData) {
    MutexLock lock(&mutex_);
    --inside_;
    control_ -= kind != Kind::kData ? 1 : 0;
    waiting_ -= kind == Kind::kWait ? 1 : 0;
    if (inside_ == 0 && closed_) emptied_.NotifyAll();
  }

  // Admits no more calls. Waits at most `grace` for admitted calls to end.
  void Close(absl::Duration grace) {
    const absl::Time deadline = SteadyNow() + grace;
    MutexLock lock(&mutex_);
    closed_ = true;
    while (inside_ > 0) {
      const absl::Duration left = deadline - SteadyNow();
      if (left <= absl::ZeroDuration()) return;
      emptied_.WaitFor(&mutex_, left);
    }
  }

  // Whether the calls inside should end.
  bool is_closed() {
    MutexLock lock(&mutex_);
    return closed_;
  }

 private:
  absl::Status TooManyControlCalls() const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return absl::ResourceExhaustedError(absl::StrCat(
        control_ + reading_,
        " control calls are under way, as many as "
        "--max_control_calls allows; start the server with a larger one"));
  }

  const uint64_t max_control_calls_;
  const uint64_t max_waits_;

  Mutex mutex_;
  CondVar emptied_;
  int64_t inside_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t control_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t waiting_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t reading_ ABSL_GUARDED_BY(mutex_) = 0;
  bool opened_ ABSL_GUARDED_BY(mutex_);
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// Enters the gate for a control call, and leaves it at the end of the scope if
// the call was admitted.
//
// Not thread-safe.
class AdmissionTicket {
 public:
  explicit AdmissionTicket(CallGate* gate, bool waits = false)
      : gate_(gate),
        kind_(waits ? CallGate::Kind::kWait : CallGate::Kind::kControl),
        status_(gate->Enter(kind_)) {}
  ~AdmissionTicket() {
    if (status_.ok()) gate_->Leave(kind_);
  }
  AdmissionTicket(const AdmissionTicket&) = delete;
  AdmissionTicket& operator=(const AdmissionTicket&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  CallGate* const gate_;
  const CallGate::Kind kind_;
  const absl::Status status_;
};

// Like GatePass, but counts the call only while its message is read.
//
// Not thread-safe.
class ReadingPass {
 public:
  explicit ReadingPass(CallGate* gate)
      : gate_(gate), status_(gate->BeginReading()) {}
  ~ReadingPass() {
    if (status_.ok()) gate_->EndReading();
  }
  ReadingPass(const ReadingPass&) = delete;
  ReadingPass& operator=(const ReadingPass&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  CallGate* const gate_;
  const absl::Status status_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_SERVER_CALL_GATE_H_
