// Structs for the calls that read and write rows. All layers from the client to
// the table use them. A layer that needs more fields derives its own struct.
//
// The spans must stay valid until the call has ended.

#ifndef TFSWITCH_CC_WIRE_ROW_CALLS_H_
#define TFSWITCH_CC_WIRE_ROW_CALLS_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "cc/base/half_floats.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/sync/worker_group.h"
#include "cc/table/embedding_table.h"

namespace tfswitch {

// Identifies a write, so that a repeated write is applied only once. If
// client_id is 0, each repetition is applied again.
struct PushId {
  uint64_t client_id = 0;
  uint64_t sequence = 0;
  // A number for the caller that the server has authenticated. The server sets
  // it; messages do not contain it.
  uint64_t caller = 0;
};

// The answer to a pull for a key without a row.
enum class IfMissing : uint8_t {
  kValue,   // The value that the table's config gives.
  kInsert,  // The key gets a row, unless there is an admission policy.
  kMark,    // See EmbeddingTable::FindAndMark.
};

struct PullRequest {
  IfMissing if_missing() const {
    return insert_missing ? IfMissing::kInsert
           : mark_missing ? IfMissing::kMark
                          : IfMissing::kValue;
  }

  std::string table;
  uint64_t table_incarnation = 0;  // See TableRef.
  absl::Span<const Key> keys;
  bool insert_missing = false;
  bool mark_missing = false;  // Without effect on a pull that inserts.
  float day = kServersDay;    // For rows that are made.
  // The type of the rows in a message. The rows in memory are floats.
  FloatType wire_dtype = FloatType::kFloat32;
};

// The memory for the rows of an answer. If `places` is empty, rows are stored
// one after another. Otherwise row k of the answer becomes row places[k] of
// `floats`.
struct RowTarget {
  // NOLINTNEXTLINE(google-explicit-constructor): the common case.
  RowTarget(absl::Span<float> floats) : floats(floats) {}
  RowTarget(absl::Span<float> floats, absl::Span<const int32_t> places, int dim)
      : floats(floats), places(places), dim(static_cast<size_t>(dim)) {}

  size_t num_floats() const {
    return dim == 0 ? floats.size() : places.size() * dim;
  }

  absl::Span<float> floats;
  absl::Span<const int32_t> places;
  size_t dim = 0;  // 0 if there are no places.
};

// A push. Unlike in GradientBatch, keys may repeat.
struct PushRequest : GradientBatch {
  std::string table;
  uint64_t table_incarnation = 0;
  bool keys_are_unique = false;  // If false, repeated keys are summed first.
  PushId id;
  // For a push to a bsp table. For other tables its group is empty.
  StepTag step;
  // The type of the gradients in a message. The gradients in memory are floats,
  // also those that were read from a message; these have been rounded.
  FloatType wire_dtype = FloatType::kFloat32;
  // The number of the worker, so that workers round differently. Not sent.
  uint32_t worker = 0;
};

// See PushResponse. All 0: not known.
struct RowsVersion {
  uint64_t generation = 0;
  uint64_t num_pushes = 0;
};

// The result of a write. A repeated write gets the result of the first one.
struct WriteResult {
  int64_t num_rows = 0;    // Rows that were updated or set.
  bool duplicate = false;  // Whether the id had been applied before.
  RowsVersion version;     // Only of pushes to a server.

  // Adds the result of another part of the write.
  void Add(const WriteResult& part) {
    num_rows += part.num_rows;
    duplicate = duplicate || part.duplicate;
  }
};

struct AssignRequest {
  std::string table;
  uint64_t table_incarnation = 0;
  absl::Span<const Key> keys;
  absl::Span<const float> embeddings;  // keys.size() x dim.
  absl::Span<const float> slots;       // Empty or keys.size() x slot_floats.
  bool only_missing = false;           // Whether present rows do not change.
  float day = kServersDay;             // For rows that are made.

  // If the id is not set, a client over the network draws an id for the call.
  // It does the same for CreateTable, DropTable and Erase.
  PushId id;
};

// InvalidArgument, naming the table, if `got` is not `num_keys` x `width`.
absl::Status CheckSize(absl::string_view table, absl::string_view what,
                       size_t num_keys, int width, size_t got);

// InvalidArgument, naming the id, if one of its values (which `what` names) is
// NaN or Inf.
absl::Status CheckFinite(absl::string_view table, absl::string_view what,
                         absl::Span<const Key> keys,
                         absl::Span<const float> values);

// InvalidArgument, naming the table, if a push to a table of this `dim` is
// invalid. CheckSettings() checks size, rate and observations. CheckPush() also
// looks for NaN and Inf, which needs a pass over the gradients.
absl::Status CheckSettings(const PushRequest& push, int dim);
absl::Status CheckPush(const PushRequest& push, int dim);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_WIRE_ROW_CALLS_H_
