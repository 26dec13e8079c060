// Serves the newest version of a model from C++ and exchanges it while requests
// run.
//
//   PredictorOptions options;
//   options.model_dir = "/models/ranking";  // Holds 1/, 2/, ...
//   options.op_library = OpLibraryPath();
//   auto predictor = Predictor::Load(options);
//   auto scores = (*predictor)->Predict({{"ids", {Integers{3, 5}}}});

#ifndef TFSWITCH_PREDICTOR_H_
#define TFSWITCH_PREDICTOR_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tfswitch/model_version.h"
#include "tfswitch/status.h"
#include "tfswitch/values.h"

namespace tfswitch {

using Seconds = std::chrono::duration<double>;

// The op library of this tfswitch for the TensorFlow of this process.
TFSWITCH_EXPORTED std::string OpLibraryPath();

struct PredictorOptions {
  // A SavedModel, which is version 0, or a folder of SavedModels whose names
  // are their versions, as for TensorFlow Serving. Other names are ignored:
  // copy a version under such a name, then rename it.
  std::string model_dir;
  // For models with custom ops; empty: none. Loaded once for the process.
  std::string op_library;
  // Serve this version and no other, until Unpin. -1: the newest.
  int64_t version = -1;
  // How often the folder is looked at for versions. Zero: only by Load and Pin.
  Seconds poll_interval{1};
  // How often newer rows are looked for, if the model has rows of its own; see
  // WatchRows. Zero: as TFSWITCH_SERVING_WATCH_SECONDS says, else never.
  Seconds watch_rows_interval{1};
  // Handle SIGBUS in the whole process, so that a row file that somebody makes
  // shorter ends requests with an error, and not the process. For programs
  // without a handler of their own for it.
  bool catch_bus_errors = false;
  ModelOptions model;
};

// The rows that a model serves.
struct ServedState {
  int64_t number = 0;       // The export whose rows are served.
  int64_t base_number = 0;  // The base that this export builds on.
  // The rows contain what was learnt until then.
  std::chrono::system_clock::time_point created;
  bool is_held = false;     // RollBackRows holds this export.
  int64_t num_refused = 0;  // How often a newer export was refused.
  // The reason, while a newer export is refused; else empty.
  std::string error;
  // The addresses of the servers, if lookups ask servers. Then there are no
  // exports, num_refused counts failed lookups, and error is that of the last
  // one.
  std::string addresses;
};

// "rows as of export 3, base 1" or "rows at grpc://...", with any error.
TFSWITCH_EXPORTED std::string Describe(const ServedState& state);

// Serves the newest version. It takes a version that was the same for two
// looks, so a version that is still being copied is left alone. It loads the
// version and warms it up beside the serving one, so both need memory for a
// while. Running requests end on the old version, which is freed after the last
// of them.
//
// If a version cannot be loaded, it is refused and the running one keeps
// serving. A refused version is tried again when its files change. If the
// running version's folder is gone, the newest of the others is taken, even if
// it is older; if there is none, the running version keeps serving.
//
// Rows of a model of tfswitch.saved_model.save change without a new version:
// tfswitch.export adds bases and deltas to its folder, and they are exchanged
// while requests run. Each request sees the rows of one moment.
//
// Thread-safe.
class TFSWITCH_EXPORTED Predictor {
 public:
  struct State {
    int64_t version = -1;               // The serving version.
    int64_t loading = -1;               // -1: none.
    std::map<int64_t, Status> refused;  // With the reasons.
    Status folder;  // The result of the last look at the folder.
    // The rows of the serving version, as of the last look; an error if it has
    // no rows of its own.
    Result<ServedState> rows =
        Status(StatusCode::kUnknown, "not looked at yet");
  };

  // Loads the newest version that can be loaded, or the one of the options. If
  // none can be loaded, returns the error of the newest.
  static Result<std::unique_ptr<Predictor>> Load(
      const PredictorOptions& options);

  // Waits for a version that is being loaded. REQUIRES: no other call is
  // running.
  ~Predictor();

  // See ModelVersion for both. They run on the version that serves at their
  // beginning.
  Result<Response> Predict(const Request& request) const {
    return current()->Predict(request);
  }
  Result<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const {
    return current()->Predict(inputs, outputs);
  }

  // The serving version. It is freed when its last holder lets it go.
  std::shared_ptr<const ModelVersion> current() const;

  // Serves this version, also an older one, until Unpin. On an error the
  // serving version stays, pinned or not as before.
  Status Pin(int64_t version);

  // From the next look on, the newest version is served again.
  void Unpin();

  // Never waits for a version that is being loaded.
  State state() const;

  // The rows of the serving version; the next version begins with its own
  // newest ones. After an error the rows stay as they are. All five functions
  // return FailedPrecondition for a model without rows of its own, and none
  // makes a request wait.
  Result<ServedState> RowsState() const;
  // Looks for newer exports now and serves them. The error says why a newer one
  // is refused.
  Status RefreshRows();
  // Serves the rows as of an earlier export, and stays there until ResumeRows.
  Status RollBackRows(int64_t number);
  Status ResumeRows();
  // Sets how often newer exports are looked for; zero: never. The interval
  // holds for later versions too, even if the serving one has no rows.
  Status WatchRows(Seconds interval);

 private:
  class Versions;

  explicit Predictor(std::unique_ptr<Versions> versions);

  const std::unique_ptr<Versions> versions_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_PREDICTOR_H_
