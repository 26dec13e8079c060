// An exported model's rows in this process: opened by the ops of the model's
// graph, and steered by the program that serves it.

#ifndef TFSWITCH_CC_SERVING_SERVED_MODEL_H_
#define TFSWITCH_CC_SERVING_SERVED_MODEL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/parallel.h"
#include "cc/client/parameter_client.h"
#include "cc/serving/served_rows.h"

namespace tfswitch {

// The part of a lookup that is in one table. The memory is the caller's.
struct LookupPart {
  absl::string_view table;
  int dim = 0;  // The dim that the graph expects.
  absl::Span<const Key> keys;
  float* embeddings = nullptr;  // Receives keys.size() x dim.
};

// The rows in which a run of a graph looks up ids. Thread-safe.
class PinnedRows {
 public:
  virtual ~PinnedRows() = default;

  // Reads the rows of all parts; a key without one reads as its table says.
  // NotFound if the model has no such table, InvalidArgument if one has another
  // dim. A table may come more than once. `threads` may be null.
  virtual absl::Status Lookup(absl::Span<const LookupPart> parts,
                              const LentThreads* threads) const = 0;
};

struct ServedState {
  ServedRows::State rows;  // Numbers are 0 if there are no exports.
  // The rest is not set unless the model looks up on servers.
  bool is_remote = false;
  std::string addresses;
  int64_t cached_rows = 0;
  int64_t num_cache_hits = 0;    // Ids that were read from the cache,
  int64_t num_cache_misses = 0;  // and that were not.
};

// Thread-safe.
class ServedModel {
 public:
  virtual ~ServedModel() = default;

  // Whether a lookup waits for servers.
  virtual bool is_remote() const = 0;

  // Never waits. Pinned rows may outlive the model.
  virtual std::shared_ptr<const PinnedRows> Pin() const = 0;

  virtual ServedState state() const = 0;

  // See ServedRows. FailedPrecondition if the model looks up on servers.
  virtual absl::Status Refresh() = 0;
  virtual absl::Status Watch(absl::Duration interval) = 0;
  virtual absl::Status RollBack(int64_t number) = 0;
  virtual absl::Status Resume() = 0;
};

// Connects to servers for reading only, and waits no longer than `timeout` for
// them, as each call does later.
using OpenClient =
    std::function<absl::StatusOr<std::shared_ptr<ParameterClient>>(
        const std::string& addresses, absl::Duration timeout)>;

// Opens the rows that a model file names (see cc/serving/model_file.h), or
// finds them open: graphs that are loaded from one model share them. A model
// that is saved anew at the path of one that is open is another one.
//
// NotFound if a file is missing, DataLoss if one is damaged,
// FailedPrecondition if it is of another version; of models that look up on
// servers Unavailable or DeadlineExceeded if one does not answer,
// FailedPrecondition if they lack a table or have one with another dim.
// Thread-safe; two threads that open one model wait for each other.
absl::StatusOr<std::shared_ptr<ServedModel>> OpenServedModel(
    const std::string& model_file, const OpenClient& open_client);

// Finds an open model by the path of its model file or SavedModel: of several
// that were saved there, the one that was opened last. NotFound if the model is
// not open in this process.
absl::StatusOr<std::shared_ptr<ServedModel>> FindServedModel(
    const std::string& path);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_SERVED_MODEL_H_
