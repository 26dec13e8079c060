// A worker's access to tables, which are in this process, on one server or on
// many servers. One suite of tests runs against all implementations
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

// Says how calls treat a table if a server has lost its part in a restart.
enum class OnLostTables {
  // Calls fail with DataLoss until the table is restored, or this process
  // resets it.
  kFail,
  // The server gets an empty part, and calls continue.
  kRecreate,
  // For clients that only read: calls fail until another process has restored
  // or reset the table.
  kFollow,
};

// A table that had lost rows and can be used again.
struct ResetTable {
  std::string name;
  // The shards whose parts were replaced by empty ones. Empty if another
  // process has restored or reset the table.
  std::vector<int> shards;
  // How many rows the lost parts had when rows were last counted; -1 if they
  // never were.
  int64_t num_lost_rows = -1;
};

struct PullArgs : PullRequest {
  int dim = 0;
  // Threads that Wait() may use; they return to their owner when Wait() ends.
  const LentThreads* threads = nullptr;
};

struct PushArgs : PushRequest {
  int dim = 0;
  // If set, this pointer keeps `gradients` alive and unchanged, also after the
  // call. So a client over the network can send them without a copy.
  std::shared_ptr<const void> gradients_owner;
  // Set by the client for a dense table: the push is a step of all rows, so
  // every shard gets it.
  bool is_dense = false;
  const LentThreads* threads = nullptr;  // See PullArgs.
};

struct AssignArgs : AssignRequest {
  int dim = 0;
};

// One of the pulls of a call.
struct PullPart {
  size_t num_floats() const { return args.keys.size() * args.dim; }
  RowTarget target() const {
    return places.empty() ? RowTarget(embeddings)
                          : RowTarget(embeddings, places, args.dim);
  }

  PullArgs args;
  absl::Span<float> embeddings;
  // If set, the row of args.keys[i] is written as row places[i].
  absl::Span<const int32_t> places = {};
};

// One of the pushes of a call. *result is set if the call ends with OK.
struct PushPart {
  PushArgs args;
  WriteResult* result = nullptr;
};

// See EmbeddingTable::ForEachChange and Shard::ExportChanges.
struct ExportChangesArgs {
  std::string table;
  uint64_t table_incarnation = 0;
  // The point at which the last export of each shard ended. If empty, all rows
  // are exported.
  std::vector<ChangeCursor> since;
  std::optional<ScoreRule> rule;
  float day = kServersDay;
  std::string export_id;
};

// The changes of a table's rows that this client knows. Servers tell of them in
// the answers to pushes and marking pulls. Only differences have a meaning.
struct RowChanges {
  // How often rows were evicted, erased, assigned or restored on any server.
  int64_t generations = 0;
  // The pushes of other clients, on the server that had the most. A large push
  // of theirs counts several times, because it has several messages.
  int64_t pushes_of_others = 0;
};

// A call that has begun. The thread that started the call must call Wait()
// once. Wait() may do the work of the call.
class PendingCall {
 public:
  virtual ~PendingCall() = default;
  virtual absl::Status Wait() = 0;
};

// Control calls are protobuf messages. The methods here make the messages, and
// StartCall() sends them. A client of many servers sends each message to all
// servers and sums up the answers. It overrides the methods for which a sum is
// not enough.
//
// Thread-safe.
//
// If a server is away, a call returns Unavailable or DeadlineExceeded within
// the client's timeout, and names the server. Calls whose work grows with the
// table (shrinks, exports, checkpoints) may take longer.
class ParameterClient {
 public:
  virtual ~ParameterClient() = default;

  // Starts a control call: sends a message of cc/shard/control_calls.h.
  // *response must have the request's response type, and is filled in if the
  // call ends with OK. The call ends within `timeout`, or the client's timeout
  // if that is shorter. `request` may be destroyed when this returns.
  virtual std::unique_ptr<PendingCall> StartCall(
      const google::protobuf::Message& request,
      google::protobuf::Message* response, absl::Duration timeout) = 0;
  absl::Status Call(const google::protobuf::Message& request,
                    google::protobuf::Message* response,
                    absl::Duration timeout = absl::InfiniteDuration()) {
    return StartCall(request, response, timeout)->Wait();
  }
  // The longest time that a call takes, with its retries.
  virtual absl::Duration timeout() const { return absl::InfiniteDuration(); }

  // OK if the table exists with an equal config; AlreadyExists if it exists
  // with a different config.
  absl::Status CreateTable(const TableConfig& config) {
    return MakeTable(config, {DrawId(), {}}, 0).status();
  }
  // Like CreateTable(), for a given `identity`; see Shard::CreateTable. Returns
  // the incarnation of the table that exists after the call.
  virtual absl::StatusOr<uint64_t> MakeTable(const TableConfig& config,
                                             const TableIdentity& identity,
                                             uint64_t replaced_incarnation);
  // NotFound if there is no such table.
  virtual absl::Status DropTable(const std::string& table);
  // Holds a table of this process. The table is dropped when its last hold is
  // destroyed. A hold may outlive the client. For tables on servers the result
  // is null, and the table stays. NotFound if there is no such table.
  virtual absl::StatusOr<std::shared_ptr<const void>> HoldTable(
      const std::string& table) {
    return nullptr;
  }
  // Lists all tables, or the named one (NotFound if it does not exist).
  virtual absl::StatusOr<std::vector<TableInfo>> ListTables(
      const TableRef& table);

  // The id of the present run of each shard's server; see TableIdentity.
  virtual absl::StatusOr<std::vector<uint64_t>> ShardInstances() = 0;

  // Bounds the memory of all tables of this process; 0 is no bound.
  virtual absl::Status SetMaxMemory(int64_t bytes) {
    return absl::InvalidArgumentError(
        "max_memory bounds tables in this process; start servers with "
        "--max_memory");
  }
  // Sets the folder for rows of tables of this process that move to disk.
  virtual absl::Status SetColdDir(const std::string& path) {
    return absl::InvalidArgumentError(
        "cold_dir is for tables in this process; start servers with "
        "--cold_dir");
  }

  virtual void SetOnLostTables(OnLostTables on_lost_tables) {}
  // Makes empty parts on the servers that have lost their parts of tables.
  // Returns these tables.
  virtual absl::StatusOr<std::vector<ResetTable>> ResetLostTables() {
    return std::vector<ResetTable>();
  }

  // Starts to read embeddings, with as few messages as possible. For each part,
  // writes the embedding of args.keys[i] to embeddings[i * dim, (i + 1) * dim),
  // or to the row that `places` names. `parts` itself may be destroyed when
  // this returns, but the data of its args and spans must live until Wait()
  // returns. Several parts may have the same table.
  virtual std::unique_ptr<PendingCall> StartPull(
      absl::Span<const PullPart> parts) = 0;

  // Starts to apply one optimizer step per key. The rules for `parts` are those
  // of StartPull(). A bsp table stages the gradients under args.step until the
  // round is committed.
  //
  // Checks the shapes, numbers and rates of all parts before it sends any part.
  // If a gradient is NaN or Inf, nothing is applied, and the call returns
  // InvalidArgument, naming the key. After other errors some parts may have
  // been applied: a server is away or has no such table, memory is out, or the
  // bsp step is over. Then a push that has an id may be repeated.
  std::unique_ptr<PendingCall> StartPush(absl::Span<const PushPart> parts);
  // Like StartPush(), without the checks. REQUIRES: CheckPush() is OK for each
  // part.
  virtual std::unique_ptr<PendingCall> StartCheckedPush(
      absl::Span<const PushPart> parts) = 0;

  virtual std::unique_ptr<PendingCall> StartAssign(const AssignArgs& args,
                                                   WriteResult* result) = 0;

  virtual RowChanges ChangesOf(const std::string& table) const { return {}; }

  virtual int num_shards() const { return 1; }
  // The handshake of each server; empty if tables are in this process.
  virtual absl::StatusOr<std::vector<v1::HandshakeResponse>> AskServers() {
    return std::vector<v1::HandshakeResponse>();
  }
  // Starts to apply a closed round on one shard. Each shard needs a call of its
  // own, because shards may lack different rounds. *committed becomes the
  // number of the last applied round; see Shard::CommitRound. `staged` are the
  // tables to which this worker has pushed in the round.
  virtual std::unique_ptr<PendingCall> StartCommitRound(
      int shard, const std::string& group, const Round& round,
      int64_t* committed, const std::vector<TableRef>& staged);

  virtual absl::StatusOr<int64_t> Erase(const TableRef& table,
                                        absl::Span<const Key> keys);

  // See EmbeddingTable::ReadUsage. REQUIRES: the spans have the length of
  // `keys`.
  virtual absl::Status ReadUsage(const TableRef& table,
                                 absl::Span<const Key> keys, float day,
                                 absl::Span<UsageOfRow> usage,
                                 absl::Span<KeyState> states);

  // Visits all rows, in chunks, in no particular order. RowChunk::slots is
  // empty unless `with_slots`.
  virtual absl::Status Export(
      const TableRef& table, bool with_slots,
      const std::function<absl::Status(const RowChunk&)>& visit) = 0;

  // Visits the rows that have changed since args.since, in chunks, one thread
  // at a time. Returns the next cursor of each shard. FailedPrecondition if the
  // changes are no longer known, for example because the number of servers has
  // changed; then all rows must be exported.
  virtual absl::StatusOr<std::vector<ChangeCursor>> ExportChanges(
      const ExportChangesArgs& args,
      const std::function<absl::Status(const ChangeChunk&)>& visit) = 0;

  // The steps of SaveCheckpoint() and RestoreCheckpoint(); other code calls
  // those two functions. See protos/tfswitch/v1/parameter_server.proto.
  // SaveShard() returns the manifest's part of each shard. A client of tables
  // in this process reports to `progress`; if `progress` is null, it prints
  // progress lines.
  virtual absl::StatusOr<v1::SaveShardResponse> SaveShard(
      const v1::SaveShardRequest& request, Progress* progress);
  virtual absl::StatusOr<v1::StageRestoreResponse> StageRestore(
      const v1::StageRestoreRequest& request, Progress* progress);
  virtual absl::Status CommitRestore(const std::string& restore_id, bool abort);

  // A client of shard 0 only.
  virtual ParameterClient& first_shard() { return *this; }

  // The groups of workers that train with these tables.
  virtual GroupClient& groups() { return groups_; }

  // Pull(), Push() and Assign() start the call above and wait until it ends.
  absl::Status Pull(const PullArgs& args, absl::Span<float> embeddings) {
    return StartPull({{args, embeddings}})->Wait();
  }
  absl::StatusOr<WriteResult> Push(const PushArgs& args);
  absl::StatusOr<WriteResult> Assign(const AssignArgs& args);

 protected:
  // Turns an error of parsing an answer into one that says the server is at
  // fault.
  virtual absl::Status AsServerFault(const absl::Status& malformed) const {
    return malformed;
  }
  // Returns an id for a write that has none. The id is empty if this client
  // never repeats calls.
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
