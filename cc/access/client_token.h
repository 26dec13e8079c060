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

// Where a client has its token from: one of the two, or neither.
struct TokenSource {
  std::string text;
  std::string file;  // Its last line that is not empty.

  friend bool operator==(const TokenSource& a, const TokenSource& b) {
    return a.text == b.text && a.file == b.file;
  }
};

// With that of the environment (TFSWITCH_TOKEN, TFSWITCH_TOKEN_FILE) in place
// of none, and with the path from the root.
TokenSource WithTokenEnvironment(TokenSource source);

// Thread-safe.
class ClientToken {
 public:
  // Null if the source has none. InvalidArgument, without the token, if it is
  // none, or both are given, or the file cannot be read.
  static absl::StatusOr<std::shared_ptr<ClientToken>> Open(
      const TokenSource& source);

  // As the file says, which is at most a second old; `now`: at once. Where it
  // cannot be read any more, the token of before, and a warning on stderr says
  // so once.
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
