// Writes a row file (serving/row_format.h), row by row, in bounded memory: some
// 20 bytes per key, and 16 more in Finish(). Where a row lies is known when all
// keys are, so until then rows are in a file without a name beside the new one,
// or in memory if they are few or the new file is in memory. Then they are read
// here and there: it goes much faster if the page cache has room for them.

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

// The facts that tell a file from a damaged one.
struct RowFileInfo {
  int64_t bytes = 0;
  int64_t num_rows = 0;
  int64_t num_removed = 0;
  uint64_t header_checksum = 0;  // The header has the others.

  friend bool operator==(const RowFileInfo& a, const RowFileInfo& b) {
    return a.bytes == b.bytes && a.num_rows == b.num_rows &&
           a.num_removed == b.num_removed &&
           a.header_checksum == b.header_checksum;
  }
};

// Create, Add() and Remove() in any order, Finish(). The last call for a key
// counts. Without Finish() there is no file.
//
// Not thread-safe.
class RowFileWriter {
 public:
  // Writes to `path`, which is replaced.
  static absl::StatusOr<std::unique_ptr<RowFileWriter>> Create(
      const std::string& path, const RowFileKind& kind);
  // Writes to an empty file that is open; the caller keeps the descriptor.
  static std::unique_ptr<RowFileWriter> WriteTo(int fd, const std::string& path,
                                                const RowFileKind& kind);
  ~RowFileWriter();

  // Makes later calls of Add() skip each row for which `is_wanted` returns
  // false. It gets the key and the row's bytes as the file would have them.
  void LeaveOut(std::function<bool(Key, const char*)> is_wanted) {
    is_wanted_ = std::move(is_wanted);
  }

  // Makes room for so many keys.
  void Reserve(size_t num_keys);

  // InvalidArgument if `embeddings` are not keys.size() x dim, or not finite
  // and the format is int8.
  absl::Status Add(absl::Span<const Key> keys,
                   absl::Span<const float> embeddings);
  // A row as it lies in another file of this format and dim.
  absl::Status AddEncoded(Key key, const char* row);
  void Remove(absl::Span<const Key> keys);

  // Flushes the file to the disk. The same rows give the same file, whatever
  // their order.
  absl::StatusOr<RowFileInfo> Finish();

 private:
  class BlockFile;
  class Spool;
  struct Places;
  RowFileWriter(std::unique_ptr<BlockFile> file, const RowFileKind& kind);
  absl::Status CheckRoom(size_t num_keys) const;
  // Gives each key a slot.
  absl::StatusOr<Places> FindPlaces();
  // Also sets the bits of slots that are used, and of those without a row.
  absl::Status WriteRecords(const Places& places, const char* rows,
                            std::vector<uint64_t>* used,
                            std::vector<uint64_t>* removed);

  const RowFileKind kind_;
  const size_t row_bytes_;
  std::unique_ptr<BlockFile> file_;
  std::unique_ptr<Spool> spool_;
  bool is_finished_ = false;
  std::function<bool(Key, const char*)> is_wanted_;  // Empty: all are.
  // The calls, in order: for a row its number in the spool, or kRemoved.
  std::vector<Key> keys_;
  std::vector<uint32_t> rows_;
  uint32_t num_spooled_ = 0;
  std::vector<char> row_;
  absl::Status status_;  // The status of the writes so far.
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FILE_WRITER_H_
