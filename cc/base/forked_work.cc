// The child says over a pipe how far it is: amounts of work, each an int64,
// then kEnd, the code of its status, and its text or result.
//
// The child closes all other descriptors, so that connections and locks of the
// parent end with the parent, and it is ended by the kernel when the parent is.

#include "cc/base/forked_work.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <exception>
#include <fstream>
#include <new>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/memory_region.h"

namespace tfswitch {
namespace {

constexpr int64_t kEnd = -1;
constexpr int kPollMs = 10;
constexpr int kResultFd = 3;

int64_t MinorFaults() {
  rusage usage = {};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

void CloseFrom(int first) {
#ifdef SYS_close_range
  if (syscall(SYS_close_range, first, ~0U, 0) == 0) return;
#endif
  const int end = static_cast<int>(sysconf(_SC_OPEN_MAX));
  for (int fd = first; fd < end; ++fd) close(fd);
}

void Tell(const void* bytes, size_t size) {
  // An error means that nobody listens any more.
  WriteAll(kResultFd, "a pipe", static_cast<const char*>(bytes), size)
      .IgnoreError();
}

void TellNumber(int64_t number) { Tell(&number, sizeof(number)); }

[[noreturn]] void RunChild(pid_t parent, int to_parent, int niceness,
                           const ForkedWork::Work& work) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(1);  // It has ended before that.
  // The parent decides when it ends.
  std::signal(SIGINT, SIG_IGN);
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  if (to_parent != kResultFd && dup2(to_parent, kResultFd) < 0) _exit(1);
  CloseFrom(kResultFd + 1);
  errno = 0;
  if (nice(niceness) == -1 && errno != 0) errno = 0;  // Then without.
  // A copy of all rows is of no use to anybody.
  const rlimit no_core = {0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  // Where memory runs out, better a save fails than the server.
  std::ofstream("/proc/self/oom_score_adj") << 1000;
  absl::StatusOr<std::string> result;
  try {
    result = work(TellNumber);
  } catch (const std::bad_alloc&) {
    result = absl::ResourceExhaustedError("no memory to save rows");
  } catch (const std::exception& error) {
    result = absl::InternalError(error.what());
  }
  TellNumber(kEnd);
  TellNumber(static_cast<int64_t>(result.status().code()));
  const std::string text =
      result.ok() ? *std::move(result) : std::string(result.status().message());
  Tell(text.data(), text.size());
  _exit(0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<ForkedWork>> ForkedWork::Start(int niceness,
                                                              Work work) {
  if (!kCanForkWork) {
    return absl::ResourceExhaustedError(
        "the memory of sanitizers does not outlast a fork");
  }
  int ends[2];
  // A program that another thread starts must not keep the pipe open.
  if (pipe2(ends, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot make a pipe: ", std::strerror(errno)));
  }
  const pid_t parent = getpid();
  const int64_t faults = MinorFaults();
  const pid_t child = fork();
  if (child == 0) RunChild(parent, ends[1], niceness, work);
  close(ends[1]);
  if (child < 0) {
    const int error = errno;
    close(ends[0]);
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot start a process that saves (fork: ", std::strerror(error),
        ")"));
  }
  return absl::WrapUnique(new ForkedWork(child, ends[0], faults));
}

ForkedWork::~ForkedWork() {
  if (child_ >= 0) {
    kill(child_, SIGKILL);
    Reap();
  }
  close(result_);
}

std::string ForkedWork::Reap() {
  int status = 0;
  rusage usage = {};
  while (wait4(child_, &status, 0, &usage) < 0 && errno == EINTR) {
  }
  child_ = -1;
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) +
           1e-6 * static_cast<double>(time.tv_usec);
  };
  cpu_seconds_ = seconds(usage.ru_utime) + seconds(usage.ru_stime);
  if (WIFSIGNALED(status)) {
    return absl::StrCat("was ended by signal ", WTERMSIG(status), " (",
                        strsignal(WTERMSIG(status)), ")");
  }
  return absl::StrCat("ended with status ", WEXITSTATUS(status));
}

absl::StatusOr<std::string> ForkedWork::Wait(
    absl::FunctionRef<void(int64_t)> report,
    absl::FunctionRef<absl::Status()> poll) {
  std::string received;
  size_t used = 0;
  bool is_over = false;
  while (true) {
    if (const absl::Status status = poll(); !status.ok()) return status;
    pollfd ready = {result_, POLLIN, 0};
    const int num_ready = ::poll(&ready, 1, kPollMs);
    if (num_ready == 0 || (num_ready < 0 && errno == EINTR)) continue;
    char buffer[4096];
    const ssize_t got = read(result_, buffer, sizeof(buffer));
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) break;
    received.append(buffer, static_cast<size_t>(got));
    int64_t amount = 0;
    while (!is_over && received.size() - used >= sizeof(amount)) {
      std::memcpy(&amount, received.data() + used, sizeof(amount));
      used += sizeof(amount);
      is_over = amount == kEnd;
      if (!is_over) report(amount);
    }
  }
  const std::string how = Reap();
  received.erase(0, used);
  int64_t code = 0;
  if (!is_over || received.size() < sizeof(code)) {
    return absl::InternalError(
        absl::StrCat("the process that saves rows ", how));
  }
  std::memcpy(&code, received.data(), sizeof(code));
  received.erase(0, sizeof(code));
  if (code == 0) return received;
  return absl::Status(static_cast<absl::StatusCode>(code), received);
}

uint64_t ForkedWork::copied_bytes() const {
  return static_cast<uint64_t>(MinorFaults() - faults_) * kSmallPageBytes;
}

}  // namespace tfswitch
