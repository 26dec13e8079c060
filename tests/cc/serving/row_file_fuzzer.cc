// libFuzzer target: row files that lie about themselves.
//
//   row_file_fuzzer -max_total_time=60 CORPUS

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/cc/serving/crafted_row_file.h"
#include "tests/cc/testing/fuzz_target.h"

// Files of each format, with a change of each kind.
std::vector<std::string> tfswitch::FuzzSeeds() {
  std::vector<std::string> seeds;
  for (char format = 0; format < 3; ++format) {
    for (char kind = 0; kind < 6; ++kind) {
      seeds.push_back({7, format, 50, 0, 1, format, kind, 3, kind, 1});
    }
  }
  return seeds;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string fault = tfswitch::ReadCrafted({data, size}).fault;
  if (!fault.empty()) {
    std::fprintf(stderr, "%s\n", fault.c_str());
    std::abort();
  }
  return 0;
}
