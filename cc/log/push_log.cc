// A record is put together in a buffer and written by a single write(2). mutex_
// is locked meanwhile, so records are in the order of their numbers. A flush
// locks another mutex, so that other threads can append records during a flush.
// With sync_every 0 several threads may wait for a flush; the first one also
// flushes the records of the others.
//
// If the last bytes of the log are an incomplete record, a crash has normally
// interrupted its write(2), and the record is removed. It is damage in two
// cases, because the record may then have been acknowledged. First, a later,
// complete record says that the incomplete one was already on the disk. Second,
// its number is at most `must_reach`, so Append() had returned the number,
// which it does only after write(2). A later record may exist in the other
// cases, too: the kernel writes pages in any order, so after a crash of the
// machine a later record may be on the disk and an earlier one not.
//
// After a failed flush the kernel may treat the pages as written, so a second
// flush could succeed without writing them. So all records are refused until a
// save of the state has made the segment superfluous.

#include "cc/log/push_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <limits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "cc/base/checksum.h"
#include "cc/base/files.h"
#include "cc/base/log_writer.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr char kMagic[] = "tfswlog1";
constexpr size_t kMagicBytes = 8;
constexpr uint32_t kRecordMagic = 0x474f4c54;

struct RecordHeader {
  uint64_t number;
  uint64_t synced;
  uint64_t payload_bytes;
  uint32_t type;
  uint32_t magic;
  uint64_t checksum;
};
static_assert(sizeof(RecordHeader) == 40);
constexpr size_t kChecksumAt = offsetof(RecordHeader, checksum);

uint64_t RoundUp8(uint64_t bytes) { return (bytes + 7) & ~uint64_t{7}; }

// Computes the checksum of a record, whose header must be complete.
uint64_t ChecksumOf(const char* record, uint64_t payload_bytes) {
  // Omits the checksum field itself, which is between the two parts.
  const uint64_t parts[] = {
      Checksum(record, kChecksumAt),
      Checksum(record + sizeof(RecordHeader), payload_bytes)};
  return Checksum(reinterpret_cast<const char*>(parts), sizeof(parts));
}

// Reads the record at the beginning of `bytes`; false if it is incomplete or
// damaged.
bool ReadRecord(absl::string_view bytes, RecordHeader* header) {
  if (bytes.size() < sizeof(RecordHeader)) return false;
  std::memcpy(header, bytes.data(), sizeof(RecordHeader));
  return header->magic == kRecordMagic &&
         header->payload_bytes <= bytes.size() - sizeof(RecordHeader) &&
         RoundUp8(header->payload_bytes) <=
             bytes.size() - sizeof(RecordHeader) &&
         header->checksum == ChecksumOf(bytes.data(), header->payload_bytes);
}

// Whether record `number`, which is incomplete now, was on the disk before.
// `rest` has the bytes from it on. A complete record in `rest` may say so.
bool WasOnDisk(absl::string_view rest, uint64_t number) {
  for (size_t at = 0; at + sizeof(RecordHeader) <= rest.size(); at += 8) {
    RecordHeader header;
    if (ReadRecord(rest.substr(at), &header) && header.number > number &&
        header.synced >= number) {
      return true;
    }
  }
  return false;
}

absl::StatusOr<std::string> ReadSegmentFile(const std::string& path) {
  return ReadWholeFile(path, std::numeric_limits<int64_t>::max());
}

absl::Status Damaged(const std::string& path, uint64_t at, uint64_t number) {
  return absl::DataLossError(
      absl::StrCat("push log segment '", path, "' is damaged at offset ", at,
                   ", where record ", number, " should be"));
}

// Finds the first complete record in `bytes` from `*at` on, and moves `*at` to
// it. Returns whether the record's number is above `number` and at most `last`.
bool FindRecord(absl::string_view bytes, uint64_t number, uint64_t last,
                size_t* at, RecordHeader* header) {
  for (; *at + sizeof(RecordHeader) <= bytes.size(); *at += 8) {
    if (ReadRecord(bytes.substr(*at), header)) {
      return header->number > number && header->number <= last;
    }
  }
  return false;
}

// Reads a segment and visits its records from `first` on. Damage before `first`
// only causes a warning. `*number` must be the number of the segment's first
// record; it becomes the number that follows the last complete record. `*bytes`
// becomes the length of the complete records. `*is_whole` becomes false if
// other bytes follow these records. If a record in the segment says that the
// other bytes were on the disk as records, `*damage` becomes an error.
absl::Status ReadSegment(const std::string& path, uint64_t first,
                         PushLog::Visit visit, uint64_t* number,
                         uint64_t* bytes, bool* is_whole,
                         absl::Status* damage) {
  const absl::StatusOr<std::string> text = ReadSegmentFile(path);
  TFSWITCH_RETURN_IF_ERROR(text.status());
  const absl::string_view all = *text;
  *bytes = 0;
  if (absl::StartsWith(all, absl::string_view(kMagic, kMagicBytes))) {
    *bytes = kMagicBytes;
    RecordHeader header;
    while (*bytes < all.size()) {
      if (!ReadRecord(all.substr(*bytes), &header)) {
        size_t at = *bytes;
        if (!FindRecord(all, *number, first, &at, &header)) break;
        std::fprintf(
            stderr, "tfswitch: warning: %s; no save needs it\n",
            std::string(Damaged(path, *bytes, *number).message()).c_str());
        *bytes = at;
        *number = header.number;
      }
      if (header.number != *number) {
        *damage = Damaged(path, *bytes, *number);
        return absl::OkStatus();
      }
      if (*number >= first) {
        const absl::Status visited = visit(
            *number, header.type,
            all.substr(*bytes + sizeof(RecordHeader), header.payload_bytes));
        if (absl::IsDataLoss(visited)) {
          *damage = absl::DataLossError(absl::StrCat(
              "push log segment '", path, "' cannot be replayed from record ",
              *number, " at offset ", *bytes, " on: ", visited.message()));
          return absl::OkStatus();
        }
        TFSWITCH_RETURN_IF_ERROR(visited);
      }
      *bytes += sizeof(RecordHeader) + RoundUp8(header.payload_bytes);
      ++*number;
    }
  }
  // If even the first bytes are missing, the segment was just being created.
  *is_whole = *bytes == all.size() && *bytes > 0;
  if (WasOnDisk(all.substr(*bytes), *number)) {
    *damage = Damaged(path, *bytes, *number);
  }
  return absl::OkStatus();
}

// Cuts off the end of a segment, or all its records. Flushes the change to the
// disk, so that new records with the same numbers are never mixed with the old
// ones.
absl::Status Cut(const std::string& path, uint64_t before, uint64_t bytes = 0) {
  const int fd = open(path.c_str(), O_WRONLY | O_CLOEXEC);
  if (fd < 0) return ErrnoStatus("open", path, errno);
  const auto close_file = absl::MakeCleanup([fd] { close(fd); });
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0 || fsync(fd) != 0) {
    return ErrnoStatus("cut", path, errno);
  }
  LogMessage(LogLevel::kInfo, {"log_cut"},
             absl::StrCat("the push log ends with a write that was not "
                          "acknowledged, or had not reached the disk: ",
                          before - bytes, " bytes of '", path, "' are cut"));
  return absl::OkStatus();
}

// Threads come in any order.
void Raise(uint64_t to, std::atomic<uint64_t>& number) {
  uint64_t now = number;
  while (now < to && !number.compare_exchange_weak(now, to)) {
  }
}

// The error of Append() when it refuses a record. The code is that of a full
// disk, after which the caller may try again. Only if the log's file was
// removed, it is DataLoss.
absl::Status Refuse(const absl::Status& status) {
  if (absl::IsDataLoss(status)) return status;
  return absl::ResourceExhaustedError(absl::StrCat(
      "the push log cannot be written, so that nothing was applied: ",
      status.message(),
      ". Make room or mend the disk; a restart is not needed"));
}

}  // namespace

absl::StatusOr<LogContents> PushLog::Read(const PushLogOptions& options,
                                          uint64_t first, uint64_t last,
                                          Visit visit) {
  LogContents contents;
  contents.last = last;
  contents.end_path = options.folder;
  absl::StatusOr<std::vector<std::string>> names = ListFolder(options.folder);
  if (absl::IsNotFound(names.status())) names = std::vector<std::string>();
  TFSWITCH_RETURN_IF_ERROR(names.status());
  std::map<uint64_t, LogSegment>& segments = contents.segments;
  for (absl::string_view name : *names) {
    const std::string path = absl::StrCat(options.folder, "/", name);
    uint64_t begin = 0;
    if (name.size() != 24 || !absl::ConsumeSuffix(&name, ".log") ||
        !absl::SimpleAtoi(name, &begin)) {
      continue;
    }
    TFSWITCH_ASSIGN_OR_RETURN(const FileStamp stamp, StampOf(path));
    segments[begin] = {path, static_cast<uint64_t>(stamp.size)};
  }
  // Locks no mutex during the visits: a visitor locks its own mutexes, and
  // other threads hold these while they append records.
  uint64_t expected = 0;  // 0: any up to `first`.
  for (auto it = segments.begin(); it != segments.end(); ++it) {
    const uint64_t begin = it->first;
    LogSegment& segment = it->second;
    // A segment is named by its first record. So the name of the next segment
    // tells the last record of this one.
    if (std::next(it) != segments.end() && std::next(it)->first <= first) {
      segment.num_records = std::next(it)->first - begin;
      continue;
    }
    if (expected == 0 ? begin > first : begin != expected) {
      contents.damage = absl::DataLossError(absl::StrCat(
          "push log: records ", expected == 0 ? first : expected, " to ",
          begin - 1, " are missing before '", segment.path, "', at offset ",
          contents.end_offset, " of '", contents.end_path, "'"));
      return contents;
    }
    expected = begin;
    bool is_whole = true;
    TFSWITCH_RETURN_IF_ERROR(ReadSegment(segment.path, first, visit, &expected,
                                         &contents.end_offset, &is_whole,
                                         &contents.damage));
    segment.num_records = expected - begin;
    contents.end_path = segment.path;
    contents.last = std::max(last, expected - 1);
    if (!contents.damage.ok()) return contents;
    if (is_whole) continue;
    for (auto later = std::next(it); later != segments.end(); ++later) {
      TFSWITCH_ASSIGN_OR_RETURN(const std::string rest,
                                ReadSegmentFile(later->second.path));
      if (!WasOnDisk(rest, expected)) continue;
      contents.damage = Damaged(segment.path, contents.end_offset, expected);
      return contents;
    }
    break;
  }
  if (contents.last < options.must_reach) {
    contents.damage = absl::DataLossError(absl::StrCat(
        segments.empty()
            ? absl::StrCat("push log '", options.folder,
                           "' is missing: record ", contents.last + 1,
                           " should be in it, at offset 0 of a segment")
            : std::string(Damaged(contents.end_path, contents.end_offset,
                                  contents.last + 1)
                              .message()),
        ": records up to ", options.must_reach, " were acknowledged"));
  }
  return contents;
}

absl::Status PushLog::CutAside(const LogContents& contents,
                               const std::string& aside) {
  // Cuts the last segment first, so that an interruption leaves no gap.
  for (auto it = contents.segments.rbegin(); it != contents.segments.rend();
       ++it) {
    const LogSegment& segment = it->second;
    const bool is_behind_end = it->first > contents.last;
    if (!is_behind_end && (segment.path != contents.end_path ||
                           segment.bytes <= contents.end_offset)) {
      continue;
    }
    TFSWITCH_ASSIGN_OR_RETURN(const std::string bytes,
                              ReadSegmentFile(segment.path));
    const size_t slash = segment.path.rfind('/');
    TFSWITCH_RETURN_IF_ERROR(CreateFolders(aside));
    TFSWITCH_RETURN_IF_ERROR(
        WriteFileAtomically(aside + segment.path.substr(slash), bytes));
    if (!is_behind_end) {
      TFSWITCH_RETURN_IF_ERROR(WriteFileAtomically(
          segment.path,
          absl::string_view(bytes).substr(0, contents.end_offset)));
    } else if (unlink(segment.path.c_str()) != 0) {
      return ErrnoStatus("remove", segment.path, errno);
    }
    TFSWITCH_RETURN_IF_ERROR(SyncFolder(segment.path.substr(0, slash)));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<PushLog>> PushLog::Open(
    const PushLogOptions& options, uint64_t first, uint64_t last, Visit visit) {
  TFSWITCH_ASSIGN_OR_RETURN(LogContents contents,
                            Read(options, first, last, visit));
  TFSWITCH_RETURN_IF_ERROR(contents.damage);
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(options.folder));
  std::map<uint64_t, LogSegment>& segments = contents.segments;
  auto it = segments.begin();
  while (it != segments.end() && it->second.path != contents.end_path) ++it;
  if (it != segments.end()) {
    LogSegment& end = it->second;
    if (end.bytes != contents.end_offset || end.bytes == 0) {
      TFSWITCH_RETURN_IF_ERROR(Cut(end.path, end.bytes, contents.end_offset));
      end.bytes = contents.end_offset;
    }
    for (++it; it != segments.end(); it = segments.erase(it)) {
      const std::string& path = it->second.path;
      TFSWITCH_RETURN_IF_ERROR(Cut(path, it->second.bytes));
      if (unlink(path.c_str()) != 0) return ErrnoStatus("remove", path, errno);
    }
  }
  // Flushes all segments, because the process that wrote them may have died
  // before it flushed them.
  for (const auto& [begin, segment] : segments) {
    const int fd = open(segment.path.c_str(), O_RDONLY | O_CLOEXEC);
    const bool is_flushed = fd >= 0 && fdatasync(fd) == 0;
    const int error = errno;
    if (fd >= 0) close(fd);
    if (!is_flushed) return ErrnoStatus("flush", segment.path, error);
  }
  TFSWITCH_RETURN_IF_ERROR(SyncFolder(options.folder));
  auto log = absl::WrapUnique(new PushLog(options));
  MutexLock lock(&log->mutex_);
  log->segments_ = std::move(segments);
  log->last_ = contents.last;
  log->synced_ = contents.last;
  if (LogProgress* const progress = options.progress; progress != nullptr) {
    // `flushed` counts only records that were flushed before Append() returned
    // their number. The flush above does not count.
    progress->flushed = options.sync_every <= absl::ZeroDuration()
                            ? contents.last
                            : std::min(contents.last, progress->flushed.load());
    progress->acknowledged = contents.last;
  }
  if (options.sync_every > absl::ZeroDuration()) {
    log->thread_ = std::thread([log = log.get()] { log->SyncOnTime(); });
  }
  return log;
}

PushLog::~PushLog() {
  {
    MutexLock lock(&mutex_);
    is_ending_ = true;
    ends_.NotifyAll();
  }
  if (thread_.joinable()) thread_.join();
  const absl::Status status = SyncTo(last());
  if (!status.ok()) {
    LogMessage(LogLevel::kWarning, {"log_failed"}, status.message());
  }
  MutexLock lock(&mutex_);
  if (fd_ >= 0) close(fd_);
  for (const int fd : ended_fds_) close(fd);
}

absl::Status PushLog::StartSegment() {
  const std::string path =
      absl::StrFormat("%s/%020d.log", options_.folder, last_ + 1);
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("create", path, errno);
  // Reserves disk space for the whole segment, so that Append() seldom has to
  // reserve any. Without support in the file system, Append() reserves it.
  (void)fallocate(fd, FALLOC_FL_KEEP_SIZE, 0,
                  static_cast<off_t>(options_.segment_bytes));
  if (absl::Status status = WriteAll(fd, path, kMagic, kMagicBytes);
      !status.ok()) {
    close(fd);
    unlink(path.c_str());
    return status;
  }
  fd_ = fd;
  // Does not flush the folder here, because all writes would wait for the disk
  // meanwhile.
  must_sync_folder_ = true;
  segments_[last_ + 1] = {path, kMagicBytes};
  return absl::OkStatus();
}

absl::Status PushLog::EndSegment() {
  if (fd_ < 0) return absl::OkStatus();
  TFSWITCH_RETURN_IF_ERROR(Write(""));  // Cuts the tail.
  ended_fds_.push_back(fd_);
  fd_ = -1;
  return absl::OkStatus();
}

absl::Status PushLog::Write(absl::string_view bytes) {
  LogSegment& segment = segments_.rbegin()->second;
  if (has_tail_) {
    if (ftruncate(fd_, static_cast<off_t>(segment.bytes)) != 0 ||
        lseek(fd_, static_cast<off_t>(segment.bytes), SEEK_SET) < 0) {
      return ErrnoStatus("cut", segment.path, errno);
    }
    has_tail_ = false;
  }
  struct stat info = {};
  if (fstat(fd_, &info) == 0 && info.st_nlink == 0) {
    return absl::DataLossError(absl::StrCat(
        "somebody has removed '", segment.path,
        "', the push log of this server, so that nothing was applied. Save the "
        "tables with `cluster.save`, and restore them on servers with new data "
        "folders"));
  }
  absl::Status status = WriteAll(fd_, segment.path, bytes.data(), bytes.size());
  if (!status.ok()) {
    has_tail_ = true;
    return status;
  }
  segment.bytes += bytes.size();
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> PushLog::Append(
    uint32_t type, absl::Span<const absl::string_view> pieces) {
  uint64_t payload_bytes = 0;
  for (const absl::string_view piece : pieces) payload_bytes += piece.size();
  const uint64_t record_bytes = sizeof(RecordHeader) + RoundUp8(payload_bytes);
  uint64_t number = 0;
  {
    MutexLock lock(&mutex_);
    if (!failed_.ok()) return Refuse(failed_);
    uint64_t all_bytes = record_bytes;
    for (const auto& [begin, segment] : segments_) all_bytes += segment.bytes;
    if (all_bytes > options_.max_bytes) {
      return Refuse(absl::ResourceExhaustedError(absl::StrCat(
          "it has ", all_bytes - record_bytes, " bytes, and ", record_bytes,
          " more are over --push_log_max_bytes (", options_.max_bytes,
          "); a save of the state makes room")));
    }
    absl::Status status;
    if (fd_ >= 0 && segments_.rbegin()->second.bytes > options_.segment_bytes) {
      status = EndSegment();
    }
    if (status.ok() && fd_ < 0) status = StartSegment();
    if (!status.ok()) return Refuse(status);
    number = last_ + 1;
    buffer_.resize(record_bytes);
    char* to = buffer_.data() + sizeof(RecordHeader);
    for (const absl::string_view piece : pieces) {
      std::memcpy(to, piece.data(), piece.size());
      to += piece.size();
    }
    std::memset(to, 0, static_cast<size_t>(buffer_.data() + record_bytes - to));
    RecordHeader header = {number, synced_,      payload_bytes,
                           type,   kRecordMagic, 0};
    std::memcpy(buffer_.data(), &header, sizeof(header));
    header.checksum = ChecksumOf(buffer_.data(), payload_bytes);
    std::memcpy(buffer_.data() + kChecksumAt, &header.checksum,
                sizeof(header.checksum));
    status = Write(buffer_);
    if (!status.ok()) return Refuse(status);
    last_ = number;
    if (buffer_.capacity() > (size_t{16} << 20)) std::string().swap(buffer_);
  }
  if (options_.sync_every <= absl::ZeroDuration()) {
    if (const absl::Status status = SyncTo(number); !status.ok()) {
      // Its bytes are in the file.
      return absl::ResourceExhaustedError(absl::StrCat(
          "the push log cannot be flushed: ", status.message(),
          ". The write was not applied, but may be when the server is started "
          "again before it has saved its state. Mend the disk"));
    }
    if (options_.progress != nullptr) Raise(number, options_.progress->flushed);
  }
  if (options_.progress != nullptr) {
    Raise(number, options_.progress->acknowledged);
  }
  return number;
}

absl::Status PushLog::SyncTo(uint64_t number) {
  MutexLock sync_lock(&sync_mutex_);
  if (synced_ >= number) return absl::OkStatus();
  std::vector<int> fds;
  uint64_t last = 0;
  bool must_sync_folder = false;
  {
    MutexLock lock(&mutex_);
    if (!failed_.ok()) return failed_;
    must_sync_folder = std::exchange(must_sync_folder_, false);
    fds.swap(ended_fds_);
    // Makes a duplicate of the descriptor, because another thread may end the
    // segment and close the original meanwhile.
    if (fd_ >= 0) fds.push_back(dup(fd_));
    last = last_;
  }
  absl::Status status;
  for (const int fd : fds) {
    if (fd < 0 || fdatasync(fd) != 0) {
      status.Update(ErrnoStatus("flush", options_.folder, errno));
    }
    if (fd >= 0) close(fd);
  }
  if (must_sync_folder) status.Update(SyncFolder(options_.folder));
  if (status.ok()) {
    synced_ = last;
    return status;
  }
  MutexLock lock(&mutex_);
  failed_ = status;
  must_sync_folder_ |= must_sync_folder;
  return status;
}

void PushLog::SyncOnTime() {
  for (;;) {
    uint64_t last = 0;
    {
      MutexLock lock(&mutex_);
      if (!is_ending_) ends_.WaitFor(&mutex_, options_.sync_every);
      if (is_ending_) return;
      last = last_;
    }
    // Append() says it to all that write.
    (void)SyncTo(last);
  }
}

uint64_t PushLog::last() const {
  MutexLock lock(&mutex_);
  return last_;
}

absl::Status PushLog::BeginBreak(uint32_t type, const absl::Status& why) {
  absl::Status status = Append(type, {}).status();
  MutexLock lock(&mutex_);
  failed_ = why;
  return status;
}

void PushLog::EndBreak() {
  MutexLock lock(&mutex_);
  failed_ = absl::OkStatus();
}

bool PushLog::has_failed() const {
  MutexLock lock(&mutex_);
  return !failed_.ok();
}

uint64_t PushLog::num_bytes() const {
  MutexLock lock(&mutex_);
  uint64_t bytes = 0;
  for (const auto& [begin, segment] : segments_) bytes += segment.bytes;
  return bytes;
}

absl::Status PushLog::StartAfterSave(uint64_t first) {
  std::map<uint64_t, LogSegment> superfluous;
  {
    MutexLock lock(&mutex_);
    if (fd_ >= 0 && segments_.rbegin()->second.bytes > kMagicBytes) {
      TFSWITCH_RETURN_IF_ERROR(EndSegment());
    }
    // Keeps a segment without records: its name is the next record's number.
    while (!segments_.empty() && segments_.begin()->first <= last_) {
      const auto next = std::next(segments_.begin());
      const bool is_last = next == segments_.end();
      const uint64_t end = is_last ? last_ + 1 : next->first;
      if (end > first || (is_last && fd_ >= 0)) break;
      superfluous.insert(segments_.extract(segments_.begin()));
    }
  }
  // Removes files without the lock, because this takes long for a large file.
  // Removes the oldest one first, so that an interruption leaves no gap.
  absl::Status status;
  while (status.ok() && !superfluous.empty()) {
    const std::string& path = superfluous.begin()->second.path;
    if (unlink(path.c_str()) != 0 && errno != ENOENT) {
      status = ErrnoStatus("remove", path, errno);
    } else {
      superfluous.erase(superfluous.begin());
    }
  }
  MutexLock lock(&mutex_);
  segments_.merge(superfluous);
  // If no segment with records of the failed flush remains, new records are
  // accepted again. Otherwise they are accepted after the next save. It makes
  // these segments superfluous, because no records are added until then.
  if (segments_.empty() || segments_.begin()->first > last_) {
    failed_ = absl::OkStatus();
  }
  return status;
}

}  // namespace tfswitch
