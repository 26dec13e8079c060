// Notices when a mapped file is being changed, so that no lookup returns rows
// of a changed file. A thread checks all watched files five times a second, in
// two ways:
//
//   lease   The kernel stops a writer in open() or truncate() until this
//           process gives its lease back. Before that, the thread marks the
//           file as changed and lets running lookups end. Leases need a file of
//           this user (or CAP_LEASE), and a file system with leases.
//   times   The size or the time of modification has changed. Renaming,
//           linking, chmod and unlinking change neither.
//
// A thread that reads beyond the new end of a file gets SIGBUS.
// CatchBusErrors() then keeps the process alive. Only tfswitch-serving calls
// it: a library must not change the signals of its process.

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
  // Starts the thread that checks the files, if it does not run yet.
  // ResourceExhausted if no thread can be started; a later call tries again.
  static absl::Status StartThread();

  // Takes ownership of the descriptor `fd`, from which `file` was mapped.
  // `file` must outlive this object.
  //
  // REQUIRES: StartThread() was OK.
  FileWatch(int fd, const MappedFile& file);
  ~FileWatch();
  FileWatch(const FileWatch&) = delete;
  FileWatch& operator=(const FileWatch&) = delete;

  // Whether a change was noticed. Once true, it stays true. Readers call this
  // before and after they read. If it is false both times, the bytes were read
  // before any change. Without a lease, changes of the last second may be
  // missed.
  bool has_changed() const {
    // The SIGBUS handler may have run in this thread during its reads. The
    // fence makes the thread see the mark that the handler has set.
    std::atomic_signal_fence(std::memory_order_acq_rel);
    return has_changed_.load(std::memory_order_acquire);
  }
  // Checks the file now.
  void Look();
  // Whether another process had the file open for writing when the file was
  // last checked. Also false if this is not known.
  bool has_writer() const { return lease_ == Lease::kRefused; }

 private:
  friend struct FileWatcher;
  enum class Lease { kNone, kRefused, kHeld };

  // Callers hold the mutex of the watcher.
  void LookLocked();
  void TakeLease();
  bool IsLeaseWanted() const;  // Whether a writer waits for the lease.
  void GiveLeaseBack();

  const int fd_;
  WatchedRange* const range_;
  std::atomic<bool>& has_changed_;  // In range_.
  std::atomic<Lease> lease_{Lease::kNone};
  struct stat first_ = {};  // Constant after construction.
};

// Installs a SIGBUS handler for the whole process. If a thread gets the signal
// in a watched file, the handler marks the file as changed, and the thread
// continues and reads zeros. Other SIGBUS signals have the same effect as
// before.
void CatchBusErrors();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_FILE_WATCH_H_
