// The tokens that a server accepts. The token file is read again when it
// changes.

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

// How many calls, bytes and rows one token uses at present. These numbers stay
// when the token's record in the file changes.
//
// Thread-safe.
class TokenUse {
 public:
  // Counts a call. ResourceExhausted, naming the limit, if the token has too
  // many calls in progress. After OK the caller must call Leave().
  absl::Status Enter(const TokenRecord& record);
  // Adds bytes of a call in progress. ResourceExhausted, naming the limit, if
  // the token's calls now have too many bytes. The bytes are added even then.
  absl::Status Add(const TokenRecord& record, uint64_t bytes);
  // Ends a call. `bytes`: the sum of what Add() has added for this call.
  void Leave(uint64_t bytes);

  // Whether the token may have `num_new` more rows. If so, counts them as used.
  // `count` returns the present number of rows. Without `now`, its last result
  // may be used for a tenth of a second.
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
  // InvalidArgument, naming the file, if the file cannot be read or is damaged.
  static absl::StatusOr<std::unique_ptr<TokenList>> Open(
      const std::string& path);

  // Finds a presented token. Unauthenticated, without the token in the text, if
  // the file does not contain it, or it has expired. A token that is removed
  // from the file may be accepted for one more second. While the file is
  // missing or damaged, the former tokens are accepted, and one warning is
  // logged.
  absl::StatusOr<std::shared_ptr<const KnownToken>> Find(
      absl::string_view token);

 private:
  using Tokens =
      std::unordered_map<std::string, std::shared_ptr<const KnownToken>>;

  explicit TokenList(const std::string& path)
      : file_(path, kMaxTokenFileBytes) {}

  static absl::StatusOr<std::shared_ptr<const KnownToken>> FindIn(
      const Tokens& tokens, absl::string_view token);

  // Returns the tokens that the file contained at most a second ago. With
  // `now`, reads the file now.
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
