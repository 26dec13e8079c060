#include "cc/predictor/log.h"

#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cc/base/log_writer.h"

namespace tfswitch {

void LogLine(LogLevel level, const std::string& text) {
  static const int least = [] {
    const char* const value = std::getenv("TF_CPP_MIN_LOG_LEVEL");
    return value != nullptr ? std::atoi(value) : 0;
  }();
  static constexpr const char* kNames[] = {"", "warning: ", "error: "};
  if (static_cast<int>(level) < least) return;
  const std::string now = absl::FormatTime("%Y-%m-%d %H:%M:%E3S", absl::Now(),
                                           absl::LocalTimeZone());
  LogWriter::Get().WriteInOrder(
      {"versions"}, absl::StrCat("tfswitch: ", now, ": ",
                                 kNames[static_cast<int>(level)], text));
}

}  // namespace tfswitch
