// libFuzzer target: row files that lie about themselves.
//
//   row_file_fuzzer -max_total_time=60 -max_len=512

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "tests/cc/serving/crafted_row_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string fault = tfswitch::ReadCrafted({data, size}).fault;
  if (!fault.empty()) {
    std::fprintf(stderr, "%s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
