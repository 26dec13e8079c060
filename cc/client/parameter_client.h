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

// The treatment of a table of which a server has lost its part in a restart.
enum class OnLostTables {
  kFail,      // Calls fail with DataLoss until it is restored, or this process
              // has reset it.
  kRecreate,  // The server gets an empty part, and calls go on.
  kFollow,  // For clients that only read: calls fail until another process has
            // made the table whole.
};

// A table that had lost rows and goes on.
struct ResetTable {
  std::string name;
  // Shards with empty parts now; none if another process has made it whole.
  std::vector<int> shards;
  int64_t num_lost_rows = -1;  // When they were last counted; -1: never.
};

struct PullArgs : PullRequest {
  int dim = 0;
  const LentThreads* threads = nullptr;  // Lent while the call is waited for.
};

struct PushArgs : PushRequest {
  int dim = 0;
  // If set, it keeps `gradients` alive and unchanged, beyond the call if need
  // be: a client over the network then sends them from where they lie.
  std::shared_ptr<const void> gradients_owner;
  // Filled in on the way: it is a step of all rows, so that it stays whole.
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
  // If set, the row of args.keys[i] goes behind places[i] others.
  absl::Span<const size_t> places = {};
};

// One of several pushes; *result is set once the call has ended with OK.
struct PushPart {
  PushArgs args;
  WriteResult* result = nullptr;
};

// See EmbeddingTable::ForEachChange and Shard::ExportChanges.
struct ExportChangesArgs {
  std::string table;
  uint64_t table_incarnation = 0;
  // Where the last export ended, of each shard; empty: all rows.
  std::vector<ChangeCursor> since;
  std::optional<ScoreRule> rule;
  float day = kServersDay;
  std::string export_id;
};

// A call in flight. Wait() must be called once, from the thread that started
// the call: the thread that waits is the thread that does the work.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  virtual absl::Status Wait() = 0;
};

// The control calls of one server are messages, which StartCall() carries; the
// functions here make them. A client of many servers overrides those that do
// more than to ask all servers for the sum.
//
// Thread-safe.
//
// A call that waits for a server that is away ends within the client's timeout,
// with Unavailable or DeadlineExceeded naming the server. One whose work grows
// with the table (shrinks, exports, checkpoints) may work longer.
class ParameterClient {
 public:
  virtual ~ParameterClient() = default;

  // Starts a control call: a message of cc/shard/control_calls.h. *response, of
  // its own type, is the answer once the call has ended with OK. It ends within
  // `timeout` if that is less than the client's. The request may go when the
  // call has been started.
  virtual std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) = 0;
  absl::Status Call(const google::protobuf::Message& request,
                    google::protobuf::Message* response,
                    absl::Duration timeout = absl::InfiniteDuration()) {
    return StartCall(request, response, timeout)->Wait();
  }
  // Longest time that a call may take, retries included.
  virtual absl::Duration timeout() const { return absl::InfiniteDuration(); }
  // The error of an answer that cannot be read: the server's fault.
  virtual absl::Status AsServerFault(const absl::Status& malformed) const {
    return malformed;
  }
  // An identity for a write that has none; empty if no call is repeated.
  virtual PushId NextWriteId() { return {}; }

  // OK if the table exists with an equal config; AlreadyExists if it exists
  // with another.
  absl::Status CreateTable(const TableConfig& config) {
    return MakeTable(config, {DrawId(), {}}, 0).status();
  }
  // The same with an identity; see Shard::CreateTable. Returns the incarnation
  // of the table that is there now.
  virtual absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                             const TableIdentity& identity,
                                             uint64_t replaced_incarnation);
  // NotFound if there is no such table.
  virtual absl::Status DropTable(const std::string& table);
  // Keeps a table of this process, which is dropped with the last of these;
  // on servers tables stay. The result outlives the client. NotFound if there
  // is no such table.
  virtual absl::StatusOr<std::shared_ptr<const void>> HoldTable(
      const std::string& table) {
    return nullptr;
  }
  // All tables, or the one named (NotFound if it is not there).
  virtual absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table);

  // The run of each shard that answers now; see TableIdentity.
  virtual absl::StatusOr<std::vector<uint64_t>> ShardInstances() = 0;

  virtual void SetOnLostTables(OnLostTables on_lost_tables) {}
  // Goes on with the tables of which servers have lost their parts, with empty
  // rows there, and returns them.
  virtual absl::StatusOr<std::vector<ResetTable>> ResetLostTables() {
    return std::vector<ResetTable>();
  }

  // Starts to read, with as few messages as there can be: of each part the
  // embedding of args.keys[i] into embeddings[i * dim, (i + 1) * dim), or where
  // `places` say. `parts` may go when the call has been started, but not the
  // data that its args and spans point to. A table may come more than once.
  virtual std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) = 0;

  // Starts to apply one optimizer step per key, likewise. To a bsp table it
  // stages the gradients under args.step, until the round is committed.
  //
  // Shapes, numbers and rates of all parts are checked before any of them goes:
  // nothing is applied if any gradient is NaN or Inf (InvalidArgument naming
  // the key). Errors that only a server finds (no such table, out of memory, a
  // bsp step that is over) and a server that is away may end a call after some
  // have been applied; those with an id may be repeated.
  std::unique_ptr<PendingCall> StartPush(absl::Span<const PushPart> parts);
  // The same without the checks. REQUIRES: CheckPush() is OK for each part.
  virtual std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) = 0;

  virtual std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                                   WriteResult* result) = 0;

  // Starts to apply a closed round; *committed becomes the last round that was
  // applied. See Shard::CommitRound. Called for each shard by itself, as the
  // rounds that are missing may differ. `staged` are the tables that this
  // worker has pushed to in the round.
  virtual int num_shards() const { return 1; }
  // How each server keeps others out; none if tables are in this process.
  virtual absl::StatusOr<std::vector<v1::ServerSecurity>> AskForSecurity() {
    return std::vector<v1::ServerSecurity>();
  }
  virtual std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged);

  virtual absl::StatusOr<int64_t> Erase(const TableRef& table,
                                        absl::Span<const Key> keys);

  // See Shard::Shrink. The report is the sum of all shards; after an error some
  // of them may have been shrunk.
  absl::StatusOr<v1::ShrinkResponse> Shrink(const v1::ShrinkRequest& request);

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

  // Visits the changes, in chunks, from one thread at a time; returns the next
  // cursors, of each shard. FailedPrecondition if the changes are not known any
  // more, for one because there were other servers: then only all rows can be
  // exported.
  virtual absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) = 0;
  // Ends an export with a rule: commits it, or aborts it. May be repeated.
  virtual absl::Status CommitExport(const TableRef& table,
                                    const std::string& export_id, bool commit);

  // The parts of a checkpoint; see protos/tfswitch/v1/parameter_server.proto.
  // Users call SaveCheckpoint and RestoreCheckpoint of client/checkpoints.h.
  // SaveShard returns this server's parts of the manifest: one per shard.
  // A client of this process tells `progress` how far it is; with null it says
  // so itself.
  virtual absl::StatusOr<v1::SaveShardResponse> SaveShard(
      const v1::SaveShardRequest& request, Progress* progress);
  // Returns the save's number.
  virtual absl::StatusOr<int64_t> CommitCheckpoint(
      const v1::CommitCheckpointRequest& request);
  virtual absl::Status AbortSave(const std::string& path,
                                 const std::string& save_id);
  virtual absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress);
  virtual absl::Status CommitRestore(const std::string& restore_id, bool abort);

  // The server of shard 0 alone.
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
