// The token that a client shows to its servers.

#ifndef TFSWITCH_CC_ACCESS_CLIENT_TOKEN_H_
#define TFSWITCH_CC_ACCESS_CLIENT_TOKEN_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/mutex.h"
#include "cc/base/watched_file.h"

namespace tfswitch {

// The source of a client's token: a text, a file, or neither.
struct TokenSource {
  std::string text;
  // The path of a file. Its last line that is not empty is the token.
  std::string file;

  friend bool operator==(const TokenSource& a, const TokenSource& b) {
    return a.text == b.text && a.file == b.file;
  }
};

// If the source is empty, uses TFSWITCH_TOKEN or TFSWITCH_TOKEN_FILE of the
// environment. Makes the path absolute.
TokenSource WithTokenEnvironment(TokenSource source);

// Thread-safe.
class ClientToken {
 public:
  // Null if the source is empty. InvalidArgument if the token is malformed, if
  // both a text and a file are given, or if the file cannot be read. Errors do
  // not contain the token.
  static absl::StatusOr<std::shared_ptr<ClientToken>> Open(
      const TokenSource& source);

  // Returns the token that the file contained at most a second ago. With `now`,
  // reads the file now. If the file cannot be read any more, returns the former
  // token, and logs one warning.
  std::string Get(bool now = false);

 private:
  ClientToken() = default;

  absl::Status Read(bool now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Mutex mutex_;
  std::optional<WatchedFile> file_ ABSL_GUARDED_BY(mutex_);
  std::string text_ ABSL_GUARDED_BY(mutex_);
  bool has_warned_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_ACCESS_CLIENT_TOKEN_H_
