// Reads and writes a folder of exports: base and delta models of tables, with
// consecutive numbers.
//
//   PATH/base-00000001/manifest.json      the content
//   PATH/base-00000001/<table>.safetensors   a row file of each table
//   PATH/delta-00000002/...               the changes since number 1
//
// A base has all rows. A delta has the changes since the export that it names.
// Readers apply deltas in order to a base. If one is missing or damaged, they
// continue with the next base. When an export is complete, one rename gives it
// its final name. Names that begin with a dot are not exports.
//
// Functions here are thread-safe.

#ifndef TFSWITCH_CC_SERVING_EXPORT_FOLDER_H_
#define TFSWITCH_CC_SERVING_EXPORT_FOLDER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cc/base/files.h"
#include "cc/serving/row_file_writer.h"
#include "cc/table/change_log.h"
#include "cc/table/embedding_table.h"
#include "tfswitch/v1/export.pb.h"

namespace tfswitch {

inline constexpr char kExportManifestName[] = "manifest.json";

struct ExportName {
  int64_t number = 0;
  bool is_delta = false;

  // "base-00000001"
  std::string ToString() const;
};

ExportName NameOf(const v1::ExportContent& manifest);

RowFormat FormatOf(const v1::ExportedTable& table);
RowFileInfo InfoOf(const v1::ExportedTable& table);

// The exports in a folder, in order of their numbers. NotFound if there is no
// such folder.
absl::StatusOr<std::vector<ExportName>> ListExports(const std::string& path);

// NotFound if the export does not exist, DataLoss if its manifest is damaged,
// FailedPrecondition if its format has another version.
absl::StatusOr<v1::ExportContent> ReadExport(const std::string& path,
                                             const ExportName& name);

// Returns a base and the deltas after it, in order, up to `last`.
// FailedPrecondition or DataLoss if one of these exports is missing or damaged.
absl::StatusOr<std::vector<v1::ExportContent>> ReadChain(
    const std::string& path, const v1::ExportContent& last);

// The path of a table's rows.
std::string RowFilePath(const std::string& path, const ExportName& name,
                        const v1::ExportedTable& table);

// Writes one export. While the object lives, other processes cannot write to
// the folder. Begin() removes exports that earlier writers have left
// unfinished.
//
// Not thread-safe.
class ExportWriter {
 public:
  // Makes the folder if it does not exist. The export gets the next number.
  // Aborted if another process is writing to the folder.
  static absl::StatusOr<std::unique_ptr<ExportWriter>> Begin(
      const std::string& path, bool is_delta);
  // Removes the files if Publish() has not been called.
  ~ExportWriter();
  ExportWriter(const ExportWriter&) = delete;
  ExportWriter& operator=(const ExportWriter&) = delete;

  // The previous export; its number is 0 if this one is the first.
  const v1::ExportContent& previous() const { return previous_; }
  ExportName name() const { return NameOf(manifest_); }
  const std::string& id() const { return manifest_.id(); }

  // Records the rule that chooses which rows are exported. Deltas that follow
  // this export must have the same rule.
  void SetRule(const v1::ScoreRule& rule) { *manifest_.mutable_rule() = rule; }

  // Adds a table. Returns a writer for its rows, which must be finished before
  // Publish().
  absl::StatusOr<std::unique_ptr<RowFileWriter>> AddTable(
      const RowFileKind& kind);
  // Notes the results of the table's writer.
  void FinishTable(const std::string& table, const RowFileInfo& info,
                   const std::vector<ChangeCursor>& cursors);

  // Publishes the export. Readers can see it if, and only if, this returns OK.
  absl::Status Publish();

 private:
  ExportWriter(std::string path, std::unique_ptr<FolderLock> lock);

  const std::string path_;
  const std::unique_ptr<FolderLock> lock_;
  std::string temporary_;
  v1::ExportContent previous_;
  v1::ExportContent manifest_;
  bool is_published_ = false;
};

// Removes exports that are older than the newest `keep_bases` bases.
absl::Status RemoveOldExports(const std::string& path, uint32_t keep_bases);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_SERVING_EXPORT_FOLDER_H_
