// Row files that lie about themselves, for the unit test and the fuzzer.

#ifndef TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_
#define TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace tfswitch {

struct CraftedResult {
  bool is_open = false;  // The file was not refused.
  // What it must not do; empty if it does not.
  std::string fault;
};

// Makes a row file and changes its header and what is behind it as `choices`
// say, with checksums that fit, so that nothing but the checks of the header
// and of what is read stands between the reader and what is not there. Then
// opens it and reads all of it in each way there is.
CraftedResult ReadCrafted(absl::Span<const uint8_t> choices);

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_
