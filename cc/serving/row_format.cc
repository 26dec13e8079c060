#include "cc/serving/row_format.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc/base/cpu_features.h"
#include "cc/base/half_floats.h"
#include "cc/serving/row_decode.h"

namespace tfswitch {

absl::string_view NameOf(RowFormat format) {
  switch (format) {
    case RowFormat::kFloat32:
      return "float32";
    case RowFormat::kFloat16:
      return "float16";
    case RowFormat::kInt8:
      return "int8";
  }
  return "";
}

absl::StatusOr<RowFormat> RowFormatOf(absl::string_view name) {
  for (const RowFormat format :
       {RowFormat::kFloat32, RowFormat::kFloat16, RowFormat::kInt8}) {
    if (name == NameOf(format)) return format;
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "row format: expected float32, float16 or int8, got '", name, "'"));
}

size_t RowBytes(RowFormat format, int dim) {
  const auto floats = static_cast<size_t>(dim);
  switch (format) {
    case RowFormat::kFloat32:
      return floats * sizeof(float);
    case RowFormat::kFloat16:
      return floats * sizeof(uint16_t);
    case RowFormat::kInt8:
      return sizeof(float) + floats;
  }
  return 0;
}

void EncodeRow(RowFormat format, const float* embedding, int dim, char* to) {
  switch (format) {
    case RowFormat::kFloat32:
      std::memcpy(to, embedding, static_cast<size_t>(dim) * sizeof(float));
      return;
    case RowFormat::kFloat16:
      for (int i = 0; i < dim; ++i) {
        const uint16_t half = Float16OfFloat<false>(embedding[i], 0);
        std::memcpy(to + 2 * static_cast<size_t>(i), &half, sizeof(half));
      }
      return;
    case RowFormat::kInt8: {
      float largest = 0.0f;
      for (int i = 0; i < dim; ++i) {
        largest = std::max(largest, std::abs(embedding[i]));
      }
      // If all values of a row are denormal, the scale may be rounded to 0.
      // Then all values become 0.
      const float scale = largest / 127.0f;
      const float per_scale = scale > 0.0f ? 1.0f / scale : 0.0f;
      std::memcpy(to, &scale, sizeof(scale));
      for (int i = 0; i < dim; ++i) {
        const float value =
            std::isfinite(per_scale) ? embedding[i] * per_scale : 0.0f;
        to[sizeof(scale) + static_cast<size_t>(i)] =
            static_cast<char>(static_cast<int8_t>(
                std::clamp(std::nearbyint(value), -127.0f, 127.0f)));
      }
      return;
    }
  }
}

RowDecoder FindRowDecoder(RowFormat format) {
  return ActiveSimdLevel() == SimdLevel::kAvx2 ? avx2::FindRowDecoder(format)
                                               : scalar::FindRowDecoder(format);
}

}  // namespace tfswitch
