#include "cc/base/watched_file.h"

#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

absl::StatusOr<std::optional<std::string>> WatchedFile::ReadIfChanged(
    bool now) {
  const absl::Time time = SteadyNow();
  if (!now && time < next_look_) return std::nullopt;
  next_look_ = time + kInterval;
  // Takes the stamp before it reads, so that a file that is replaced meanwhile
  // is read again.
  TFSWITCH_ASSIGN_OR_RETURN(const FileStamp stamp, StampOf(path_));
  if (stamp_ == stamp) return std::nullopt;
  TFSWITCH_ASSIGN_OR_RETURN(std::string text, ReadWholeFile(path_, max_bytes_));
  // Keeps no stamp of a file that could not be read, so that the next check
  // tries again.
  stamp_ = stamp;
  return text;
}

}  // namespace tfswitch
