// Shared by the files that write and that load a checkpoint.

#ifndef TFSWITCH_CC_CHECKPOINT_PARTS_H_
#define TFSWITCH_CC_CHECKPOINT_PARTS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace tfswitch::checkpoint {

// Integers in a mark: client, sequence and count.
inline constexpr int64_t kMarkWidth = 3;

inline absl::Status Damaged(const std::string& what, absl::string_view field) {
  return absl::DataLossError(absl::StrCat(what, " is damaged: ", field));
}

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_PARTS_H_
