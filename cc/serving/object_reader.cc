#include "cc/serving/object_reader.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tfswitch {
namespace {

std::string Dump(const Json& json) {
  return json.dump(-1, ' ', true, Json::error_handler_t::replace);
}

std::string IntegerRange(uint64_t max) {
  return absl::StrCat("an integer from 0 to ", max);
}

bool ParseDigits(const std::string& text, uint64_t* number) {
  if (text.empty()) return false;
  for (const char c : text) {
    if (c < '0' || c > '9') return false;
  }
  return absl::SimpleAtoi(text, number);
}

}  // namespace

ObjectReader::ObjectReader(const Json& json, std::string path,
                           absl::string_view document)
    : json_(json), path_(std::move(path)), document_(document) {
  if (!json.is_object()) Fail("", "an object", json);
}

const Json* ObjectReader::Find(const char* field) {
  known_.insert(field);
  if (!status_.ok()) return nullptr;
  const auto it = json_.find(field);
  return it == json_.end() ? nullptr : &*it;
}

void ObjectReader::Read(const char* field, std::string* value) {
  const Json* json = Find(field);
  if (json == nullptr) return;
  if (!json->is_string()) return Fail(field, "a string", *json);
  *value = json->get<std::string>();
}

void ObjectReader::Read(const char* field, float* value) {
  const Json* json = Find(field);
  if (json == nullptr) return;
  if (!json->is_number()) return Fail(field, "a number", *json);
  const double number = json->get<double>();
  if (std::fabs(number) >
      static_cast<double>(std::numeric_limits<float>::max())) {
    return Fail(field, "a number in the range of float32", *json);
  }
  *value = static_cast<float>(number);
}

void ObjectReader::Read(const char* field, uint64_t max, uint64_t* value) {
  const Json* json = Find(field);
  if (json == nullptr) return;
  uint64_t number = 0;
  if (json->is_number_unsigned()) {
    number = json->get<uint64_t>();
  } else if (!json->is_string() ||
             !ParseDigits(json->get_ref<const std::string&>(), &number)) {
    return Fail(field, IntegerRange(max), *json);
  }
  if (number > max) return Fail(field, IntegerRange(max), *json);
  *value = number;
}

void ObjectReader::Fail(absl::string_view field, absl::string_view expected,
                        const Json& got) {
  if (!status_.ok()) return;
  status_ = absl::InvalidArgumentError(
      absl::StrCat(document_, ": ", Name(field), ": expected ", expected,
                   ", got ", Dump(got)));
}

absl::Status ObjectReader::Finish() {
  if (!status_.ok()) return status_;
  for (const auto& item : json_.items()) {
    if (known_.count(item.key()) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          document_, ": unknown field ", Name(absl::CHexEscape(item.key())),
          "; expected one of: ", absl::StrJoin(known_, ", ")));
    }
  }
  return absl::OkStatus();
}

std::string ObjectReader::Name(absl::string_view field) const {
  if (path_.empty()) {
    return field.empty() ? "the whole" : absl::StrCat("'", field, "'");
  }
  return absl::StrCat("'", path_, field.empty() ? "" : ".", field, "'");
}

}  // namespace tfswitch
