// Reads row files. They are mapped, so that all processes share their memory.
// Opening one reads only its header.

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
#include "cc/base/files.h"
#include "cc/base/hash.h"
#include "cc/base/json.h"
#include "cc/serving/file_watch.h"
#include "cc/serving/key_filter.h"
#include "cc/serving/perfect_hash.h"
#include "cc/serving/row_decode.h"
#include "cc/serving/row_file_writer.h"
#include "cc/serving/row_format.h"

namespace tfswitch {

inline constexpr char kRowFileFormat[] = "tfswitch-rows";
inline constexpr int kRowFileVersion = 2;
inline constexpr size_t kRowFileHeaderBytes = 4096;

// Opening verifies the header and the list of checksums. Each block after the
// header is verified when it is first used, or all of them by Verify().
//
// Thread-safe. Immutable, except for the state of verification and of the
// watch. If Open() has mapped the file, another process may change its bytes
// even during a read.
class RowFile {
 public:
  // NotFound if there is no such file, DataLoss if it is not the file of
  // `expected`, FailedPrecondition if it has a newer version. Errors name the
  // file.
  static absl::StatusOr<std::shared_ptr<const RowFile>> Open(
      const std::string& path, const RowFileInfo& expected);
  // Maps an open file. The caller may close it, and nobody may change it.
  static absl::StatusOr<std::shared_ptr<const RowFile>> Map(
      int fd, const std::string& path, const RowFileInfo& expected);
  // Copies an open file to memory of this process; see MappedFile::Copy().
  static absl::StatusOr<std::shared_ptr<const RowFile>> Copy(
      int fd, const std::string& path, const RowFileInfo& expected);

  const std::string& path() const { return path_; }
  const RowFileKind& kind() const { return kind_; }
  int64_t num_rows() const { return info_.num_rows; }
  int64_t num_removed() const { return info_.num_removed; }
  const RowFileInfo& info() const { return info_; }
  const FileStamp& stamp() const { return file_->stamp(); }

  // DataLoss if the file has been changed or is about to be. Then nothing that
  // was read from the file may be used. Call it before and after reading.
  absl::Status CheckUnchanged() const {
    return watch_ == nullptr || !watch_->has_changed() ? absl::OkStatus()
                                                       : Changed();
  }
  // Like CheckUnchanged(), but first looks at the file itself, so that it
  // notices every change up to now.
  absl::Status CheckUnchangedNow() const {
    if (watch_ != nullptr) watch_->Look();
    return CheckUnchanged();
  }
  // Whether another process has the file open for writing; false if unknown.
  bool has_writer() const { return watch_ != nullptr && watch_->has_writer(); }

  // Reads the whole file and compares it with its checksums. DataLoss, naming
  // the file and the position, if they differ. Cancelled as soon as
  // is_cancelled() returns true.
  absl::Status Verify(
      const std::function<bool()>& is_cancelled = nullptr) const;
  // Whether all blocks have been verified, by Verify() or one by one.
  bool is_verified() const {
    return num_unverified_.load(std::memory_order_acquire) == 0;
  }

  // The result of a search for a key.
  struct Found {
    bool is_here = false;
    // The bytes of the row; null if the key has lost its row, or is not in this
    // file.
    const char* row = nullptr;
    uint64_t slot = 0;  // Set if it is here.
  };
  // REQUIRES: is_verified().
  Found Find(Key key) const;
  // Verifies the bytes that it reads.
  absl::StatusOr<Found> FindVerified(Key key) const;

  // Where the parts of the file are in memory, and the steps of a search, in
  // their order. The caller prefetches and verifies the bytes. A search never
  // reads outside the file, whatever the file contains.
  struct View {
    PerfectHash hash;
    uint64_t num_slots = 0;  // If 0, nothing else may be used.
    size_t record_bytes = 0;
    const uint8_t* pilots = nullptr;
    const char* records = nullptr;
    const uint64_t* removed = nullptr;  // Null if no key is removed.

    const uint8_t* Pilot(uint64_t point) const {
      return pilots + hash.PilotOf(point);
    }
    uint64_t Slot(uint64_t point) const {
      return hash.SlotOf(point, *Pilot(point));
    }
    const char* Record(uint64_t slot) const {
      return records + slot * record_bytes;
    }
    bool IsRemoved(uint64_t slot) const {
      return removed != nullptr && HasBit(removed, slot);
    }
  };
  const View& view() const { return view_; }
  static Key KeyOf(const char* record) {
    Key key;
    __builtin_memcpy(&key, record, sizeof(key));
    return key;
  }
  static const char* RowOf(const char* record) { return record + sizeof(Key); }
  absl::Status VerifyPilot(uint64_t point) const {
    return VerifyBytes(view_.Pilot(point), 1);
  }
  // Verifies a record, and the bit that tells whether its row was removed.
  absl::Status VerifyRecord(uint64_t slot) const;

  RowDecoder decoder() const { return decoder_; }

  // Builds a filter with which searches skip most keys that are not in this
  // file. This helps if the file has only few of the keys that are searched.
  // REQUIRES: is_verified().
  void BuildFilter() const;
  // Null if there is no filter.
  const KeyFilter* filter() const {
    return filter_.load(std::memory_order_acquire);
  }

  // False if the filter shows that the key is not in this file.
  bool MayHave(Key key) const {
    const KeyFilter* const filter = this->filter();
    const uint64_t hash = HashKey(key);
    return filter == nullptr || KeyFilter::MayHave(*filter->Word(hash), hash);
  }

  // Calls visit(key, row) for all keys, with `row` as in Found.
  // REQUIRES: is_verified().
  absl::Status ForEachKey(
      const std::function<absl::Status(Key, const char*)>& visit) const;

 private:
  RowFile(std::unique_ptr<MappedFile> file, std::string path,
          const RowFileInfo& info);

  // If `watched_fd` is not -1, takes ownership of it and watches the file.
  static absl::StatusOr<std::shared_ptr<const RowFile>> Make(
      absl::StatusOr<std::unique_ptr<MappedFile>> mapped,
      const std::string& path, const RowFileInfo& expected,
      int watched_fd = -1);

  static bool HasBit(const uint64_t* words, uint64_t at) {
    return (words[at / 64] >> (at % 64) & 1) != 0;
  }
  // The number of 64-bit words in a bitmap of `num_slots`.
  static uint64_t NumWords(uint64_t num_slots) { return (num_slots + 63) / 64; }
  Found FoundIn(uint64_t slot, Key key) const;

  absl::StatusOr<Json> ParseHeader() const;
  absl::Status ReadHeader();
  absl::Status Damaged(absl::string_view why) const;
  absl::Status Changed() const;
  // Verifies the bytes [begin, begin + size), which are after the header.
  absl::Status VerifyBytes(const void* begin, size_t size) const;
  absl::Status VerifyBlock(size_t block) const;

  // Constant after Open().
  const std::unique_ptr<MappedFile> file_;
  std::unique_ptr<FileWatch> watch_;  // Null if nobody can change the bytes.
  const std::string path_;
  const RowFileInfo info_;
  RowFileKind kind_;
  RowDecoder decoder_ = nullptr;
  View view_;
  const char* blocks_ = nullptr;
  size_t blocks_bytes_ = 0;
  const uint64_t* checksums_ = nullptr;

  mutable std::atomic<size_t> num_unverified_{0};
  // One bit per block.
  mutable std::vector<std::atomic<uint64_t>> verified_;

  mutable std::once_flag build_filter_;
  mutable std::unique_ptr<const KeyFilter> filter_storage_;
  mutable std::atomic<const KeyFilter*> filter_{nullptr};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FILE_H_
