// Row files as they are read: mapped, shared by all processes, and opened in
// the time that a header takes, whatever their size.

#ifndef TFSWITCH_CC_SERVING_ROW_FILE_H_
#define TFSWITCH_CC_SERVING_ROW_FILE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/files.h"
#include "cc/base/hash.h"
#include "cc/serving/key_filter.h"
#include "cc/serving/row_decode.h"
#include "cc/serving/row_file_writer.h"
#include "cc/serving/row_format.h"

namespace tfswitch {

inline constexpr char kRowFileFormat[] = "tfswitch-rows";
inline constexpr int kRowFileVersion = 1;
inline constexpr size_t kRowFileHeaderBytes = 4096;

// Header and checksums are verified when the file is opened, and each block of
// rows or index when it is first used, or all of them by Verify().
//
// Thread-safe. Immutable but for what it knows of its contents.
class RowFile {
 public:
  // NotFound if there is no such file, DataLoss if it is not the one that
  // `expected` is of, FailedPrecondition if it is of a newer version. Errors
  // name the file.
  static absl::StatusOr<std::shared_ptr<const RowFile>> Open(
      const std::string& path, const RowFileInfo& expected);
  // Of a file that is open, which the caller may close.
  static absl::StatusOr<std::shared_ptr<const RowFile>> Map(
      int fd, const std::string& path, const RowFileInfo& expected);

  const std::string& path() const { return path_; }
  const RowFileKind& kind() const { return kind_; }
  int64_t num_rows() const { return info_.num_rows; }
  int64_t num_removed() const { return info_.num_removed; }
  int64_t bytes() const { return info_.bytes; }
  const RowFileInfo& info() const { return info_; }
  const FileStamp& stamp() const { return file_->stamp(); }

  // Reads the whole file and compares it with its checksums. DataLoss naming
  // the file and the place; Cancelled, as soon as is_cancelled() says so.
  absl::Status Verify(
      const std::function<bool()>& is_cancelled = nullptr) const;
  // All blocks are, by Verify() or one by one.
  bool is_verified() const {
    return num_unverified_.load(std::memory_order_acquire) == 0;
  }

  // Parts of a search, in their order; prefetching is up to the caller. Nothing
  // that a file may hold leads to a read outside of it.
  const ServedBucket* Home(uint64_t hash) const {
    return buckets_ + ServedHome(hash, num_homes_);
  }
  // The row number of a key, kRemovedRow, or kNoRow.
  static constexpr int64_t kNoRow = -1;
  int64_t Search(const ServedBucket* home, Key key) const {
    for (const ServedBucket* bucket = home; bucket < end_buckets_; ++bucket) {
      const int64_t row = SearchBucket(*bucket, key);
      if (row != kGoOn) return row;
    }
    return kNoRow;
  }
  // Search() with each bucket verified before it is read.
  absl::StatusOr<int64_t> SearchVerified(const ServedBucket* home,
                                         Key key) const;
  // The bytes of a row. REQUIRES: IsRow(row).
  bool IsRow(int64_t row) const {
    return static_cast<uint64_t>(row) < static_cast<uint64_t>(num_embeddings_);
  }
  const char* Row(int64_t row) const {
    return rows_ + static_cast<size_t>(row) * row_bytes_;
  }
  size_t row_bytes() const { return row_bytes_; }
  absl::Status VerifyRow(int64_t row) const;
  // DataLoss: a number that IsRow() does not take.
  absl::Status BadRow(Key key, int64_t row) const;

  RowDecoder decoder() const { return decoder_; }

  // Has searches pass over most keys that are not here; for files that have few
  // of the keys that are asked for. REQUIRES: is_verified().
  void BuildFilter() const;
  // Null if there is none.
  const KeyFilter* filter() const {
    return filter_.load(std::memory_order_acquire);
  }

  // Calls visit(key, row), row as of Search(), for all keys.
  // REQUIRES: is_verified().
  absl::Status ForEachKey(
      const std::function<absl::Status(Key, int64_t)>& visit) const;

 private:
  RowFile(std::unique_ptr<MappedFile> file, std::string path,
          const RowFileInfo& info);

  static absl::StatusOr<std::shared_ptr<const RowFile>> Make(
      std::unique_ptr<MappedFile> mapped, const std::string& path,
      const RowFileInfo& expected);

  // As Search() in one bucket; kGoOn: look in the next one.
  static constexpr int64_t kGoOn = -2;
  static int64_t SearchBucket(const ServedBucket& bucket, Key key) {
    // Without a branch per key, which nothing could predict.
    uint32_t found = 0;
    for (uint32_t i = 0; i < kServedKeysPerBucket; ++i) {
      found |= static_cast<uint32_t>(bucket.keys[i] == key) << i;
    }
    found &= (1u << (bucket.meta & kServedUsedMask)) - 1;
    if (found != 0) return bucket.rows[__builtin_ctz(found)];
    return (bucket.meta & kServedOverflow) == 0 ? kNoRow : kGoOn;
  }

  absl::Status ReadHeader();
  absl::Status Damaged(absl::string_view why) const;
  // Of the bytes [begin, end) behind the header.
  absl::Status VerifyBytes(const void* begin, size_t size) const;
  absl::Status VerifyBlock(size_t block) const;

  // Constant after Open().
  const std::unique_ptr<MappedFile> file_;
  const std::string path_;
  const RowFileInfo info_;
  RowFileKind kind_;
  RowDecoder decoder_ = nullptr;
  size_t row_bytes_ = 0;
  int64_t num_embeddings_ = 0;
  const char* rows_ = nullptr;
  const ServedBucket* buckets_ = nullptr;
  const ServedBucket* end_buckets_ = nullptr;
  uint64_t num_homes_ = 0;
  const char* blocks_ = nullptr;
  size_t blocks_bytes_ = 0;
  const uint64_t* checksums_ = nullptr;

  mutable std::atomic<size_t> num_unverified_{0};
  // A bit per block.
  mutable std::vector<std::atomic<uint64_t>> verified_;

  mutable std::once_flag build_filter_;
  mutable std::unique_ptr<const KeyFilter> filter_storage_;
  mutable std::atomic<const KeyFilter*> filter_{nullptr};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FILE_H_
