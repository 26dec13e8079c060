// Changes the rows of served models that tfswitch.saved_model.save has written.
// It uses the JSON calls of tfswitch's C API.

#ifndef CC_PREDICTOR_ROWS_API_H_
#define CC_PREDICTOR_ROWS_API_H_

#include <cstdint>
#include <string>

#include "nlohmann/json.hpp"
#include "tfswitch/predictor.h"
#include "tfswitch/status.h"

struct Tfswitch_Api;

namespace tfswitch {

// A SavedModel with tfswitch rows has this file.
inline constexpr char kModelFile[] = "assets/tfswitch_model.json";

// Controls models that this process has loaded. A model is named by the folder
// of its SavedModel. No call delays requests, but a call may wait until another
// model is loaded. All return NotFound for a model that is not loaded, and
// FailedPrecondition for one without rows of its own.
//
// Constant. Thread-safe.
class RowsApi {
 public:
  // Finds the functions in tfswitch's op library, which must be loaded.
  static Result<RowsApi> Find(const std::string& op_library);

  Result<ServedState> State(const std::string& folder) const;
  // Sets how often newer exports are looked for; zero: never.
  Status Watch(const std::string& folder, Seconds interval) const;

  // Looks for newer exports now and serves them. An error tells why a newer
  // export is refused; then the served rows do not change.
  Status Refresh(const std::string& folder) const;
  // Serves the rows of an earlier export, until Resume is called.
  Status RollBack(const std::string& folder, int64_t number) const;
  Status Resume(const std::string& folder) const;

  // See PredictorOptions.
  void CatchBusErrors() const;

 private:
  explicit RowsApi(const Tfswitch_Api* api) : api_(api) {}

  // Makes a request of type ServedModel, and returns the state in its response.
  // If `call` is not null, sets the request's field `call` to `value`.
  Result<ServedState> Call(const std::string& folder,
                           const char* call = nullptr,
                           const nlohmann::json& value = true) const;

  const Tfswitch_Api* api_;
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_ROWS_API_H_
