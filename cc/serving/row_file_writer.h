// Writes a row file (serving/row_format.h) row by row. Needs about 20 bytes of
// memory per key, and 16 more in Finish(). The position of a row is known only
// when all keys are known. Until then rows are kept in an unnamed file in the
// same folder, or in memory if they are few or the new file is in memory.
// Finish() then reads the rows in another order, which is much faster if they
// fit into the page cache.

#ifndef TFSWITCH_CC_SERVING_ROW_FILE_WRITER_H_
#define TFSWITCH_CC_SERVING_ROW_FILE_WRITER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/serving/row_format.h"

namespace tfswitch {

// The table of a file, and its format.
struct RowFileKind {
  std::string table;
  int dim = 0;
  RowFormat format = RowFormat::kFloat32;
  std::vector<float> default_row;  // dim floats.
};

// Identifies the intact file.
struct RowFileInfo {
  int64_t bytes = 0;
  int64_t num_rows = 0;
  int64_t num_removed = 0;
  uint64_t header_checksum = 0;  // The header has all other checksums.

  friend bool operator==(const RowFileInfo& a, const RowFileInfo& b) {
    return a.bytes == b.bytes && a.num_rows == b.num_rows &&
           a.num_removed == b.num_removed &&
           a.header_checksum == b.header_checksum;
  }
};

// Call Create(), then Add() and Remove() in any order, then Finish(). The last
// call for a key counts. Without Finish() no file is created.
//
// Not thread-safe.
class RowFileWriter {
 public:
  // Writes to `path`, and replaces a file that exists there.
  static absl::StatusOr<std::unique_ptr<RowFileWriter>> Create(
      const std::string& path, const RowFileKind& kind);
  // Writes to an open, empty file, which the caller closes.
  static std::unique_ptr<RowFileWriter> WriteTo(int fd, const std::string& path,
                                                const RowFileKind& kind);
  ~RowFileWriter();

  // From now on, Add() skips rows for which `is_wanted` returns false. Its
  // arguments are the key and the encoded row.
  void LeaveOut(std::function<bool(Key, const char*)> is_wanted) {
    is_wanted_ = std::move(is_wanted);
  }

  // Reserves memory for this many keys.
  void Reserve(size_t num_keys);

  // InvalidArgument if `embeddings` are not keys.size() x dim, or if the format
  // is int8 and they are not finite.
  absl::Status Add(absl::Span<const Key> keys,
                   absl::Span<const float> embeddings);
  // Adds an encoded row of another file of the same format and dim.
  absl::Status AddEncoded(Key key, const char* row);
  void Remove(absl::Span<const Key> keys);

  // Writes the file and flushes it to the disk. The order of the calls does not
  // matter: the same rows always give the same file.
  absl::StatusOr<RowFileInfo> Finish();

 private:
  class BlockFile;
  class Spool;
  struct Places;
  RowFileWriter(std::unique_ptr<BlockFile> file, const RowFileKind& kind);
  absl::Status CheckRoom(size_t num_keys) const;
  // Gives each key a slot.
  absl::StatusOr<Places> FindPlaces();
  // Writes the records. Sets the slot's bit in `used` for each slot with a key,
  // and in `removed` for each key whose row was removed.
  absl::Status WriteRecords(const Places& places, const char* rows,
                            std::vector<uint64_t>* used,
                            std::vector<uint64_t>* removed);
  // Returns the checksum of the header.
  absl::StatusOr<uint64_t> WriteHeader(std::string text);

  const RowFileKind kind_;
  const size_t row_bytes_;
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<Spool> spool_;
  bool is_finished_ = false;
  // The argument of LeaveOut(); may be empty.
  std::function<bool(Key, const char*)> is_wanted_;
  // The keys of all calls, in order. For each key, rows_ has the number of its
  // row in the spool, or kRemoved.
  std::vector<Key> keys_;
  std::vector<uint32_t> rows_;
  uint32_t num_spooled_ = 0;
  std::vector<char> row_;
  absl::Status status_;  // The status of the writes so far.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FILE_WRITER_H_
