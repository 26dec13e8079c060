// How configs are written to and read from JSON: the forms that protobuf's
// canonical mapping gives their messages, with snake_case names.

#ifndef TFSWITCH_CC_TABLE_JSON_READER_H_
#define TFSWITCH_CC_TABLE_JSON_READER_H_

#include <cstdint>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cc/base/json.h"
#include "nlohmann/json.hpp"

namespace tfswitch {

// Keeps the order of the proto fields, so that manifests read well.
using OrderedJson = nlohmann::ordered_json;

// ParseJson(), with an error that names the document and quotes its beginning.
absl::StatusOr<Json> ParseDocument(absl::string_view text,
                                   absl::string_view document);

// Shortest number that gives the same float back: 0.1, not 0.10000000149.
double ShortestDouble(float value);

// Reads the fields of one JSON object. Each Read leaves its target as it is if
// the field is absent; Finish() objects to fields that nothing read. The first
// error stays.
//
// Not thread-safe.
class ObjectReader {
 public:
  // `path` names the object in messages: "" for the root, "optimizer.adam".
  // `document` names what it is read from, and must outlive this.
  ObjectReader(const Json& json, std::string path,
               absl::string_view document = "table config");

  const Json* Find(const char* field);

  void Read(const char* field, std::string* value);
  void Read(const char* field, bool* value);
  void Read(const char* field, float* value);
  // An integer in [0, max]. The canonical mapping of protobuf writes 64-bit
  // integers as strings, so these are read too.
  void Read(const char* field, uint64_t max, uint64_t* value);
  void Read(const char* field, uint32_t* value);

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

// A oneof in JSON: an object with at most one of the known fields.
absl::Status CheckOneKind(const Json& json, absl::string_view path);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_JSON_READER_H_
