#include "cc/capi/core_loader.h"

#include <dlfcn.h>
#include <stdlib.h>

#include <cstring>
#include <string>

#include "cc/capi/tfswitch.h"

namespace tfswitch {
namespace {

constexpr char kCoreFile[] = "libtfswitch_core.so";
constexpr char kPathVariable[] = "TFSWITCH_CORE_LIBRARY";

// The folder of the library that contains this code, with a final '/'.
std::string OwnFolder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&OpenCore), &info) == 0 ||
      info.dli_fname == nullptr) {
    return "";
  }
  // Resolves symbolic links: if a library is loaded by two paths, both must
  // find the same core, because two cores would not share the tables of this
  // process.
  char* resolved = realpath(info.dli_fname, nullptr);
  std::string path = resolved != nullptr ? resolved : info.dli_fname;
  free(resolved);
  return path.substr(0, path.rfind('/') + 1);
}

// Finds the folder while the library is loaded, because dladdr() returns the
// path that was given to dlopen(). The path may be relative, and the working
// directory may change before the first call. The string is never freed, so
// that threads that run at exit can use it.
const std::string& own_folder = *new std::string(OwnFolder());

struct Core {
  const Tfswitch_Api* api = nullptr;
  std::string error;
};

Core Open() {
  Core core;
  const char* path_from_user = getenv(kPathVariable);
  const std::string path = path_from_user != nullptr && *path_from_user != '\0'
                               ? path_from_user
                               : own_folder + kCoreFile;
  void* handle = dlopen(path.c_str(),
                        RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND | RTLD_NODELETE);
  if (handle == nullptr) {
    const char* reason = dlerror();
    core.error = "cannot open the tfswitch core library '" + path +
                 "': " + (reason != nullptr ? reason : "unknown reason") +
                 ". Reinstall tfswitch-ps, or set " + kPathVariable +
                 " to the path of " + kCoreFile + ".";
    return core;
  }
  auto get_api =
      reinterpret_cast<Tfswitch_GetApiFn>(dlsym(handle, "Tfswitch_GetApi"));
  if (get_api == nullptr) {
    core.error = "'" + path +
                 "' is not a tfswitch core library: it has no function "
                 "Tfswitch_GetApi. Reinstall tfswitch-ps.";
    return core;
  }
  core.api = get_api(TFSWITCH_API_VERSION);
  if (core.api == nullptr) {
    core.error = "the tfswitch core library '" + path +
                 "' does not speak API version " +
                 std::to_string(TFSWITCH_API_VERSION) +
                 ", which this part of tfswitch was built for. Reinstall "
                 "tfswitch, so that all of its libraries are of one version.";
  } else if (std::strcmp(core.api->version(), TFSWITCH_VERSION) != 0) {
    core.error = "the tfswitch core library '" + path + "' is of version " +
                 core.api->version() +
                 ", and this part of tfswitch of version " TFSWITCH_VERSION
                 ". Reinstall tfswitch-ps, so that all of its libraries are of "
                 "one version.";
    core.api = nullptr;
  }
  return core;
}

}  // namespace

const Tfswitch_Api* OpenCore(std::string* error) {
  static const Core& core = *new Core(Open());
  if (core.api == nullptr) *error = core.error;
  return core.api;
}

}  // namespace tfswitch
