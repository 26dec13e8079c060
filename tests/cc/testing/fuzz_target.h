// The functions that each fuzz target defines; see tfswitch_cc_fuzzer() in
// cmake/tfswitch_targets.cmake.

#ifndef TFSWITCH_TESTS_CC_TESTING_FUZZ_TARGET_H_
#define TFSWITCH_TESTS_CC_TESTING_FUZZ_TARGET_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace tfswitch {

// Inputs to begin with.
std::vector<std::string> FuzzSeeds();

}  // namespace tfswitch

// Runs one input. It ends the process if the input finds a fault.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

#endif  // TFSWITCH_TESTS_CC_TESTING_FUZZ_TARGET_H_
