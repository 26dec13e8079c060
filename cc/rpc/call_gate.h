// Lets calls in until it is closed, and knows when the last one has left.
//
// gRPC's own graceful shutdown waits for connections, and an idle client that
// nobody polls keeps its connection open for the whole grace. What has to end
// is calls.

#ifndef TFSWITCH_CC_RPC_CALL_GATE_H_
#define TFSWITCH_CC_RPC_CALL_GATE_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cc/base/mutex.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

// Thread-safe.
class CallGate {
 public:
  // Unavailable if the gate is closed. After OK the caller must Leave().
  absl::Status Enter() {
    MutexLock lock(&mutex_);
    if (closed_) return absl::UnavailableError("the server is stopping");
    ++inside_;
    return absl::OkStatus();
  }

  void Leave() {
    MutexLock lock(&mutex_);
    --inside_;
    if (inside_ == 0 && closed_) emptied_.NotifyAll();
  }

  // Lets nobody in any more, and waits until all have left, for at most
  // `grace`.
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

  // Whether those who are inside should come to an end.
  bool is_closed() {
    MutexLock lock(&mutex_);
    return closed_;
  }

 private:
  Mutex mutex_;
  CondVar emptied_;
  int64_t inside_ ABSL_GUARDED_BY(mutex_) = 0;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// Leaves at the end of its scope, if it was let in.
//
// Not thread-safe.
class GatePass {
 public:
  explicit GatePass(CallGate* gate) : gate_(gate), status_(gate->Enter()) {}
  ~GatePass() {
    if (status_.ok()) gate_->Leave();
  }
  GatePass(const GatePass&) = delete;
  GatePass& operator=(const GatePass&) = delete;

  const absl::Status& status() const { return status_; }

 private:
  CallGate* const gate_;
  const absl::Status status_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_RPC_CALL_GATE_H_
