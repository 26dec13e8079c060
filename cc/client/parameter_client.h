// A worker's access to tables in this process, on one server, or on many. All
// implementations pass one behaviour suite
// (tests/cc/testing/parameter_client_suite.h).

#ifndef TFSWITCH_CC_CLIENT_PARAMETER_CLIENT_H_
#define TFSWITCH_CC_CLIENT_PARAMETER_CLIENT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "cc/base/hash.h"
#include "cc/base/key_observations.h"
#include "cc/base/parallel.h"
#include "cc/base/progress.h"
#include "cc/base/random_id.h"
#include "cc/client/group_client.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"
#include "cc/table/table_info.h"
#include "cc/wire/row_calls.h"
#include "google/protobuf/message.h"
#include "tfswitch/v1/parameter_server.pb.h"

namespace tfswitch {

// How calls treat a table if a server has lost its part in a restart.
enum class OnLostTables {
  kFail,      // Calls fail with DataLoss until the table is restored, or this
              // process resets it.
  kRecreate,  // The server gets an empty part, and calls continue.
  kFollow,  // For clients that only read: calls fail until another process has
            // made the table whole.
};

// A table that had lost rows and is used again.
struct ResetTable {
  std::string name;
  // Shards that now have empty parts. Empty if another process has made the
  // table whole.
  std::vector<int> shards;
  int64_t num_lost_rows = -1;  // When they were last counted; -1: never.
};

struct PullArgs : PullRequest {
  int dim = 0;
  const LentThreads* threads = nullptr;  // Lent during the call's Wait().
};

struct PushArgs : PushRequest {
  int dim = 0;
  // If set, it keeps `gradients` alive and unchanged, also after the call. A
  // client over the network can then send them without a copy.
  std::shared_ptr<const void> gradients_owner;
  // Set by the client: the push is a step of all rows, and is not split.
  bool is_dense = false;
  const LentThreads* threads = nullptr;  // As for a pull.
};

struct AssignArgs : AssignRequest {
  int dim = 0;
};

// One of several pulls.
struct PullPart {
  size_t num_floats() const { return args.keys.size() * args.dim; }
  RowTarget target() const {
    return places.empty() ? RowTarget(embeddings)
                          : RowTarget(embeddings, places, args.dim);
  }

  PullArgs args;
  absl::Span<float> embeddings;
  // If set, the row of args.keys[i] is written as row places[i].
  absl::Span<const size_t> places = {};
};

// One of several pushes. *result is set if the call ends with OK.
struct PushPart {
  PushArgs args;
  WriteResult* result = nullptr;
};

// See EmbeddingTable::ForEachChange and Shard::ExportChanges.
struct ExportChangesArgs {
  std::string table;
  uint64_t table_incarnation = 0;
  // Where the last export ended, for each shard. Empty means all rows.
  std::vector<ChangeCursor> since;
  std::optional<ScoreRule> rule;
  float day = kServersDay;
  std::string export_id;
};

// A call in flight. The thread that started the call must call Wait(), once.
// Wait() may do the work of the call.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  virtual absl::Status Wait() = 0;
};

// Control calls are messages. The functions here make them, and StartCall()
// sends them. A client of many servers sends a message to all and sums up the
// answers; it overrides functions for which that is not enough.
//
// Thread-safe.
//
// If a server is away, a call ends within the client's timeout with Unavailable
// or DeadlineExceeded, naming the server. Calls whose work grows with the table
// (shrinks, exports, checkpoints) may take longer.
class ParameterClient {
 public:
  virtual ~ParameterClient() = default;

  // Starts a control call: a message of cc/shard/control_calls.h. *response
  // must have the request's response type, and is filled in if the call ends
  // with OK. The call ends within `timeout`, or the client's timeout if that is
  // shorter. `request` is not used after this returns.
  virtual std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) = 0;
  absl::Status Call(const google::protobuf::Message& request,
                    google::protobuf::Message* response,
                    absl::Duration timeout = absl::InfiniteDuration()) {
    return StartCall(request, response, timeout)->Wait();
  }
  // The longest time of a call, retries included.
  virtual absl::Duration timeout() const { return absl::InfiniteDuration(); }

  // OK if the table exists with an equal config; AlreadyExists if it exists
  // with another.
  absl::Status CreateTable(const TableConfig& config) {
    return MakeTable(config, {DrawId(), {}}, 0).status();
  }
  // As CreateTable(), with an identity; see Shard::CreateTable. Returns the
  // incarnation of the table that now exists.
  virtual absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                             const TableIdentity& identity,
                                             uint64_t replaced_incarnation);
  // NotFound if there is no such table.
  virtual absl::Status DropTable(const std::string& table);
  // Holds a table of this process: it is dropped when the last hold is
  // destroyed. Tables on servers stay, and the result is null. A hold may
  // outlive the client. NotFound if there is no such table.
  virtual absl::StatusOr<std::shared_ptr<const void>> HoldTable(
      const std::string& table) {
    return nullptr;
  }
  // Lists all tables, or the named one (NotFound if it does not exist).
  virtual absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table);

  // The id of each shard's present run; see TableIdentity.
  virtual absl::StatusOr<std::vector<uint64_t>> ShardInstances() = 0;

  virtual void SetOnLostTables(OnLostTables on_lost_tables) {}
  // Gives servers empty parts of the tables whose parts they have lost. Returns
  // these tables.
  virtual absl::StatusOr<std::vector<ResetTable>> ResetLostTables() {
    return std::vector<ResetTable>();
  }

  // Starts to read embeddings, with as few messages as possible. For each part
  // the embedding of args.keys[i] is written to
  // embeddings[i * dim, (i + 1) * dim), or where `places` says. `parts` is not
  // used after this returns, but the data that its args and spans point to is.
  // Several parts may have the same table.
  virtual std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) = 0;

  // Starts to apply one optimizer step per key; `parts` is as for StartPull().
  // A bsp table stages the gradients under args.step until the round is
  // committed.
  //
  // The shapes, numbers and rates of all parts are checked before any is sent.
  // So nothing is applied if a gradient is NaN or Inf: the call returns
  // InvalidArgument, naming the key. Other errors may come after some parts
  // were applied: a server is away, or finds that the table does not exist,
  // memory is out, or the bsp step is over. Pushes with an id may be repeated
  // then.
  std::unique_ptr<PendingCall> StartPush(absl::Span<const PushPart> parts);
  // As StartPush(), without the checks. REQUIRES: CheckPush() is OK for each
  // part.
  virtual std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) = 0;

  virtual std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                                   WriteResult* result) = 0;

  virtual int num_shards() const { return 1; }
  // The security settings of each server; empty if tables are in this process.
  virtual absl::StatusOr<std::vector<v1::ServerSecurity>> AskForSecurity() {
    return std::vector<v1::ServerSecurity>();
  }
  // Starts to apply a closed round on one shard, since each shard may lack
  // other rounds. *committed becomes the last round that was applied; see
  // Shard::CommitRound. `staged` are the tables that this worker has pushed to
  // in the round.
  virtual std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged);

  virtual absl::StatusOr<int64_t> Erase(const TableRef& table,
                                        absl::Span<const Key> keys);

  // See EmbeddingTable::ReadUsage. REQUIRES: spans as long as `keys`.
  virtual absl::Status ReadUsage(const TableRef& table,
                                 absl::Span<const Key> keys, float day,
                                 absl::Span<UsageOfRow> usage,
                                 absl::Span<KeyState> states);

  // Visits all rows, in chunks, in no particular order. RowChunk::slots is
  // empty unless `with_slots`.
  virtual absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) = 0;

  // Visits the changes, in chunks, from one thread at a time. Returns the next
  // cursor of each shard. FailedPrecondition if the changes are not known any
  // more, for example because the number of servers has changed: then all rows
  // must be exported.
  virtual absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) = 0;

  // The steps of SaveCheckpoint() and RestoreCheckpoint(), which callers use
  // instead; see protos/tfswitch/v1/parameter_server.proto. SaveShard() returns
  // one part of the manifest for each shard. A client of this process reports
  // to `progress`, or prints progress lines itself if that is null.
  virtual absl::StatusOr<v1::SaveShardResponse> SaveShard(
      const v1::SaveShardRequest& request, Progress* progress);
  virtual absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress);
  virtual absl::Status CommitRestore(const std::string& restore_id, bool abort);

  // A client of shard 0 alone.
  virtual ParameterClient& first_shard() { return *this; }

  // The groups of workers that train with these tables.
  virtual GroupClient& groups() { return groups_; }

  // Blocking forms of the calls above.
  absl::Status Pull(const PullArgs& args, absl::Span<float> embeddings) {
    return StartPull({{args, embeddings}})->Wait();
  }
  absl::StatusOr<WriteResult> Push(const PushArgs& args);
  absl::StatusOr<WriteResult> Assign(const AssignArgs& args);

 protected:
  // Turns the error of parsing an answer into one that blames the server.
  virtual absl::Status AsServerFault(const absl::Status& malformed) const {
    return malformed;
  }
  // Returns an identity for a write that has none; empty if this client never
  // repeats calls.
  virtual PushId NextWriteId() { return {}; }
  std::unique_ptr<PendingCall> StartReadUsage(const TableRef& table,
                                              absl::Span<const Key> keys,
                                              float day,
                                              absl::Span<UsageOfRow> usage,
                                              absl::Span<KeyState> states,
                                              absl::Duration timeout);

 private:
  GroupClient groups_{this};
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_CLIENT_PARAMETER_CLIENT_H_
