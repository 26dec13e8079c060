#include "cc/predictor/example_parser.h"

#include <cstring>
#include <string>
#include <utility>

#include "cc/predictor/wire.h"

namespace tfswitch {
namespace {

constexpr size_t kFloatBytes = sizeof(float);

bool AppendFloats(std::string_view bytes, Floats* floats) {
  if (bytes.size() % kFloatBytes != 0) return false;
  const size_t before = floats->size();
  floats->resize(before + bytes.size() / kFloatBytes);
  if (!bytes.empty()) {
    std::memcpy(floats->data() + before, bytes.data(), bytes.size());
  }
  return true;
}

// Reads a BytesList, FloatList or Int64List. Each has one field, whose numbers
// may be packed.
bool ReadList(std::string_view bytes, Strings* list) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(1)) list->emplace_back(fields.bytes());
  }
  return fields.ok();
}

bool ReadList(std::string_view bytes, Floats* list) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (!fields.IsBytes(1) && !fields.IsFixed32(1)) continue;
    if (!AppendFloats(fields.bytes(), list)) return false;
  }
  return fields.ok();
}

bool ReadList(std::string_view bytes, Integers* list) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsInteger(1)) {
      list->push_back(static_cast<int64_t>(fields.integer()));
    } else if (fields.IsBytes(1)) {
      std::string_view packed = fields.bytes();
      while (!packed.empty()) {
        uint64_t integer = 0;
        if (!WireReader::TakeVarint(&packed, &integer)) return false;
        list->push_back(static_cast<int64_t>(integer));
      }
    }
  }
  return fields.ok();
}

// Adds a list to the feature. If the feature has a list of the same kind,
// appends to it; a list of another kind is replaced.
template <typename List>
bool MergeList(std::string_view bytes, Feature* feature) {
  if (!std::holds_alternative<List>(*feature)) feature->emplace<List>();
  return ReadList(bytes, &std::get<List>(*feature));
}

bool ReadFeature(std::string_view bytes, Feature* feature) {
  WireReader fields(bytes);
  while (fields.Next()) {
    bool parsed = true;
    if (fields.IsBytes(1)) {
      parsed = MergeList<Strings>(fields.bytes(), feature);
    } else if (fields.IsBytes(2)) {
      parsed = MergeList<Floats>(fields.bytes(), feature);
    } else if (fields.IsBytes(3)) {
      parsed = MergeList<Integers>(fields.bytes(), feature);
    }
    if (!parsed) return false;
  }
  return fields.ok();
}

bool ReadFeatures(std::string_view bytes, Features* features) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (!fields.IsBytes(1)) continue;
    const bool parsed =
        ReadEntry(fields.bytes(), [&](const std::string& name, auto value) {
          // Replaces an earlier feature of that name.
          return ReadFeature(value, &((*features)[name] = Feature()));
        });
    if (!parsed) return false;
  }
  return fields.ok();
}

}  // namespace

bool ParseExample(std::string_view bytes, Features* features) {
  WireReader fields(bytes);
  while (fields.Next()) {
    if (fields.IsBytes(1) && !ReadFeatures(fields.bytes(), features)) {
      return false;
    }
  }
  return fields.ok();
}

}  // namespace tfswitch
