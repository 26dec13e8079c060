// PieceReader hides the ends of pieces. ReadMessage() calls a function of its
// caller for each field, and skips a field that this function does not know.
// The readers return a Complaint, a constant text, so that only an error makes
// a string. ArrayField borrows an array that lies whole and aligned in one
// piece, and copies it to scratch otherwise.
//
// The writers of requests run twice over the same fields, to count bytes and to
// write them, so that the two cannot differ. A push is also written as head and
// tail, because the gradients between them may be sent from where they lie.

#include "cc/wire/codec.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/base/config.h"
#include "absl/strings/str_cat.h"
#include "cc/base/copy_bytes.h"

#ifndef ABSL_IS_LITTLE_ENDIAN
#error "Arrays are used as they lie on the wire, which is little-endian."
#endif

namespace tfswitch {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kKeptScratchBytes = size_t{64} << 20;
// As many tables as a call of the C API takes; other clients may send more.
constexpr size_t kKeptParts = 256;
// Protobuf's own limit, so that both refuse the same messages.
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

// The error in a field; nullptr if there is none.
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
// Not an error: the reader of a message does not know the field.
constexpr char kUnknownField[] = "";

// Reads bytes over the ends of pieces.
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

  // The next `size` bytes if they lie in one piece; they are then consumed.
  const char* Borrow(uint64_t size) {
    if (size > static_cast<uint64_t>(end_ - at_)) return nullptr;
    const char* borrowed = at_;
    Advance(size);
    return borrowed;
  }

  // Appends the pieces of the next `size` bytes, and goes behind them.
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

// Bits beyond the 64th are dropped, as protobuf does.
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

// A length that the rest of the message can hold.
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

// An integer of fewer than 64 bits gets the lowest; a bool, whether any is set.
template <typename T>
Complaint ReadNumber(PieceReader* reader, T* value) {
  uint64_t number = 0;
  Complaint bad = ReadVarint(reader, 10, &number);
  *value = static_cast<T>(number);
  return bad;
}

// Well-formed UTF-8 as Unicode defines it: no surrogates, no overlong forms.
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

// A repeated field of fixed-size numbers as it grows. The first packed run is
// used where it lies, if it lies whole and aligned; anything else goes to
// scratch.
template <typename T>
class ArrayField {
 public:
  ArrayField(uint32_t number, AlignedBuffer* scratch)
      : number_(number), scratch_(scratch) {}

  absl::Span<const T> span() const { return {data_, size_}; }

  Complaint ReadPacked(PieceReader* reader) {
    uint64_t length;
    if (Complaint bad = ReadLength(reader, &length)) return bad;
    if (length % sizeof(T) != 0) return kBadArray;
    if (length == 0) return kFine;
    if (size_ == 0) {
      const char* lying = reader->Borrow(length);
      if (lying != nullptr &&
          reinterpret_cast<uintptr_t>(lying) % alignof(T) == 0) {
        data_ = reinterpret_cast<const T*>(lying);
        size_ = length / sizeof(T);
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

  // Reads it, packed or not, if `tag` is that of this field.
  bool Accept(uint32_t tag, PieceReader* reader, Complaint* bad) {
    if (tag == Tag(number_, kBytes)) {
      *bad = ReadPacked(reader);
      return true;
    }
    if (tag == Tag(number_, sizeof(T) == 8 ? kFixed64 : kFixed32)) {
      *bad = ReadOne(reader);
      return true;
    }
    return false;
  }

 private:
  Complaint Append(const void* bytes, size_t size) {
    T* to = Extend(size);
    if (to == nullptr) return kNoMemory;
    CopyBytes(to, bytes, size);
    return kFine;
  }

  // Makes room for `bytes` more in scratch, behind the elements that it has.
  T* Extend(size_t bytes) {
    const size_t used = size_ * sizeof(T);
    const bool in_scratch =
        size_ == 0 || reinterpret_cast<const char*>(data_) == scratch_->data();
    if (!scratch_->Reserve(used + bytes, in_scratch ? used : 0)) return nullptr;
    if (!in_scratch) CopyBytes(scratch_->data(), data_, used);
    data_ = reinterpret_cast<const T*>(scratch_->data());
    size_ += bytes / sizeof(T);
    return reinterpret_cast<T*>(scratch_->data() + used);
  }

  const uint32_t number_;
  AlignedBuffer* const scratch_;
  const T* data_ = nullptr;
  size_t size_ = 0;
};

// Reads the one of `arrays` that has the tag.
template <typename... Arrays>
Complaint ReadArray(uint32_t tag, PieceReader* reader, Arrays*... arrays) {
  Complaint bad = kUnknownField;
  (void)(arrays->Accept(tag, reader, &bad) || ...);
  return bad;
}

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

absl::Status ReadPullRequest(int max_group_depth, MessagePieces pieces,
                             DecodeScratch* scratch, PullRequest* request) {
  *request = PullRequest();
  ArrayField<Key> keys(2, &scratch->keys);
  absl::Status status =
      ReadMessage("PullRequest", pieces, max_group_depth,
                  [&](uint32_t tag, PieceReader* reader) -> Complaint {
                    switch (tag) {
                      case Tag(1, kBytes):
                        return ReadName(reader, &request->table);
                      case Tag(30, kFixed64):
                        return ReadFixed(reader, &request->table_incarnation);
                      case Tag(3, kVarint):
                        return ReadNumber(reader, &request->insert_missing);
                      case Tag(4, kFixed32):
                        return ReadFixed(reader, &request->day);
                      default:
                        return ReadArray(tag, reader, &keys);
                    }
                  });
  request->keys = keys.span();
  return status;
}

absl::Status ReadPushRequest(int max_group_depth, MessagePieces pieces,
                             DecodeScratch* scratch, PushRequest* request) {
  *request = PushRequest();
  ArrayField<Key> keys(2, &scratch->keys);
  ArrayField<float> gradients(3, &scratch->values);
  ArrayField<float> counts(13, &scratch->counts);
  ArrayField<float> shows(14, &scratch->shows);
  ArrayField<float> clicks(15, &scratch->clicks);
  absl::Status status =
      ReadMessage("PushRequest", pieces, max_group_depth,
                  [&](uint32_t tag, PieceReader* reader) -> Complaint {
                    switch (tag) {
                      case Tag(1, kBytes):
                        return ReadName(reader, &request->table);
                      case Tag(30, kFixed64):
                        return ReadFixed(reader, &request->table_incarnation);
                      case Tag(4, kFixed32):
                        return ReadFixed(reader, &request->learning_rate);
                      case Tag(5, kVarint):
                        return ReadNumber(reader, &request->insert_missing);
                      case Tag(6, kVarint):
                        return ReadNumber(reader, &request->keys_are_unique);
                      case Tag(7, kVarint):
                        return ReadNumber(reader, &request->id.client_id);
                      case Tag(8, kVarint):
                        return ReadNumber(reader, &request->id.sequence);
                      case Tag(9, kBytes):
                        return ReadName(reader, &request->step.group);
                      case Tag(10, kVarint):
                        return ReadNumber(reader, &request->step.worker);
                      case Tag(11, kVarint):
                        return ReadNumber(reader, &request->step.incarnation);
                      case Tag(12, kVarint):
                        return ReadNumber(reader, &request->step.clock);
                      case Tag(16, kVarint):
                        return ReadNumber(reader, &request->global_step);
                      case Tag(17, kFixed32):
                        return ReadFixed(reader, &request->day);
                      default:
                        return ReadArray(tag, reader, &keys, &gradients,
                                         &counts, &shows, &clicks);
                    }
                  });
  request->keys = keys.span();
  request->gradients = gradients.span();
  request->observations = {counts.span(), shows.span(), clicks.span()};
  return status;
}

// Reads the floats [begin, begin + size) of an answer to where they go.
void ReadRows(PieceReader* reader, const RowTarget& target, uint64_t begin,
              uint64_t size) {
  if (target.dim == 0) {
    if (size > 0) {
      reader->Read(target.floats.data() + begin, size * sizeof(float));
    }
    return;
  }
  while (size > 0) {
    const uint64_t of_row = begin % target.dim;
    const uint64_t part = std::min(size, target.dim - of_row);
    reader->Read(target.floats.data() +
                     target.places[begin / target.dim] * target.dim + of_row,
                 part * sizeof(float));
    begin += part;
    size -= part;
  }
}

absl::Status ReadPullResponse(int max_group_depth, MessagePieces pieces,
                              const RowTarget& target, uint64_t* num_floats) {
  uint64_t count = 0;
  absl::Status status = ReadMessage(
      "PullResponse", pieces, max_group_depth,
      [&](uint32_t tag, PieceReader* reader) -> Complaint {
        uint64_t length = sizeof(float);
        if (tag == Tag(1, kBytes)) {
          if (Complaint bad = ReadLength(reader, &length)) return bad;
          if (length % sizeof(float) != 0) return kBadArray;
        } else if (tag != Tag(1, kFixed32)) {
          return kUnknownField;
        } else if (reader->remaining() < length) {
          return kCutShort;
        }
        const uint64_t size = length / sizeof(float);
        const uint64_t room =
            count < target.num_floats() ? target.num_floats() - count : 0;
        const uint64_t wanted = std::min(size, room);
        ReadRows(reader, target, count, wanted);
        reader->Skip((size - wanted) * sizeof(float));
        count += size;
        return kFine;
      });
  *num_floats = count;
  return status;
}

absl::Status ReadWriteResponse(const char* name, int max_group_depth,
                               MessagePieces pieces, WriteResult* result) {
  *result = WriteResult();
  return ReadMessage(name, pieces, max_group_depth,
                     [&](uint32_t tag, PieceReader* reader) -> Complaint {
                       switch (tag) {
                         case Tag(1, kVarint):
                           return ReadNumber(reader, &result->num_rows);
                         case Tag(2, kVarint):
                           return ReadNumber(reader, &result->duplicate);
                         default:
                           return kUnknownField;
                       }
                     });
}

// Reads a message of many; `read_part(i, pieces)` reads its i-th part, which
// may nest one group less deep.
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

size_t VarintBytes(uint64_t value) {
  size_t bytes = 1;
  for (; value >= 0x80; value >>= 7) ++bytes;
  return bytes;
}

// Lengths and bytes of fields; like protobuf, a field that has its default is
// left out. With `to` null nothing is written, only counted.
class FieldWriter {
 public:
  explicit FieldWriter(char* to) : to_(to) {}

  uint64_t size() const { return size_; }

  void Bytes(uint32_t field, const void* data, uint64_t length) {
    BytesHeader(field, length);
    Raw(data, length);
  }
  void BytesHeader(uint32_t field, uint64_t length) {
    if (length == 0) return;
    Varint(Tag(field, kBytes));
    Varint(length);
  }
  void Uint(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Varint(Tag(field, kVarint));
    Varint(value);
  }
  void Fixed64(uint32_t field, uint64_t value) {
    if (value == 0) return;
    Varint(Tag(field, kFixed64));
    Raw(&value, sizeof(value));
  }
  void Float(uint32_t field, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    if (bits != 0) PresentFloat(field, value);  // -0 is no default.
  }
  // For an optional field: written even if it is 0.
  void PresentFloat(uint32_t field, float value) {
    Varint(Tag(field, kFixed32));
    Raw(&value, sizeof(value));
  }
  template <typename T>
  void Array(uint32_t field, absl::Span<const T> values) {
    Bytes(field, values.data(), values.size() * sizeof(T));
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
  char* const to_;
  uint64_t size_ = 0;
};

uint64_t WritePull(const PullRequest& request, char* to) {
  FieldWriter writer(to);
  writer.Bytes(1, request.table.data(), request.table.size());
  writer.Array(2, request.keys);
  writer.Uint(3, request.insert_missing);
  if (request.day >= 0.0f) writer.PresentFloat(4, request.day);
  writer.Fixed64(30, request.table_incarnation);
  return writer.size();
}

uint64_t GradientBytes(const PushRequest& request) {
  return request.gradients.size() * sizeof(float);
}

void WritePushHead(const PushRequest& request, FieldWriter* writer) {
  writer->Bytes(1, request.table.data(), request.table.size());
  writer->Array(2, request.keys);
  writer->BytesHeader(3, GradientBytes(request));
}

void WritePushTail(const PushRequest& request, FieldWriter* writer) {
  writer->Float(4, request.learning_rate);
  writer->Uint(5, request.insert_missing);
  writer->Uint(6, request.keys_are_unique);
  writer->Uint(7, request.id.client_id);
  writer->Uint(8, request.id.sequence);
  writer->Bytes(9, request.step.group.data(), request.step.group.size());
  writer->Uint(10, request.step.worker);
  writer->Uint(11, request.step.incarnation);
  writer->Uint(12, static_cast<uint64_t>(request.step.clock));
  writer->Array(13, request.observations.counts);
  writer->Array(14, request.observations.shows);
  writer->Array(15, request.observations.clicks);
  writer->Uint(16, static_cast<uint64_t>(request.global_step));
  if (request.day >= 0.0f) writer->PresentFloat(17, request.day);
  writer->Fixed64(30, request.table_incarnation);
}

uint64_t WritePush(const PushRequest& request, char* to) {
  FieldWriter writer(to);
  WritePushHead(request, &writer);
  writer.Raw(request.gradients.data(), GradientBytes(request));
  WritePushTail(request, &writer);
  return writer.size();
}

uint64_t WriteAssign(const AssignRequest& request, char* to) {
  FieldWriter writer(to);
  writer.Bytes(1, request.table.data(), request.table.size());
  writer.Array(2, request.keys);
  writer.Array(3, request.embeddings);
  writer.Array(4, request.slots);
  writer.Uint(5, request.only_missing);
  if (request.day >= 0.0f) writer.PresentFloat(6, request.day);
  writer.Uint(7, request.id.client_id);
  writer.Uint(8, request.id.sequence);
  writer.Fixed64(30, request.table_incarnation);
  return writer.size();
}

}  // namespace

bool AlignedBuffer::Reserve(size_t bytes, size_t used) {
  if (bytes <= capacity_) return true;
  // Half as much again, or an array sent number by number takes quadratic time.
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
  return ReadPullRequest(kMaxGroupDepth, pieces, scratch, request);
}

absl::Status ReadPushRequest(MessagePieces pieces, DecodeScratch* scratch,
                             PushRequest* request) {
  return ReadPushRequest(kMaxGroupDepth, pieces, scratch, request);
}

absl::Status ReadAssignRequest(MessagePieces pieces, DecodeScratch* scratch,
                               AssignRequest* request) {
  *request = AssignRequest();
  ArrayField<Key> keys(2, &scratch->keys);
  ArrayField<float> values(3, &scratch->values);
  ArrayField<float> slots(4, &scratch->slots);
  absl::Status status =
      ReadMessage("AssignRequest", pieces, kMaxGroupDepth,
                  [&](uint32_t tag, PieceReader* reader) -> Complaint {
                    switch (tag) {
                      case Tag(1, kBytes):
                        return ReadName(reader, &request->table);
                      case Tag(30, kFixed64):
                        return ReadFixed(reader, &request->table_incarnation);
                      case Tag(5, kVarint):
                        return ReadNumber(reader, &request->only_missing);
                      case Tag(6, kFixed32):
                        return ReadFixed(reader, &request->day);
                      case Tag(7, kVarint):
                        return ReadNumber(reader, &request->id.client_id);
                      case Tag(8, kVarint):
                        return ReadNumber(reader, &request->id.sequence);
                      default:
                        return ReadArray(tag, reader, &keys, &values, &slots);
                    }
                  });
  request->keys = keys.span();
  request->embeddings = values.span();
  request->slots = slots.span();
  return status;
}

absl::Status ReadPullResponse(MessagePieces pieces, const RowTarget& target,
                              uint64_t* num_floats) {
  return ReadPullResponse(kMaxGroupDepth, pieces, target, num_floats);
}

absl::Status ReadWriteResponse(const char* name, MessagePieces pieces,
                               WriteResult* result) {
  return ReadWriteResponse(name, kMaxGroupDepth, pieces, result);
}

absl::Status ReadPullManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PullRequest>* requests) {
  requests->clear();
  return ReadParts("PullManyRequest", pieces,
                   [&](size_t i, MessagePieces part) {
                     requests->emplace_back();
                     return ReadPullRequest(kMaxGroupDepth - 1, part,
                                            &scratch->at(i), &requests->back());
                   });
}

absl::Status ReadPushManyRequest(MessagePieces pieces, PartScratch* scratch,
                                 std::vector<PushRequest>* requests) {
  requests->clear();
  return ReadParts("PushManyRequest", pieces,
                   [&](size_t i, MessagePieces part) {
                     requests->emplace_back();
                     return ReadPushRequest(kMaxGroupDepth - 1, part,
                                            &scratch->at(i), &requests->back());
                   });
}

absl::Status ReadPullManyResponse(MessagePieces pieces,
                                  absl::Span<const RowTarget> targets,
                                  std::vector<uint64_t>* num_floats) {
  num_floats->clear();
  return ReadParts(
      "PullManyResponse", pieces, [&](size_t i, MessagePieces part) {
        num_floats->push_back(0);
        return ReadPullResponse(kMaxGroupDepth - 1, part,
                                i < targets.size() ? targets[i] : RowTarget({}),
                                &num_floats->back());
      });
}

absl::Status ReadPushManyResponse(MessagePieces pieces,
                                  std::vector<WriteResult>* results) {
  results->clear();
  return ReadParts("PushManyResponse", pieces, [&](size_t, MessagePieces part) {
    results->emplace_back();
    return ReadWriteResponse("PushResponse", kMaxGroupDepth - 1, part,
                             &results->back());
  });
}

uint64_t PullRequestBytes(const PullRequest& request) {
  return WritePull(request, nullptr);
}
void WritePullRequest(const PullRequest& request, char* to) {
  WritePull(request, to);
}

uint64_t PushRequestBytes(const PushRequest& request) {
  return WritePush(request, nullptr);
}
void WritePushRequest(const PushRequest& request, char* to) {
  WritePush(request, to);
}

uint64_t PushRequestHeadBytes(const PushRequest& request) {
  FieldWriter counter(nullptr);
  WritePushHead(request, &counter);
  return counter.size();
}
void WritePushRequestHead(const PushRequest& request, char* to) {
  FieldWriter writer(to);
  WritePushHead(request, &writer);
}
std::string PushRequestTail(const PushRequest& request) {
  FieldWriter counter(nullptr);
  WritePushTail(request, &counter);
  std::string bytes(counter.size(), '\0');
  FieldWriter writer(bytes.data());
  WritePushTail(request, &writer);
  return bytes;
}

uint64_t AssignRequestBytes(const AssignRequest& request) {
  return WriteAssign(request, nullptr);
}
void WriteAssignRequest(const AssignRequest& request, char* to) {
  WriteAssign(request, to);
}

size_t WritePullResponseHeader(uint64_t num_floats, char* to) {
  if (num_floats == 0) return 0;
  return WritePartHeader(num_floats * sizeof(float), to);
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

uint64_t PullResponseBytes(uint64_t num_floats) {
  char header[kMaxPullResponseHeader];
  return WritePullResponseHeader(num_floats, header) +
         num_floats * sizeof(float);
}

std::string EncodeWriteResponse(const WriteResult& result) {
  FieldWriter counter(nullptr);
  counter.Uint(1, static_cast<uint64_t>(result.num_rows));
  counter.Uint(2, result.duplicate);
  std::string bytes(counter.size(), '\0');
  FieldWriter writer(bytes.data());
  writer.Uint(1, static_cast<uint64_t>(result.num_rows));
  writer.Uint(2, result.duplicate);
  return bytes;
}

}  // namespace tfswitch
