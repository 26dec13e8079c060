// Reads the JSON of manifests and model files, and says which field is wrong.

#ifndef TFSWITCH_CC_SERVING_OBJECT_READER_H_
#define TFSWITCH_CC_SERVING_OBJECT_READER_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "cc/base/json.h"

namespace tfswitch {

// Reads the fields of one JSON object. Each Read leaves its target as it is if
// the field is absent; Finish() objects to fields that nothing read. The first
// error stays.
//
// Not thread-safe.
class ObjectReader {
 public:
  // `path` names the object in messages: "" for the root, "optimizer.adam".
  // `document` names its source, and must outlive this.
  ObjectReader(const Json& json, std::string path, absl::string_view document);

  const Json* Find(const char* field);

  void Read(const char* field, std::string* value);
  void Read(const char* field, float* value);
  // An integer in [0, max]. The canonical mapping of protobuf writes 64-bit
  // integers as strings, so these are read too.
  void Read(const char* field, uint64_t max, uint64_t* value);

  void Fail(absl::string_view field, absl::string_view expected,
            const Json& got);

  absl::Status Finish();

 private:
  std::string Name(absl::string_view field) const;

  const Json& json_;
  const std::string path_;
  const absl::string_view document_;
  std::set<std::string> known_;
  absl::Status status_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_OBJECT_READER_H_
