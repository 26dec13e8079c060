#include "cc/rpc/process_settings.h"

#include <grpc/support/log.h>
#include <grpcpp/version_info.h>
#include <signal.h>
#include <sys/resource.h>

#include <cstdlib>
#include <string>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "cc/base/log_writer.h"
#include "cc/base/malloc_tuning.h"

namespace tfswitch {

// Later versions write their lines with Abseil.
#if GRPC_CPP_VERSION_MAJOR == 1 && GRPC_CPP_VERSION_MINOR < 65
namespace {

// Escapes the text, because it may contain bytes that a peer has sent. Each
// place in gRPC's code that logs has its own limit of lines.
void WriteLineOfGrpc(gpr_log_func_args* line) {
  constexpr size_t kLongest = 500;
  const std::string place = absl::StrCat(line->file, ":", line->line);
  LogMessage(
      line->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning
                                               : LogLevel::kInfo,
      {"grpc"},
      absl::StrCat("gRPC: ", place, "] ",
                   absl::CHexEscape(
                       absl::string_view(line->message).substr(0, kLongest))),
      place);
}

}  // namespace

void TakeLinesOfGrpc() { gpr_set_log_function(WriteLineOfGrpc); }
#else
void TakeLinesOfGrpc() {}
#endif

void PrepareProcess() {
  static const bool prepared = [] {
    TuneMalloc();
    absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
    TakeLinesOfGrpc();
    return true;
  }();
  (void)prepared;
}

void PrepareServerProgram() {
  signal(SIGPIPE, SIG_IGN);
// Other versions of gRPC may not know this name, and would print a warning.
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
