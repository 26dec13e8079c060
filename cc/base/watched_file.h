// A small file that may be replaced while the process uses it.

#ifndef TFSWITCH_CC_BASE_WATCHED_FILE_H_
#define TFSWITCH_CC_BASE_WATCHED_FILE_H_

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cc/base/files.h"

namespace tfswitch {

// Not thread-safe.
class WatchedFile {
 public:
  // The least time between two checks of the file by ReadIfChanged().
  static constexpr absl::Duration kInterval = absl::Seconds(1);

  // Longer files are errors.
  WatchedFile(std::string path, size_t max_bytes)
      : path_(std::move(path)), max_bytes_(max_bytes) {}

  const std::string& path() const { return path_; }

  // Returns the contents if they have changed since the last read. Returns
  // nullopt if they have not, or if the last check was less than kInterval ago
  // and `now` is false.
  absl::StatusOr<std::optional<std::string>> ReadIfChanged(bool now = false);

 private:
  const std::string path_;
  const size_t max_bytes_;
  absl::Time next_look_ = absl::InfinitePast();
  // The file as it was read last.
  std::optional<FileStamp> stamp_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_WATCHED_FILE_H_
