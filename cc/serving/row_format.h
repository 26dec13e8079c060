// How rows lie in a row file: the formats of a row, and where it is found.
//
//   | header, 4096 bytes | default_row | . | records | pilots | . | used |
//   removed | checksums |
//                        |<------------- blocks of 4096 bytes ------------>|
//
// A row file is a safetensors file (https://github.com/huggingface/safetensors)
// that serves as it lies: mapped read-only, with all that finds a row in it.
//
//   default_row  float32 [dim]: the value of an id without a row
//   records      [slots, 8 + row bytes]: an id and its row, which for int8 is a
//                scale as float32 and then the values
//   pilots       which slot an id has (serving/perfect_hash.h)
//   used         a bit for each slot that an id has, for other readers; the
//                others have an id of another slot, so that nothing is found
//                there
//   removed      in a file of changes, a bit for each slot whose id lost its
//                row; else empty
//   checksums    uint64 [blocks]: XXH3 of each block; the header has theirs
//
// A row is beside its id, so that reading it costs one place in memory and not
// two.

#ifndef TFSWITCH_CC_SERVING_ROW_FORMAT_H_
#define TFSWITCH_CC_SERVING_ROW_FORMAT_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace tfswitch {

enum class RowFormat : uint8_t { kFloat32, kFloat16, kInt8 };

// "float32", "float16" or "int8".
absl::string_view NameOf(RowFormat format);
// InvalidArgument naming the formats there are.
absl::StatusOr<RowFormat> RowFormatOf(absl::string_view name);

// Bytes of one row.
size_t RowBytes(RowFormat format, int dim);

// Writes RowBytes() to `to`. float16 is the nearest one, and the largest finite
// one for larger values. int8 is the nearest multiple of the row's scale, which
// is its largest absolute value / 127: its values must be finite.
void EncodeRow(RowFormat format, const float* embedding, int dim, char* to);

inline constexpr size_t kRowFileBlockBytes = 4096;

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_FORMAT_H_
