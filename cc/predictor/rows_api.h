// The rows of models that tfswitch.saved_model.save has written, and how they
// change while they are served: the C API of tfswitch, by its JSON calls.

#ifndef CC_PREDICTOR_ROWS_API_H_
#define CC_PREDICTOR_ROWS_API_H_

#include <cstdint>
#include <string>

#include "nlohmann/json.hpp"
#include "tfswitch/predictor.h"
#include "tfswitch/status.h"

struct Tfswitch_Api;

namespace tfswitch {

// In a SavedModel whose rows are tfswitch's.
inline constexpr char kModelFile[] = "assets/tfswitch_model.json";

// Steers models that this process has loaded, by the folders of their
// SavedModels. No call makes a request wait, but a call may wait until another
// model has been loaded. All give NotFound for a model that is not loaded, and
// FailedPrecondition for one that has no rows of its own.
//
// Constant. Thread-safe.
class RowsApi {
 public:
  // The calls of the op library of tfswitch, which has been loaded.
  static Result<RowsApi> Find(const std::string& op_library);

  Result<ServedState> State(const std::string& folder) const;
  // Looks for newer exports every so often from now on; zero: never.
  Status Watch(const std::string& folder, Seconds interval) const;

  // Looks for newer exports now and serves them. An error says why something
  // newer is refused; what was served stays.
  Status Refresh(const std::string& folder) const;
  // Serves the rows as of an earlier export, and stays there until Resume.
  Status RollBack(const std::string& folder, int64_t number) const;
  Status Resume(const std::string& folder) const;

  // See PredictorOptions.
  void CatchBusErrors() const;

 private:
  explicit RowsApi(const Tfswitch_Api* api) : api_(api) {}

  // `call`: a field of ServedModelRequest that is set to `value`, or none.
  Result<ServedState> Call(const std::string& folder,
                           const char* call = nullptr,
                           const nlohmann::json& value = true) const;

  const Tfswitch_Api* api_;
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_ROWS_API_H_
