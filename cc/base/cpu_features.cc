#include "cc/base/cpu_features.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <cstdint>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"
#include "cc/base/racy_memory.h"

namespace tfswitch {

absl::string_view SimdLevelName(SimdLevel level) {
  return level == SimdLevel::kAvx2 ? "avx2" : "scalar";
}

SimdLevel BestSimdLevel() {
#if defined(__x86_64__) && !TFSWITCH_THREAD_SANITIZER
  // clang 14's __builtin_cpu_supports() does not know F16C.
  uint32_t eax = 0;
  uint32_t ebx = 0;
  uint32_t ecx = 0;
  uint32_t edx = 0;
  const bool has_f16c =
      __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
  return has_f16c && __builtin_cpu_supports("avx2") &&
                 __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2")
             ? SimdLevel::kAvx2
             : SimdLevel::kScalar;
#else
  return SimdLevel::kScalar;
#endif
}

SimdLevel ResolveSimdLevel(const char* wish) {
  const absl::string_view name = wish == nullptr ? "" : wish;
  const SimdLevel best = BestSimdLevel();
  if (name.empty()) return best;
  if (name == SimdLevelName(SimdLevel::kScalar)) return SimdLevel::kScalar;
  if (name == SimdLevelName(best)) return best;
  LogMessageInOrder(
      LogLevel::kWarning, {"unknown_simd"},
      absl::StrCat("TFSWITCH_SIMD must be 'scalar' or 'avx2' and supported "
                   "here, got '",
                   name, "'; using '", SimdLevelName(best), "'"));
  return best;
}

SimdLevel ActiveSimdLevel() {
  static const SimdLevel level = ResolveSimdLevel(getenv("TFSWITCH_SIMD"));
  return level;
}

}  // namespace tfswitch
