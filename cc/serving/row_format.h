// The layout of a row file, and the formats of its rows.
//
//   | header, 4096 bytes | default_row | . | records | pilots | . | used |
//   removed | checksums |
//                        |<------------- blocks of 4096 bytes ------------>|
//
// A row file is a safetensors file
// (https://github.com/huggingface/safetensors). It is served without
// conversion: processes map it read-only, and it contains all data that a
// search needs.
//
//   default_row  float32 [dim]: the value of an id without a row
//   records      [slots, 8 + row bytes]: an id and its row, which for int8 is a
//                scale as float32 and then the values
//   pilots       for finding the slot of an id (serving/perfect_hash.h)
//   used         a bit for each slot that an id has, for other readers; empty
//                slots have an id of another slot, so that searches find
//                nothing there
//   removed      in a file of changes, a bit for each slot whose id lost its
//                row; else empty
//   checksums    uint64 [blocks]: XXH3 of each block; the header has the
//                checksum of this list
//
// An id and its row are adjacent, so that a search reads one place in memory
// instead of two.

#ifndef TFSWITCH_CC_SERVING_ROW_FORMAT_H_
#define TFSWITCH_CC_SERVING_ROW_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

enum class RowFormat : uint8_t { kFloat32, kFloat16, kInt8 };

// Returns "float32", "float16" or "int8".
absl::string_view NameOf(RowFormat format);
// InvalidArgument, naming all formats, for an unknown name.
absl::StatusOr<RowFormat> RowFormatOf(absl::string_view name);

// The number of bytes of one row.
size_t RowBytes(RowFormat format, int dim);

// Writes RowBytes() bytes to `to`. float16 rounds to the nearest value, and
// larger values become the largest finite one. int8 rounds to the nearest
// multiple of the row's scale, which is its largest absolute value / 127;
// values must be finite.
void EncodeRow(RowFormat format, const float* embedding, int dim, char* to);

inline constexpr size_t kRowFileBlockBytes = 4096;

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FORMAT_H_
