#include "rows_api.h"

#include <dlfcn.h>

#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "cc/capi/tfswitch.h"
#include "nlohmann/json.hpp"

namespace serving_cc {
namespace {

using Json = nlohmann::json;

std::string JsonRequest(const char* call) {
  return Json({{"call", call}}).dump();
}

// A field that is missing, null or of another type is the default.
template <typename T>
T Field(const Json& json, const char* name, T standard) {
  const auto found = json.find(name);
  if (found == json.end()) return standard;
  if constexpr (std::is_same_v<T, bool>) {
    return found->is_boolean() ? found->get<bool>() : standard;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return found->is_string() ? found->get<std::string>() : standard;
  } else {
    return found->is_number() ? found->get<T>() : standard;
  }
}

}  // namespace

std::string Describe(const ServedState& state) {
  if (!state.addresses.empty()) {
    return absl::StrCat(
        "rows at ", state.addresses,
        state.error.empty() ? "" : "; the last lookup failed: ", state.error);
  }
  std::string text = absl::StrCat("rows as of export ", state.number, ", base ",
                                  state.base_number);
  if (state.is_held) absl::StrAppend(&text, ", held there");
  if (!state.error.empty()) {
    absl::StrAppend(&text, "; newer ones are refused: ", state.error);
  }
  return text;
}

absl::StatusOr<RowsApi> RowsApi::Find(const std::string& op_library) {
  if (op_library.empty()) {
    return absl::FailedPreconditionError(
        "no op library is loaded; rows need that of tfswitch");
  }
  // It has been loaded, and stays.
  void* const library = dlopen(op_library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  const auto get_api = library == nullptr
                           ? nullptr
                           : reinterpret_cast<Tfswitch_GetApiFn>(
                                 dlsym(library, "Tfswitch_GetApi"));
  if (get_api == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("'", op_library,
                     "' is not the op library of tfswitch, or an older one; "
                     "give the path of libtfswitch_ops.so"));
  }
  const Tfswitch_Api* const api = get_api(TFSWITCH_API_VERSION);
  if (api == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "'", op_library, "' does not speak version ", TFSWITCH_API_VERSION,
        " of the C API, for which this program was built, or does not find "
        "libtfswitch_core.so. Build the program for this tfswitch, or install "
        "the one it was built for"));
  }
  return RowsApi(api);
}

absl::StatusOr<ServedState> RowsApi::Call(const std::string& folder,
                                          const std::string& request) const {
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::path(folder) / kModelFile,
                               ignored)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the model in '", folder,
        "' has no rows of its own; tfswitch.saved_model.save writes those that "
        "have"));
  }
  char* response = nullptr;
  char error[TFSWITCH_ERROR_SIZE] = "";
  const int code = api_->served_model_call(folder.c_str(), request.c_str(),
                                           &response, error);
  if (code != 0)
    return absl::Status(static_cast<absl::StatusCode>(code), error);
  const Json json = Json::parse(response, nullptr, /*allow_exceptions=*/false);
  api_->free_string(response);
  if (!json.is_object()) {
    return absl::InternalError(absl::StrCat(
        "the state of '", folder, "' is no JSON object; install one tfswitch"));
  }
  ServedState state;
  state.number = Field<int64_t>(json, "number", 0);
  state.base_number = Field<int64_t>(json, "base_number", 0);
  state.created = absl::FromUnixMillis(Field<int64_t>(json, "created_ms", 0));
  state.is_held = Field(json, "held", false);
  state.num_refused = Field<int64_t>(json, "refused", 0);
  state.error = Field<std::string>(json, "error", "");
  state.addresses = Field<std::string>(json, "addresses", "");
  return state;
}

absl::StatusOr<ServedState> RowsApi::State(const std::string& folder) const {
  return Call(folder, JsonRequest("state"));
}

absl::Status RowsApi::Watch(const std::string& folder,
                            absl::Duration interval) const {
  const Json request = {{"call", "watch"},
                        {"seconds", absl::ToDoubleSeconds(interval)}};
  return Call(folder, request.dump()).status();
}

absl::Status RowsApi::Refresh(const std::string& folder) const {
  return Call(folder, JsonRequest("refresh")).status();
}

absl::Status RowsApi::RollBack(const std::string& folder,
                               int64_t number) const {
  if (number < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "expected the number of an export, which is at least 1, got ", number));
  }
  const Json request = {{"call", "roll_back"}, {"number", number}};
  return Call(folder, request.dump()).status();
}

absl::Status RowsApi::Resume(const std::string& folder) const {
  return Call(folder, JsonRequest("resume")).status();
}

}  // namespace serving_cc
