// A small file that may be exchanged while the process uses it.

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
  // How old an answer of ReadIfChanged() may be.
  static constexpr absl::Duration kInterval = absl::Seconds(1);

  // Longer files are errors.
  WatchedFile(std::string path, size_t max_bytes)
      : path_(std::move(path)), max_bytes_(max_bytes) {}

  const std::string& path() const { return path_; }

  // The contents, if they are others than when they were last read. nullopt:
  // they are not, or it is too early to look again, unless `now`.
  absl::StatusOr<std::optional<std::string>> ReadIfChanged(bool now = false);

 private:
  const std::string path_;
  const size_t max_bytes_;
  absl::Time next_look_ = absl::InfinitePast();
  // Of what was read last.
  std::optional<FileStamp> stamp_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_WATCHED_FILE_H_
