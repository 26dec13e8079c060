// The part that all fuzz targets have in common. Built for libFuzzer, it writes
// the seeds of the target into the corpus:
//
//   control_fuzzer -max_total_time=60 CORPUS
//
// Built for other compilers, it is the main program, in place of libFuzzer:
//
//   control_fuzzer -max_total_time=60   runs the seeds, and for a minute
//                                       inputs that it makes of them by chance
//   control_fuzzer FILE...              runs these inputs
//
// Its inputs are the same in each run. The one that ends the process is written
// to crash-control_fuzzer.

#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "tests/cc/testing/fuzz_target.h"

// No input is longer than some kilobytes, and the limits of the targets are
// small. So a large block is one for which a length was believed.
extern "C" const char* __asan_default_options() {
  return "handle_abort=1:handle_sigill=1:"
         "max_allocation_size_mb=64:hard_rss_limit_mb=1024:"
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
  constexpr absl::string_view kTime = "-max_total_time=";
  program = std::filesystem::path(argv[0]).filename().string();
  absl::Duration time;
  for (int i = 1; i < argc; ++i) {
    absl::string_view argument = argv[i];
    int seconds = 0;
    if (absl::ConsumePrefix(&argument, kTime) &&
        absl::SimpleAtoi(argument, &seconds)) {
      time = absl::Seconds(seconds);
      continue;
    }
    std::ifstream file(argv[i], std::ios::binary);
    if (!file) {
      std::fprintf(stderr, "%s: no file '%s'\n", argv[0], argv[i]);
      return 2;
    }
    input.assign(std::istreambuf_iterator<char>(file), {});
    RunInput();
  }
  if (time == absl::ZeroDuration()) return 0;
  __sanitizer_set_death_callback(WriteInput);
  const absl::Time end = absl::Now() + time;
  const std::vector<std::string> seeds = tfswitch::FuzzSeeds();
  for (const std::string& seed : seeds) {
    input = seed;
    RunInput();
  }
  std::mt19937_64 random(1);
  int64_t num_made = 0;
  for (; absl::Now() < end; ++num_made) {
    input = MakeInput(seeds, random);
    RunInput();
  }
  std::printf("%zu seeds and %lld inputs made of them\n", seeds.size(),
              static_cast<long long>(num_made));
  return 0;
}

#endif
