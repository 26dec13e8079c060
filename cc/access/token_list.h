// The tokens of a server, kept up to date with its token file.

#ifndef TFSWITCH_CC_ACCESS_TOKEN_LIST_H_
#define TFSWITCH_CC_ACCESS_TOKEN_LIST_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "cc/access/tokens.h"
#include "cc/base/mutex.h"
#include "cc/base/watched_file.h"

namespace tfswitch {

// The calls, bytes and rows that one token takes at present. It outlives the
// exchange of its record.
//
// Thread-safe.
class TokenUse {
 public:
  // ResourceExhausted, naming the limit, for a call too many. After OK the
  // caller must Leave().
  absl::Status Enter(const TokenRecord& record);
  // Counts bytes of a running call. ResourceExhausted, naming the limit, if
  // they are too many; they count nevertheless.
  absl::Status Add(const TokenRecord& record, uint64_t bytes);
  // `bytes` are all bytes that the call has added.
  void Leave(uint64_t bytes);

  // Whether there is room for `num_new` rows, which then count. The result of
  // `count` may be reused for a tenth of a second, unless `now`.
  bool ReserveRows(const TokenRecord& record, size_t num_new, bool now,
                   const std::function<int64_t()>& count);

 private:
  std::atomic<uint64_t> calls_{0};
  std::atomic<uint64_t> bytes_{0};

  Mutex mutex_;
  absl::Time next_count_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  // The counted rows, and those reserved since.
  uint64_t num_rows_ ABSL_GUARDED_BY(mutex_) = 0;
};

// A valid token that was shown.
struct KnownToken {
  TokenRecord record;
  std::shared_ptr<TokenUse> use;
};

// Thread-safe.
class TokenList {
 public:
  // InvalidArgument, naming the file, if it cannot be read or is damaged.
  static absl::StatusOr<std::unique_ptr<TokenList>> Open(
      const std::string& path);

  // Unauthenticated, without the token, if the file does not have it, or it has
  // expired. A revoked token may be valid for a second more. While the file is
  // missing or damaged, the last tokens count, and a warning on stderr says so
  // once.
  absl::StatusOr<std::shared_ptr<const KnownToken>> Find(
      absl::string_view token);

 private:
  using Tokens =
      std::unordered_map<std::string, std::shared_ptr<const KnownToken>>;

  explicit TokenList(const std::string& path)
      : file_(path, kMaxTokenFileBytes) {}

  static absl::StatusOr<std::shared_ptr<const KnownToken>> FindIn(
      const Tokens& tokens, absl::string_view token);

  // The tokens of the file, up to a second old unless `now`.
  std::shared_ptr<const Tokens> ReadTokens(bool now);
  // Brings tokens_ up to date.
  absl::Status Read(bool now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::string last_warning_ ABSL_GUARDED_BY(mutex_);
  WatchedFile file_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<const Tokens> tokens_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_ACCESS_TOKEN_LIST_H_
