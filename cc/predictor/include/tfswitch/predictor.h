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
  // are their versions, as TensorFlow Serving has it. Other names are passed
  // over: copy a version under such a name, then rename it.
  std::string model_dir;
  // For models with ops of their own; empty: none. Loaded for the process.
  std::string op_library;
  // Serve this version and no other, until Unpin. -1: the newest.
  int64_t version = -1;
  // How often the folder is looked at for versions. Zero: only by Load and Pin.
  Seconds poll_interval{1};
  // How often newer rows are looked for, if the model has rows of its own; see
  // WatchRows. Zero: as TFSWITCH_SERVING_WATCH_SECONDS says, else never.
  Seconds watch_rows_interval{1};
  // Handle SIGBUS in the whole process, so that a row file that somebody makes
  // shorter ends requests with an error, and not the process. For programs that
  // have no handler of their own for it.
  bool catch_bus_errors = false;
  ModelOptions model;
};

// The rows that a model serves.
struct ServedState {
  int64_t number = 0;       // The export that its rows are of.
  int64_t base_number = 0;  // The base that this goes back to.
  // What had been learned by then is served.
  std::chrono::system_clock::time_point created;
  bool is_held = false;     // By RollBackRows.
  int64_t num_refused = 0;  // How often something newer could not be served.
  std::string error;        // Why, if that is so now; else empty.
  // The addresses of the servers, if lookups ask those. Then there are no
  // exports, num_refused counts lookups that failed, and error is that of the
  // last one.
  std::string addresses;
};

// "rows as of export 3, base 1" or "rows at grpc://...", and what is wrong.
TFSWITCH_EXPORTED std::string Describe(const ServedState& state);

// A version is taken when it has been the same for two looks, so one that is
// being copied is left alone. It is loaded and warmed up beside the one that
// serves, so both need memory for a while. Requests under way end on the old
// one, which goes after the last of them.
//
// A version that cannot be loaded is refused: the running one keeps serving.
// The refused one is tried again when its files change. If the running
// version's folder is gone, the newest of the others is taken, even if it is
// older; if there is none, it keeps serving.
//
// Rows of a model of tfswitch.saved_model.save change without a new version:
// tfswitch.export puts bases and deltas into its folder, and they are exchanged
// beside requests, each of which sees the rows of one moment.
//
// Thread-safe.
class TFSWITCH_EXPORTED Predictor {
 public:
  struct State {
    int64_t version = -1;               // That serves.
    int64_t loading = -1;               // -1: none.
    std::map<int64_t, Status> refused;  // And why.
    Status folder;                      // Of the last look at the folder.
    // The rows that the version serves, as of the last look; an error if it has
    // no rows of its own.
    Result<ServedState> rows =
        Status(StatusCode::kUnknown, "not looked at yet");
  };

  // Loads the newest version that can be loaded, or the one of the options. If
  // there is none, the error is that of the newest.
  static Result<std::unique_ptr<Predictor>> Load(
      const PredictorOptions& options);

  // Waits for a version that is being loaded. REQUIRES: no other call is
  // running.
  ~Predictor();

  // See ModelVersion for both. They run on the version that serves when they
  // begin.
  Result<Response> Predict(const Request& request) const {
    return current()->Predict(request);
  }
  Result<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const {
    return current()->Predict(inputs, outputs);
  }

  // The version that serves now. It is freed when the last holder lets it go.
  std::shared_ptr<const ModelVersion> current() const;

  // Serves this version, an older one too, until Unpin. On an error the version
  // that serves stays, pinned or not as it was.
  Status Pin(int64_t version);

  // From the next look on, the newest version is served again.
  void Unpin();

  // Never waits for a version that is being loaded.
  State state() const;

  // The rows of the version that serves; the next version begins with its own
  // newest ones. An error leaves what is served. All five give
  // FailedPrecondition for a model that has no rows of its own, and no call
  // makes a request wait.
  Result<ServedState> RowsState() const;
  // Looks for newer exports now and serves them. An error says why something
  // newer is refused.
  Status RefreshRows();
  // Serves the rows as of an earlier export, and stays there until ResumeRows.
  Status RollBackRows(int64_t number);
  Status ResumeRows();
  // Looks for newer exports every so often from now on; zero: never. Holds for
  // later versions too, even if the one that serves has no rows.
  Status WatchRows(Seconds interval);

 private:
  class Versions;

  explicit Predictor(std::unique_ptr<Versions> versions);

  const std::unique_ptr<Versions> versions_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_PREDICTOR_H_
