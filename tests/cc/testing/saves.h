// Requests of saves and restores.

#ifndef TFSWITCH_TESTS_CC_TESTING_SAVES_H_
#define TFSWITCH_TESTS_CC_TESTING_SAVES_H_

#include <string>
#include <vector>

#include "tfswitch/v1/control.pb.h"

namespace tfswitch {

template <typename Request>
Request RequestOf(const std::string& path,
                  const std::vector<std::string>& tables) {
  Request request;
  request.set_path(path);
  request.mutable_tables()->Add(tables.begin(), tables.end());
  return request;
}

inline v1::SaveRequest SaveTo(const std::string& path,
                              const std::vector<std::string>& tables = {}) {
  return RequestOf<v1::SaveRequest>(path, tables);
}

inline v1::RestoreRequest RestoreFrom(
    const std::string& path, const std::vector<std::string>& tables = {}) {
  return RequestOf<v1::RestoreRequest>(path, tables);
}

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_TESTING_SAVES_H_
