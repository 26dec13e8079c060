// Admits writes, and holds them back while the state must not change.

#ifndef TFSWITCH_CC_BASE_WRITE_GATE_H_
#define TFSWITCH_CC_BASE_WRITE_GATE_H_

#include <atomic>
#include <cstdint>

#include "cc/base/mutex.h"

namespace tfswitch {

// A thread that closes the gate waits only for writes that are already inside:
// later writes wait for the thread.
//
// Thread-safe.
class WriteGate {
 public:
  // A write holds this from the moment when it is logged until it has taken
  // effect.
  class Pass {
   public:
    // Null: there is nothing to wait for.
    explicit Pass(WriteGate* gate) : gate_(gate) {
      if (gate_ != nullptr) gate_->Enter();
    }
    ~Pass() {
      if (gate_ != nullptr) gate_->Leave();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;

   private:
    WriteGate* const gate_;
  };

  // Like Pass, but fails at once if the gate is closed.
  class TryPass {
   public:
    explicit TryPass(WriteGate* gate)
        : gate_(gate), is_inside_(gate == nullptr || gate->TryEnter()) {}
    ~TryPass() {
      if (gate_ != nullptr && is_inside_) gate_->Leave();
    }
    TryPass(const TryPass&) = delete;
    TryPass& operator=(const TryPass&) = delete;

    bool is_inside() const { return is_inside_; }

   private:
    WriteGate* const gate_;
    const bool is_inside_;
  };

  // While it lives, no write is inside.
  class Closed {
   public:
    explicit Closed(WriteGate* gate) : gate_(gate) {
      if (gate_ != nullptr) gate_->Close();
    }
    ~Closed() {
      if (gate_ != nullptr) gate_->Open();
    }
    Closed(const Closed&) = delete;
    Closed& operator=(const Closed&) = delete;

   private:
    WriteGate* const gate_;
  };

 private:
  void Enter() {
    while (!TryEnter()) {
      MutexLock lock(&mutex_);
      while (is_closed_) changed_.Wait(&mutex_);
    }
  }
  // The operations here and in Close() are sequentially consistent. So if this
  // thread still sees an open gate, the thread that closes the gate sees this
  // one inside, and waits for it.
  bool TryEnter() {
    inside_.fetch_add(1);
    if (!is_closed_) return true;
    Leave();
    return false;
  }
  void Leave() {
    if (inside_.fetch_sub(1) != 1 || !is_closed_) return;
    MutexLock lock(&mutex_);
    changed_.NotifyAll();
  }
  void Close() {
    MutexLock lock(&mutex_);
    while (is_closed_) changed_.Wait(&mutex_);
    is_closed_ = true;
    while (inside_ > 0) changed_.Wait(&mutex_);
  }
  void Open() {
    MutexLock lock(&mutex_);
    is_closed_ = false;
    changed_.NotifyAll();
  }

  std::atomic<int64_t> inside_{0};
  std::atomic<bool> is_closed_{false};  // Changes under the mutex.
  Mutex mutex_;
  CondVar changed_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_WRITE_GATE_H_
