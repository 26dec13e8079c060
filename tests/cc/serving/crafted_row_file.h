// Row files that lie about themselves, for the unit test and the fuzzer.

#ifndef TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_
#define TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_

#include <cstdint>
#include <string>

#include "absl/types/span.h"

namespace tfswitch {

struct CraftedResult {
  bool is_open = false;  // The file was not refused.
  // Describes a fault of the reader; empty if there is none.
  std::string fault;
};

// Makes a row file, changes its header and data as `choices` say, and sets
// matching checksums. So only the checks of the header and of the data protect
// readers from reading outside of the file. Then opens the file and reads all
// of it in all ways.
CraftedResult ReadCrafted(absl::Span<const uint8_t> choices);

}  // namespace tfswitch

#endif  // TFSWITCH_TESTS_CC_SERVING_CRAFTED_ROW_FILE_H_
