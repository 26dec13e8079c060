#include "cc/predictor/whole_file.h"

#include <cerrno>
#include <cstring>
#include <fstream>

#include "cc/predictor/errors.h"

namespace tfswitch {

// Uses read(), because it reports an error as a state of the stream. An
// istreambuf_iterator would throw an exception.
Result<std::string> ReadWholeFile(const std::string& path, uint64_t max_bytes) {
  constexpr size_t kChunk = size_t{1} << 20;
  std::ifstream file(path, std::ios::binary);
  if (!file.is_open()) {
    return Error(StatusCode::kNotFound, "cannot open '", path,
                 "': ", std::strerror(errno));
  }
  std::string bytes;
  while (file) {
    const size_t before = bytes.size();
    bytes.resize(before + kChunk);
    errno = 0;
    file.read(&bytes[before], kChunk);
    bytes.resize(before + static_cast<size_t>(file.gcount()));
    if (file.bad()) {
      return Error(StatusCode::kUnavailable, "cannot read '", path,
                   "': ", std::strerror(errno));
    }
    if (bytes.size() > max_bytes) {
      return Error(StatusCode::kResourceExhausted, "'", path,
                   "' has more than ", max_bytes, " bytes");
    }
  }
  return bytes;
}

}  // namespace tfswitch
