// The core's functions for programs that load this library for its ops, with
// TF_LoadLibrary, and would steer a model that it serves. They need not know
// where the core is, nor how it must be opened.

#include <cstdint>
#include <string>

#include "cc/capi/core_loader.h"
#include "cc/capi/tfswitch.h"

extern "C" __attribute__((visibility("default"))) const Tfswitch_Api*
Tfswitch_GetApi(uint32_t api_version) {
  std::string error;  // The ops say it, when the first of them runs.
  const Tfswitch_Api* const api = tfswitch::OpenCore(&error);
  return api != nullptr && api->api_version == api_version ? api : nullptr;
}
