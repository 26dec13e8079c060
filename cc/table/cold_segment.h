// A file of rows that a table has moved from memory to disk, and, in memory,
// what a search for them needs: a filter of 10 bits a row, the first place of
// each block, and a bit that tells whether the row is still here.
//
//   file:    block 0 | block 1 | ...             whole pages
//   block:   record | record | ... | 0 | sum     the checksum is in the last 8
//   B record:  key (8 B) | stamp (4 B) | words of the row | statistics
//
// Records are sorted by the places of their keys in the table's index, so a
// search reads one block, seldom two. The file has the bits of the row as it
// was in memory.
//
// The file is scratch: it belongs to one table of one process, and is deleted
// when that table ends. Checkpoints and the push log have the same rows.

#ifndef TFSWITCH_CC_TABLE_COLD_SEGMENT_H_
#define TFSWITCH_CC_TABLE_COLD_SEGMENT_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/base/batch_reads.h"
#include "cc/base/files.h"
#include "cc/base/hash.h"

namespace tfswitch {

// The place of a key in the order of records: its stripe, and its position
// there (table/bucket.h).
using ColdPlace = uint64_t;

// The sizes of records and blocks. Plain data.
struct ColdFormat {
  ColdFormat(int num_words, int num_statistics);

  static Key KeyOf(const char* record);
  static uint32_t StampOf(const char* record);
  static const float* WordsOf(const char* record) {
    return reinterpret_cast<const float*>(record + kHeaderBytes);
  }
  const float* StatisticsOf(const char* record) const {
    return WordsOf(record) + num_words;
  }
  static void SetHeader(Key key, uint32_t stamp, char* record);
  static float* MutableWordsOf(char* record) {
    return reinterpret_cast<float*>(record + kHeaderBytes);
  }

  static constexpr size_t kHeaderBytes = sizeof(Key) + sizeof(uint32_t);

  size_t num_words;
  size_t record_bytes;
  size_t rows_per_block;
  size_t block_bytes;  // A multiple of 4 KiB.
};

// Thread-safe.
class ColdSegment {
 public:
  ~ColdSegment();
  ColdSegment(const ColdSegment&) = delete;
  ColdSegment& operator=(const ColdSegment&) = delete;

  const ColdFormat& format() const { return format_; }
  uint64_t num_rows() const { return num_rows_; }
  uint64_t num_blocks() const { return first_places_.size(); }
  // The highest stamp of all its rows (table/change_log.h).
  uint32_t max_stamp() const { return max_stamp_; }
  uint64_t file_bytes() const { return num_blocks() * format_.block_bytes; }
  size_t memory_bytes() const;

  // Whether it may have a row of `key`: true for each row that it has, live or
  // not, and for one in a hundred other keys.
  bool MayContain(Key key) const;
  void Prefetch(Key key) const;  // For MayContain().
  // The blocks [first, second) that have all records of places [begin, end).
  std::pair<uint64_t, uint64_t> BlocksOf(ColdPlace begin, ColdPlace end) const;
  // Reads whole blocks. `buffer` is aligned to pages and has room for them.
  // Internal that names the file and the rows if a block is damaged.
  absl::Status ReadBlocks(uint64_t begin, uint64_t end, char* buffer) const;
  // The same in two parts, so that many reads can run at the same time.
  FileRead ReadOf(uint64_t block, char* buffer) const;
  absl::Status Check(uint64_t begin, uint64_t end, const char* buffer) const;
  uint64_t RowsInBlock(uint64_t block) const;
  // Whether a block did not have what was written.
  bool is_damaged() const { return is_damaged_; }

  // A live row is in this segment and nowhere else. Changes only while the
  // mutex of the row's stripe is held.
  bool IsLive(uint64_t row) const {
    return (live_[row / 64].load(std::memory_order_acquire) >> row % 64 & 1) !=
           0;
  }
  void SetLive(uint64_t row);
  void EndLife(uint64_t row);
  int64_t num_live() const { return num_live_; }
  // The bits of rows [64 * begin, 64 * end).
  std::vector<uint64_t> LiveBits(uint64_t begin, uint64_t end) const;

 private:
  friend class ColdSegmentWriter;
  absl::Status Read(uint64_t begin, uint64_t end, char* buffer) const;
  ColdSegment(const ColdFormat& format, std::string path, int fd)
      : format_(format), path_(std::move(path)), fd_(fd) {}

  const ColdFormat format_;
  const std::string path_;
  const int fd_;
  // These are constant once the segment has been written.
  uint64_t num_rows_ = 0;
  uint32_t max_stamp_ = 0;
  // The first place of each block.
  std::vector<ColdPlace> first_places_;
  std::vector<uint64_t> filter_;  // Lines of 64 bytes.
  std::vector<std::atomic<uint64_t>> live_;
  std::atomic<int64_t> num_live_{0};
  mutable std::atomic<bool> is_damaged_{false};
};

// Thread-compatible.
class ColdSegmentWriter {
 public:
  // Makes a file for at most `max_rows` rows.
  static absl::StatusOr<std::unique_ptr<ColdSegmentWriter>> Create(
      const ColdFormat& format, const std::string& path, uint64_t max_rows);

  // Adds a record, which is not live yet. Places never decrease. After an
  // error, the writer can only be destroyed, and the file is deleted.
  absl::Status Add(ColdPlace place, const char* record);
  absl::StatusOr<std::shared_ptr<ColdSegment>> Finish();

 private:
  explicit ColdSegmentWriter(std::shared_ptr<ColdSegment> segment)
      : segment_(std::move(segment)) {}

  absl::Status EndBlock();
  absl::Status Flush();

  std::shared_ptr<ColdSegment> segment_;
  PageBuffer buffer_;
  size_t num_buffered_ = 0;   // Whole blocks in the buffer.
  size_t rows_in_block_ = 0;  // In the block behind them.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_COLD_SEGMENT_H_
