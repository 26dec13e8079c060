// Writes the seed corpus of codec_fuzzer into the folder given.

#include <cstdio>
#include <fstream>
#include <string>

#include "tests/cc/wire/codec_oracle.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: write_codec_corpus FOLDER\n");
    return 2;
  }
  int number = 0;
  for (const std::string& message : tfswitch::SeedMessages()) {
    for (char cut_seed : {0, 3}) {
      std::ofstream file(
          std::string(argv[1]) + "/seed" + std::to_string(number++),
          std::ios::binary);
      file << cut_seed << '\0' << message;
      if (!file.flush()) {
        std::fprintf(stderr, "cannot write to %s\n", argv[1]);
        return 1;
      }
    }
  }
  return 0;
}
