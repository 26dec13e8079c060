// Writes records to the disk before the writes that they describe take effect.
//
//   FOLDER/<number of its first record, 20 digits>.log    a segment:
//     "tfswlog1"
//     records, each at a multiple of 8 bytes:
//       number, last number on the disk, bytes of the payload   uint64 each
//       type, 0x474f4c54                                        uint32 each
//       XXH3 of these and of the payload                        uint64
//       payload, filled up with zeros
//
// Integers are little-endian. The checksum is XXH3 and not CRC32C: it is as
// fast as memory on every machine, and its 64 bits miss less.

#ifndef TFSWITCH_CC_LOG_PUSH_LOG_H_
#define TFSWITCH_CC_LOG_PUSH_LOG_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/mutex.h"

namespace tfswitch {

// The progress of a log, in memory that outlives the process. It only grows
// while records are appended. Thread-safe.
struct LogProgress {
  // The last record whose number Append() has returned.
  std::atomic<uint64_t> acknowledged{0};
  // The same, if the record was flushed before (sync_every 0).
  std::atomic<uint64_t> flushed{0};
};

struct PushLogOptions {
  std::string folder;
  // How often records are flushed to the disk; 0: each before Append() returns.
  // Unflushed records survive the process, but not the machine.
  absl::Duration sync_every = absl::Seconds(1);
  uint64_t segment_bytes = uint64_t{64} << 20;
  uint64_t max_bytes = uint64_t{8} << 30;  // All segments together.
  // If the log ends before this record, it has lost some. 0: not known.
  uint64_t must_reach = 0;
  LogProgress* progress = nullptr;  // Updated if it is not null.
};

struct LogSegment {
  std::string path;
  uint64_t bytes = 0;
  // The number of whole records, from the first one on.
  uint64_t num_records = 0;
};

// The state of the files of a log.
struct LogContents {
  // The key is the number of their first record.
  std::map<uint64_t, LogSegment> segments;
  // All records from `first` to this one are whole.
  uint64_t last = 0;
  // The end of these records: a segment and an offset in it. The folder, if no
  // segment was read.
  std::string end_path;
  uint64_t end_offset = 0;
  // DataLoss, naming file and offset, if records after `last` are lost or
  // cannot be replayed.
  absl::Status damage;
};

// Thread-safe.
class PushLog {
 public:
  using Visit = absl::FunctionRef<absl::Status(uint64_t number, uint32_t type,
                                               absl::string_view payload)>;

  // Visits the records from `first` on, up to the first damage. The first one
  // visited must be `first` itself. The save has the records up to `last`.
  // Changes nothing. A DataLoss of `visit` counts as damage; its other errors
  // are returned.
  static absl::StatusOr<LogContents> Read(const PushLogOptions& options,
                                          uint64_t first, uint64_t last,
                                          Visit visit);

  // Removes all bytes behind the whole records of `contents`, and moves them to
  // the folder `aside`, which it makes if there are any.
  static absl::Status CutAside(const LogContents& contents,
                               const std::string& aside);

  // Opens the log of a folder, which is made if it is not there. Visits records
  // as Read() does. New records get numbers after these, and after `last`. A
  // record that is cut short at the end is removed, unless it is known that it
  // was whole. DataLoss, naming segment and offset, for damage.
  static absl::StatusOr<std::unique_ptr<PushLog>> Open(
      const PushLogOptions& options, uint64_t first, uint64_t last,
      Visit visit);
  ~PushLog();
  PushLog(const PushLog&) = delete;
  PushLog& operator=(const PushLog&) = delete;

  // Writes a record of `pieces`, one after the other, and returns its number.
  // ResourceExhausted if the disk is full or failing, or the log has max_bytes:
  // then the record does not exist, and a later one may succeed.
  absl::StatusOr<uint64_t> Append(uint32_t type,
                                  absl::Span<const absl::string_view> pieces);

  // The number of the last record; 0: there was none.
  uint64_t last() const;
  uint64_t num_bytes() const;

  // Flushes all records to the disk.
  absl::Status Sync() { return SyncTo(last()); }

  // For a change of state that no record describes: writes a record that says
  // so, and refuses others with the reason `why` until EndBreak(). Call that
  // when a later save exists.
  absl::Status BeginBreak(uint32_t type, const absl::Status& why);
  void EndBreak();

  // Whether all records are refused, because flushing has failed, or a break
  // was not ended.
  bool has_failed() const;

  // Removes segments whose records are all before `first`, because they are not
  // needed any more. Later records go to a new segment.
  absl::Status StartAfterSave(uint64_t first);

 private:
  explicit PushLog(const PushLogOptions& options) : options_(options) {}
  absl::Status StartSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes the segment. The next record begins another one.
  absl::Status EndSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(absl::string_view bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Flushes all records up to `number`, or more.
  absl::Status SyncTo(uint64_t number) ABSL_LOCKS_EXCLUDED(sync_mutex_, mutex_);
  void SyncOnTime();

  const PushLogOptions options_;

  // Held while the disk is flushed; taken before mutex_.
  Mutex sync_mutex_;
  std::atomic<uint64_t> synced_{0};  // All up to this number are on the disk.

  mutable Mutex mutex_;
  // The key is the number of their first record.
  std::map<uint64_t, LogSegment> segments_ ABSL_GUARDED_BY(mutex_);
  int fd_ ABSL_GUARDED_BY(mutex_) = -1;  // The last segment; -1: start one.
  // Still to be flushed and closed.
  std::vector<int> ended_fds_ ABSL_GUARDED_BY(mutex_);
  bool must_sync_folder_ ABSL_GUARDED_BY(mutex_) = false;  // It has a new file.
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  // A failed write left part of a record.
  bool has_tail_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);  // The error of a flush.
  std::string buffer_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar ends_;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_LOG_PUSH_LOG_H_
