#include "cc/base/key_batch.h"

#include <algorithm>
#include <cstring>

namespace tfswitch {
namespace {

constexpr uint32_t kExponentMask = 0x7f800000u;

bool HasNonFinite(const float* values, size_t count) {
  // Works on bits, so that the loop has no branch and vectorises.
  uint32_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    found |= (bits & kExponentMask) == kExponentMask ? 1u : 0u;
  }
  return found != 0;
}

}  // namespace

size_t UniqueKeys::Run(absl::Span<const Key> keys, absl::Span<Key> unique,
                       absl::Span<int32_t> inverse) {
  size_t capacity = 64;
  while (capacity < 2 * keys.size()) capacity *= 2;
  slots_.assign(capacity, -1);
  const size_t mask = capacity - 1;
  int32_t count = 0;
  constexpr size_t kAhead = 16;
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + kAhead < keys.size()) {
      __builtin_prefetch(&slots_[(HashKey(keys[i + kAhead]) >> 20) & mask], 1);
    }
    const Key key = keys[i];
    size_t slot = (HashKey(key) >> 20) & mask;
    while (true) {
      const int32_t place = slots_[slot];
      if (place < 0) {
        slots_[slot] = count;
        unique[count] = key;
        inverse[i] = count;
        ++count;
        break;
      }
      if (unique[place] == key) {
        inverse[i] = place;
        break;
      }
      slot = (slot + 1) & mask;
    }
  }
  return static_cast<size_t>(count);
}

UniqueKeys& ThreadUniqueKeys() {
  thread_local UniqueKeys unique_keys;
  return unique_keys;
}

void SumByInverse(absl::Span<const int32_t> inverse, int dim,
                  absl::Span<const float> gradients, absl::Span<float> sums) {
  const float* source = gradients.data();
  int32_t next_new = 0;
  for (size_t i = 0; i < inverse.size(); ++i, source += dim) {
    float* target = sums.data() + static_cast<size_t>(inverse[i]) * dim;
    if (inverse[i] == next_new) {
      // First appearance: a copy, so that `sums` need not be cleared.
      std::memcpy(target, source, sizeof(float) * dim);
      ++next_new;
    } else {
      for (int d = 0; d < dim; ++d) target[d] += source[d];
    }
  }
}

void Scale(float factor, absl::Span<float> values) {
  for (float& value : values) value *= factor;
}

int64_t FindNonFinite(absl::Span<const float> values) {
  constexpr size_t kBlock = 4096;
  for (size_t begin = 0; begin < values.size(); begin += kBlock) {
    const size_t count = std::min(kBlock, values.size() - begin);
    if (!HasNonFinite(values.data() + begin, count)) continue;
    for (size_t i = begin; i < begin + count; ++i) {
      if (HasNonFinite(&values[i], 1)) return static_cast<int64_t>(i);
    }
  }
  return -1;
}

}  // namespace tfswitch
