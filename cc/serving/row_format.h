// How rows lie in a row file: the formats of a row, and the index.
//
//   | header, 4096 bytes | default_row | . | embeddings | . | buckets |
//   checksums |
//                        |<------------ blocks of 4096 bytes ------->|
//
// A row file is a safetensors file (https://github.com/huggingface/safetensors)
// that serves as it lies: mapped read-only, with the index in it.
//
//   embeddings   [rows, dim] or, for int8, [rows, 4 + dim]: a row's scale as
//                float32 and then its values
//   buckets      int64 [n, 8]: an index of 64-byte buckets as in table/bucket.h
//   default_row  float32 [dim]: what an id without a row reads as
//   checksums    uint64 [blocks]: XXH3 of each block; the header has theirs
//
// A file of changes also has ids that lost their rows: in the index, with
// kRemovedRow in place of the number of a row.

#ifndef TFSWITCH_CC_SERVING_ROW_FORMAT_H_
#define TFSWITCH_CC_SERVING_ROW_FORMAT_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/base/hash.h"

namespace tfswitch {

enum class RowFormat : uint8_t { kFloat32, kFloat16, kInt8 };

// "float32", "float16" or "int8".
absl::string_view NameOf(RowFormat format);
// What safetensors calls the elements of its rows: "F32", "F16" or "I8".
const char* SafetensorsDtypeOf(RowFormat format);
// InvalidArgument naming the formats there are.
absl::StatusOr<RowFormat> RowFormatOf(absl::string_view name);

// Bytes of one row.
size_t RowBytes(RowFormat format, int dim);

// Writes RowBytes() to `to`. float16 is the nearest one, and the largest finite
// one for what is larger. int8 is the nearest multiple of the row's scale,
// which is its largest absolute value / 127: its values must be finite.
void EncodeRow(RowFormat format, const float* embedding, int dim, char* to);

inline constexpr int kServedKeysPerBucket = 5;

struct alignas(64) ServedBucket {
  Key keys[kServedKeysPerBucket];
  uint32_t rows[kServedKeysPerBucket];
  uint32_t meta;  // How many are used, and kServedOverflow.
};
static_assert(sizeof(ServedBucket) == 64, "a bucket is one cache line");

inline constexpr uint32_t kServedUsedMask = 0x7;
// A key that belongs here or before is in a bucket behind this one.
inline constexpr uint32_t kServedOverflow = 1u << 3;

inline constexpr uint32_t kRemovedRow = ~uint32_t{0};
inline constexpr int64_t kMaxRowsPerFile = int64_t{kRemovedRow} - 1;

// The bucket where the search for a key begins; those that follow take what
// does not fit. `num_homes` buckets can be such a one.
inline uint64_t ServedHome(uint64_t hash, uint64_t num_homes) {
  return static_cast<uint64_t>(
      (static_cast<unsigned __int128>(hash) * num_homes) >> 64);
}

inline constexpr size_t kRowFileBlockBytes = 4096;

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FORMAT_H_
