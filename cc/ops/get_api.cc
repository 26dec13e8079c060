// Exports the core's functions for programs that load this library with
// TF_LoadLibrary for its ops, and want to control a model that they serve. The
// program need not know where the core is, or how to open it.

#include <cstdint>
#include <string>

#include "cc/capi/core_loader.h"
#include "cc/capi/tfswitch.h"

extern "C" __attribute__((visibility("default"))) const Tfswitch_Api*
Tfswitch_GetApi(uint32_t api_version) {
  std::string error;  // The first op that runs reports it.
  const Tfswitch_Api* const api = tfswitch::OpenCore(&error);
  return api != nullptr && api->api_version == api_version ? api : nullptr;
}
