// Reads and writes checkpoints. A checkpoint is a folder of saves of whole
// tables, in files that the `safetensors` package can read.
//
//   PATH/manifest.json                          the newest save; written last
//   PATH/manifest-<number>.json                 earlier saves that are kept
//   PATH/<table>/<save_id>-s<shard>-<part>-<attempt>.safetensors
//        keys        int64    [rows]
//        embeddings  float32  [rows, dim]
//        slots       float32  [rows, slot_floats]   if rows have any
//
// A save of a server's own state may write only what has changed. It takes over
// the files of the previous save, and adds files of changes after them: first
// "removed" (keys that have lost their row), then rows. So readers read the
// files in the order of the manifest, and later rows replace earlier ones.
//
// A table with an admission policy has further files, for keys that have no row
// yet: "candidates" (keys, and records as float32 [keys, candidate_floats]) or
// "bloom" (virtual_shards as int64 [n], and cells as uint8 [n, bytes]).
//
// A save of a server's own state also has the marks of applied writes
// ("%server/...": marks int64 [n, 3]).
//
// A reader sees a file only when a manifest names it. A manifest replaces the
// previous one in one atomic rename, so a failed save does not change the
// checkpoint. Each kept save is complete: if a save writes only some tables, it
// names the files of the other tables in the save before it.
// protos/tfswitch/v1/checkpoint.proto has the fields of a manifest.
//
// The functions are thread-safe. Other processes may save to the same path at
// the same time: a lock publishes their manifests one after another.

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

// Records a write that a server has applied. If the write is repeated, the
// server finds its mark, and answers without applying the write again.
struct WriteMark {
  uint64_t client_id = 0;
  uint64_t sequence = 0;
  int64_t count = 0;  // The count in the answer.
};

// A mark has three integers in a file: client, sequence and count.
inline constexpr int64_t kMarkWidth = 3;

// A push that a server keeps until its round closes.
struct StagedMessage {
  uint64_t number = 0;  // Numbers its record in the push log.
  std::string bytes;    // The serialized PushRequest.
};

// A table in a published save. The next save may take over its files and add
// only the changes since then.
struct TableBase {
  ChangeCursor cursor;
  Files files;
};

// Whether the next save should take over the files of `base` and add the
// changes. If they are much longer than files of all rows, it should write all
// rows.
bool IsWorthExtending(const TableBase& base, const EmbeddingTable& table);

// Called while files are written or read. If it returns an error, the writing
// or reading ends with that error.
using Interrupt = std::function<absl::Status()>;

// Writes one shard's files. Call AddTable() for each table, then Finish().
// Without Finish() the destructor removes the files.
//
// Not thread-safe.
class PartWriter {
 public:
  // `all_tables` says that the save has all tables of the shard. Then the
  // commit drops the tables that only the previous save has.
  PartWriter(std::string path, std::string save_id, uint32_t shard_index,
             uint32_t num_shards, bool all_tables, Interrupt interrupt);
  ~PartWriter();

  // Writes a table, and calls `report` with numbers of written rows. If the
  // snapshot has only the changes since `base`, the table also takes over the
  // files of `base`.
  absl::Status AddTable(TableSnapshot& snapshot,
                        absl::FunctionRef<void(int64_t)> report,
                        const TableBase& base = TableBase());
  // The files of a table that AddTable() has written.
  Files FilesOf(const EmbeddingTable& table) const;

  // Sets the work queues in the manifest. Only one shard calls this.
  void SetWorkQueues(const v1::SavedWorkQueues& work_queues);

  // Makes this a save from which the server can recover. Writes the files of
  // marks and staged pushes, and adds them to `server`. CommitOptions::is_own
  // must be set.
  absl::Status AddServer(v1::CheckpointServer server,
                         const std::vector<WriteMark>& marks,
                         const std::vector<StagedMessage>& staged);

  // The files written so far, relative to the checkpoint's folder.
  const std::vector<std::string>& files() const;

  // The part of the manifest for Commit().
  v1::CheckpointPart Finish();

 private:
  struct Data;
  class TableWriter;
  const std::unique_ptr<Data> data_;
};

struct CommitOptions {
  // How many saves stay, including this one. Up to two more saves stay if they
  // have rows of other incarnations of the saved tables: the newest of these
  // saves, and the one with the most rows.
  int keep = 2;
  // Tables that the previous save has and this one may lack.
  std::vector<std::string> dropped_tables;
  // Called at intervals while the commit waits for another process that writes
  // to the folder.
  Interrupt interrupt = [] { return absl::OkStatus(); };
  // The part that this server itself wrote. If set, the parts must include it:
  // a caller cannot replace this shard's part by a different one.
  std::optional<v1::CheckpointPart> own_part = std::nullopt;
  // Whether the save is a server's own state. It then has one part, for
  // whatever number of shards.
  bool is_own = false;
};

// Joins the parts of all shards to one manifest and publishes it. Then removes
// the saves that are not kept: their manifests, and the row files that no other
// save names. If the parts do not have all tables, the other tables and the
// work queues are taken from the previous save. Returns the save's number. A
// repeated call returns the same number.
//
// FailedPrecondition, naming the reason, in these cases: a part is missing or
// belongs to another save; a table is not in all parts, or differs between
// them; this process does not see a file; or a table of the previous save is
// missing. InvalidArgument if a part names a file that this save has not
// written. An error changes nothing.
absl::StatusOr<int64_t> Commit(const std::string& path,
                               const std::string& save_id,
                               const std::vector<v1::CheckpointPart>& parts,
                               const CommitOptions& options);

// Removes those of a writer's `files` that no manifest names. They are relative
// to `path`.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::vector<std::string>& files,
                               const Interrupt& interrupt);

// Removes the files of saves that were not published, because the process that
// wrote them has ended. If `save_id` is given, removes only the files of that
// save.
//
// REQUIRES: no process is saving to `path`.
absl::Status RemoveUnpublished(const std::string& path,
                               const std::string& save_id = "");

// Sets the newest save aside, because it is damaged: renames its manifest to a
// name that ends in ".damaged", so that the save is no longer read. The save's
// files stay until RemoveUnpublished().
absl::Status SetNewestAside(const std::string& path);

// Sets aside each earlier save whose manifest is damaged. Returns the errors of
// these manifests.
absl::StatusOr<std::vector<std::string>> SetDamagedAside(
    const std::string& path);

// Reads the save `number`, or the newest for 0. If `newer_than` is n, skips the
// n newest saves, whether or not they can be read. NotFound, naming the
// existing saves, if there is no such save. DataLoss if the manifest is
// damaged. FailedPrecondition if its format is newer than this program.
absl::StatusOr<v1::CheckpointManifest> ReadManifest(const std::string& path,
                                                    int64_t number = 0,
                                                    int newer_than = 0);

// The number of rows in all tables of a save.
uint64_t RowsOf(const v1::CheckpointManifest& save);

SavedSteps StepsOf(const v1::CheckpointTable& table);

// Says which state loaded rows get besides their embeddings.
enum class LoadedState {
  // The saved state.
  kSaved,
  // The saved state, but no state of a different optimizer.
  kResetIfDifferent,
  // No optimizer state, no statistics and no counts of admission.
  kReset,
};

// The rows and bytes of the files that LoadTable() reads. The files may also
// have rows of other shards.
struct RowsToRead {
  int64_t num_rows = 0;
  int64_t bytes = 0;
};
RowsToRead FindRowsToRead(const v1::CheckpointTable& saved,
                          uint32_t shard_index, uint32_t num_shards);

// Whether the table's optimizer can use the state of the saved rows.
bool HasStateOf(const v1::CheckpointTable& saved, const EmbeddingTable& table);

// Reads into `table` the saved rows that shard `shard_index` of `num_shards`
// owns. The save may have a different number of shards. Verifies every file
// that it reads. FailedPrecondition if dim differs, or if `state` is kSaved and
// the optimizer state differs. Statistics that were not saved start as in new
// rows. The counts of admission start from nothing in these cases: statistics
// or the kind of policy differ, a Bloom filter has a different size, or records
// contain optimizer state that is reset.
absl::Status LoadTable(const std::string& path,
                       const v1::CheckpointTable& saved, uint32_t shard_index,
                       uint32_t num_shards, const Interrupt& interrupt,
                       EmbeddingTable& table, Progress* progress = nullptr,
                       LoadedState state = LoadedState::kSaved);

// Reads the marks in a server's own state. Returns DataLoss in the cases of
// LoadTable().
absl::StatusOr<std::vector<WriteMark>> LoadMarks(
    const std::string& path, const v1::CheckpointServer& server);
// Reads the staged pushes in a server's own state. Returns DataLoss in the
// cases of LoadTable().
absl::StatusOr<std::vector<StagedMessage>> LoadStaged(
    const std::string& path, const v1::CheckpointServer& server);

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
