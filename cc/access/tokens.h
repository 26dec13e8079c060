// Bearer tokens: secrets that callers show to servers, and the file in which a
// server keeps their hashes (docs/access.md describes it).

#ifndef TFSWITCH_CC_ACCESS_TOKENS_H_
#define TFSWITCH_CC_ACCESS_TOKENS_H_

#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "tfswitch/v1/access.pb.h"

namespace tfswitch {

inline constexpr size_t kMaxTokenFileBytes = 4 << 20;

// SHA-256.
using TokenHash = std::array<unsigned char, 32>;

// The limits that all calls with one token together have on one server.
struct TokenQuota {
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  uint64_t max_rows = kNone;  // In all of the token's tables.
  uint64_t max_tables = kNone;
  uint64_t max_bytes_in_flight = kNone;  // Requests and answers.
  uint64_t max_calls_in_flight = kNone;
  uint64_t max_request_bytes = kNone;  // For each request.
};

// The record of a token.
struct TokenRecord {
  std::string id;  // The public part of the token.
  TokenHash hash = {};
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::vector<std::string> tables;  // Patterns; see MatchesPattern().
  absl::Time expires = absl::InfiniteFuture();
  TokenQuota quota;

  bool MayUse(absl::string_view table) const;
  bool MayUseAll() const;
};

// Parses token records, whose ids must differ. InvalidArgument names the place
// of an error, but does not quote text that may be a secret.
absl::StatusOr<std::vector<TokenRecord>> ParseTokenFile(absl::string_view text);

// The id in "tfswitch_ID_SECRET". InvalidArgument, without the text, if the
// text has another form.
absl::StatusOr<absl::string_view> TokenId(absl::string_view token);

// Whether the text contains a token, or the beginning of a token.
bool HasToken(absl::string_view text);

// InvalidArgument if the path contains a token; the error does not contain the
// path. `name` is the name of the setting.
absl::Status CheckIsNoToken(absl::string_view name, absl::string_view path);

// Returns nullopt if there is no memory for the hash's context.
std::optional<TokenHash> HashToken(absl::string_view token);

// Takes the same time wherever they differ.
bool AreEqual(const TokenHash& a, const TokenHash& b);

// Compares a text with a pattern, in which '*' matches any text, '?' any one
// character, and all else itself.
bool MatchesPattern(absl::string_view pattern, absl::string_view name);

// "read", "train" or "admin".
std::string RoleName(v1::Role role);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_ACCESS_TOKENS_H_
