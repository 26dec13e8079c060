// The kernel announces a writer by the signal SIGIO, whose default action ends
// the process. So each lease belongs to the watcher's thread, which blocks all
// signals. The thread asks with F_GETLEASE instead, and takes no signals away
// from the process.
//
// The SIGBUS handler walks a list without a lock. The ranges that it needs
// cannot disappear, because it interrupts a reader of such a range. Nodes of
// the list are reused and never freed.

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

// The address range of a watched file, for the SIGBUS handler.
struct WatchedRange {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0 if the node is free.
  std::atomic<bool> has_changed{false};
  WatchedRange* next = nullptr;  // Constant.
};

// All watched files, and the thread that checks them. Never destroyed.
struct FileWatcher {
  static constexpr absl::Duration kInterval = absl::Milliseconds(200);
  // How long this process keeps a lease after it has marked the file as
  // changed. The writer waits meanwhile, and lookups from before the mark end.
  static constexpr absl::Duration kReadersEnd = absl::Milliseconds(100);

  static FileWatcher& Get() {
    static FileWatcher* const watcher = new FileWatcher;
    return *watcher;
  }

  FileWatcher() {
    // The new thread inherits this mask.
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
  // An empty file gets a range of one byte, because the file's mark ("has
  // changed") is stored with its range.
  range->end = range->begin + std::max<size_t>(file.size(), 1);
  return range;
}

struct sigaction former_action;
uintptr_t page_bytes;

void OnBusError(int number, siginfo_t* info, void*) {
  const int error = errno;
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  // A signal has an address only if the kernel has sent it.
  WatchedRange* range = info->si_code > 0 ? all_ranges.load() : nullptr;
  for (; range != nullptr; range = range->next) {
    const uintptr_t end = range->end;
    if (at < range->begin || at >= end) continue;
    // First marks the file as changed, because other threads may read the zeros
    // from now on. Maps zeros over all pages up to the end at once, because a
    // process may have only some 65,000 mappings.
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
  raise(number);  // Delivered when this handler returns.
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
  // Compares with the file's times as they are now: nothing has been read from
  // the file so far, so earlier changes do no harm.
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
  // Closing the descriptor would not release the lease if a forked child has a
  // copy of the descriptor.
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
  // Reads the file's times after it has tried to take the lease. So it also
  // notices a write from the time before the lease.
  if (lease_ == Lease::kRefused) TakeLease();
  struct stat now = {};
  if (IsLeaseWanted() || fstat(fd_, &now) != 0 ||
      now.st_size != first_.st_size ||
      now.st_mtim.tv_sec != first_.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != first_.st_mtim.tv_nsec) {
    // Sets has_changed_ to true, but never to false, because the SIGBUS handler
    // may have set it meanwhile.
    has_changed_ = true;
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
