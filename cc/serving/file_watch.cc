// The kernel tells of a writer by SIGIO, whose default action ends the process.
// So each lease is owned by the watcher's thread, which has all signals
// blocked: the signal stays pending there. The thread asks F_GETLEASE instead,
// and takes no signal away from the process.
//
// The handler of SIGBUS walks a list without a lock. It interrupts a reader of
// the range, which keeps that range in use. Nodes are reused and never freed.

#include "cc/serving/file_watch.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <future>
#include <system_error>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// The bytes of a watched file, for the handler of SIGBUS.
struct WatchedRange {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0: the range is free.
  std::atomic<bool> has_changed{false};
  WatchedRange* next = nullptr;  // Constant.
};

// All files, and the thread that looks at them. Never destroyed.
struct FileWatcher {
  static constexpr absl::Duration kInterval = absl::Milliseconds(200);
  // For lookups that began before a file was marked. The writer waits for it.
  static constexpr absl::Duration kReadersEnd = absl::Milliseconds(100);

  static FileWatcher& Get() {
    static FileWatcher* const watcher = new FileWatcher;
    return *watcher;
  }

  FileWatcher() {
    // The thread starts with this mask.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    auto restore = absl::MakeCleanup(
        [&before] { pthread_sigmask(SIG_SETMASK, &before, nullptr); });
    std::promise<pid_t> id;
    std::thread([this, &id] {
      id.set_value(gettid());
      Run();
    }).detach();
    thread = id.get_future().get();
  }

  [[noreturn]] void Run() {
    for (;;) {
      bool is_writer_waiting = false;
      {
        MutexLock lock(&mutex);
        while (files.empty()) added.Wait(&mutex);
        for (FileWatch* const file : files) {
          file->LookLocked();
          if (file->IsLeaseWanted()) is_writer_waiting = true;
        }
      }
      absl::SleepFor(is_writer_waiting ? kReadersEnd : kInterval);
      MutexLock lock(&mutex);
      for (FileWatch* const file : files) {
        if (file->has_changed()) file->GiveLeaseBack();
      }
    }
  }

  pid_t thread = 0;  // Constant after construction.
  Mutex mutex;
  CondVar added;
  std::vector<FileWatch*> files ABSL_GUARDED_BY(mutex);
};

namespace {

std::atomic<WatchedRange*> all_ranges{nullptr};

WatchedRange* TakeRange(const MappedFile& file) {
  MutexLock lock(&FileWatcher::Get().mutex);
  WatchedRange* range = all_ranges;
  while (range != nullptr && range->end != 0) range = range->next;
  if (range == nullptr) {
    range = new WatchedRange;
    range->next = all_ranges;
    all_ranges = range;
  }
  range->has_changed = false;
  range->begin = reinterpret_cast<uintptr_t>(file.data());
  // An empty file has a range, too, for its mark.
  range->end = range->begin + std::max<size_t>(file.size(), 1);
  return range;
}

struct sigaction former_action;
uintptr_t page_bytes;

void OnBusError(int number, siginfo_t* info, void*) {
  const int error = errno;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  // A signal that the kernel did not send has no address.
  WatchedRange* range = info->si_code > 0 ? all_ranges.load() : nullptr;
  for (; range != nullptr; range = range->next) {
    const uintptr_t end = range->end;
    if (at < range->begin || at >= end) continue;
    // The mark comes first, because other threads may read the zeros. One
    // mapping reaches to the end: a process may have only some 65,000.
    range->has_changed = true;
    const uintptr_t page = at / page_bytes * page_bytes;
    if (mmap(reinterpret_cast<void*>(page), end - page, PROT_READ,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) == MAP_FAILED) {
      break;
    }
    errno = error;
    return;
  }
  sigaction(number, &former_action, nullptr);
  raise(number);  // It comes when this handler returns.
}

}  // namespace

absl::Status FileWatch::StartThread() {
  try {
    FileWatcher::Get();
    return absl::OkStatus();
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "cannot start the thread that watches served files for changes: ",
        error.what(),
        "; raise the number of threads that this process may have (`ulimit -u`"
        ", or the pids limit of its container), or its memory"));
  }
}

FileWatch::FileWatch(int fd, const MappedFile& file)
    : fd_(fd), range_(TakeRange(file)), has_changed_(range_->has_changed) {
  FileWatcher& watcher = FileWatcher::Get();
  MutexLock lock(&watcher.mutex);
  TakeLease();
  // Nothing has been read so far, so an earlier change of the bytes is none.
  has_changed_ = fstat(fd_, &first_) != 0 ||
                 static_cast<size_t>(first_.st_size) != file.size();
  watcher.files.push_back(this);
  watcher.added.NotifyAll();
}

FileWatch::~FileWatch() {
  FileWatcher& watcher = FileWatcher::Get();
  MutexLock lock(&watcher.mutex);
  watcher.files.erase(
      std::find(watcher.files.begin(), watcher.files.end(), this));
  // A child that was forked may keep the descriptor, and the lease with it.
  GiveLeaseBack();
  close(fd_);
  range_->end = 0;
}

void FileWatch::Look() {
  MutexLock lock(&FileWatcher::Get().mutex);
  LookLocked();
}

void FileWatch::LookLocked() {
  if (has_changed()) return;
  // The times come behind, and have what was written without a lease.
  if (lease_ == Lease::kRefused) TakeLease();
  struct stat now = {};
  if (IsLeaseWanted() || fstat(fd_, &now) != 0 ||
      now.st_size != first_.st_size ||
      now.st_mtim.tv_sec != first_.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != first_.st_mtim.tv_nsec) {
    has_changed_ = true;  // The handler of SIGBUS may have set it meanwhile.
  }
}

void FileWatch::TakeLease() {
  const f_owner_ex owner = {F_OWNER_TID, FileWatcher::Get().thread};
  if (fcntl(fd_, F_SETOWN_EX, &owner) != 0) return;
  if (fcntl(fd_, F_SETLEASE, F_RDLCK) == 0) {
    lease_ = Lease::kHeld;
  } else {
    lease_ = errno == EAGAIN ? Lease::kRefused : Lease::kNone;
  }
}

bool FileWatch::IsLeaseWanted() const {
  return lease_ == Lease::kHeld && fcntl(fd_, F_GETLEASE) != F_RDLCK;
}

void FileWatch::GiveLeaseBack() {
  if (lease_ != Lease::kHeld) return;
  fcntl(fd_, F_SETLEASE, F_UNLCK);
  lease_ = Lease::kNone;
}

void CatchBusErrors() {
  page_bytes = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  struct sigaction action = {};
  action.sa_sigaction = &OnBusError;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  static const int once [[maybe_unused]] =
      sigaction(SIGBUS, &action, &former_action);
}

}  // namespace tfswitch
