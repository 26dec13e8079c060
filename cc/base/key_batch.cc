// UniqueKeys::Run() uses a hash table with slots for about as many keys as the
// last batch had, so that the table stays in the cache. If more than half of
// the slots would be filled, it makes the table four times as large. It works
// in blocks. A first loop without branches finds the keys that are in their
// home, the slot that their hash selects. A second loop searches for the other
// keys one by one. Meanwhile the homes of the next block are prefetched.
//
// SumByInverse() copies the first row of each key and adds later ones to it, so
// that the sums need not be cleared first. It therefore needs keys that are
// numbered in order of first appearance. WithDim() makes loops of a fixed
// length for common dims.

#include "cc/base/key_batch.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace tfswitch {
namespace {

// Threads share the copying only from this size on: to copy fewer floats takes
// only a few microseconds.
constexpr size_t kMinFloatsPerRange = 16 * 1024;

constexpr uint32_t kExponentMask = 0x7f800000u;

bool HasNonFinite(const float* values, size_t count) {
  // Tests the bits of the floats, so that the loop has no branch and the
  // compiler can vectorise it.
  uint32_t found = 0;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &values[i], sizeof(bits));
    found |= (bits & kExponentMask) == kExponentMask ? 1u : 0u;
  }
  return found != 0;
}

// Calls body(std::integral_constant<size_t, d>). If `dim` is a common one, d is
// `dim`, so that loops in `body` have a fixed length; otherwise d is 0.
template <typename Body>
auto WithDim(int dim, const Body& body) {
  switch (dim) {
    case 8:
      return body(std::integral_constant<size_t, 8>());
    case 16:
      return body(std::integral_constant<size_t, 16>());
    case 32:
      return body(std::integral_constant<size_t, 32>());
    case 64:
      return body(std::integral_constant<size_t, 64>());
    default:
      return body(std::integral_constant<size_t, 0>());
  }
}

template <size_t kCount>
void CopyFloats(float* to, const float* from, size_t count) {
  std::memcpy(to, from, sizeof(float) * (kCount != 0 ? kCount : count));
}

template <size_t kDim>
void AddFloats(float* to, const float* from, size_t count) {
  if constexpr (kDim != 0) {
    // Reads both values before it writes either: the compiler must otherwise
    // assume that the arrays overlap.
    float sum[kDim];
    float other[kDim];
    std::memcpy(sum, to, sizeof(sum));
    std::memcpy(other, from, sizeof(other));
    for (size_t d = 0; d < kDim; ++d) sum[d] += other[d];
    std::memcpy(to, sum, sizeof(sum));
  } else {
    for (size_t d = 0; d < count; ++d) to[d] += from[d];
  }
}

}  // namespace

void UniqueKeys::Rebuild(size_t capacity, absl::Span<const Key> unique) {
  slots_.assign(capacity, -1);
  shift_ = 1 + __builtin_clzll(capacity);
  const size_t mask = capacity - 1;
  for (size_t place = 0; place < unique.size(); ++place) {
    size_t slot = HomeOf(unique[place]);
    while (slots_[slot] >= 0) slot = (slot + 1) & mask;
    slots_[slot] = static_cast<int32_t>(place);
  }
}

size_t UniqueKeys::Run(absl::Span<const Key> keys, absl::Span<Key> unique,
                       absl::Span<int32_t> inverse) {
  // Makes slots for about as many distinct keys as the last batch had, because
  // successive batches are similar. These slots fit in the cache; slots for the
  // largest possible number would not.
  const size_t expected = std::min(
      keys.size(), std::max(last_count_ + last_count_ / 8, keys.size() / 8));
  size_t capacity = 64;
  while (capacity < 2 * expected) capacity *= 2;
  Rebuild(capacity, {});
  const Key* const key_data = keys.data();
  Key* const unique_data = unique.data();
  int32_t* const inverse_data = inverse.data();
  size_t count = 0;
  constexpr size_t kBlock = 64;
  uint32_t homes[2][kBlock];
  uint16_t others[kBlock];
  const auto find_homes = [&](size_t begin, uint32_t* home) {
    const size_t end = std::min(begin + kBlock, keys.size());
    const KeyedHash hash = hash_;
    const int shift = shift_;
    for (size_t i = begin; i < end; ++i, ++home) {
      *home = static_cast<uint32_t>(hash(key_data[i]) >> shift);
      __builtin_prefetch(&slots_[*home], 1);
    }
  };
  find_homes(0, homes[0]);
  for (size_t begin = 0, turn = 0; begin < keys.size();
       begin += kBlock, turn ^= 1) {
    const size_t size = std::min(kBlock, keys.size() - begin);
    if (begin + kBlock < keys.size())
      find_homes(begin + kBlock, homes[turn ^ 1]);
    const uint32_t* const home = homes[turn];
    const int32_t* const slots = slots_.data();
    size_t num_others = 0;
    for (size_t i = 0; i < size; ++i) {
      const int32_t place = slots[home[i]];
      inverse_data[begin + i] = place;
      // Place -1 means an empty slot. The comparison with key 0 is then made
      // without a branch, but its result does not count.
      const bool is_found =
          (unique_data[std::max(place, 0)] == key_data[begin + i]) &
          (place >= 0);
      others[num_others] = static_cast<uint16_t>(i);
      num_others += is_found ? 0 : 1;
    }
    if (2 * (count + num_others) > slots_.size()) {
      Rebuild(4 * slots_.size(), unique.first(count));
      if (begin + kBlock < keys.size()) {
        find_homes(begin + kBlock, homes[turn ^ 1]);
      }
    }
    const size_t mask = slots_.size() - 1;
    for (size_t o = 0; o < num_others; ++o) {
      const size_t i = begin + others[o];
      const Key key = key_data[i];
      size_t slot = HomeOf(key);
      int32_t place = slots_[slot];
      while (place >= 0 && unique_data[place] != key) {
        slot = (slot + 1) & mask;
        place = slots_[slot];
      }
      if (place < 0) {
        place = static_cast<int32_t>(count);
        slots_[slot] = place;
        unique_data[count++] = key;
      }
      inverse_data[i] = place;
    }
  }
  last_count_ = count;
  return count;
}

size_t UniqueKeys::LongestRun() const {
  size_t longest = 0;
  size_t run = 0;
  for (const int32_t place : slots_) {
    run = place >= 0 ? run + 1 : 0;
    longest = std::max(longest, run);
  }
  return longest;
}

UniqueKeys& ThreadUniqueKeys() {
  thread_local UniqueKeys unique_keys;
  return unique_keys;
}

void ScatterRows(absl::Span<const int32_t> inverse, int dim,
                 const float* unique_rows, float* rows,
                 const LentThreads* threads) {
  RunRanges(threads, inverse.size(), kMinFloatsPerRange / dim,
            [&](size_t begin, size_t end) {
              WithDim(dim, [&](auto fixed_dim) {
                const size_t width = fixed_dim != 0 ? fixed_dim : dim;
                for (size_t i = begin; i < end; ++i) {
                  CopyFloats<fixed_dim>(
                      rows + i * width,
                      unique_rows + static_cast<size_t>(inverse[i]) * width,
                      width);
                }
              });
            });
}

void PlaceRows(absl::Span<const int32_t> places, int dim, const char* from,
               float* rows) {
  WithDim(dim, [&](auto fixed_dim) {
    const size_t width = fixed_dim != 0 ? fixed_dim : dim;
    for (const int32_t place : places) {
      std::memcpy(rows + static_cast<size_t>(place) * width, from,
                  width * sizeof(float));
      from += width * sizeof(float);
    }
  });
}

void SumByInverse(absl::Span<const int32_t> inverse, int dim,
                  absl::Span<const float> gradients, absl::Span<float> sums) {
  WithDim(dim, [&](auto fixed_dim) {
    const size_t width = fixed_dim != 0 ? fixed_dim : dim;
    const float* source = gradients.data();
    int32_t next_new = 0;
    for (const int32_t place : inverse) {
      float* const target = sums.data() + static_cast<size_t>(place) * width;
      if (place < next_new) {
        AddFloats<fixed_dim>(target, source, width);
      } else {
        CopyFloats<fixed_dim>(target, source, width);
        ++next_new;
      }
      source += width;
    }
  });
}

void AddScaled(absl::Span<const float> values, float factor,
               absl::Span<float> sums) {
  const float* const from = values.data();
  float* const to = sums.data();
  for (size_t i = 0; i < values.size(); ++i) to[i] += factor * from[i];
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
