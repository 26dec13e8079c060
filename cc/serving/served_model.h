// The rows of an exported model in this process. The ops of the model's graph
// open them, and the program that serves the model controls them.

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

// The part of a lookup that concerns one table. The caller owns the memory.
struct LookupPart {
  absl::string_view table;
  int dim = 0;  // The dim that the graph expects.
  absl::Span<const Key> keys;
  float* embeddings = nullptr;  // Receives keys.size() x dim.
};

// The rows that one run of a graph reads. Thread-safe.
class PinnedRows {
 public:
  virtual ~PinnedRows() = default;

  // Reads the rows of all parts. A key without a row reads as the table's
  // default row. NotFound if the model lacks a table, InvalidArgument if a
  // table has another dim. Several parts may have the same table. `threads` may
  // be null.
  virtual absl::Status Lookup(absl::Span<const LookupPart> parts,
                              const LentThreads* threads) const = 0;
};

struct ServedState {
  // The numbers in `rows` are 0 if there are no exports.
  ServedRows::State rows;
  // The fields below are set only if the model looks up on servers.
  bool is_remote = false;
  std::string addresses;
  int64_t cached_rows = 0;
  int64_t num_cache_hits = 0;    // Ids that were read from the cache.
  int64_t num_cache_misses = 0;  // Ids that were not in the cache.
};

// Thread-safe.
class ServedModel {
 public:
  virtual ~ServedModel() = default;

  // Whether a lookup waits for servers.
  virtual bool is_remote() const = 0;

  // Never waits. Pinned rows may be used after the model is destroyed.
  virtual std::shared_ptr<const PinnedRows> Pin() const = 0;

  virtual ServedState state() const = 0;

  // These do the same as the functions of ServedRows. FailedPrecondition if the
  // model looks up its rows on servers.
  virtual absl::Status Refresh() = 0;
  virtual absl::Status Watch(absl::Duration interval) = 0;
  virtual absl::Status RollBack(int64_t number) = 0;
  virtual absl::Status Resume() = 0;
};

// Connects to servers for reading. This and each later call wait at most
// `timeout`.
using OpenClient =
    std::function<absl::StatusOr<std::shared_ptr<ParameterClient>>(
        const std::string& addresses, absl::Duration timeout)>;

// Opens the rows that a model file names (see cc/serving/model_file.h). If the
// model is already open, returns the same rows, so that all its graphs share
// them. A model that was saved later at the same path is a different one.
//
// NotFound if a file is missing, DataLoss if a file is damaged,
// FailedPrecondition if a file has another version. For models that look up on
// servers: Unavailable or DeadlineExceeded if a server does not answer,
// FailedPrecondition if servers lack a table or a table has another dim.
//
// Thread-safe. Threads that open the same model wait for each other.
absl::StatusOr<std::shared_ptr<ServedModel>> OpenServedModel(
    const std::string& model_file, const OpenClient& open_client);

// Finds an open model by the path of its model file or SavedModel. If several
// open models were saved there, returns the one that was opened last. NotFound
// if no model of this path is open in this process.
absl::StatusOr<std::shared_ptr<ServedModel>> FindServedModel(
    const std::string& path);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_SERVED_MODEL_H_
