// The push log: before a write takes effect, a record that describes it is
// written to the disk.
//
//   FOLDER/<number of its first record, 20 digits>.log    a segment:
//     "tfswlog1"
//     records, each at a multiple of 8 bytes:
//       number, last number on the disk, bytes of the payload   uint64 each
//       type, 0x474f4c54                                        uint32 each
//       XXH3 of these and of the payload                        uint64
//       payload, filled up with zeros
//
// Integers are little-endian. The checksum is XXH3 instead of CRC32C, because
// it is as fast as memory on every machine, and with 64 bits misses fewer
// errors.

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

// How far a log has got. The owner keeps it in memory that survives the
// process. The numbers never decrease while records are appended. Thread-safe.
struct LogProgress {
  // The last record whose number Append() has returned.
  std::atomic<uint64_t> acknowledged{0};
  // The last record that was flushed before Append() returned its number
  // (sync_every 0).
  std::atomic<uint64_t> flushed{0};
};

struct PushLogOptions {
  std::string folder;
  // How often records are flushed to the disk. 0 means that each one is flushed
  // before Append() returns. Records that are not flushed survive a crash of
  // the process, but not a crash of the machine.
  absl::Duration sync_every = absl::Seconds(1);
  uint64_t segment_bytes = uint64_t{64} << 20;
  // The size of all segments together.
  uint64_t max_bytes = uint64_t{8} << 30;
  // The number of the last record that the log must contain. If the log ends
  // before it, records were lost. 0 if this number is not known.
  uint64_t must_reach = 0;
  LogProgress* progress = nullptr;  // Updated if it is not null.
};

struct LogSegment {
  std::string path;
  uint64_t bytes = 0;
  // The number of complete records at the beginning of the segment.
  uint64_t num_records = 0;
};

// The state of the files of a log.
struct LogContents {
  // The key is the number of the segment's first record.
  std::map<uint64_t, LogSegment> segments;
  // All records from `first` to this one are complete.
  uint64_t last = 0;
  // Where the last of these records ends: the path of its segment, and an
  // offset in that file. If no segment was read, the path of the folder.
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

  // Visits the records from `first` on, until one is damaged. The first visited
  // record must have the number `first`. A save of the state already contains
  // the records up to `last`. Changes no files. DataLoss returned by `visit`
  // counts as damage; other errors of `visit` are returned.
  static absl::StatusOr<LogContents> Read(const PushLogOptions& options,
                                          uint64_t first, uint64_t last,
                                          Visit visit);

  // Cuts all bytes that follow the complete records of `contents` off the log.
  // First copies each file that it changes or removes to the folder `aside`,
  // which it makes if needed.
  static absl::Status CutAside(const LogContents& contents,
                               const std::string& aside);

  // Opens the log of a folder; makes the folder if it does not exist. Visits
  // records as Read() does. The first new record gets the number that follows
  // the last visited record, or `last` if that is larger. If the last record is
  // incomplete, removes it, unless it is known to have been complete. DataLoss,
  // naming segment and offset, for damage.
  static absl::StatusOr<std::unique_ptr<PushLog>> Open(
      const PushLogOptions& options, uint64_t first, uint64_t last,
      Visit visit);
  ~PushLog();
  PushLog(const PushLog&) = delete;
  PushLog& operator=(const PushLog&) = delete;

  // Writes a record that consists of `pieces`, and returns its number.
  // ResourceExhausted if the disk is full or fails, or if the log has
  // max_bytes: then nothing was recorded, and a later call may succeed.
  absl::StatusOr<uint64_t> Append(uint32_t type,
                                  absl::Span<const absl::string_view> pieces);

  // The number of the last record; 0 if there was none.
  uint64_t last() const;
  uint64_t num_bytes() const;
  // Records that a power loss may take.
  uint64_t num_unflushed() const {
    const uint64_t synced = synced_;  // Read first, so that it is not larger.
    return last() - synced;
  }

  // Flushes all records to the disk.
  absl::Status Sync() { return SyncTo(last()); }

  // Call it for a change of the state that no record can describe. Writes a
  // record of this type, which marks the place in the log. Then refuses all
  // records with the error `why`, until the caller has saved the state and
  // calls EndBreak().
  absl::Status BeginBreak(uint32_t type, const absl::Status& why);
  void EndBreak();

  // Whether the log refuses all records, because a flush has failed, or because
  // EndBreak() was not called after BeginBreak().
  bool has_failed() const;

  // Call it after a save of the state that contains all records before `first`.
  // Removes the segments whose records are all before `first`, because nothing
  // needs them any more. Further records go to a new segment.
  absl::Status StartAfterSave(uint64_t first);

 private:
  explicit PushLog(const PushLogOptions& options) : options_(options) {}
  absl::Status StartSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Closes the present segment; the next record begins a new one.
  absl::Status EndSegment() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Write(absl::string_view bytes)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Flushes all records up to `number`. May also flush later ones.
  absl::Status SyncTo(uint64_t number) ABSL_LOCKS_EXCLUDED(sync_mutex_, mutex_);
  void SyncOnTime();

  const PushLogOptions options_;

  // Held during a flush; locked before mutex_.
  Mutex sync_mutex_;
  // All records up to this number are on the disk.
  std::atomic<uint64_t> synced_{0};

  mutable Mutex mutex_;
  // The key is the number of the segment's first record.
  std::map<uint64_t, LogSegment> segments_ ABSL_GUARDED_BY(mutex_);
  // The descriptor of the last segment. -1 if the next record needs a new one.
  int fd_ ABSL_GUARDED_BY(mutex_) = -1;
  // Ended segments, which must still be flushed and closed.
  std::vector<int> ended_fds_ ABSL_GUARDED_BY(mutex_);
  bool must_sync_folder_ ABSL_GUARDED_BY(mutex_) = false;  // It has a new file.
  uint64_t last_ ABSL_GUARDED_BY(mutex_) = 0;
  // True if a failed write has left a part of a record in the file.
  bool has_tail_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Status failed_ ABSL_GUARDED_BY(mutex_);  // The error of a flush.
  std::string buffer_ ABSL_GUARDED_BY(mutex_);
  bool is_ending_ ABSL_GUARDED_BY(mutex_) = false;
  CondVar ends_;
  std::thread thread_;  // Last: it uses the others.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_LOG_PUSH_LOG_H_
