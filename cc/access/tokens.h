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

// Limits of all calls with one token together, on one server.
struct TokenQuota {
  static constexpr uint64_t kNone = std::numeric_limits<uint64_t>::max();

  uint64_t max_rows = kNone;  // In all tables that the token may use.
  uint64_t max_tables = kNone;
  uint64_t max_bytes_in_flight = kNone;  // Requests and answers.
  uint64_t max_calls_in_flight = kNone;
  uint64_t max_request_bytes = kNone;  // For each request.
};

// The record of a token.
struct TokenRecord {
  std::string id;  // The public part of the token, which names it.
  TokenHash hash = {};
  v1::Role role = v1::ROLE_UNSPECIFIED;
  std::vector<std::string> tables;  // Patterns; see MatchesPattern().
  absl::Time expires = absl::InfiniteFuture();
  TokenQuota quota;

  bool MayUse(absl::string_view table) const;
  bool MayUseAll() const;
};

// Parses records with different ids. InvalidArgument naming the place, but not
// its text if that may be a secret.
absl::StatusOr<std::vector<TokenRecord>> ParseTokenFile(absl::string_view text);

// The id in "tfswitch_ID_SECRET"; InvalidArgument, without the text, for
// another form.
absl::StatusOr<absl::string_view> TokenId(absl::string_view token);

// Whether the text contains a token, or the beginning of one.
bool HasToken(absl::string_view text);

// InvalidArgument, without the path, if it contains a token. `name` is the name
// of the setting.
absl::Status CheckIsNoToken(absl::string_view name, absl::string_view path);

// nullopt if the system has no memory for it.
std::optional<TokenHash> HashToken(absl::string_view token);

// Takes the same time wherever they differ.
bool AreEqual(const TokenHash& a, const TokenHash& b);

// '*' matches any text, '?' any one character, all else itself.
bool MatchesPattern(absl::string_view pattern, absl::string_view name);

// "read", "train" or "admin".
std::string RoleName(v1::Role role);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_ACCESS_TOKENS_H_
