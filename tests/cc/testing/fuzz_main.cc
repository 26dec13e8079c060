// The part that all fuzz targets have in common. Built for libFuzzer, it writes
// the seeds of the target into the corpus:
//
//   control_fuzzer -max_total_time=60 CORPUS
//
// Built for other compilers, it is the main program, in place of libFuzzer:
//
//   control_fuzzer            runs the seeds, and for TFSWITCH_FUZZ_SECONDS
//                             (5) inputs that it makes of them by chance
//   control_fuzzer FILE...    runs these inputs
//
// Its inputs are the same in each run. The one that ends the process is written
// to crash-control_fuzzer, as libFuzzer does.

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "tests/cc/testing/fuzz_target.h"

// No input is longer than some kilobytes, and the limits of the targets are
// small. So a large block is one for which a length was believed.
extern "C" const char* __asan_default_options() {
  return "handle_abort=1:max_allocation_size_mb=64:hard_rss_limit_mb=1024:"
         "quarantine_size_mb=64";
}

#ifdef TFSWITCH_BUILD_FUZZERS

extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  for (int i = 1; i < *argc; ++i) {
    const std::filesystem::path folder = (*argv)[i];
    if (!std::filesystem::is_directory(folder)) continue;
    int number = 0;
    for (const std::string& seed : tfswitch::FuzzSeeds()) {
      std::ofstream(folder / ("seed" + std::to_string(number++)),
                    std::ios::binary)
          << seed;
    }
    break;
  }
  return 0;
}

#else

namespace {

std::string program;
std::string input;

void WriteInput() {
  std::ofstream("crash-" + program, std::ios::binary) << input;
}

void RunInput() {
  LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(input.data()),
                         input.size());
}

std::string MakeInput(const std::vector<std::string>& seeds,
                      std::mt19937_64& random) {
  const auto byte = [&] { return static_cast<char>(random()); };
  std::string made = seeds[random() % seeds.size()];
  if (random() % 4 == 0) {
    made.resize(random() % 256);
    std::generate(made.begin(), made.end(), byte);
  }
  for (uint64_t changes = random() % 8; changes > 0; --changes) {
    const size_t at = random() % (made.size() + 1);
    const std::string& other = seeds[random() % seeds.size()];
    switch (random() % 4) {
      case 0:
        made.erase(at, random() % 16);
        break;
      case 1:
        for (uint64_t i = random() % 8; i > 0; --i) made.insert(at, 1, byte());
        break;
      case 2:
        made.insert(at, other, random() % (other.size() + 1), random() % 32);
        break;
      default:
        if (at < made.size()) made[at] = byte();
        break;
    }
  }
  return made;
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    std::ifstream file(argv[i], std::ios::binary);
    input.assign(std::istreambuf_iterator<char>(file), {});
    RunInput();
  }
  if (argc > 1) return 0;
  program = std::filesystem::path(argv[0]).filename().string();
  __sanitizer_set_death_callback(WriteInput);
  const char* seconds = std::getenv("TFSWITCH_FUZZ_SECONDS");
  const auto end =
      std::chrono::steady_clock::now() +
      std::chrono::seconds(seconds == nullptr ? 5 : std::atoi(seconds));
  const std::vector<std::string> seeds = tfswitch::FuzzSeeds();
  for (const std::string& seed : seeds) {
    input = seed;
    RunInput();
  }
  std::mt19937_64 random(1);
  int64_t num_made = 0;
  for (; std::chrono::steady_clock::now() < end; ++num_made) {
    input = MakeInput(seeds, random);
    RunInput();
  }
  std::printf("%zu seeds and %lld inputs made of them\n", seeds.size(),
              static_cast<long long>(num_made));
  return 0;
}

#endif
