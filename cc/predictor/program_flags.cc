#include "cc/predictor/program_flags.h"

#include <algorithm>
#include <string_view>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace tfswitch {
namespace {

bool Set(std::string_view text, std::string* value) {
  *value = text;
  return true;
}
bool Set(std::string_view text, bool* value) {
  return absl::SimpleAtob({text.data(), text.size()}, value);
}
bool Set(std::string_view text, double* value) {
  return absl::SimpleAtod({text.data(), text.size()}, value);
}
template <typename Integer>
bool Set(std::string_view text, Integer* value) {
  return absl::SimpleAtoi({text.data(), text.size()}, value);
}

std::string TextOf(const std::string& value) { return value; }
std::string TextOf(bool value) { return value ? "true" : "false"; }
template <typename Number>
std::string TextOf(Number value) {
  return absl::StrCat(value);
}

}  // namespace

std::string ParseFlags(int argc, char** argv, const std::vector<Flag>& flags) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view argument = argv[i];
    const size_t equals = argument.find('=');
    const auto flag =
        std::find_if(flags.begin(), flags.end(), [&](const Flag& each) {
          return argument.substr(0, equals) == "--" + each.name;
        });
    const bool has_value = equals != argument.npos;
    if (flag == flags.end() ||
        !(has_value || std::holds_alternative<bool*>(flag->value))) {
      // Shows only the flag's name: its value may be a secret.
      return absl::StrCat("unknown argument '",
                          absl::string_view(argv[i]).substr(0, equals),
                          "'; see --help");
    }
    const std::string_view text =
        has_value ? argument.substr(equals + 1) : "true";
    if (text.empty() && !flag->may_be_empty) {
      return absl::StrCat("flag --", flag->name,
                          " is empty; give a file, or leave it out");
    }
    if (!std::visit([&](auto* value) { return Set(text, value); },
                    flag->value)) {
      return absl::StrCat("'", argv[i], "' has a bad value; see --help");
    }
  }
  return "";
}

std::string FlagsHelp(const char* program, const std::vector<Flag>& flags) {
  std::string help = absl::StrCat("usage: ", program, "\nFlags:\n");
  for (const Flag& flag : flags) {
    absl::StrAppend(&help, "  --", flag.name, "=",
                    std::visit([](const auto* value) { return TextOf(*value); },
                               flag.value),
                    "\n      ", flag.help, "\n");
  }
  return help;
}

}  // namespace tfswitch
