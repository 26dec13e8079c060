// Makes choices from the bytes of a made-up input.

#ifndef TFSWITCH_TESTS_CC_TESTING_CHOICES_H_
#define TFSWITCH_TESTS_CC_TESTING_CHOICES_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/types/span.h"
#include "cc/base/json.h"

namespace tfswitch {

// Reads the choices in order. After the last one all are 0.
//
// Not thread-safe.
class Choices {
 public:
  explicit Choices(absl::Span<const uint8_t> bytes) : bytes_(bytes) {}

  bool IsOver() const { return at_ >= bytes_.size(); }
  uint8_t Byte() { return IsOver() ? 0 : bytes_[at_++]; }
  uint64_t Word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | Byte();
    return word;
  }
  // Less than `end`, which is not 0.
  size_t Below(size_t end) {
    return (end <= 256 ? Byte() : static_cast<size_t>(Word())) % end;
  }
  // Takes the next `size` choices, so that changes of other choices do not
  // shift them.
  Choices Next(size_t size) {
    const Choices next(bytes_.subspan(std::min(at_, bytes_.size()), size));
    at_ += size;
    return next;
  }
  uint64_t Number() {
    switch (Byte() % 4) {
      case 0:
        return Byte();
      case 1:
        return uint64_t{1} << (Byte() % 64);
      case 2:
        return std::numeric_limits<uint64_t>::max() - Byte();
      default:
        return Word();
    }
  }
  std::string Text() {
    std::string text(Byte() % 9, '\0');
    for (char& c : text) c = static_cast<char>(Byte());
    return text;
  }

 private:
  const absl::Span<const uint8_t> bytes_;
  size_t at_ = 0;
};

// Changes one value at any depth.
inline void ChangeJson(Choices* choices, Json* json) {
  const Json flat = json->flatten();
  if (flat.empty()) return;
  auto place = flat.begin();
  std::advance(place, choices->Below(flat.size()));
  if (place.key().empty()) return;  // It is no list and no object any more.
  Json value = choices->Number();
  switch (choices->Byte() % 8) {
    case 0:
      value = -1;
      break;
    case 1:
      value = 1e300;
      break;
    case 2:
      value = choices->Text();
      break;
    case 3:
      value = Json::array({value, value});
      break;
    case 4:
      value = {{"a", value}};
      break;
    case 5:
      value = nullptr;
      break;
    default:
      break;
  }
  (*json)[Json::json_pointer(place.key())] = value;
}

// Changes a byte, removes some, or inserts some.
inline void ChangeBytes(Choices* choices, std::string* bytes) {
  const size_t at = choices->Below(bytes->size() + 1);
  switch (choices->Byte() % 4) {
    case 0:
      bytes->resize(at);
      break;
    case 1:
      bytes->insert(at, choices->Text());
      break;
    case 2:
      bytes->erase(at, choices->Byte());
      break;
    default:
      if (at < bytes->size()) (*bytes)[at] = static_cast<char>(choices->Byte());
      break;
  }
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_CHOICES_H_
