// Converts arrays of floats to 16-bit numbers and back, for each instruction
// set. Only messages use it; rows in memory have kernels of their own.

#ifndef TFSWITCH_CC_WIRE_HALF_KERNELS_H_
#define TFSWITCH_CC_WIRE_HALF_KERNELS_H_

#include <cstddef>
#include <cstdint>

#include "cc/base/half_floats.h"

namespace tfswitch {

// A float with the bits `mark`, a NaN, is this 16-bit number of either type,
// and no other float is.
inline constexpr uint16_t kHalfMark = 0x7fff;

struct HalfKernels {
  // Rounds to nearest.
  void (*encode)(FloatType type, const float* floats, size_t count,
                 uint32_t mark, char* halves);
  // Rounds at random. The noise depends on `seed` and on each float's index.
  void (*encode_at_random)(FloatType type, const float* floats, size_t count,
                           uint32_t seed, char* halves);
  void (*decode)(FloatType type, const char* halves, size_t count,
                 uint32_t mark, float* floats);
};

namespace scalar {
HalfKernels FindHalfKernels();
}
namespace avx2 {
HalfKernels FindHalfKernels();
}

// The kernels for the instruction set that this process uses.
const HalfKernels& ActiveHalfKernels();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_HALF_KERNELS_H_
