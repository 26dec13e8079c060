// Converts rows of a file to floats, for each instruction set.

#ifndef TFSWITCH_CC_SERVING_ROW_DECODE_H_
#define TFSWITCH_CC_SERVING_ROW_DECODE_H_

#include "cc/serving/row_format.h"

namespace tfswitch {

// Writes the `dim` floats of a row.
using RowDecoder = void (*)(const char* row, int dim, float* to);

namespace scalar {
RowDecoder FindRowDecoder(RowFormat format);
}
namespace avx2 {
RowDecoder FindRowDecoder(RowFormat format);
}

// Returns the decoder for the instruction set that this process uses.
RowDecoder FindRowDecoder(RowFormat format);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_ROW_DECODE_H_
