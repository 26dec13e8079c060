// The instruction set that the kernels of this process use.
//
// Each kernel is compiled twice, for the baseline of the platform ("scalar")
// and for AVX2. Both give exactly the same results. The choice is made once, at
// the first call: AVX2 if the processor has it, unless the environment variable
// TFSWITCH_SIMD says `scalar` or `avx2`. If its value is unknown, or this
// processor or build does not support it, a line is logged and the best
// supported level is used.

#ifndef TFSWITCH_CC_BASE_CPU_FEATURES_H_
#define TFSWITCH_CC_BASE_CPU_FEATURES_H_

#include "absl/strings/string_view.h"

namespace tfswitch {

enum class SimdLevel { kScalar, kAvx2 };

// "scalar" or "avx2".
absl::string_view SimdLevelName(SimdLevel level);

// The best level that this processor and this build support. ThreadSanitizer
// has to see each memory access, so its builds use kScalar.
SimdLevel BestSimdLevel();

// The level that a value of TFSWITCH_SIMD selects. A null or empty value means
// that the variable is not set.
SimdLevel ResolveSimdLevel(const char* wish);

// ResolveSimdLevel(getenv("TFSWITCH_SIMD")), decided once per process.
//
// Thread-safe.
SimdLevel ActiveSimdLevel();

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_CPU_FEATURES_H_
