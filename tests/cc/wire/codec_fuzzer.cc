// libFuzzer target: the wire decoder against protobuf's parser.
//
//   codec_fuzzer -max_total_time=60 CORPUS

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "tests/cc/testing/fuzz_target.h"
#include "tests/cc/wire/codec_oracle.h"

std::vector<std::string> tfswitch::FuzzSeeds() {
  std::vector<std::string> seeds;
  for (const std::string& message : SeedMessages()) {
    for (const char cut_seed : {0, 3}) {
      seeds.push_back(std::string{cut_seed, 0} + message);
    }
  }
  return seeds;
}

// The first two bytes say how the rest is cut into pieces.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint16_t cut_seed = 0;
  if (size < sizeof(cut_seed)) return 0;
  std::memcpy(&cut_seed, data, sizeof(cut_seed));
  const std::string difference = tfswitch::CompareWithProtobuf(
      absl::string_view(reinterpret_cast<const char*>(data) + sizeof(cut_seed),
                        size - sizeof(cut_seed)),
      cut_seed);
  if (!difference.empty()) {
    std::fprintf(stderr, "%s\n", difference.c_str());
    std::abort();
  }
  return 0;
}
