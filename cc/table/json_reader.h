// How configs are written to and read from JSON: the forms that protobuf's
// canonical mapping gives their messages, with snake_case names.

#ifndef TFSWITCH_CC_TABLE_JSON_READER_H_
#define TFSWITCH_CC_TABLE_JSON_READER_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <set>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "cc/base/config_fields.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"
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

// All fields of a struct of config_fields.h.
template <typename Struct>
OrderedJson FieldsToJson(const Struct& config) {
  OrderedJson json = OrderedJson::object();
  ForEachField(
      config, [&](const char* name, const auto& value, const FieldRange&) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, float>) {
          json[name] = ShortestDouble(value);
        } else {
          json[name] = value;
        }
      });
  return json;
}

// The kind that was chosen, as {its name: its fields}.
template <typename... Kinds>
OrderedJson KindToJson(const std::variant<Kinds...>& kind) {
  return {{KindName(kind),
           std::visit([](const auto& config) { return FieldsToJson(config); },
                      kind)}};
}

template <typename Struct>
void ReadFields(ObjectReader* reader, Struct* config) {
  ForEachField(
      *config, [reader](const char* name, auto& value, const FieldRange&) {
        if constexpr (std::is_same_v<std::decay_t<decltype(value)>, uint64_t>) {
          reader->Read(name, std::numeric_limits<uint64_t>::max(), &value);
        } else {
          reader->Read(name, &value);
        }
      });
}

// Reads the kind that the object has, which is at `path` and may have other
// fields. Leaves `kind` as it is if there is none; more than one are an error.
template <typename... Kinds>
absl::Status ReadKind(ObjectReader* object, const std::string& path,
                      std::variant<Kinds...>* kind) {
  std::vector<std::string> found;
  absl::Status status;
  ForEachKind<std::variant<Kinds...>>([&](auto config) {
    const Json* fields = object->Find(config.kName);
    if (fields == nullptr || !status.ok()) return;
    found.push_back(config.kName);
    ObjectReader reader(*fields, absl::StrCat(path, ".", config.kName));
    ReadFields(&reader, &config);
    status = reader.Finish();
    *kind = config;
  });
  TFSWITCH_RETURN_IF_ERROR(status);
  if (found.size() <= 1) return absl::OkStatus();
  std::sort(found.begin(), found.end());
  return absl::InvalidArgumentError(
      absl::StrCat("table config: '", path, "': expected one kind, got ",
                   found.size(), ": ", absl::StrJoin(found, ", ")));
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_TABLE_JSON_READER_H_
