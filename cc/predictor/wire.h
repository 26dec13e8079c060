// Protobuf's wire format, for the few messages of TensorFlow that the predictor
// reads and writes. Protobuf itself must not be linked: TensorFlow exports the
// functions of its own copy, and the two would call each other's.

#ifndef CC_PREDICTOR_WIRE_H_
#define CC_PREDICTOR_WIRE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace tfswitch {

// Goes through the fields of a message, whose bytes may come from anywhere. A
// field that holds a message gives its bytes, to be read by another reader.
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

  // False at the end, and if the bytes are no message.
  bool Next();
  // Whether all bytes up to here are a message.
  bool ok() const { return ok_; }

  // Whether the field has this number and is of bytes, or an integer. Like
  // protobuf, callers ignore a field of another type than they expect.
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

  // Takes a varint from the front of `bytes`. False if there is none.
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

  // Reads a field, with all that is in a group of at most this depth.
  bool TakeField(int depth);
  bool Take(uint64_t size);

  std::string_view rest_;
  bool ok_ = true;
  uint32_t number_ = 0;
  uint32_t type_ = kVarint;
  std::string_view bytes_;  // For all types but varints.
  uint64_t integer_ = 0;
};

// Returns entry(key, value) for an entry of a map; false if the bytes are none.
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
