// Protobuf's wire format, for the few messages of TensorFlow that the predictor
// reads and writes. Protobuf itself must not be linked: TensorFlow exports the
// functions of its own copy, and each copy would call functions of the other.

#ifndef CC_PREDICTOR_WIRE_H_
#define CC_PREDICTOR_WIRE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace tfswitch {

// Reads the fields of a message one by one. The bytes may come from anywhere. A
// field that contains a message returns its bytes, which another reader can
// read.
//
//   WireReader fields(message);
//   while (fields.Next()) {
//     if (fields.IsBytes(1)) name = fields.bytes();
//   }
//   if (!fields.ok()) ...
//
// Not thread-safe. The bytes must outlive it.
class WireReader {
 public:
  explicit WireReader(std::string_view message) : rest_(message) {}

  // Reads the next field. False at the end, and if the bytes are not a valid
  // message.
  bool Next();
  // Whether all bytes up to here were valid.
  bool ok() const { return ok_; }

  // Whether the current field has this number and contains bytes, or an
  // integer. Callers ignore a field with another type than expected, as
  // protobuf does.
  bool IsBytes(uint32_t number) const {
    return number_ == number && type_ == kBytes;
  }
  bool IsInteger(uint32_t number) const {
    return number_ == number && type_ == kVarint;
  }
  bool IsFixed32(uint32_t number) const {
    return number_ == number && type_ == kFixed32;
  }

  std::string_view bytes() const { return bytes_; }
  uint64_t integer() const { return integer_; }

  // Removes a varint from the front of `bytes`. False if there is none.
  static bool TakeVarint(std::string_view* bytes, uint64_t* value);

 private:
  enum Type : uint32_t {
    kVarint = 0,
    kFixed64 = 1,
    kBytes = 2,
    kGroup = 3,  // No message here has one.
    kEndGroup = 4,
    kFixed32 = 5
  };

  // Reads one field. If the field is a group, also reads the fields in it;
  // groups may be nested to at most `depth` levels.
  bool TakeField(int depth);
  bool Take(uint64_t size);

  std::string_view rest_;
  bool ok_ = true;
  uint32_t number_ = 0;
  uint32_t type_ = kVarint;
  std::string_view bytes_;  // For all types but varints.
  uint64_t integer_ = 0;
};

// Calls entry(key, value) for an entry of a map and returns its result; false
// if the bytes are not a map entry.
template <typename Entry>
bool ReadEntry(std::string_view bytes, const Entry& entry) {
  std::string_view key, value;
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(1)) key = fields.bytes();
    if (fields.IsBytes(2)) value = fields.bytes();
  }
  return fields.ok() && entry(std::string(key), value);
}

// Appends a field to a message.
void AppendInteger(uint32_t number, int64_t value, std::string* message);
void AppendBytes(uint32_t number, std::string_view bytes, std::string* message);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_WIRE_H_
