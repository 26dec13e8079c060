// How the floats of a row are stored in memory, and the conversion in both
// directions.
//
// Code that works with a row uses floats; a table may store some of them in 16
// bits:
//
//   floats   | embedding | slots: one per coordinate, one per row |
//   words    | embedding | slots: one per coordinate, one per row |
//              type of     type of slots             float32
//              embeddings
//
// A word has 4 bytes; a part with an odd number of 16-bit values ends with two
// unused bytes. A slot with one float per row, such as Adam's count of steps,
// is always float32: it takes little memory, and a 16-bit type could not count
// beyond 2048. Statistics are float32, too; they are stored elsewhere.

#ifndef TFSWITCH_CC_TABLE_ROW_CODEC_H_
#define TFSWITCH_CC_TABLE_ROW_CODEC_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cc/base/half_floats.h"
#include "cc/base/hash.h"
#include "cc/base/racy_memory.h"
#include "cc/table/table_config.h"

namespace tfswitch {

// How a step rounds the values that it stores: to nearest, or at random.
struct RowRounding {
  bool is_stochastic = false;
  uint32_t seed = 0;  // The seed of all draws for one row.
};

// The floats of a row. Only one thread at a time may change them.
struct RowFloats {
  float* embedding = nullptr;
  float* slots = nullptr;
  float* statistics = nullptr;  // Null if rows have none.
};

// Immutable, so thread-safe.
class RowCodec {
 public:
  // REQUIRES: config.Validate() is OK.
  explicit RowCodec(const TableConfig& config);
  RowCodec(const RowCodec&) = delete;
  RowCodec& operator=(const RowCodec&) = delete;

  // Whether words and floats are the same.
  bool is_plain() const { return has_plain_embedding_ && has_plain_slots_; }
  int num_floats() const { return num_floats_; }
  int num_words() const { return num_words_; }
  FloatType embedding_type() const { return parts_[0].type; }
  // The first words, which have the embedding.
  int embedding_words() const { return embedding_words_; }

  // Decodes the embedding. It has kDim floats or, if kDim is 0, as many as the
  // config says.
  template <FloatType kType, int kDim>
  TFSWITCH_ALWAYS_INLINE void DecodeEmbedding(const float* words,
                                              float* floats) const {
    DecodeFloats<kType>(words, kDim != 0 ? kDim : parts_[0].count, floats);
  }

  TFSWITCH_ALWAYS_INLINE void DecodeEmbedding(const float* words,
                                              float* floats) const {
    DecodePart(parts_[0], words, floats);
  }

  TFSWITCH_ALWAYS_INLINE void Decode(const float* words, float* floats) const {
    for (int i = 0; i < num_parts_; ++i) DecodePart(parts_[i], words, floats);
  }

  // Calls modify(embedding, slots) to change a row. If words are floats, does
  // so in place. Otherwise decodes the row to `scratch`, which has room for
  // num_floats(), and then encodes it.
  template <typename Modify>
  TFSWITCH_ALWAYS_INLINE void ModifyFloats(float* words, float* scratch,
                                           const RowRounding& rounding,
                                           const Modify& modify) const {
    for (int i = 0; i < num_packed_parts_; ++i) {
      DecodePart(parts_[first_packed_part_ + i], words, scratch);
    }
    modify(has_plain_embedding_ ? words : scratch,
           has_plain_slots_ ? words + embedding_words_
                            : scratch + parts_[0].count);
    Encode(scratch, rounding, words);
  }

 private:
  // Stores `floats`, the scratch of ModifyFloats().
  TFSWITCH_ALWAYS_INLINE void Encode(const float* floats,
                                     const RowRounding& rounding,
                                     float* words) const {
    for (int i = 0; i < num_packed_parts_; ++i) {
      const Part& part = parts_[first_packed_part_ + i];
      const float* const from = floats + part.begin;
      float* const to = words + part.word;
      // Each part of the row gets its own seed, so that a value's rounding
      // depends on its place in the row.
      const uint32_t seed =
          rounding.seed + static_cast<uint32_t>(part.begin) * kHalfSeedStep;
      switch (part.type) {
        case FloatType::kFloat32:
          CopyFloats(from, part.count, to);
          break;
        case FloatType::kFloat16:
          EncodePart<FloatType::kFloat16>(from, part.count, rounding, seed, to);
          break;
        case FloatType::kBfloat16:
          EncodePart<FloatType::kBfloat16>(from, part.count, rounding, seed,
                                           to);
          break;
      }
    }
  }

  struct Part {
    FloatType type = FloatType::kFloat32;
    int begin = 0;  // The index of its first float.
    int count = 0;
    int word = 0;  // The index of its first word.
  };

  void Add(FloatType type, int count);

  // Inlined, because a call of memcpy() would cost more than the copy.
  TFSWITCH_ALWAYS_INLINE static void CopyFloats(const float* from, int count,
                                                float* to) {
    int i = 0;
    for (; i + 8 <= count; i += 8) __builtin_memcpy(to + i, from + i, 32);
    for (; i < count; ++i) __builtin_memcpy(to + i, from + i, 4);
  }

  template <FloatType kType>
  TFSWITCH_ALWAYS_INLINE static void DecodeFloats(const float* __restrict words,
                                                  int count,
                                                  float* __restrict floats) {
    if constexpr (kType == FloatType::kFloat32) {
      CopyFloats(words, count, floats);
    } else {
      DecodeHalves<kType>(reinterpret_cast<const char*>(words),
                          static_cast<size_t>(count), floats);
    }
  }

  template <FloatType kType>
  TFSWITCH_ALWAYS_INLINE static void EncodePart(const float* floats, int count,
                                                const RowRounding& rounding,
                                                uint32_t seed, float* words) {
    const auto size = static_cast<size_t>(count);
    char* const halves = reinterpret_cast<char*>(words);
    if (rounding.is_stochastic) {
      EncodeHalves<kType, true>(floats, size, seed, halves);
    } else {
      EncodeHalves<kType, false>(floats, size, 0, halves);
    }
  }

  TFSWITCH_ALWAYS_INLINE static void DecodePart(const Part& part,
                                                const float* words,
                                                float* floats) {
    const float* const from = words + part.word;
    float* const to = floats + part.begin;
    switch (part.type) {
      case FloatType::kFloat32:
        DecodeFloats<FloatType::kFloat32>(from, part.count, to);
        break;
      case FloatType::kFloat16:
        DecodeFloats<FloatType::kFloat16>(from, part.count, to);
        break;
      case FloatType::kBfloat16:
        DecodeFloats<FloatType::kBfloat16>(from, part.count, to);
        break;
    }
  }

  std::vector<Part> storage_;
  const Part* parts_ = nullptr;  // Points to storage_, for the inlined code.
  int num_parts_ = 0;
  // The first part that ModifyFloats() must copy. It is the first 16-bit part,
  // unless only the embedding has 16 bits.
  int first_packed_part_ = 0;
  int num_packed_parts_ = 0;
  bool has_plain_embedding_ = false;
  bool has_plain_slots_ = false;
  int num_floats_ = 0;
  int num_words_ = 0;
  int embedding_words_ = 0;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_ROW_CODEC_H_
