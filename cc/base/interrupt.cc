#include "cc/base/interrupt.h"

#include <atomic>

namespace tfswitch {
namespace {

std::atomic<int (*)()> interrupt_check{nullptr};

}  // namespace

void SetInterruptCheck(int (*check)()) { interrupt_check = check; }

absl::Status CheckInterrupt() {
  int (*const check)() = interrupt_check;
  if (check == nullptr || check() == 0) return absl::OkStatus();
  return absl::CancelledError("interrupted");
}

}  // namespace tfswitch
