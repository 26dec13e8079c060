// Reads TFRecord files.

#ifndef CC_PREDICTOR_RECORD_READER_H_
#define CC_PREDICTOR_RECORD_READER_H_

#include <cstdint>
#include <istream>
#include <memory>
#include <string>
#include <string_view>

#include "tfswitch/status.h"

namespace tfswitch {

// Errors name the record, but not the file. Not thread-safe.
class RecordReader {
 public:
  // A file whose name ends in ".gz" is decompressed in memory.
  // ResourceExhausted if the result is larger than this.
  static Result<RecordReader> Open(const std::string& path,
                                   uint64_t max_inflated_bytes = uint64_t{4}
                                                                 << 30);

  // Reads the next record. OutOfRange at the end of the file, DataLoss if the
  // record is damaged.
  Result<std::string> Read();

 private:
  RecordReader() = default;

  bool IsAtEnd();
  // Reads up to `size` bytes. Returns fewer only at the end of the file, or if
  // the file is damaged.
  std::string ReadBytes(uint64_t size);
  // Reads `size` bytes, and the checksum that follows them.
  Result<std::string> ReadChecked(uint64_t size);

  std::unique_ptr<std::istream> file_;
  uint64_t offset_ = 0;  // The place of the next byte.
  uint64_t record_offset_ = 0;
};

// CRC-32C, as TFRecord files have it.
uint32_t MaskedCrc32c(std::string_view bytes);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_RECORD_READER_H_
