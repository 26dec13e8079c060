#include "cc/rpc/process_settings.h"

#include "absl/synchronization/mutex.h"
#include "cc/base/malloc_tuning.h"

namespace tfswitch {

void PrepareProcess() {
  static const bool prepared = [] {
    TuneMalloc();
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    return true;
  }();
  (void)prepared;
}

}  // namespace tfswitch
