// Flags of programs: "--name=value", and "--name" for booleans.

#ifndef CC_PREDICTOR_PROGRAM_FLAGS_H_
#define CC_PREDICTOR_PROGRAM_FLAGS_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace tfswitch {

struct Flag {
  std::string name;
  std::variant<std::string*, bool*, int32_t*, int64_t*, double*> value;
  std::string help;
  bool may_be_empty = true;
};

// Sets the values of the flags. Returns the error text, or an empty string.
std::string ParseFlags(int argc, char** argv, const std::vector<Flag>& flags);

// The text of --help, with the current values.
std::string FlagsHelp(const char* program, const std::vector<Flag>& flags);

}  // namespace tfswitch

#endif  // CC_PREDICTOR_PROGRAM_FLAGS_H_
