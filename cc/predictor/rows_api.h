// Changes the rows of models of tfswitch.saved_model.save while they are
// served, by the JSON calls of tfswitch's C API.

#ifndef CC_PREDICTOR_ROWS_API_H_
#define CC_PREDICTOR_ROWS_API_H_

#include <cstdint>
#include <string>

#include "nlohmann/json.hpp"
#include "tfswitch/predictor.h"
#include "tfswitch/status.h"

struct Tfswitch_Api;

namespace tfswitch {

// The file that a SavedModel with tfswitch rows has.
inline constexpr char kModelFile[] = "assets/tfswitch_model.json";

// Controls models that this process has loaded, by the folders of their
// SavedModels. No call makes a request wait, but a call may wait until another
// model has been loaded. All return NotFound for a model that is not loaded,
// and FailedPrecondition for one without rows of its own.
//
// Constant. Thread-safe.
class RowsApi {
 public:
  // Finds the calls in the loaded op library of tfswitch.
  static Result<RowsApi> Find(const std::string& op_library);

  Result<ServedState> State(const std::string& folder) const;
  // Sets how often newer exports are looked for; zero: never.
  Status Watch(const std::string& folder, Seconds interval) const;

  // Looks for newer exports now and serves them. The error says why a newer one
  // is refused; the served rows then stay.
  Status Refresh(const std::string& folder) const;
  // Serves the rows as of an earlier export, and stays there until Resume.
  Status RollBack(const std::string& folder, int64_t number) const;
  Status Resume(const std::string& folder) const;

  // See PredictorOptions.
  void CatchBusErrors() const;

 private:
  explicit RowsApi(const Tfswitch_Api* api) : api_(api) {}

  // `call`: a field of ServedModelRequest that is set to `value`, or empty.
  Result<ServedState> Call(const std::string& folder,
                           const char* call = nullptr,
                           const nlohmann::json& value = true) const;

  const Tfswitch_Api* api_;
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_ROWS_API_H_
