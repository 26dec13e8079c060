// Reads and writes files of named arrays in the safetensors format
// (https://github.com/huggingface/safetensors). A file has 8 bytes with the
// length of the header, a JSON header, and the little-endian arrays.

#ifndef TFSWITCH_CC_CHECKPOINT_SAFETENSORS_H_
#define TFSWITCH_CC_CHECKPOINT_SAFETENSORS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "cc/base/files.h"

namespace tfswitch::checkpoint {

// An array to write. The caller keeps the bytes alive; they are not copied.
struct TensorToWrite {
  std::string name;
  std::string dtype;  // "I64", "F32" or "U8".
  std::vector<int64_t> shape;
  absl::Span<const char> bytes;
};

struct WrittenFile {
  int64_t bytes = 0;
  uint32_t crc32 = 0;  // The CRC-32 of zlib over the whole file.
};

// Writes a file under a temporary name in the same folder, flushes it to disk,
// and renames it to `path`. So the file at `path` is complete or does not
// exist.
absl::StatusOr<WrittenFile> WriteSafetensors(
    const std::string& path, absl::Span<const TensorToWrite> tensors,
    const std::map<std::string, std::string>& metadata);

// A file read into memory. Immutable after ReadSafetensors.
class SafetensorsFile {
 public:
  // The bytes of a tensor of `dtype` "I64", "F32" or "U8", aligned for its
  // elements. DataLoss, naming the file and the tensor, if there is no such
  // tensor, or if its dtype or shape is a different one.
  absl::StatusOr<absl::Span<const char>> Get(
      const std::string& name, const std::string& dtype,
      const std::vector<int64_t>& shape) const;

 private:
  friend absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string&,
                                                         int64_t, uint32_t,
                                                         SafetensorsFile);
  struct Tensor {
    std::string dtype;
    std::vector<int64_t> shape;
    uint64_t begin = 0;  // The offset in the bytes after the header.
    uint64_t end = 0;
  };

  std::string path_;
  PageBuffer buffer_;
  const char* data_ = nullptr;  // The bytes after the header.
  std::map<std::string, Tensor> tensors_;
};

// Reads the metadata that WriteSafetensors() was given. DataLoss, naming the
// file, if the file is missing, does not have `expected_bytes`, or has a
// malformed header.
absl::StatusOr<std::map<std::string, std::string>> ReadMetadata(
    const std::string& path, int64_t expected_bytes);

// Reads a file. DataLoss, naming the file and both values, if the file is
// missing, does not have `expected_bytes`, is malformed, or has a different
// checksum. ResourceExhausted if memory is too short for the arrays of a
// well-formed header. Reuses the memory of `former`, because new memory takes
// longer to get than the file takes to read.
absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path,
                                                int64_t expected_bytes,
                                                uint32_t expected_crc32,
                                                SafetensorsFile former = {});

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_SAFETENSORS_H_
