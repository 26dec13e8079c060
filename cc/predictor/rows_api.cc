#include "cc/predictor/rows_api.h"

#include <dlfcn.h>

#include <cmath>
#include <filesystem>
#include <system_error>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/capi/tfswitch.h"
#include "cc/predictor/errors.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

using Json = nlohmann::json;

// These read fields of a message in protobuf's JSON, where 64-bit integers are
// strings. If a field is missing or has another type, they return its default.
std::string TextField(const Json& json, const char* name) {
  const auto found = json.find(name);
  return found != json.end() && found->is_string() ? found->get<std::string>()
                                                   : "";
}
int64_t NumberField(const Json& json, const char* name) {
  int64_t number = 0;
  return absl::SimpleAtoi(TextField(json, name), &number) ? number : 0;
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

Result<RowsApi> RowsApi::Find(const std::string& op_library) {
  if (op_library.empty()) {
    return Error(StatusCode::kFailedPrecondition,
                 "no op library is loaded; rows need that of tfswitch");
  }
  // It has been loaded, and stays.
  void* const library = dlopen(op_library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  const auto get_api = library == nullptr
                           ? nullptr
                           : reinterpret_cast<Tfswitch_GetApiFn>(
                                 dlsym(library, "Tfswitch_GetApi"));
  if (get_api == nullptr) {
    return Error(StatusCode::kFailedPrecondition, "'", op_library,
                 "' is not the op library of tfswitch, or an older one; give "
                 "the path of the package's libtfswitch_ops_tf...so");
  }
  const Tfswitch_Api* const api = get_api(TFSWITCH_API_VERSION);
  if (api == nullptr) {
    return Error(
        StatusCode::kFailedPrecondition, "'", op_library,
        "' does not speak version ", TFSWITCH_API_VERSION,
        " of the C API, for which this program was built, or does not find "
        "libtfswitch_core.so. Build the program for this tfswitch, or install "
        "the one it was built for");
  }
  return RowsApi(api);
}

Result<ServedState> RowsApi::Call(const std::string& folder, const char* call,
                                  const Json& value) const {
  std::error_code ignored;
  if (!std::filesystem::exists(std::filesystem::path(folder) / kModelFile,
                               ignored)) {
    return Error(
        StatusCode::kFailedPrecondition, "the model in '", folder,
        "' has no rows of its own; tfswitch.saved_model.save writes those that "
        "have");
  }
  char* response = nullptr;
  char error[TFSWITCH_ERROR_SIZE] = "";
  Json request = {{"path", folder}};
  if (call != nullptr) request[call] = value;
  // Replaces bytes that are not UTF-8: dump() would throw an exception. A path
  // may contain such bytes.
  const std::string text =
      request.dump(/*indent=*/-1, /*indent_char=*/' ', /*ensure_ascii=*/false,
                   Json::error_handler_t::replace);
  const int code = api_->call(/*cluster=*/nullptr, "ServedModel", text.c_str(),
                              &response, error);
  if (code != 0) {
    return Status(static_cast<StatusCode>(code), error);
  }
  const Json json = Json::parse(response, nullptr, /*allow_exceptions=*/false);
  api_->free_string(response);
  if (!json.is_object()) {
    return Error(StatusCode::kInternal, "the state of '", folder,
                 "' is no JSON object; install one tfswitch");
  }
  ServedState state;
  state.number = NumberField(json, "number");
  state.base_number = NumberField(json, "base_number");
  state.created = std::chrono::system_clock::time_point(
      std::chrono::milliseconds(NumberField(json, "created_ms")));
  state.is_held = json.value("held", Json()) == true;
  state.num_refused = NumberField(json, "refused");
  state.error = TextField(json, "error");
  state.addresses = TextField(json, "addresses");
  return state;
}

Result<ServedState> RowsApi::State(const std::string& folder) const {
  return Call(folder);
}

Status RowsApi::Watch(const std::string& folder, Seconds interval) const {
  const double seconds = interval.count();
  // JSON has no infinity.
  if (!(seconds >= 0.0) || std::isinf(seconds)) {
    return Invalid("expected an interval of at least 0 that ends, got ",
                   absl::FormatDuration(absl::Seconds(seconds)));
  }
  return Call(folder, "watch_secs", seconds).status();
}

Status RowsApi::Refresh(const std::string& folder) const {
  return Call(folder, "refresh").status();
}

Status RowsApi::RollBack(const std::string& folder, int64_t number) const {
  if (number < 1) {
    return Invalid(
        "expected the number of an export, which is at least 1, got ", number);
  }
  return Call(folder, "roll_back_to", number).status();
}

Status RowsApi::Resume(const std::string& folder) const {
  return Call(folder, "resume").status();
}

void RowsApi::CatchBusErrors() const { api_->catch_bus_errors(); }

}  // namespace tfswitch
