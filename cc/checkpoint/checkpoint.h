// A checkpoint on disk: whole tables, readable with the `safetensors` package.
//
//   PATH/manifest.json                          what is here; written last
//   PATH/<table>/<save_id>-s<shard>-<part>-<attempt>.safetensors
//        keys        int64    [rows]
//        embeddings  float32  [rows, dim]
//        slots       float32  [rows, slot_floats]   if rows have any
//
// A table with an admission policy has files of another kind beside them, for
// the keys that wait: "candidates" (keys, and records as float32 [keys,
// candidate_floats]) or "bloom" (virtual_shards as int64 [n], and cells as
// uint8 [n, bytes]).
//
// A file exists for readers once the manifest names it, and the manifest
// replaces its predecessor in one atomic rename: a save that ends half-way
// leaves the old checkpoint as it was. docs/checkpoint_format.md describes each
// field.
//
// Functions here are thread-safe; two saves to one path at the same time are
// not supported, the last manifest stays.

#ifndef TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
#define TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/table/embedding_table.h"
#include "cc/table/table_config.h"

namespace tfswitch::checkpoint {

inline constexpr char kManifestName[] = "manifest.json";
inline constexpr int kFormatVersion = 1;

// What is in a file.
enum class FileKind { kRows, kCandidates, kBloom };

// One file of rows, or of what is known of keys without one.
struct RowFile {
  std::string name;  // Relative to the checkpoint.
  FileKind kind = FileKind::kRows;
  uint32_t virtual_shards_begin = 0;  // Keys are of [begin, end).
  uint32_t virtual_shards_end = 0;
  int64_t num_rows = 0;  // Or candidates, or virtual shards.
  int64_t bytes = 0;
  uint32_t crc32 = 0;
};

struct SavedTable {
  TableConfig config;
  int slot_floats = 0;
  float last_day = kServersDay;  // See EmbeddingTable::last_day.
  std::vector<RowFile> files;
};

struct Manifest {
  std::string save_id;
  std::map<std::string, SavedTable> tables;
  // JSON, not looked into here: where work queues were. Empty if the save was
  // by a version without.
  std::string work_queues;
};

// Writes one shard's files. Create, AddTable() for each, Finish(). Without
// Finish() the files are removed again.
//
// Not thread-safe.
class PartWriter {
 public:
  // `all_tables`: the save is of all tables of the shard, so that the commit
  // drops tables that only the former checkpoint had.
  PartWriter(std::string path, std::string save_id, uint32_t shard_index,
             uint32_t num_shards, bool all_tables);
  ~PartWriter();

  // Writes the rows that the table has while the call runs; each row is saved
  // whole, but the table may change between two rows.
  absl::Status AddTable(const EmbeddingTable& table);

  // A JSON text that the manifest keeps; of one shard.
  void SetWorkQueues(std::string json);

  // The part of the manifest for Commit().
  std::string Finish();

 private:
  struct Data;
  const std::unique_ptr<Data> data_;
};

// Makes one manifest of all shards' parts and publishes it; then removes row
// files in the tables' folders that it does not name. Tables of the former
// manifest are kept unless the parts are of all tables, and so are its work
// queues. FailedPrecondition if a
// part is missing or of another save, or if a file is not visible from here.
absl::Status Commit(const std::string& path, const std::string& save_id,
                    const std::vector<std::string>& manifest_parts);

// NotFound if there is no manifest at `path`, DataLoss if it is damaged,
// FailedPrecondition if it is of a newer format.
absl::StatusOr<Manifest> ReadManifest(const std::string& path);

// Reads into `table` the saved rows that shard `shard_index` of `num_shards`
// owns, whatever the number of shards that saved them. Verifies every file it
// reads. FailedPrecondition if dim or optimizer state differ. Statistics that
// were not saved begin anew; so do the counts of admission where statistics or
// the kind of policy are others, or a Bloom filter has another size.
absl::Status LoadTable(const std::string& path, const SavedTable& saved,
                       uint32_t shard_index, uint32_t num_shards,
                       EmbeddingTable& table);

}  // namespace tfswitch::checkpoint

#endif  // TFSWITCH_CC_CHECKPOINT_CHECKPOINT_H_
