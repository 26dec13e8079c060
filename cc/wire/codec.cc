// PieceReader reads across the ends of pieces. ReadMessage() calls a function
// of its caller for each field, and skips fields that this function does not
// know. The readers return a Complaint, which is a constant text, so that
// memory for a string is allocated only on errors. If an array is whole and
// aligned in one piece, ArrayField points to it. It copies other arrays to
// scratch memory.
//
// The same function counts and writes the bytes of a request, so that the
// computed length always agrees with the bytes. A push can be written as head
// and tail, so that the gradients between them are sent without a copy.

#include "cc/wire/codec.h"

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "cc/base/copy_bytes.h"
#include "cc/base/cpu_features.h"
#include "cc/base/key_batch.h"
#include "cc/base/racy_memory.h"
#include "cc/wire/half_kernels.h"

#ifndef ABSL_IS_LITTLE_ENDIAN
#error "Arrays are used as they lie on the wire, which is little-endian."
#endif

namespace tfswitch {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kKeptScratchBytes = size_t{64} << 20;
// A call of the C API has at most so many parts; other clients may send more.
constexpr size_t kKeptParts = 256;
// The same limit as in protobuf, so that this code and protobuf refuse the same
// messages.
constexpr int kMaxGroupDepth = 100;

enum WireType : uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kStartGroup = 3,
  kEndGroup = 4,
  kFixed32 = 5,
};

constexpr uint32_t Tag(uint32_t field, WireType type) {
  return field << 3 | type;
}

// The fault in a field, as a constant text; nullptr if there is none.
using Complaint = const char*;
constexpr Complaint kFine = nullptr;
constexpr char kCutShort[] = "the message ends in the middle of a field";
constexpr char kBadVarint[] = "a varint has too many bytes";
constexpr char kBadLength[] = "a length runs past the end of the message";
constexpr char kBadArray[] = "an array's length is no multiple of its element";
constexpr char kBadUtf8[] = "a name is not UTF-8";
constexpr char kBadTag[] = "a tag that no field can have";
constexpr char kBadGroup[] = "a group that does not end or is nested too deep";
constexpr char kNoMemory[] = "no memory for an array";
constexpr char kBadPart[] = "a part that is malformed itself";
constexpr char kTooManyParts[] = "more parts than a message may have";
// Not an error: the function that reads the fields does not know this one.
constexpr char kUnknownField[] = "";

// Reads bytes across the ends of pieces.
class PieceReader {
 public:
  explicit PieceReader(MessagePieces pieces) : pieces_(pieces) {
    for (absl::string_view piece : pieces) remaining_ += piece.size();
    NextPiece();
  }

  uint64_t offset() const { return offset_; }
  uint64_t remaining() const { return remaining_; }

  // REQUIRES: remaining() > 0.
  uint8_t Byte() {
    const uint8_t byte = static_cast<uint8_t>(*at_);
    Advance(1);
    return byte;
  }

  // REQUIRES: remaining() >= size.
  void Read(void* to, uint64_t size) {
    char* out = static_cast<char*>(to);
    while (size > 0) {
      const size_t part = std::min<uint64_t>(size, end_ - at_);
      CopyBytes(out, at_, part);
      out += part;
      size -= part;
      Advance(part);
    }
  }

  // REQUIRES: remaining() >= size.
  void Skip(uint64_t size) {
    while (size > 0) {
      const size_t part = std::min<uint64_t>(size, end_ - at_);
      size -= part;
      Advance(part);
    }
  }

  // How many of the next bytes are in one piece.
  uint64_t NumBorrowable() const { return static_cast<uint64_t>(end_ - at_); }

  // If the next `size` bytes are in one piece, returns a pointer to them and
  // moves behind them. Otherwise returns null.
  const char* Borrow(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) return nullptr;
    const char* borrowed = at_;
    Advance(size);
    return borrowed;
  }

  // Moves behind the next `size` bytes, and appends the pieces that contain
  // them to `pieces`.
  //
  // REQUIRES: remaining() >= size.
  void Take(uint64_t size, std::vector<absl::string_view>* pieces) {
    while (size > 0) {
      const size_t part = std::min<uint64_t>(size, end_ - at_);
      pieces->emplace_back(at_, part);
      size -= part;
      Advance(part);
    }
  }

 private:
  void Advance(size_t size) {
    at_ += size;
    offset_ += size;
    remaining_ -= size;
    if (at_ == end_) NextPiece();
  }

  void NextPiece() {
    while (at_ == end_ && next_ < pieces_.size()) {
      at_ = pieces_[next_].data();
      end_ = at_ + pieces_[next_].size();
      ++next_;
    }
  }

  const MessagePieces pieces_;
  size_t next_ = 0;
  const char* at_ = nullptr;
  const char* end_ = nullptr;
  uint64_t offset_ = 0;
  uint64_t remaining_ = 0;
};

// Drops bits beyond the 64th, as protobuf does.
Complaint ReadVarint(PieceReader* reader, int max_bytes, uint64_t* value) {
  uint64_t result = 0;
  for (int i = 0; i < max_bytes; ++i) {
    if (reader->remaining() == 0) return kCutShort;
    const uint64_t byte = reader->Byte();
    result |= (byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      *value = result;
      return kFine;
    }
  }
  return kBadVarint;
}

Complaint ReadTag(PieceReader* reader, uint32_t* tag) {
  uint64_t value;
  if (Complaint bad = ReadVarint(reader, 5, &value)) return bad;
  *tag = static_cast<uint32_t>(value);
  return kFine;
}

// Reads a length, and checks that at least so many bytes of the message follow.
Complaint ReadLength(PieceReader* reader, uint64_t* length) {
  if (Complaint bad = ReadVarint(reader, 5, length)) return bad;
  return *length > reader->remaining() ? kBadLength : kFine;
}

template <typename T>
Complaint ReadFixed(PieceReader* reader, T* value) {
  if (reader->remaining() < sizeof(T)) return kCutShort;
  reader->Read(value, sizeof(T));
  return kFine;
}

// Reads a varint. A number type that is smaller gets the lowest bits. A bool
// becomes true if any bit is set.
template <typename T>
Complaint ReadNumber(PieceReader* reader, T* value) {
  uint64_t number = 0;
  Complaint bad = ReadVarint(reader, 10, &number);
  *value = static_cast<T>(number);
  return bad;
}

// Whether the text is UTF-8 as Unicode defines it: no surrogates, no overlong
// forms.
bool IsUtf8(absl::string_view text) {
  size_t i = 0;
  while (i < text.size()) {
    const uint8_t lead = static_cast<uint8_t>(text[i++]);
    if (lead < 0x80) continue;
    int tail;
    uint8_t low = 0x80;
    uint8_t high = 0xbf;
    if (lead >= 0xc2 && lead <= 0xdf) {
      tail = 1;
    } else if (lead >= 0xe0 && lead <= 0xef) {
      tail = 2;
      if (lead == 0xe0) low = 0xa0;
      if (lead == 0xed) high = 0x9f;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
      tail = 3;
      if (lead == 0xf0) low = 0x90;
      if (lead == 0xf4) high = 0x8f;
    } else {
      return false;
    }
    for (; tail > 0; --tail, low = 0x80, high = 0xbf) {
      if (i == text.size()) return false;
      const uint8_t byte = static_cast<uint8_t>(text[i++]);
      if (byte < low || byte > high) return false;
    }
  }
  return true;
}

Complaint ReadName(PieceReader* reader, std::string* name) {
  uint64_t length;
  if (Complaint bad = ReadLength(reader, &length)) return bad;
  name->resize(length);
  reader->Read(name->data(), length);
  return IsUtf8(*name) ? kFine : kBadUtf8;
}

Complaint SkipField(PieceReader* reader, uint32_t tag, int depth) {
  uint64_t number;
  if (tag >> 3 == 0) return kBadTag;
  switch (tag & 7) {
    case kVarint:
      return ReadVarint(reader, 10, &number);
    case kFixed64:
      if (reader->remaining() < 8) return kCutShort;
      reader->Skip(8);
      return kFine;
    case kBytes:
      if (Complaint bad = ReadLength(reader, &number)) return bad;
      reader->Skip(number);
      return kFine;
    case kStartGroup:
      if (depth == 0) return kBadGroup;
      while (reader->remaining() > 0) {
        uint32_t inner;
        if (Complaint bad = ReadTag(reader, &inner)) return bad;
        if ((inner & 7) == kEndGroup) {
          return inner >> 3 == tag >> 3 ? kFine : kBadGroup;
        }
        if (Complaint bad = SkipField(reader, inner, depth - 1)) return bad;
      }
      return kBadGroup;
    case kFixed32:
      if (reader->remaining() < 4) return kCutShort;
      reader->Skip(4);
      return kFine;
    default:
      return kBadTag;
  }
}

// Collects a repeated field of fixed-size numbers. The first packed run is not
// copied if it is whole and aligned in one piece; all other numbers are copied
// to scratch memory.
template <typename T>
class ArrayField {
 public:
  ArrayField(absl::Span<const T>* values, AlignedBuffer* scratch)
      : values_(*values), scratch_(*scratch) {}

  Complaint ReadPacked(PieceReader* reader) {
    uint64_t length;
    if (Complaint bad = ReadLength(reader, &length)) return bad;
    if (length % sizeof(T) != 0) return kBadArray;
    if (length == 0) return kFine;
    if (values_.empty()) {
      const char* lying = reader->Borrow(length);
      if (lying != nullptr &&
          reinterpret_cast<uintptr_t>(lying) % alignof(T) == 0) {
        values_ = {reinterpret_cast<const T*>(lying), length / sizeof(T)};
        return kFine;
      }
      if (lying != nullptr) return Append(lying, length);
    }
    T* to = Extend(length);
    if (to == nullptr) return kNoMemory;
    reader->Read(to, length);
    return kFine;
  }

  Complaint ReadOne(PieceReader* reader) {
    T value;
    if (Complaint bad = ReadFixed(reader, &value)) return bad;
    return Append(&value, sizeof(T));
  }

 private:
  Complaint Append(const void* bytes, size_t size) {
    T* to = Extend(size);
    if (to == nullptr) return kNoMemory;
    CopyBytes(to, bytes, size);
    return kFine;
  }

  // Makes room in scratch for `bytes` bytes after the elements that are there.
  T* Extend(size_t bytes) {
    const size_t used = values_.size() * sizeof(T);
    const bool in_scratch =
        values_.empty() ||
        reinterpret_cast<const char*>(values_.data()) == scratch_.data();
    if (!scratch_.Reserve(used + bytes, in_scratch ? used : 0)) return nullptr;
    if (!in_scratch) CopyBytes(scratch_.data(), values_.data(), used);
    values_ = {reinterpret_cast<const T*>(scratch_.data()),
               values_.size() + bytes / sizeof(T)};
    return reinterpret_cast<T*>(scratch_.data() + used);
  }

  absl::Span<const T>& values_;
  AlignedBuffer& scratch_;
};

// Reads a message field by field. `read_field(tag, reader)` returns
// kUnknownField if it does not know the tag; otherwise it has read the field.
template <typename ReadField>
absl::Status ReadMessage(const char* name, MessagePieces pieces,
                         int max_group_depth, ReadField read_field) {
  PieceReader reader(pieces);
  while (reader.remaining() > 0) {
    const uint64_t start = reader.offset();
    uint32_t tag = 0;
    Complaint bad = ReadTag(&reader, &tag);
    if (bad == kFine) bad = read_field(tag, &reader);
    if (bad == kUnknownField) bad = SkipField(&reader, tag, max_group_depth);
    if (bad == kFine) continue;
    const std::string text =
        absl::StrCat(name, ": malformed field at byte ", start, " of ",
                     reader.offset() + reader.remaining(), ": ", bad);
    return bad == kNoMemory ? absl::ResourceExhaustedError(text)
                            : absl::InvalidArgumentError(text);
  }
  return absl::OkStatus();
}

// Lists the fields of messages, once for both FieldReader and FieldWriter. The
// functions return true when a reader has found the field that it looks for. A
// writer always returns false, so that all fields are written.
constexpr auto kPullFields = [](auto& request, auto* fields) {
  return fields->Name(1, request.table) ||
         fields->Array(2, request.keys, &DecodeScratch::keys) ||
         fields->Number(3, request.insert_missing) ||
         fields->Day(4, request.day) ||
         fields->Number(5, request.mark_missing) ||
         fields->Type(6, request.wire_dtype) ||
         fields->Fixed64(30, request.table_incarnation);
};

// The fields of a push before the gradients, and the fields after them.
constexpr auto kPushHead = [](auto& request, auto* fields) {
  return fields->Name(1, request.table) ||
         fields->Array(2, request.keys, &DecodeScratch::keys);
};
constexpr auto kPushTail = [](auto& request, auto* fields) {
  return fields->Float(4, request.learning_rate) ||
         fields->Number(5, request.insert_missing) ||
         fields->Number(6, request.keys_are_unique) ||
         fields->Number(7, request.id.client_id) ||
         fields->Number(8, request.id.sequence) ||
         fields->Name(9, request.step.group) ||
         fields->Number(10, request.step.worker) ||
         fields->Number(11, request.step.incarnation) ||
         fields->Number(12, request.step.clock) ||
         fields->Array(13, request.observations.counts,
                       &DecodeScratch::counts) ||
         fields->Array(14, request.observations.shows, &DecodeScratch::shows) ||
         fields->Array(15, request.observations.clicks,
                       &DecodeScratch::clicks) ||
         fields->Number(16, request.global_step) ||
         fields->Day(17, request.day) || fields->HalfGradients(request) ||
         fields->Fixed64(30, request.table_incarnation);
};
constexpr auto kPushFields = [](auto& request, auto* fields) {
  return kPushHead(request, fields) || fields->Gradients(request) ||
         kPushTail(request, fields);
};

constexpr auto kAssignFields = [](auto& request, auto* fields) {
  return fields->Name(1, request.table) ||
         fields->Array(2, request.keys, &DecodeScratch::keys) ||
         fields->Array(3, request.embeddings, &DecodeScratch::values) ||
         fields->Array(4, request.slots, &DecodeScratch::slots) ||
         fields->Number(5, request.only_missing) ||
         fields->Day(6, request.day) ||
         fields->Number(7, request.id.client_id) ||
         fields->Number(8, request.id.sequence) ||
         fields->Fixed64(30, request.table_incarnation);
};

constexpr auto kWriteResultFields = [](auto& result, auto* fields) {
  return fields->Number(1, result.num_rows) ||
         fields->Number(2, result.duplicate) ||
         fields->Fixed64(3, result.version.generation) ||
         fields->Fixed64(4, result.version.num_pushes);
};

// The fields of 16-bit numbers in a PullResponse and a PushRequest: the first
// one is for float16, the next one for bfloat16.
constexpr uint32_t kHalfValues = 2;
constexpr uint32_t kHalfGradients = 18;

uint32_t FieldOfHalves(FloatType type, uint32_t first_field) {
  return first_field + (type == FloatType::kFloat16 ? 0 : 1);
}

// The type of a field with this tag; kFloat32 if it is another field.
FloatType HalfTypeOf(uint32_t tag, uint32_t first_field) {
  for (const FloatType type : {FloatType::kFloat16, FloatType::kBfloat16}) {
    if (tag == Tag(FieldOfHalves(type, first_field), kBytes)) return type;
  }
  return FloatType::kFloat32;
}

// Reads how many 16-bit numbers follow.
Complaint ReadHalvesLength(PieceReader* reader, uint64_t* size) {
  uint64_t length = 0;
  if (Complaint bad = ReadLength(reader, &length)) return bad;
  *size = length / sizeof(uint16_t);
  return length % sizeof(uint16_t) == 0 ? kFine : kBadArray;
}

// REQUIRES: the reader has as many bytes left.
void ReadHalves(PieceReader* reader, FloatType type, uint64_t size,
                float* floats) {
  constexpr uint64_t kPart = 1024;
  char copy[kPart * sizeof(uint16_t)];
  while (size > 0) {
    uint64_t part = size;
    const char* halves = reader->Borrow(part * sizeof(uint16_t));
    if (halves == nullptr) {  // They end in a later piece.
      part = std::min(size, kPart);
      reader->Read(copy, part * sizeof(uint16_t));
      halves = copy;
    }
    ActiveHalfKernels().decode(type, halves, part, kMissingMark, floats);
    floats += part;
    size -= part;
  }
}

// The seed of the noise of a push. It does not depend on the client's id, which
// is random, so that a training run can be repeated to the bit.
uint32_t SeedOf(const PushRequest& push) {
  const Key number = static_cast<Key>(push.id.sequence);
  return static_cast<uint32_t>(HashKey(number) >> 32) ^ MixBits(push.worker);
}

// Reads the field that has this tag, if the message has such a field.
struct FieldReader {
  const uint32_t tag;
  PieceReader* const reader;
  DecodeScratch* const scratch;
  Complaint result = kUnknownField;

  bool Name(uint32_t field, std::string& name) {
    if (tag != Tag(field, kBytes)) return false;
    return Done(ReadName(reader, &name));
  }
  template <typename T>
  bool Number(uint32_t field, T& value) {
    if (tag != Tag(field, kVarint)) return false;
    return Done(ReadNumber(reader, &value));
  }
  bool Fixed64(uint32_t field, uint64_t& value) {
    if (tag != Tag(field, kFixed64)) return false;
    return Done(ReadFixed(reader, &value));
  }
  bool Float(uint32_t field, float& value) {
    if (tag != Tag(field, kFixed32)) return false;
    return Done(ReadFixed(reader, &value));
  }
  bool Day(uint32_t field, float& day) { return Float(field, day); }
  // Reads types of later versions as kFloat32.
  bool Type(uint32_t field, FloatType& type) {
    if (tag != Tag(field, kVarint)) return false;
    int32_t number = 0;
    const Complaint bad = ReadNumber(reader, &number);
    const bool is_known = number == static_cast<int>(FloatType::kFloat16) ||
                          number == static_cast<int>(FloatType::kBfloat16);
    type = is_known ? static_cast<FloatType>(number) : FloatType::kFloat32;
    return Done(bad);
  }
  bool Gradients(PushRequest& push) {
    return Array(3, push.gradients, &DecodeScratch::values);
  }
  bool HalfGradients(PushRequest& push) {
    const FloatType type = HalfTypeOf(tag, kHalfGradients);
    if (type == FloatType::kFloat32) return false;
    uint64_t size = 0;
    if (Complaint bad = ReadHalvesLength(reader, &size)) return Done(bad);
    AlignedBuffer& floats = scratch->values;
    if (!floats.Reserve(size * sizeof(float), 0)) return Done(kNoMemory);
    push.gradients = {reinterpret_cast<const float*>(floats.data()), size};
    ReadHalves(reader, type, size, reinterpret_cast<float*>(floats.data()));
    return Done(kFine);
  }
  // Reads an array, packed or not. Inlined, so that a tag of another field
  // costs no call.
  template <typename T>
  TFSWITCH_ALWAYS_INLINE bool Array(uint32_t field, absl::Span<const T>& values,
                                    AlignedBuffer DecodeScratch::*buffer) {
    if (tag == Tag(field, kBytes)) {
      return Done(
          ArrayField<T>(&values, &(scratch->*buffer)).ReadPacked(reader));
    }
    if (tag == Tag(field, sizeof(T) == 8 ? kFixed64 : kFixed32)) {
      return Done(ArrayField<T>(&values, &(scratch->*buffer)).ReadOne(reader));
    }
    return false;
  }

 private:
  bool Done(Complaint bad) {
    result = bad;
    return true;
  }
};

template <typename Fields, typename Message>
absl::Status ReadFields(const char* name, const Fields& fields,
                        int max_group_depth, MessagePieces pieces,
                        DecodeScratch* scratch, Message* message) {
  *message = Message();
  return ReadMessage(name, pieces, max_group_depth,
                     [&](uint32_t tag, PieceReader* reader) {
                       FieldReader field{tag, reader, scratch};
                       fields(*message, &field);
                       return field.result;
                     });
}

// Reads the floats [begin, begin + size) of an answer to their places in
// memory. `type` is their type in the message.
void ReadRows(PieceReader* reader, FloatType type, const RowTarget& target,
              uint64_t begin, uint64_t size) {
  const auto read = [&](float* to, uint64_t count) {
    if (type == FloatType::kFloat32) {
      reader->Read(to, count * sizeof(float));
    } else {
      ReadHalves(reader, type, count, to);
    }
  };
  if (target.dim == 0) {
    if (size > 0) read(target.floats.data() + begin, size);
    return;
  }
  constexpr uint64_t kMost = 1024;
  float decoded[kMost];
  while (size > 0) {
    const uint64_t of_row = begin % target.dim;
    const size_t row = begin / target.dim;
    // Places all rows together that are whole in one piece, or in `decoded`.
    const uint64_t at_once = type == FloatType::kFloat32
                                 ? reader->NumBorrowable() / sizeof(float)
                                 : kMost;
    const uint64_t rows =
        of_row == 0 ? std::min(size, at_once) / target.dim : 0;
    const uint64_t part =
        rows > 0 ? rows * target.dim : std::min(size, target.dim - of_row);
    if (rows == 0) {
      read(target.floats.data() + target.places[row] * target.dim + of_row,
           part);
    } else {
      const char* from = reinterpret_cast<const char*>(decoded);
      if (type == FloatType::kFloat32) {
        from = reader->Borrow(part * sizeof(float));
      } else {
        ReadHalves(reader, type, part, decoded);
      }
      PlaceRows(target.places.subspan(row, rows), static_cast<int>(target.dim),
                from, target.floats.data());
    }
    begin += part;
    size -= part;
  }
}

constexpr uint32_t kGeneration = 4;
constexpr uint32_t kNumPushes = 5;

absl::Status ReadPullResponse(int max_group_depth, MessagePieces pieces,
                              const RowTarget& target, uint64_t* num_floats,
                              RowsVersion* version) {
  uint64_t count = 0;
  absl::Status status = ReadMessage(
      "PullResponse", pieces, max_group_depth,
      [&](uint32_t tag, PieceReader* reader) -> Complaint {
        const FloatType type = HalfTypeOf(tag, kHalfValues);
        uint64_t size = 1;
        if (type != FloatType::kFloat32) {
          if (Complaint bad = ReadHalvesLength(reader, &size)) return bad;
        } else if (tag == Tag(1, kBytes)) {
          uint64_t length = 0;
          if (Complaint bad = ReadLength(reader, &length)) return bad;
          if (length % sizeof(float) != 0) return kBadArray;
          size = length / sizeof(float);
        } else if (tag == Tag(kGeneration, kFixed64) ||
                   tag == Tag(kNumPushes, kFixed64)) {
          uint64_t value = 0;
          if (reader->remaining() < sizeof(value)) return kCutShort;
          reader->Read(&value, sizeof(value));
          if (version == nullptr) return kFine;
          (tag == Tag(kGeneration, kFixed64) ? version->generation
                                             : version->num_pushes) = value;
          return kFine;
        } else if (tag != Tag(1, kFixed32)) {
          return kUnknownField;
        } else if (reader->remaining() < sizeof(float)) {
          return kCutShort;
        }
        const uint64_t room =
            count < target.num_floats() ? target.num_floats() - count : 0;
        const uint64_t wanted = std::min(size, room);
        ReadRows(reader, type, target, count, wanted);
        reader->Skip(WireBytes(size - wanted, type));
        count += size;
        return kFine;
      });
  *num_floats = count;
  return status;
}

// Reads a message that contains many messages. `read_part(i, pieces)` reads its
// i-th part. Groups in a part may be nested one level less than in a message.
template <typename ReadPart>
absl::Status ReadParts(const char* name, MessagePieces pieces,
                       ReadPart read_part) {
  size_t num_parts = 0;
  std::vector<absl::string_view> part_pieces;
  absl::Status part_status;
  absl::Status status =
      ReadMessage(name, pieces, kMaxGroupDepth,
                  [&](uint32_t tag, PieceReader* reader) -> Complaint {
                    if (tag != Tag(1, kBytes)) return kUnknownField;
                    uint64_t length = 0;
                    if (Complaint bad = ReadLength(reader, &length)) return bad;
                    if (num_parts == kMaxPartsPerMessage) return kTooManyParts;
                    part_pieces.clear();
                    reader->Take(length, &part_pieces);
                    part_status = read_part(num_parts, part_pieces);
                    if (!part_status.ok()) return kBadPart;
                    ++num_parts;
                    return kFine;
                  });
  if (part_status.ok()) return status;
  return absl::Status(
      part_status.code(),
      absl::StrCat(name, ": part ", num_parts, ": ", part_status.message()));
}

// Reads a message that contains requests of one kind.
template <typename Fields, typename Request>
absl::Status ReadRequests(const char* name, const char* part_name,
                          const Fields& fields, MessagePieces pieces,
                          PartScratch* scratch,
                          std::vector<Request>* requests) {
  requests->clear();
  return ReadParts(name, pieces, [&](size_t i, MessagePieces part) {
    return ReadFields(part_name, fields, kMaxGroupDepth - 1, part,
                      &scratch->at(i), &requests->emplace_back());
  });
}

size_t VarintBytes(uint64_t value) {
  size_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

// Counts or writes the bytes of fields. Like protobuf, omits fields that have
// their default value. If `to` is null, only counts.
class FieldWriter {
 public:
  explicit FieldWriter(char* to) : to_(to) {}

  uint64_t size() const { return size_; }

  bool Name(uint32_t field, const std::string& name) {
    return Array<char>(field, name);
  }
  void BytesHeader(uint32_t field, uint64_t length) {
    if (length == 0) return;
    Varint(Tag(field, kBytes));
    Varint(length);
  }
  template <typename T>
  bool Number(uint32_t field, T value) {
    if (value == T{}) return false;
    Varint(Tag(field, kVarint));
    Varint(static_cast<uint64_t>(value));
    return false;
  }
  bool Fixed64(uint32_t field, uint64_t value) {
    if (value != 0) PresentFixed64(field, value);
    return false;
  }
  void PresentFixed64(uint32_t field, uint64_t value) {
    Varint(Tag(field, kFixed64));
    Raw(&value, sizeof(value));
  }
  bool Float(uint32_t field, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (bits != 0) PresentFloat(field, value);  // -0 is not the default.
    return false;
  }
  // The field "day" has presence, so it is written even if it is 0.
  bool Day(uint32_t field, float day) {
    if (day >= 0.0f) PresentFloat(field, day);
    return false;
  }
  bool Type(uint32_t field, FloatType type) { return Number(field, type); }
  bool Gradients(const PushRequest& push) {
    if (push.wire_dtype != FloatType::kFloat32) return false;
    return Array(3, push.gradients);
  }
  bool HalfGradients(const PushRequest& push) {
    if (push.wire_dtype == FloatType::kFloat32) return false;
    const uint64_t length = WireBytes(push.gradients.size(), push.wire_dtype);
    BytesHeader(FieldOfHalves(push.wire_dtype, kHalfGradients), length);
    if (to_ != nullptr) {
      ActiveHalfKernels().encode_at_random(
          push.wire_dtype, push.gradients.data(), push.gradients.size(),
          SeedOf(push), to_ + size_);
    }
    size_ += length;
    return false;
  }
  template <typename T>
  bool Array(uint32_t field, absl::Span<const T> values,
             AlignedBuffer DecodeScratch::* /*buffer*/ = nullptr) {
    BytesHeader(field, values.size() * sizeof(T));
    Raw(values.data(), values.size() * sizeof(T));
    return false;
  }
  void Raw(const void* data, uint64_t length) {
    if (to_ != nullptr) CopyBytes(to_ + size_, data, length);
    size_ += length;
  }
  void Varint(uint64_t value) {
    if (to_ == nullptr) {
      size_ += VarintBytes(value);
      return;
    }
    for (; value >= 0x80; value >>= 7) {
      to_[size_++] = static_cast<char>(value | 0x80);
    }
    to_[size_++] = static_cast<char>(value);
  }

 private:
  void PresentFloat(uint32_t field, float value) {
    Varint(Tag(field, kFixed32));
    Raw(&value, sizeof(value));
  }

  char* const to_;
  uint64_t size_ = 0;
};

// Writes the fields and returns their length; if `to` is null, only computes
// the length. Inlined as a whole, because a call for each field would take
// longer than the field.
template <typename Fields, typename Message>
[[gnu::flatten]] uint64_t WriteFields(const Fields& fields,
                                      const Message& message, char* to) {
  FieldWriter writer(to);
  fields(message, &writer);
  return writer.size();
}

template <typename Fields, typename Message>
std::string EncodeFields(const Fields& fields, const Message& message) {
  std::string bytes(WriteFields(fields, message, nullptr), '\0');
  WriteFields(fields, message, bytes.data());
  return bytes;
}

// Writes the bytes that precede the gradients, including the gradients' length.
uint64_t WritePushHead(const PushRequest& request, char* to) {
  assert(request.wire_dtype == FloatType::kFloat32);
  FieldWriter writer(to);
  kPushHead(request, &writer);
  writer.BytesHeader(3, request.gradients.size() * sizeof(float));
  return writer.size();
}

}  // namespace

const HalfKernels& ActiveHalfKernels() {
  static const HalfKernels kernels = ActiveSimdLevel() == SimdLevel::kAvx2
                                         ? avx2::FindHalfKernels()
                                         : scalar::FindHalfKernels();
  return kernels;
}

bool AlignedBuffer::Reserve(size_t bytes, size_t used) {
  if (bytes <= capacity_) return true;
  // Grows by at least half of the capacity. With smaller steps, reading an
  // array that arrives number by number would take quadratic time.
  const size_t wanted = std::max(bytes, capacity_ + capacity_ / 2);
  const size_t rounded = (wanted + kAlignment - 1) / kAlignment * kAlignment;
  char* grown = static_cast<char*>(std::aligned_alloc(kAlignment, rounded));
  if (grown == nullptr) return false;
  if (used > 0) CopyBytes(grown, data_, used);
  std::free(data_);
  data_ = grown;
  capacity_ = rounded;
  return true;
}

void AlignedBuffer::Free() {
  std::free(data_);
  data_ = nullptr;
  capacity_ = 0;
}

DecodeScratch& PartScratch::at(size_t part) {
  is_used_ = true;
  while (parts_.size() <= part) parts_.emplace_back();
  return parts_[part];
}

void PartScratch::Trim() {
  if (!is_used_) return;
  is_used_ = false;
  while (parts_.size() > kKeptParts) parts_.pop_back();
  size_t capacity = 0;
  for (const DecodeScratch& part : parts_) capacity += part.capacity();
  if (capacity > kKeptScratchBytes) parts_.clear();
}

size_t DecodeScratch::capacity() const {
  return keys.capacity() + values.capacity() + slots.capacity() +
         counts.capacity() + shows.capacity() + clicks.capacity();
}

void DecodeScratch::Trim() {
  if (capacity() <= kKeptScratchBytes) return;
  for (AlignedBuffer* buffer :
       {&keys, &values, &slots, &counts, &shows, &clicks}) {
    buffer->Free();
  }
}

absl::Status ReadPullRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PullRequest* request) {
  return ReadFields("PullRequest", kPullFields, kMaxGroupDepth, pieces, scratch,
                    request);
}

absl::Status ReadPushRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PushRequest* request) {
  return ReadFields("PushRequest", kPushFields, kMaxGroupDepth, pieces, scratch,
                    request);
}

absl::Status ReadAssignRequest(MessagePieces pieces, DecodeScratch* scratch,
                               AssignRequest* request) {
  return ReadFields("AssignRequest", kAssignFields, kMaxGroupDepth, pieces,
                    scratch, request);
}

absl::Status ReadPullResponse(MessagePieces pieces, const RowTarget& target,
                              uint64_t* num_floats) {
  return ReadPullResponse(kMaxGroupDepth, pieces, target, num_floats,
                          /*version=*/nullptr);
}

absl::Status ReadWriteResponse(const char* name, MessagePieces pieces,
                               WriteResult* result) {
  return ReadFields(name, kWriteResultFields, kMaxGroupDepth, pieces,
                    /*scratch=*/nullptr, result);
}

absl::Status ReadPullManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PullRequest>* requests) {
  return ReadRequests("PullManyRequest", "PullRequest", kPullFields, pieces,
                      scratch, requests);
}

absl::Status ReadPushManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PushRequest>* requests) {
  return ReadRequests("PushManyRequest", "PushRequest", kPushFields, pieces,
                      scratch, requests);
}

absl::Status ReadPullManyResponse(MessagePieces pieces,
                                  absl::Span<const RowTarget> targets,
                                  std::vector<uint64_t>* num_floats,
                                  std::vector<RowsVersion>* versions) {
  num_floats->clear();
  if (versions != nullptr) versions->clear();
  return ReadParts(
      "PullManyResponse", pieces, [&](size_t i, MessagePieces part) {
        num_floats->push_back(0);
        return ReadPullResponse(
            kMaxGroupDepth - 1, part,
            i < targets.size() ? targets[i] : RowTarget({}),
            &num_floats->back(),
            versions == nullptr ? nullptr : &versions->emplace_back());
      });
}

absl::Status ReadPushManyResponse(MessagePieces pieces,
                                  std::vector<WriteResult>* results) {
  results->clear();
  return ReadParts("PushManyResponse", pieces, [&](size_t, MessagePieces part) {
    return ReadFields("PushResponse", kWriteResultFields, kMaxGroupDepth - 1,
                      part, /*scratch=*/nullptr, &results->emplace_back());
  });
}

uint64_t PullRequestBytes(const PullRequest& request) {
  return WriteFields(kPullFields, request, nullptr);
}
void WritePullRequest(const PullRequest& request, char* to) {
  WriteFields(kPullFields, request, to);
}

uint64_t PushRequestBytes(const PushRequest& request) {
  return WriteFields(kPushFields, request, nullptr);
}
void WritePushRequest(const PushRequest& request, char* to) {
  WriteFields(kPushFields, request, to);
}

uint64_t PushRequestHeadBytes(const PushRequest& request) {
  return WritePushHead(request, nullptr);
}
void WritePushRequestHead(const PushRequest& request, char* to) {
  WritePushHead(request, to);
}
std::string PushRequestTail(const PushRequest& request) {
  return EncodeFields(kPushTail, request);
}

uint64_t AssignRequestBytes(const AssignRequest& request) {
  return WriteFields(kAssignFields, request, nullptr);
}
void WriteAssignRequest(const AssignRequest& request, char* to) {
  WriteFields(kAssignFields, request, to);
}

size_t WritePullResponseHeader(uint64_t num_floats, char* to, FloatType type) {
  FieldWriter writer(to);
  writer.BytesHeader(
      type == FloatType::kFloat32 ? 1 : FieldOfHalves(type, kHalfValues),
      WireBytes(num_floats, type));
  return writer.size();
}

void WriteRowsVersion(const RowsVersion& version, char* to) {
  FieldWriter writer(to);
  writer.PresentFixed64(kGeneration, version.generation);
  writer.PresentFixed64(kNumPushes, version.num_pushes);
}

void WriteHalfRows(absl::Span<const float> rows, FloatType type, char* to) {
  ActiveHalfKernels().encode(type, rows.data(), rows.size(), kMissingMark, to);
}

size_t WritePartHeader(uint64_t part_bytes, char* to) {
  FieldWriter writer(to);
  writer.Varint(Tag(1, kBytes));
  writer.Varint(part_bytes);
  return writer.size();
}

uint64_t PartBytes(uint64_t part_bytes) {
  char header[kMaxPartHeader];
  return WritePartHeader(part_bytes, header) + part_bytes;
}

void RoundRows(FloatType type, absl::Span<float> rows) {
  if (type == FloatType::kFloat32) return;
  std::vector<char> halves(WireBytes(rows.size(), type));
  WriteHalfRows(rows, type, halves.data());
  ActiveHalfKernels().decode(type, halves.data(), rows.size(), kMissingMark,
                             rows.data());
}

uint64_t PullResponseBytes(uint64_t num_floats, FloatType type) {
  char header[kMaxPullResponseHeader];
  return WritePullResponseHeader(num_floats, header, type) +
         WireBytes(num_floats, type);
}

std::string EncodeWriteResponse(const WriteResult& result) {
  return EncodeFields(kWriteResultFields, result);
}

}  // namespace tfswitch
