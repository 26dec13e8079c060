// The rows of models that tfswitch.saved_model.save has written, and how they
// change while they are served: the C API of tfswitch, by its JSON calls.

#ifndef CC_PREDICTOR_ROWS_API_H_
#define CC_PREDICTOR_ROWS_API_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "nlohmann/json.hpp"

struct Tfswitch_Api;

namespace tfswitch {

// In a SavedModel whose rows are tfswitch's.
inline constexpr char kModelFile[] = "assets/tfswitch_model.json";

// The rows that a model serves.
struct ServedState {
  int64_t number = 0;       // The export that its rows are of.
  int64_t base_number = 0;  // The base that this goes back to.
  absl::Time created;       // What had been learned by then is served.
  bool is_held = false;     // By RollBack.
  int64_t num_refused = 0;  // How often something newer could not be served.
  std::string error;        // Why, if that is so now; else empty.
  // The addresses of the servers, if lookups ask those. Then there are no
  // exports, num_refused counts lookups that failed, and error is that of the
  // last one.
  std::string addresses;
};

// "rows as of export 3, base 1" or "rows at grpc://...", and what is wrong.
std::string Describe(const ServedState& state);

// Steers models that this process has loaded, by the folders of their
// SavedModels. No call makes a request wait, but a call may wait until another
// model has been loaded. All give NotFound for a model that is not loaded, and
// FailedPrecondition for one that has no rows of its own.
//
// Constant. Thread-safe.
class RowsApi {
 public:
  // The calls of the op library of tfswitch, which has been loaded.
  static absl::StatusOr<RowsApi> Find(const std::string& op_library);

  absl::StatusOr<ServedState> State(const std::string& folder) const;
  // Looks for newer exports every so often from now on; zero: never.
  absl::Status Watch(const std::string& folder, absl::Duration interval) const;

  // Looks for newer exports now and serves them. An error says why something
  // newer is refused; what was served stays.
  absl::Status Refresh(const std::string& folder) const;
  // Serves the rows as of an earlier export, and stays there until Resume.
  absl::Status RollBack(const std::string& folder, int64_t number) const;
  absl::Status Resume(const std::string& folder) const;

 private:
  explicit RowsApi(const Tfswitch_Api* api) : api_(api) {}

  // `call`: a field of ServedModelRequest that is set to `value`, or none.
  absl::StatusOr<ServedState> Call(const std::string& folder,
                                   const char* call = nullptr,
                                   const nlohmann::json& value = true) const;

  const Tfswitch_Api* api_;
};

}  // namespace tfswitch

#endif  // CC_PREDICTOR_ROWS_API_H_
