#include "cc/predictor/wire.h"

namespace tfswitch {
namespace {

constexpr int kMaxDepth = 100;  // As in protobuf.

void AppendVarint(uint64_t value, std::string* message) {
  for (; value >= 0x80; value >>= 7) {
    message->push_back(static_cast<char>(value | 0x80));
  }
  message->push_back(static_cast<char>(value));
}

}  // namespace

bool WireReader::TakeVarint(std::string_view* bytes, uint64_t* value) {
  *value = 0;
  for (size_t i = 0; i < bytes->size() && i < 10; ++i) {
    const auto byte = static_cast<uint8_t>((*bytes)[i]);
    *value |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
    if (byte < 0x80) {
      bytes->remove_prefix(i + 1);
      return true;
    }
  }
  return false;
}

bool WireReader::Take(uint64_t size) {
  if (size > rest_.size()) return false;
  bytes_ = rest_.substr(0, size);
  rest_.remove_prefix(size);
  return true;
}

bool WireReader::Next() {
  if (!ok_ || rest_.empty()) return false;
  ok_ = TakeField(kMaxDepth) && type_ != kEndGroup;
  return ok_;
}

bool WireReader::TakeField(int depth) {
  uint64_t tag = 0;
  if (!TakeVarint(&rest_, &tag) || tag >> 32 != 0 || tag >> 3 == 0) {
    return false;
  }
  number_ = static_cast<uint32_t>(tag >> 3);
  type_ = static_cast<uint32_t>(tag & 7);
  switch (type_) {
    case kVarint:
      return TakeVarint(&rest_, &integer_);
    case kFixed64:
      return Take(8);
    case kBytes: {
      uint64_t size = 0;
      return TakeVarint(&rest_, &size) && Take(size);
    }
    case kFixed32:
      return Take(4);
    case kGroup: {
      const uint32_t group = number_;
      if (depth == 0) return false;
      do {
        if (!TakeField(depth - 1)) return false;
      } while (type_ != kEndGroup);
      type_ = kGroup;
      return number_ == group;
    }
    case kEndGroup:
      return true;
    default:  // No type at all.
      return false;
  }
}

void AppendInteger(uint32_t number, int64_t value, std::string* message) {
  AppendVarint(uint64_t{number} << 3, message);
  AppendVarint(static_cast<uint64_t>(value), message);
}

void AppendBytes(uint32_t number, std::string_view bytes,
                 std::string* message) {
  AppendVarint(uint64_t{number} << 3 | 2, message);
  AppendVarint(bytes.size(), message);
  message->append(bytes);
}

}  // namespace tfswitch
