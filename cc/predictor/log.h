// Lines on stderr. TF_CPP_MIN_LOG_LEVEL leaves some out, as it does with
// TensorFlow's: 1 those that only inform, 2 warnings, 3 errors.

#ifndef CC_PREDICTOR_LOG_H_
#define CC_PREDICTOR_LOG_H_

#include <string>

#include "absl/strings/str_cat.h"
#include "cc/base/log_writer.h"

namespace tfswitch {

void LogLine(LogLevel level, const std::string& text);

template <typename... Texts>
void Log(LogLevel level, const Texts&... texts) {
  LogLine(level, absl::StrCat(texts...));
}

}  // namespace tfswitch

#endif  // CC_PREDICTOR_LOG_H_
