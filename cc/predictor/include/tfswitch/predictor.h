// Serves the newest version of a model from C++, and replaces it with newer
// ones while requests run.
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

// The path of tfswitch's op library for the TensorFlow version of this process.
TFSWITCH_EXPORTED std::string OpLibraryPath();

struct PredictorOptions {
  // Either a SavedModel, which is served as version 0, or a folder of
  // SavedModels whose names are version numbers, as for TensorFlow Serving.
  // Folders with other names are ignored. So copy a new version under another
  // name, and then rename it.
  std::string model_dir;
  // The library of the model's custom ops; empty if it has none. The process
  // loads it once.
  std::string op_library;
  // Serves only this version until Unpin is called. -1: the newest version.
  int64_t version = -1;
  // How often the folder is checked for new versions. Zero: only in Load and
  // Pin.
  Seconds poll_interval{1};
  // How often newer exported rows are looked for, if the model has its own
  // rows; see WatchRows. If this is zero, the environment variable
  // TFSWITCH_SERVING_WATCH_SECS determines it; without the variable, never.
  Seconds watch_rows_interval{1};
  // Install a SIGBUS handler for the process. If somebody shortens a row file,
  // requests then fail with an error; without a handler the process would be
  // killed. Set it only in programs that have no such handler.
  bool catch_bus_errors = false;
  ModelOptions model;
};

// The rows that a model serves.
struct ServedState {
  // The export whose rows are served.
  int64_t number = 0;
  // The base that this export builds on.
  int64_t base_number = 0;
  // When the export was written: its rows contain all training up to this time.
  std::chrono::system_clock::time_point created;
  // Whether RollBackRows has fixed the served export.
  bool is_held = false;
  // How often a newer export was refused.
  int64_t num_refused = 0;
  // Why the newest export is not served; empty if it is.
  std::string error;
  // The addresses of the servers on which the model looks up its rows; empty if
  // the rows are files. With servers there are no exports: num_refused then
  // counts failed lookups, and error is the last failure.
  std::string addresses;
};

// Describes the rows, for example as "rows as of export 3, base 1" or "rows at
// grpc://...", and adds the error if there is one.
TFSWITCH_EXPORTED std::string Describe(const ServedState& state);

// Serves the newest version. A version is loaded when its files were the same
// in two consecutive checks, so that a version that is still being copied is
// not used. The new version is loaded and warmed up while the old one serves,
// so both need memory for a while. Requests in progress end on the old version,
// which is freed after the last one.
//
// A version that cannot be loaded is refused, and the present one continues to
// serve. A refused version is tried again when its files change. If the folder
// of the serving version is deleted, the newest remaining version is served,
// even if it is older; if there is none, the deleted version continues to
// serve.
//
// The rows of a model that tfswitch.saved_model.save has written can change
// without a new version: tfswitch.export adds base and delta exports to the
// model's folder, and the predictor replaces the rows while requests run. All
// lookups of a request see the rows of the same moment.
//
// Thread-safe.
class TFSWITCH_EXPORTED Predictor {
 public:
  struct State {
    // The serving version.
    int64_t version = -1;
    // The version that is being loaded; -1 if there is none.
    int64_t loading = -1;
    // The versions that were refused, with the reasons.
    std::map<int64_t, Status> refused;
    // The result of the last check of the folder.
    Status folder;
    // The rows of the serving version at the last check; an error if it has no
    // rows of its own.
    Result<ServedState> rows =
        Status(StatusCode::kUnknown, "not looked at yet");
  };

  // Loads the newest version that can be loaded, or the version in `options`.
  // If none can be loaded, returns the error of the newest.
  static Result<std::unique_ptr<Predictor>> Load(
      const PredictorOptions& options);

  // If a version is being loaded, waits for it. REQUIRES: no other call is in
  // progress.
  ~Predictor();

  // These call the functions of the same name of the ModelVersion that serves
  // when the call begins.
  Result<Response> Predict(const Request& request) const {
    return current()->Predict(request);
  }
  Result<NamedValues> Predict(
      const NamedValues& inputs,
      const std::vector<std::string>& outputs = {}) const {
    return current()->Predict(inputs, outputs);
  }

  // The serving version. A replaced version is freed when the last pointer to
  // it is destroyed.
  std::shared_ptr<const ModelVersion> current() const;

  // Serves this version until Unpin, even if it is not the newest. On an error
  // nothing changes: the present version continues to serve, pinned or not.
  Status Pin(int64_t version);

  // Serves the newest version again, beginning with the next check.
  void Unpin();

  // The present state. Does not wait, even while a version is being loaded.
  State state() const;

  // Returns the state of the serving version's rows. This and the next four
  // functions are about these rows; the next version begins with its own newest
  // rows. After an error the rows stay as they are. All return
  // FailedPrecondition for a model without rows of its own. None of them delays
  // requests.
  Result<ServedState> RowsState() const;
  // Looks for newer exports now and serves them. An error tells why a newer
  // export is refused.
  Status RefreshRows();
  // Serves the rows of an earlier export, until ResumeRows is called.
  Status RollBackRows(int64_t number);
  Status ResumeRows();
  // Sets how often newer exports are looked for; zero: never. The interval also
  // applies to later versions, even if the serving version has no rows of its
  // own.
  Status WatchRows(Seconds interval);

 private:
  class Versions;

  explicit Predictor(std::unique_ptr<Versions> versions);

  const std::unique_ptr<Versions> versions_;
};

}  // namespace tfswitch

#endif  // TFSWITCH_PREDICTOR_H_
