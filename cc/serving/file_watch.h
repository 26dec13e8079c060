// Finds out that a mapped file is being changed, so that nothing that was read
// from it is answered. A thread looks at all watched files five times a second:
//
//   lease   The kernel stops a writer in open() or truncate() until this
//           process gives its lease back. The thread marks the file first, and
//           lets running lookups end. Leases need a file of this user (or
//           CAP_LEASE), on a file system that has them.
//   times   The size or the time of modification is another one. To rename,
//           link, chmod or unlink a file changes neither.
//
// A thread that reads behind the new end of a file gets SIGBUS.
// CatchBusErrors() keeps the process alive then. It is for tfswitch-serving: a
// library must leave the signals of its process alone.

#ifndef TFSWITCH_CC_SERVING_FILE_WATCH_H_
#define TFSWITCH_CC_SERVING_FILE_WATCH_H_

#include <sys/stat.h>

#include <atomic>

#include "absl/status/status.h"
#include "cc/base/files.h"

namespace tfswitch {

struct WatchedRange;

// Thread-safe.
class FileWatch {
 public:
  // Starts the thread, unless it runs. ResourceExhausted if there is none to be
  // had; a later call tries again.
  static absl::Status StartThread();

  // Takes over `fd`, from which `file` was mapped. `file` must outlive this.
  //
  // REQUIRES: StartThread() was OK.
  FileWatch(int fd, const MappedFile& file);
  ~FileWatch();
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

  // Once true, it stays true. Readers ask before they read and again behind: if
  // it is false then, they have read what was there before the change, or
  // without a lease at most a second after it.
  bool has_changed() const {
    // The handler of SIGBUS may have run within the reads.
    std::atomic_signal_fence(std::memory_order_acq_rel);
    return has_changed_.load(std::memory_order_acquire);
  }
  // Looks at the file now.
  void Look();
  // Whether another process had the file open for writing at the last look.
  // False if that cannot be known.
  bool has_writer() const { return lease_ == Lease::kRefused; }

 private:
  friend struct FileWatcher;
  enum class Lease { kNone, kRefused, kHeld };

  // Callers hold the mutex of the watcher.
  void LookLocked();
  void TakeLease();
  bool IsLeaseWanted() const;  // By a writer, who waits for it.
  void GiveLeaseBack();

  const int fd_;
  WatchedRange* const range_;
  std::atomic<bool>& has_changed_;  // In range_.
  std::atomic<Lease> lease_{Lease::kNone};
  struct stat first_ = {};  // Constant after construction.
};

// Installs a handler of SIGBUS for the whole process. If a thread meets the
// signal in a watched file, the handler marks the file as changed, and the
// thread reads zeros. Any other SIGBUS acts as before.
void CatchBusErrors();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_FILE_WATCH_H_
