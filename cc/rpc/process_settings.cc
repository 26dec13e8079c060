#include "cc/rpc/process_settings.h"

#include <grpcpp/version_info.h>
#include <sys/resource.h>

#include <cstdlib>

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

void PrepareServerProgram() {
// Other versions may not know the name, and would complain.
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR == 51
  setenv("GRPC_EXPERIMENTS", "-tcp_read_chunks", /*overwrite=*/0);
#endif
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
  }
}

}  // namespace tfswitch
