// If several files have a key, the newest one counts. IsNews() marks the key's
// slot in that file. A key has disappeared if it is unmarked at the end and in
// no newer file.

#include "cc/serving/row_difference.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Whether one of the `num_files` newest files has the key.
bool IsInNewer(const RowLayers& layers, size_t num_files, Key key) {
  for (size_t i = 0; i < num_files; ++i) {
    if (layers.files[i]->MayHave(key) && layers.files[i]->Find(key).is_here) {
      return true;
    }
  }
  return false;
}

}  // namespace

RowDifference::RowDifference(RowLayers layers) : layers_(std::move(layers)) {
  for (const auto& file : layers_.files) {
    shown_.emplace_back(static_cast<size_t>(file->view().num_slots));
  }
}

absl::StatusOr<std::unique_ptr<RowDifference>> RowDifference::Open(
    const std::string& path, const v1::ExportContent& last,
    const std::string& table) {
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<v1::ExportContent> chain,
                            ReadChain(path, last));
  const v1::ExportedTable& expected = last.tables().at(table);
  RowLayers layers{table, expected.dim(), {}};
  for (const v1::ExportContent& manifest : chain) {
    const auto found = manifest.tables().find(table);
    if (found == manifest.tables().end() ||
        found->second.dim() != expected.dim() ||
        found->second.row_format() != expected.row_format()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", table, "' is not in ", NameOf(manifest).ToString(),
          " of '", path, "' as it is in ", NameOf(last).ToString(),
          ". Export a base."));
    }
    TFSWITCH_ASSIGN_OR_RETURN(
        std::shared_ptr<const RowFile> file,
        RowFile::Open(RowFilePath(path, NameOf(manifest), found->second),
                      InfoOf(found->second)));
    TFSWITCH_RETURN_IF_ERROR(file->Verify());
    if (manifest.is_delta()) file->BuildFilter();
    layers.files.insert(layers.files.begin(), std::move(file));
    while (layers.IsWorthMerging()) {
      TFSWITCH_RETURN_IF_ERROR(layers.MergeNewest());
    }
  }
  return std::unique_ptr<RowDifference>(new RowDifference(std::move(layers)));
}

bool RowDifference::IsNews(Key key, const char* row) {
  for (size_t i = 0; i < layers_.files.size(); ++i) {
    const RowFile& file = *layers_.files[i];
    if (!file.MayHave(key)) continue;
    const RowFile::Found found = file.Find(key);
    if (!found.is_here) continue;
    const bool is_again = shown_[i][found.slot];
    shown_[i][found.slot] = true;
    if (is_again || found.row == nullptr) return true;
    ++num_found_;
    return std::memcmp(row, found.row,
                       RowBytes(file.kind().format, layers_.dim)) != 0;
  }
  return true;
}

absl::Status RowDifference::ForEachGone(
    const std::function<void(Key)>& visit) const {
  for (size_t i = 0; i < layers_.files.size(); ++i) {
    const RowFile& file = *layers_.files[i];
    TFSWITCH_RETURN_IF_ERROR(
        file.ForEachKey([&](Key key, const char* row) -> absl::Status {
          if (row != nullptr && !shown_[i][file.Find(key).slot] &&
              !IsInNewer(layers_, i, key)) {
            visit(key);
          }
          return absl::OkStatus();
        }));
    TFSWITCH_RETURN_IF_ERROR(file.CheckUnchangedNow());
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
