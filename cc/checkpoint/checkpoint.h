// Reads and writes checkpoints: folders of whole tables, in files that the
// `safetensors` package can read.
//
//   PATH/manifest.json                          the newest save; written last
//   PATH/manifest-<number>.json                 earlier saves that are kept
//   PATH/<table>/<save_id>-s<shard>-<part>-<attempt>.safetensors
//        keys        int64    [rows]
//        embeddings  float32  [rows, dim]
//        slots       float32  [rows, slot_floats]   if rows have any
//
// A server's own save may have the files of the previous save and, after them,
// files with changes: "removed" (keys that have lost their row), then rows. So
// readers read files in their order, and later rows replace earlier ones.
//
// A table with an admission policy has further files for the keys that wait:
// "candidates" (keys, and records as float32 [keys, candidate_floats]) or
// "bloom" (virtual_shards as int64 [n], and cells as uint8 [n, bytes]).
//
// A save from which a server recovers also has its marks of writes
// ("%server/...": marks int64 [n, 3]).
//
// Readers see a file once a manifest names it. A manifest replaces the previous
// one in one atomic rename, so a failed save does not change the checkpoint.
// Each kept save is whole; a save of some tables shares the files of the other
// tables. protos/tfswitch/v1/checkpoint.proto has the fields of a manifest.
//
// Functions here are thread-safe, also if other processes save to the same
// path: manifests are published one after another.

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

// A write that a server has applied. The mark recognises its repetitions.
struct WriteMark {
  uint64_t client_id = 0;
  uint64_t sequence = 0;
  int64_t count = 0;  // The count of its answer.
};

// The integers of a mark in a file: client, sequence and count.
inline constexpr int64_t kMarkWidth = 3;

// A push that waits for its round to close.
struct StagedMessage {
  uint64_t number = 0;  // The number of its record.
  std::string bytes;    // Its PushRequest.
};

// A table in a published save, to which the next save adds the changes.
struct TableBase {
  ChangeCursor cursor;
  Files files;
};

// Whether the files of `base` are not much longer than files of all rows.
bool IsWorthExtending(const TableBase& base, const EmbeddingTable& table);

// Called while files are written or read. An error of it ends that.
using Interrupt = std::function<absl::Status()>;

// Writes one shard's files. Call AddTable() for each table, then Finish().
// Without Finish() the destructor removes the files.
//
// Not thread-safe.
class PartWriter {
 public:
  // `all_tables` says that the save has all tables of the shard, so that the
  // commit drops tables that only the former checkpoint had.
  PartWriter(std::string path, std::string save_id, uint32_t shard_index,
             uint32_t num_shards, bool all_tables, Interrupt interrupt);
  ~PartWriter();

  // Writes a table, and calls `report` with numbers of written rows. If the
  // snapshot is not whole, it has the changes since `base`, and the files of
  // `base` are taken over.
  absl::Status AddTable(TableSnapshot& snapshot,
                        absl::FunctionRef<void(int64_t)> report,
                        const TableBase& base = TableBase());
  // The files of a table that has been written.
  Files FilesOf(const EmbeddingTable& table) const;

  // Sets the work queues in the manifest. One shard calls it.
  void SetWorkQueues(const v1::SavedWorkQueues& work_queues);

  // Makes this a save from which the server can recover. Adds the files of
  // marks and staged pushes to `server`. CommitOptions::is_own must be set.
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
  // How many saves stay, including this one. Two more saves with rows of other
  // incarnations of the saved tables stay: the newest, and the one with most
  // rows.
  int keep = 2;
  // Tables of the former save that may be missing from this one.
  std::vector<std::string> dropped_tables;
  // Called while another process writes to the folder.
  Interrupt interrupt = [] { return absl::OkStatus(); };
  // If set, the parts must include this one: the caller is not trusted about
  // this shard's part.
  std::optional<v1::CheckpointPart> own_part = std::nullopt;
  // Whether the save is a server's own state. Then it has only one part, for
  // any number of shards.
  bool is_own = false;
};

// Makes one manifest of all shards' parts, publishes it, and removes saves that
// are not kept: their manifests, and the row files that only they name. Unless
// the parts have all tables, the other tables and the work queues of the former
// save are kept. Returns the save's number. A repeated call returns the same
// number.
//
// FailedPrecondition, naming the reason, if a part is missing or belongs to
// another save, a table is not in all parts or differs between them, a file is
// not visible from here, or a table of the former save is missing.
// InvalidArgument if a part names a file that this save has not written. After
// an error nothing has changed.
absl::StatusOr<int64_t> Commit(const std::string& path,
                               const std::string& save_id,
                               const std::vector<v1::CheckpointPart>& parts,
                               const CommitOptions& options);

// Removes files of a writer, relative to `path`, that no manifest names.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::vector<std::string>& files,
                               const Interrupt& interrupt);

// Removes the files of saves that were never published, because the process
// that wrote them has ended. With `save_id` removes only the files of this
// save.
//
// REQUIRES: no process is saving to `path`.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::string& save_id = "");

// Sets the newest save aside because it is damaged: its manifest gets a name
// that ends in ".damaged". Its files stay until RemoveUnpublished().
absl::Status SetNewestAside(const std::string& path);

// Sets each former save with a damaged manifest aside. Returns their errors.
absl::StatusOr<std::vector<std::string>> SetDamagedAside(
    const std::string& path);

// Reads the save `number`, or the newest for 0. With `newer_than` n skips the n
// newest saves, whether or not they can be read. NotFound, naming the existing
// saves, if there is no such save. DataLoss if its manifest is damaged,
// FailedPrecondition if its format is newer.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& path,
                                                    int64_t number = 0,
                                                    int newer_than = 0);

// The number of rows in all tables of a save.
uint64_t RowsOf(const v1::CheckpointManifest& save);

SavedSteps StepsOf(const v1::CheckpointTable& table);

// The state that loaded rows get besides their embeddings.
enum class LoadedState {
  kSaved,             // The saved state.
  kResetIfDifferent,  // Without the state of another optimizer.
  kReset,  // Without optimizer state, statistics and counts of admission.
};

// The rows of the files that LoadTable() reads, which may have rows of other
// shards, and the bytes of these files.
struct RowsToRead {
  int64_t num_rows = 0;
  int64_t bytes = 0;
};
RowsToRead FindRowsToRead(const v1::CheckpointTable& saved,
                          uint32_t shard_index, uint32_t num_shards);

// Whether saved rows have a state that the table's optimizer can use.
bool HasStateOf(const v1::CheckpointTable& saved, const EmbeddingTable& table);

// Reads into `table` the saved rows that shard `shard_index` of `num_shards`
// owns; the save may have another number of shards. Verifies every file that it
// reads. FailedPrecondition if dim differs or, with kSaved, the optimizer state
// does. Statistics that were not saved start as for new rows. Counts of
// admission start from nothing if statistics or the kind of policy differ, if a
// Bloom filter has another size, or if records have optimizer state that is
// reset.
absl::Status LoadTable(const std::string& path,
                       const v1::CheckpointTable& saved, uint32_t shard_index,
                       uint32_t num_shards, const Interrupt& interrupt,
                       EmbeddingTable& table, Progress* progress = nullptr,
                       LoadedState state = LoadedState::kSaved);

// Reads the marks of a server's own state. DataLoss as for LoadTable().
absl::StatusOr<std::vector<WriteMark>> LoadMarks(
    const std::string& path, const v1::CheckpointServer& server);
// Reads its staged pushes. DataLoss as for LoadTable().
absl::StatusOr<std::vector<StagedMessage>> LoadStaged(
    const std::string& path, const v1::CheckpointServer& server);

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
