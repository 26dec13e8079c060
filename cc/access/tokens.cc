// A secret has 256 random bits, so nobody can guess it. So its hash is a single
// SHA-256: salt or many rounds would not make it safer.

#include "cc/access/tokens.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr absl::string_view kPrefix = "tfswitch_";
constexpr size_t kIdDigits = 12;
constexpr size_t kSecretDigits = 64;
constexpr size_t kMaxTokens = 10'000;
constexpr size_t kMaxPatterns = 1'000;

bool IsHex(absl::string_view text, size_t size) {
  return text.size() == size &&
         std::all_of(text.begin(), text.end(), [](char c) {
           return absl::ascii_isdigit(c) || (c >= 'a' && c <= 'f');
         });
}

// Returns the field; null if there is none.
const Json* Find(const Json& object, const char* name) {
  const auto found = object.find(name);
  return found == object.end() ? nullptr : &*found;
}

absl::Status BadField(absl::string_view name, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("'", name, "' must be ", expected));
}

absl::Status ReadText(const Json& object, const char* name,
                      absl::string_view expected, std::string* value) {
  const Json* field = Find(object, name);
  if (field == nullptr || !field->is_string()) return BadField(name, expected);
  *value = field->get<std::string>();
  return absl::OkStatus();
}

absl::Status ReadTables(const Json& object, std::vector<std::string>* tables) {
  constexpr const char* kExpected = "a list of 1 to 1000 patterns of names";
  const Json* field = Find(object, "tables");
  if (field == nullptr || !field->is_array() || field->empty() ||
      field->size() > kMaxPatterns) {
    return BadField("tables", kExpected);
  }
  for (const Json& pattern : *field) {
    if (!pattern.is_string()) return BadField("tables", kExpected);
    tables->push_back(pattern.get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status ReadQuota(const Json& object, TokenQuota* quota) {
  const std::pair<const char*, uint64_t*> limits[] = {
      {"max_rows", &quota->max_rows},
      {"max_tables", &quota->max_tables},
      {"max_bytes_in_flight", &quota->max_bytes_in_flight},
      {"max_calls_in_flight", &quota->max_calls_in_flight},
      {"max_request_bytes", &quota->max_request_bytes}};
  for (const auto& [name, value] : limits) {
    const Json* field = Find(object, name);
    if (field == nullptr) continue;
    if (!field->is_number_unsigned() || field->get<uint64_t>() == 0) {
      return BadField(name, "a whole number from 1");
    }
    *value = field->get<uint64_t>();
  }
  return absl::OkStatus();
}

absl::StatusOr<TokenRecord> ReadRecord(const Json& object) {
  if (!object.is_object()) {
    return absl::InvalidArgumentError("it must be an object");
  }
  static const std::set<std::string>* const known =
      new std::set<std::string>{"id",
                                "sha256",
                                "role",
                                "tables",
                                "created",
                                "expires",
                                "max_rows",
                                "max_tables",
                                "max_bytes_in_flight",
                                "note",
                                "max_calls_in_flight",
                                "max_request_bytes"};
  for (const auto& [name, value] : object.items()) {
    // Refuses unknown entries: if they were ignored, a misspelled limit would
    // have no effect.
    if (known->count(name) == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "'", absl::CHexEscape(name.substr(0, 32)), "' is not known"));
    }
  }
  TokenRecord record;
  TFSWITCH_RETURN_IF_ERROR(
      ReadText(object, "id", "12 hexadecimal digits", &record.id));
  if (!IsHex(record.id, kIdDigits)) {
    return BadField("id", "12 hexadecimal digits");
  }
  std::string hash;
  constexpr const char* kExpectedHash = "64 hexadecimal digits";
  TFSWITCH_RETURN_IF_ERROR(ReadText(object, "sha256", kExpectedHash, &hash));
  if (!IsHex(hash, 2 * record.hash.size())) {
    return BadField("sha256", kExpectedHash);
  }
  const std::string bytes = absl::HexStringToBytes(hash);
  std::copy(bytes.begin(), bytes.end(), record.hash.begin());
  std::string role;
  TFSWITCH_RETURN_IF_ERROR(
      ReadText(object, "role", "read, train or admin", &role));
  for (const v1::Role each : {v1::ROLE_READ, v1::ROLE_TRAIN, v1::ROLE_ADMIN}) {
    if (role == RoleName(each)) record.role = each;
  }
  if (record.role == v1::ROLE_UNSPECIFIED) {
    return BadField("role", "read, train or admin");
  }
  TFSWITCH_RETURN_IF_ERROR(ReadTables(object, &record.tables));
  if (Find(object, "expires") != nullptr) {
    constexpr const char* kExpected = "a time such as 2030-01-31T00:00:00Z";
    std::string expires;
    TFSWITCH_RETURN_IF_ERROR(ReadText(object, "expires", kExpected, &expires));
    std::string error;
    if (!absl::ParseTime(absl::RFC3339_full, expires, &record.expires,
                         &error)) {
      return BadField("expires", kExpected);
    }
  }
  TFSWITCH_RETURN_IF_ERROR(ReadQuota(object, &record.quota));
  return record;
}

}  // namespace

bool TokenRecord::MayUse(absl::string_view table) const {
  return std::any_of(tables.begin(), tables.end(), [&](const auto& pattern) {
    return MatchesPattern(pattern, table);
  });
}

bool TokenRecord::MayUseAll() const {
  return std::find(tables.begin(), tables.end(), "*") != tables.end();
}

absl::StatusOr<std::vector<TokenRecord>> ParseTokenFile(
    absl::string_view text) {
  const absl::StatusOr<Json> json = ParseJson(text);
  const Json* list = nullptr;
  if (json.ok() && json->is_object()) list = Find(*json, "tokens");
  if (list == nullptr || json->size() > 1 || !list->is_array() ||
      list->size() > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("it is not a JSON object with a list 'tokens' of at most ",
                     kMaxTokens, " entries, and with nothing else"));
  }
  std::vector<TokenRecord> records;
  std::set<std::string> ids;
  for (const Json& entry : *list) {
    absl::StatusOr<TokenRecord> record = ReadRecord(entry);
    if (record.ok() && !ids.insert(record->id).second) {
      record = absl::InvalidArgumentError(
          absl::StrCat("there is another one with the id ", record->id));
    }
    if (!record.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("entry ", records.size() + 1,
                       " of 'tokens': ", record.status().message()));
    }
    records.push_back(*std::move(record));
  }
  return records;
}

absl::StatusOr<absl::string_view> TokenId(absl::string_view token) {
  absl::string_view rest = token;
  if (absl::ConsumePrefix(&rest, kPrefix) &&
      rest.size() == kIdDigits + 1 + kSecretDigits && rest[kIdDigits] == '_' &&
      IsHex(rest.substr(0, kIdDigits), kIdDigits) &&
      IsHex(rest.substr(kIdDigits + 1), kSecretDigits)) {
    return rest.substr(0, kIdDigits);
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a text of ", token.size(),
      " characters is no token; `tfswitch token create` prints one, as "
      "tfswitch_ID_SECRET"));
}

bool HasToken(absl::string_view text) {
  for (size_t begin = text.find(kPrefix); begin != text.npos;
       begin = text.find(kPrefix, begin + 1)) {
    const absl::string_view rest = text.substr(begin + kPrefix.size());
    if (IsHex(rest.substr(0, kIdDigits), kIdDigits) &&
        absl::StartsWith(rest.substr(kIdDigits), "_")) {
      return true;
    }
  }
  return false;
}

absl::Status CheckIsNoToken(absl::string_view name, absl::string_view path) {
  if (!HasToken(path)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name,
      " must be the path of a file, and has a token in it, which is left out "
      "here; put the token into a file that others cannot read"));
}

std::optional<TokenHash> HashToken(absl::string_view token) {
  // Each thread reuses its context: creating one would cost more than the hash.
  thread_local const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)>
      context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  static const EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  TokenHash hash = {};
  unsigned int size = 0;
  if (context == nullptr || sha256 == nullptr ||
      EVP_DigestInit_ex(context.get(), sha256, nullptr) != 1 ||
      EVP_DigestUpdate(context.get(), token.data(), token.size()) != 1 ||
      EVP_DigestFinal_ex(context.get(), hash.data(), &size) != 1) {
    return std::nullopt;
  }
  return hash;
}

bool AreEqual(const TokenHash& a, const TokenHash& b) {
  return CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

bool MatchesPattern(absl::string_view pattern, absl::string_view name) {
  // The end of the UTF-8 character that begins at position `n` of the name.
  const auto end_of_character = [&](size_t n) {
    do {
      ++n;
    } while (n < name.size() && (name[n] & 0xC0) == 0x80);
    return n;
  };
  // The position of the last '*' in the pattern, and the end of the part of the
  // name that this '*' has matched so far.
  size_t star = pattern.npos, taken = 0;
  size_t p = 0, n = 0;
  while (n < name.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      taken = n;
    } else if (p < pattern.size() && pattern[p] == '?') {
      ++p;
      n = end_of_character(n);
    } else if (p < pattern.size() && pattern[p] == name[n]) {
      ++p;
      ++n;
    } else if (star != pattern.npos) {
      p = star + 1;
      n = taken = end_of_character(taken);
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == pattern.npos;
}

std::string RoleName(v1::Role role) {
  switch (role) {
    case v1::ROLE_READ:
      return "read";
    case v1::ROLE_TRAIN:
      return "train";
    case v1::ROLE_ADMIN:
      return "admin";
    default:
      return "none";
  }
}

}  // namespace tfswitch
