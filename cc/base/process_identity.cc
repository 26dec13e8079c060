#include "cc/base/process_identity.h"

#include <unistd.h>

#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "cc/base/files.h"

namespace tfswitch {
namespace {

// When the process started, in ticks since the boot; empty if there is no such
// process.
std::string StartOf(int number) {
  const auto stat =
      ReadWholeFile(absl::StrCat("/proc/", number, "/stat"), 4096);
  if (!stat.ok()) return "";
  // The line is "1 (a name) S ...". The first field after the name is the
  // state, and the 20th the start time (proc(5)). A zombie, a process that has
  // ended but was not waited for, counts as ended.
  const std::vector<absl::string_view> fields =
      absl::StrSplit(absl::string_view(*stat).substr(stat->rfind(')') + 1), ' ',
                     absl::SkipEmpty());
  if (fields.size() < 20 || fields[0] == "Z" || fields[0] == "X") return "";
  return std::string(fields[19]);
}

}  // namespace

std::string BootId() {
  const auto id = ReadWholeFile("/proc/sys/kernel/random/boot_id", 256);
  return id.ok() ? std::string(absl::StripSuffix(*id, "\n")) : "";
}

std::string ProcessIdentity(int number) {
  char space[64];
  const ssize_t size = readlink("/proc/self/ns/pid", space, sizeof(space));
  const std::string boot = BootId();
  const std::string start = StartOf(number);
  // In a process namespace of its own, a process may see a /proc that belongs
  // to another namespace. Its numbers would then have another meaning.
  char own[16] = "";
  if (readlink("/proc/self", own, sizeof(own) - 1) <= 0 ||
      absl::StrCat(getpid()) != own) {
    return "";
  }
  if (size <= 0 || boot.empty() || start.empty()) return "";
  return absl::StrCat(boot, "/",
                      absl::string_view(space, static_cast<size_t>(size)), "/",
                      number, "/", start);
}

int RunningProcess(absl::string_view identity) {
  const std::vector<absl::string_view> parts = absl::StrSplit(identity, '/');
  int number = 0;
  if (parts.size() != 4 || !absl::SimpleAtoi(parts[2], &number) ||
      number <= 0 || number == getpid()) {
    return 0;
  }
  return ProcessIdentity(number) == identity ? number : 0;
}

}  // namespace tfswitch
