// A checkpoint on disk: whole tables, readable with the `safetensors` package.
//
//   PATH/manifest.json                          the newest save; written last
//   PATH/manifest-<number>.json                 saves before it that are kept
//   PATH/<table>/<save_id>-s<shard>-<part>-<attempt>.safetensors
//        keys        int64    [rows]
//        embeddings  float32  [rows, dim]
//        slots       float32  [rows, slot_floats]   if rows have any
//
// A server's own save may have files of the one before and, behind these, files
// with what has changed: "removed" (keys that have lost their row), and then
// rows. So files are read in their order, and a later row replaces an earlier
// one.
//
// A table with an admission policy has files of another kind beside them, for
// the keys that wait: "candidates" (keys, and records as float32 [keys,
// candidate_floats]) or "bloom" (virtual_shards as int64 [n], and cells as
// uint8 [n, bytes]).
//
// A save that a server makes of itself, to recover from, has its marks of
// writes beside its tables ("%server/...": marks int64 [n, 3]).
//
// A file exists for readers once a manifest names it, and a manifest replaces
// its predecessor in one atomic rename: a save that ends half-way leaves the
// old checkpoint as it was. Each save that is kept is whole; saves of some
// tables share the files of the others. Its fields are in
// protos/tfswitch/v1/checkpoint.proto.
//
// Functions here are thread-safe, also with other processes that save to the
// same path: manifests are published one after the other.

#ifndef TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
#define TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/progress.h"
#include "cc/table/embedding_table.h"
#include "google/protobuf/repeated_field.h"
#include "tfswitch/v1/checkpoint.pb.h"

namespace tfswitch::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";

using Files = google::protobuf::RepeatedPtrField<v1::CheckpointFile>;

// A write that a server has applied, and knows again by this.
struct WriteMark {
  uint64_t client_id = 0;
  uint64_t sequence = 0;
  int64_t count = 0;  // That of its answer.
};

// Integers of a mark in a file: client, sequence and count.
inline constexpr int64_t kMarkWidth = 3;

// A push that waits for its round to close.
struct StagedMessage {
  uint64_t number = 0;  // Of its record.
  std::string bytes;    // Of its PushRequest.
};

// A table as a published save has it, to which the next one adds what has
// changed.
struct TableBase {
  ChangeCursor cursor;
  Files files;
};

// Whether its files are not much longer than those of all rows would be.
bool IsWorthExtending(const TableBase& base, const EmbeddingTable& table);

// Asked while files are written or read: an error ends that with it.
using Interrupt = std::function<absl::Status()>;

// Writes one shard's files. Create, AddTable() for each, Finish(). Without
// Finish() the files are removed again.
//
// Not thread-safe.
class PartWriter {
 public:
  // `all_tables`: the save is of all tables of the shard, so that the commit
  // drops tables that only the former checkpoint had.
  PartWriter(std::string path, std::string save_id, uint32_t shard_index,
             uint32_t num_shards, bool all_tables, Interrupt interrupt);
  ~PartWriter();

  // Writes a table; `report` hears of rows that are written. A snapshot that is
  // not whole is of changes since `base`, whose files are taken over.
  absl::Status AddTable(TableSnapshot& snapshot,
                        absl::FunctionRef<void(int64_t)> report,
                        const TableBase& base = TableBase());
  // The files of a table that has been written.
  Files FilesOf(const EmbeddingTable& table) const;

  // A JSON text that the manifest keeps; of one shard.
  void SetWorkQueues(const v1::SavedWorkQueues& work_queues);

  // Makes it a save that this server can recover from: CommitOptions::is_own
  // must be set. `server` gets the files of marks and staged pushes.
  absl::Status AddServer(v1::CheckpointServer server,
                         const std::vector<WriteMark>& marks,
                         const std::vector<StagedMessage>& staged);

  // The files written so far, relative to the checkpoint.
  const std::vector<std::string>& files() const;

  // The part of the manifest for Commit().
  v1::CheckpointPart Finish();

 private:
  struct Data;
  class TableWriter;
  const std::unique_ptr<Data> data_;
};

struct CommitOptions {
  // How many saves stay, this one included. Two more stay among those that
  // have rows of other incarnations of the tables saved now: the newest, and
  // the one with most rows.
  int keep = 2;
  // Tables of the former save that may be missing from this one.
  std::vector<std::string> dropped_tables;
  // Asked while another process writes to the folder.
  Interrupt interrupt = [] { return absl::OkStatus(); };
  // If set, one of the parts must be this: the caller that brings the parts is
  // not believed about this shard.
  std::optional<v1::CheckpointPart> own_part = std::nullopt;
  // The save is a server's own state: its part is the only one, whatever the
  // number of shards.
  bool is_own = false;
};

// Makes one manifest of all shards' parts, publishes it, and removes the saves
// that are not kept: their manifests, and the row files that only they name.
// Tables of the former save are kept unless the parts are of all tables, and so
// are its work queues. Returns the save's number; that of the first time if it
// is repeated.
//
// FailedPrecondition, naming them, if a part is missing or of another save, a
// table is not in all parts or differs between them, a file is not visible from
// here, or a table of the former save is missing; InvalidArgument if this save
// has not written a file that a part names. Nothing has changed then.
absl::StatusOr<int64_t> Commit(const std::string& path,
                               const std::string& save_id,
                               const std::vector<v1::CheckpointPart>& parts,
                               const CommitOptions& options);

// Removes those of a writer's files, relative to `path`, that no manifest
// names.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::vector<std::string>& files,
                               const Interrupt& interrupt);

// Removes the files of saves that were never published, because the process
// that wrote them has ended; with `save_id` those of this save.
//
// REQUIRES: nobody is saving to `path`.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::string& save_id = "");

// Takes the newest save out of the folder's saves, because it is damaged: gives
// its manifest a name ending in ".damaged". Its files stay until
// RemoveUnpublished().
absl::Status SetNewestAside(const std::string& path);

// The same for each former save whose manifest is damaged; says what is wrong
// with them.
absl::StatusOr<std::vector<std::string>> SetDamagedAside(
    const std::string& path);

// The save `number`; 0: the newest. With `newer_than` n, the newest but n of
// them, whether or not these can be read. NotFound, naming the saves there are,
// if there is none; DataLoss if its manifest is damaged, FailedPrecondition if
// it is of a newer format.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& path,
                                                    int64_t number = 0,
                                                    int newer_than = 0);

// The rows of all tables of a save.
uint64_t RowsOf(const v1::CheckpointManifest& save);

SavedSteps StepsOf(const v1::CheckpointTable& table);

// The state of loaded rows besides their embeddings.
enum class LoadedState {
  kSaved,             // As saved.
  kResetIfDifferent,  // Of another optimizer: its state begins anew.
  kReset,  // Optimizer state, statistics and counts of admission begin anew.
};

// The rows that LoadTable() looks at, its own and others in their files, and
// the bytes of these files.
struct RowsToRead {
  int64_t num_rows = 0;
  int64_t bytes = 0;
};
RowsToRead FindRowsToRead(const v1::CheckpointTable& saved,
                          uint32_t shard_index, uint32_t num_shards);

// Whether saved rows have the optimizer state of the table's.
bool HasStateOf(const v1::CheckpointTable& saved, const EmbeddingTable& table);

// Reads into `table` the saved rows that shard `shard_index` of `num_shards`
// owns, whatever the number of shards that saved them. Verifies every file it
// reads. FailedPrecondition if dim differs, or with kSaved the optimizer state.
// Statistics that were not saved begin anew; so do the counts of admission
// where statistics or the kind of policy are others, a Bloom filter has another
// size, or records have optimizer state and that begins anew.
absl::Status LoadTable(const std::string& path,
                       const v1::CheckpointTable& saved, uint32_t shard_index,
                       uint32_t num_shards, const Interrupt& interrupt,
                       EmbeddingTable& table, Progress* progress = nullptr,
                       LoadedState state = LoadedState::kSaved);

// The marks of a server's own state. DataLoss as for LoadTable().
absl::StatusOr<std::vector<WriteMark>> LoadMarks(
    const std::string& path, const v1::CheckpointServer& server);
// The same of its staged pushes.
absl::StatusOr<std::vector<StagedMessage>> LoadStaged(
    const std::string& path, const v1::CheckpointServer& server);

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
