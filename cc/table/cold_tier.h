// The rows of one table that are on disk: its segments from the oldest to the
// newest, reading them, and merging them.

#ifndef TFSWITCH_CC_TABLE_COLD_TIER_H_
#define TFSWITCH_CC_TABLE_COLD_TIER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/batch_reads.h"
#include "cc/base/files.h"
#include "cc/base/hash.h"
#include "cc/base/mutex.h"
#include "cc/table/batch_kernels.h"
#include "cc/table/cold_segment.h"

namespace tfswitch {

// The folder of a process for rows that its tables move to disk.
//
// Thread-safe.
class ColdFolder {
 public:
  // Makes the folder if it is missing, and deletes the files that an earlier
  // process left there. Aborted if another process uses the folder, or the
  // error of a test file that cannot be written.
  static absl::StatusOr<std::shared_ptr<ColdFolder>> Open(
      const std::string& path);

  const std::string& path() const { return path_; }
  // The path of a new file.
  std::string NextFile();
  BatchReads& reads() { return reads_; }

 private:
  ColdFolder(std::string path, std::unique_ptr<FolderLock> lock);

  const std::string path_;
  const std::unique_ptr<FolderLock> lock_;
  std::atomic<uint64_t> num_files_{0};
  BatchReads reads_;
};

using ColdSegments = std::vector<std::shared_ptr<ColdSegment>>;

// A record that was live when it was found.
struct ColdHit {
  size_t i;  // The index of its key, if a search has found it.
  ColdSegment* segment;
  uint64_t row;
  const char* record;
};

// The result of ColdTier::Find(). Owns the memory of the records, and keeps
// the segments.
struct ColdBatch {
  std::vector<ColdHit> hits;
  std::shared_ptr<const ColdSegments> segments;
  std::vector<PageBuffer> buffers;
};

// The live records of some segments at one moment. They can be read later,
// because a segment's records do not change.
struct ColdRange {
  struct Part {
    std::shared_ptr<ColdSegment> segment;
    uint64_t begin = 0;  // Blocks.
    uint64_t end = 0;
    // The live bits. The first word has the bit of the first row.
    std::vector<uint64_t> live;
  };
  // The range has records of these places only.
  ColdPlace begin = 0;
  ColdPlace end = 0;
  std::vector<Part> parts;
};

// A segment that has been written from others, before their rows move.
struct ColdMerge {
  struct Source {
    std::shared_ptr<ColdSegment> segment;
    std::vector<uint64_t> live;  // Its live rows when they were copied.
    uint64_t next = 0;           // The row to begin the next search at.
  };
  std::vector<Source> sources;
  // Null if the sources had no live rows.
  std::shared_ptr<ColdSegment> target;
  // The source of each row of the target.
  std::vector<uint8_t> origins;
  // The rows [begins[s], begins[s + 1]) of the target are in stripe s.
  std::array<uint64_t, kNumStripes + 1> begins = {};
};

// Thread-safe.
class ColdTier {
 public:
  // place_of(key) gives the order of records.
  ColdTier(std::shared_ptr<ColdFolder> folder, const ColdFormat& format,
           std::function<ColdPlace(Key)> place_of)
      : folder_(std::move(folder)),
        format_(format),
        place_of_(std::move(place_of)),
        segments_(std::make_shared<ColdSegments>()) {}

  const ColdFormat& format() const { return format_; }
  std::shared_ptr<const ColdSegments> segments() const {
    MutexLock lock(&mutex_);
    return segments_;
  }
  int64_t file_bytes() const;
  int64_t memory_bytes() const;
  int64_t written_bytes() const { return written_bytes_; }
  int64_t num_reads() const { return num_reads_; }

  // Returns those i of `chosen` for which keys[i] may have a row on disk: all
  // that have one, and a few others.
  std::vector<uint16_t> FindCandidates(absl::Span<const Key> keys,
                                       absl::Span<const uint16_t> chosen) const;
  // Reads the live records of keys[i] for each i of `chosen`. A row that moves
  // meanwhile may be missing.
  absl::Status Find(absl::Span<const Key> keys,
                    absl::Span<const uint16_t> chosen, ColdBatch* batch) const;

  // Notes which records with places [begin, end) are live, except in segments
  // whose stamps are all below `min_stamp`. REQUIRES: the mutex of the places'
  // stripe is held.
  ColdRange Collect(ColdPlace begin, ColdPlace end, uint32_t min_stamp) const;
  // Calls visit() for each record of the range.
  absl::Status Visit(
      const ColdRange& range,
      absl::FunctionRef<absl::Status(const ColdHit& hit)> visit) const;

  absl::StatusOr<std::unique_ptr<ColdSegmentWriter>> NewSegment(
      uint64_t max_rows) const;
  // Adds a new segment. Its rows become live afterwards.
  void Add(std::shared_ptr<ColdSegment> segment);

  // Merges several segments of similar size, or rewrites one with few live
  // rows: writes the file, and moves no rows yet. Null if there is nothing to
  // do. Only one thread at a time may merge. Cancelled soon after `stops` is
  // set.
  absl::StatusOr<std::unique_ptr<ColdMerge>> WriteMerge(
      const std::atomic<bool>& stops) const;
  // These begin and end the move of rows from the sources to the target.
  void BeginMove(const ColdMerge& merge);
  // REQUIRES: called for each stripe, in this order, with its mutex held.
  static void MoveStripe(int stripe, ColdMerge* merge);
  void EndMove(const ColdMerge& merge);

 private:
  // The run of segments to merge; may be empty.
  ColdSegments ChooseRun() const;

  const std::shared_ptr<ColdFolder> folder_;
  const ColdFormat format_;
  const std::function<ColdPlace(Key)> place_of_;
  mutable std::atomic<int64_t> written_bytes_{0};
  mutable std::atomic<int64_t> num_reads_{0};
  // The memory of a merge that is being written.
  mutable std::atomic<int64_t> merge_bytes_{0};
  mutable Mutex mutex_;
  // Replaced by a new list at each change.
  std::shared_ptr<const ColdSegments> segments_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_COLD_TIER_H_
