#include "cc/base/watched_file.h"

#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

absl::StatusOr<std::optional<std::string>> WatchedFile::ReadIfChanged(
    bool now) {
  const absl::Time time = SteadyNow();
  if (!now && time < next_look_) return std::nullopt;
  next_look_ = time + kInterval;
  // The stamp comes first: a file that is exchanged meanwhile is read again.
  const absl::StatusOr<FileStamp> stamp = StampOf(path_);
  const FileStamp present = stamp.value_or(FileStamp());
  if (stamp_ == present) return std::nullopt;
  stamp_ = present;
  TFSWITCH_RETURN_IF_ERROR(stamp.status());
  return ReadWholeFile(path_, max_bytes_);
}

}  // namespace tfswitch
