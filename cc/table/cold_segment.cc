#include "cc/table/cold_segment.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cc/base/checksum.h"
#include "cc/base/memory_region.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr size_t kPageBytes = 4096;
constexpr size_t kChecksumBytes = sizeof(uint64_t);
constexpr size_t kWriteBytes = size_t{1} << 20;

// A filter is made of lines. Each key sets kBitsPerKey bits of one line, so a
// search reads one cache line (Putze, Sanders and Singler, "Cache-, Hash- and
// Space-Efficient Bloom Filters", 2007).
constexpr uint64_t kWordsPerLine = 8;
constexpr uint64_t kFilterBitsPerRow = 10;
constexpr int kBitsPerKey = 6;

uint64_t LineOf(uint64_t hash, uint64_t num_words) {
  const auto line =
      static_cast<unsigned __int128>(hash) * (num_words / kWordsPerLine) >> 64;
  return static_cast<uint64_t>(line) * kWordsPerLine;
}

// Calls visit(word, mask) for each bit of a key, until it returns false.
template <typename Visit>
bool ForEachBit(uint64_t hash, const Visit& visit) {
  // Other bits of the hash than those that determine the line.
  uint64_t bits = hash * 0x9e3779b97f4a7c15u;
  for (int i = 0; i < kBitsPerKey; ++i, bits >>= 9) {
    if (!visit(bits >> 6 & (kWordsPerLine - 1), uint64_t{1} << (bits & 63))) {
      return false;
    }
  }
  return true;
}

// Includes the number of the block, so that a block in the place of another one
// is found.
uint64_t ChecksumOf(const char* block, size_t block_bytes, uint64_t number) {
  return Checksum(block, block_bytes - kChecksumBytes) + number;
}

// Other codes mean that a row, a table or a save is missing or damaged.
absl::Status DiskError(const absl::Status& status) {
  return status.ok() || absl::IsResourceExhausted(status)
             ? status
             : absl::InternalError(status.message());
}

// Turns O_DIRECT off. False if it is off already.
bool EndDirect(int fd) {
  const int flags = fcntl(fd, F_GETFL);
  return flags >= 0 && (flags & O_DIRECT) != 0 &&
         fcntl(fd, F_SETFL, flags & ~O_DIRECT) == 0;
}

}  // namespace

ColdFormat::ColdFormat(int words, int statistics)
    : num_words(static_cast<size_t>(words)),
      record_bytes(kHeaderBytes +
                   static_cast<size_t>(words + statistics) * sizeof(float)),
      rows_per_block(
          std::max<size_t>(1, (kPageBytes - kChecksumBytes) / record_bytes)),
      block_bytes(RoundUpTo(rows_per_block * record_bytes + kChecksumBytes,
                            kPageBytes)) {}

Key ColdFormat::KeyOf(const char* record) {
  Key key;
  std::memcpy(&key, record, sizeof(key));
  return key;
}

uint32_t ColdFormat::StampOf(const char* record) {
  uint32_t stamp;
  std::memcpy(&stamp, record + sizeof(Key), sizeof(stamp));
  return stamp;
}

void ColdFormat::SetHeader(Key key, uint32_t stamp, char* record) {
  std::memcpy(record, &key, sizeof(key));
  std::memcpy(record + sizeof(key), &stamp, sizeof(stamp));
}

ColdSegment::~ColdSegment() {
  close(fd_);
  unlink(path_.c_str());
}

size_t ColdSegment::memory_bytes() const {
  return sizeof(*this) + first_places_.capacity() * sizeof(ColdPlace) +
         (filter_.capacity() + live_.size()) * sizeof(uint64_t);
}

bool ColdSegment::MayContain(Key key) const {
  const uint64_t hash = HashKey(key);
  const uint64_t* const line = &filter_[LineOf(hash, filter_.size())];
  return ForEachBit(hash, [line](uint64_t word, uint64_t mask) {
    return (line[word] & mask) != 0;
  });
}

void ColdSegment::Prefetch(Key key) const {
  __builtin_prefetch(&filter_[LineOf(HashKey(key), filter_.size())]);
}

std::pair<uint64_t, uint64_t> ColdSegment::BlocksOf(ColdPlace begin,
                                                    ColdPlace end) const {
  const auto all = first_places_.begin();
  // Records with the first place of a block may begin in the block before.
  const auto from = std::lower_bound(all, first_places_.end(), begin);
  const auto to = std::lower_bound(from, first_places_.end(), end);
  return {static_cast<uint64_t>(from - all) - (from == all ? 0 : 1),
          static_cast<uint64_t>(to - all)};
}

absl::Status ColdSegment::ReadBlocks(uint64_t begin, uint64_t end,
                                     char* buffer) const {
  TFSWITCH_RETURN_IF_ERROR(Read(begin, end, buffer));
  return Check(begin, end, buffer);
}

FileRead ColdSegment::ReadOf(uint64_t block, char* buffer) const {
  return {fd_, block * format_.block_bytes,
          static_cast<uint32_t>(format_.block_bytes), buffer};
}

absl::Status ColdSegment::Read(uint64_t begin, uint64_t end,
                               char* buffer) const {
  const size_t size = (end - begin) * format_.block_bytes;
  for (size_t done = 0; done < size;) {
    const ssize_t got =
        pread(fd_, buffer + done, size - done,
              static_cast<off_t>(begin * format_.block_bytes + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EINVAL && EndDirect(fd_)) continue;
    if (got < 0) return DiskError(ErrnoStatus("read", path_, errno));
    if (got == 0) {
      return absl::InternalError(
          absl::StrCat("'", path_, "' is shorter than it was written"));
    }
    done += static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

absl::Status ColdSegment::Check(uint64_t begin, uint64_t end,
                                const char* buffer) const {
  for (uint64_t block = begin; block < end; ++block) {
    const char* const bytes = buffer + (block - begin) * format_.block_bytes;
    uint64_t sum;
    std::memcpy(&sum, bytes + format_.block_bytes - kChecksumBytes,
                sizeof(sum));
    if (sum == ChecksumOf(bytes, format_.block_bytes, block)) continue;
    is_damaged_ = true;
    const uint64_t row = block * format_.rows_per_block;
    return absl::InternalError(absl::StrCat(
        "'", path_, "': rows ", row, " to ", row + RowsInBlock(block) - 1,
        " are damaged on the disk. Start the process again with a folder on "
        "another disk, and restore the newest checkpoint"));
  }
  return absl::OkStatus();
}

uint64_t ColdSegment::RowsInBlock(uint64_t block) const {
  return std::min<uint64_t>(format_.rows_per_block,
                            num_rows_ - block * format_.rows_per_block);
}

void ColdSegment::SetLive(uint64_t row) {
  live_[row / 64].fetch_or(uint64_t{1} << row % 64, std::memory_order_release);
  ++num_live_;
}

void ColdSegment::EndLife(uint64_t row) {
  live_[row / 64].fetch_and(~(uint64_t{1} << row % 64),
                            std::memory_order_release);
  --num_live_;
}

std::vector<uint64_t> ColdSegment::LiveBits(uint64_t begin,
                                            uint64_t end) const {
  std::vector<uint64_t> bits;
  bits.reserve(end - begin);
  for (uint64_t i = begin; i < end; ++i) {
    bits.push_back(live_[i].load(std::memory_order_acquire));
  }
  return bits;
}

absl::StatusOr<std::unique_ptr<ColdSegmentWriter>> ColdSegmentWriter::Create(
    const ColdFormat& format, const std::string& path, uint64_t max_rows) {
  // Reads and writes bypass the page cache, which would take the memory that
  // rows on disk save.
  constexpr int kFlags = O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC;
  int fd = open(path.c_str(), kFlags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) {  // For example tmpfs.
    unlink(path.c_str());
    fd = open(path.c_str(), kFlags, 0600);
  }
  if (fd < 0) return DiskError(ErrnoStatus("create", path, errno));
  std::unique_ptr<ColdSegmentWriter> writer(new ColdSegmentWriter(
      std::shared_ptr<ColdSegment>(new ColdSegment(format, path, fd))));
  if (!writer->buffer_.Reserve(RoundUpTo(
          std::max(kWriteBytes, format.block_bytes), format.block_bytes))) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory to write '", path, "'"));
  }
  const uint64_t line_bits = kWordsPerLine * 64;
  writer->segment_->filter_.resize(
      (max_rows * kFilterBitsPerRow / line_bits + 1) * kWordsPerLine);
  return writer;
}

absl::Status ColdSegmentWriter::Add(ColdPlace place, const char* record) {
  ColdSegment& segment = *segment_;
  const ColdFormat& format = segment.format_;
  char* const block = buffer_.data() + num_buffered_ * format.block_bytes;
  if (rows_in_block_ == 0) {
    std::memset(block, 0, format.block_bytes);
    segment.first_places_.push_back(place);
  }
  std::memcpy(block + rows_in_block_ * format.record_bytes, record,
              format.record_bytes);
  ++segment.num_rows_;
  segment.max_stamp_ =
      std::max(segment.max_stamp_, ColdFormat::StampOf(record));
  const uint64_t hash = HashKey(ColdFormat::KeyOf(record));
  uint64_t* const line = &segment.filter_[LineOf(hash, segment.filter_.size())];
  ForEachBit(hash, [line](uint64_t word, uint64_t mask) {
    line[word] |= mask;
    return true;
  });
  if (++rows_in_block_ < format.rows_per_block) return absl::OkStatus();
  return EndBlock();
}

absl::Status ColdSegmentWriter::EndBlock() {
  const size_t block_bytes = segment_->format_.block_bytes;
  char* const block = buffer_.data() + num_buffered_ * block_bytes;
  const uint64_t sum =
      ChecksumOf(block, block_bytes, segment_->first_places_.size() - 1);
  std::memcpy(block + block_bytes - kChecksumBytes, &sum, sizeof(sum));
  rows_in_block_ = 0;
  ++num_buffered_;
  return (num_buffered_ + 1) * block_bytes <= buffer_.capacity()
             ? absl::OkStatus()
             : Flush();
}

absl::Status ColdSegmentWriter::Flush() {
  const size_t size = num_buffered_ * segment_->format_.block_bytes;
  num_buffered_ = 0;
  // Some file systems accept O_DIRECT and fail at the first write.
  const ssize_t written = write(segment_->fd_, buffer_.data(), size);
  if (written < 0 && errno == EINVAL) EndDirect(segment_->fd_);
  const size_t done = static_cast<size_t>(std::max<ssize_t>(0, written));
  return DiskError(WriteAll(segment_->fd_, segment_->path_,
                            buffer_.data() + done, size - done));
}

absl::StatusOr<std::shared_ptr<ColdSegment>> ColdSegmentWriter::Finish() {
  if (rows_in_block_ > 0) TFSWITCH_RETURN_IF_ERROR(EndBlock());
  TFSWITCH_RETURN_IF_ERROR(Flush());
  segment_->first_places_.shrink_to_fit();
  segment_->live_ =
      std::vector<std::atomic<uint64_t>>(segment_->num_rows_ / 64 + 1);
  return std::move(segment_);
}

}  // namespace tfswitch
