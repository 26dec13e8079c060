#include "cc/base/watched_file.h"

#include "cc/base/status_macros.h"
#include "cc/base/steady_clock.h"

namespace tfswitch {

absl::StatusOr<std::optional<std::string>> WatchedFile::ReadIfChanged(
    bool now) {
  const absl::Time time = SteadyNow();
  if (!now && time < next_look_) return std::nullopt;
  next_look_ = time + kInterval;
  // Gets the file's stamp (its version) before reading: if the file is replaced
  // in between, the next check reads it again.
  TFSWITCH_ASSIGN_OR_RETURN(const FileStamp stamp, StampOf(path_));
  if (stamp_ == stamp) return std::nullopt;
  TFSWITCH_ASSIGN_OR_RETURN(std::string text, ReadWholeFile(path_, max_bytes_));
  // Stores the stamp only after the file could be read. If it could not, the
  // next check tries again.
  stamp_ = stamp;
  return text;
}

}  // namespace tfswitch
