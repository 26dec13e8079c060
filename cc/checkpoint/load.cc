// Files are loaded in the order that the manifest has them in. A key that got
// its row during the save is in a file of candidates, too, and its row counts.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "cc/base/status_macros.h"
#include "cc/checkpoint/checkpoint.h"
#include "cc/checkpoint/parts.h"
#include "cc/checkpoint/safetensors.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/counting_bloom.h"
#include "cc/table/embedding_table.h"
#include "cc/table/row_statistics.h"

namespace tfswitch::checkpoint {
namespace {

int StateFloats(const SavedTable& saved) {
  return saved.slot_floats -
         RowStatistics(saved.config.statistics).num_floats();
}
int StateFloats(const EmbeddingTable& table) {
  return table.slot_floats() - table.statistics_floats();
}

// Slots as saved to those of a table with other statistics, or of one whose
// state begins anew. Both are the optimizer's state, and statistics behind it;
// of these the common ones stay.
class SlotConverter {
 public:
  // `day` is when rows count as seen whose saved statistics do not say it.
  SlotConverter(const SavedTable& saved, const EmbeddingTable& table,
                bool keeps_state, bool keeps_statistics, float day)
      : from_(saved.slot_floats),
        from_state_(StateFloats(saved)),
        state_(StateFloats(table)),
        kept_state_(keeps_state ? state_ : 0),
        kept_statistics_(keeps_statistics
                             ? std::min(table.statistics_floats(),
                                        saved.slot_floats - from_state_)
                             : 0),
        is_needed_(from_ != table.slot_floats() || !keeps_state ||
                   !keeps_statistics) {
    const TableConfig& config = table.config();
    fresh_.resize(static_cast<size_t>(table.slot_floats()));
    Optimizer(config.optimizer, config.dim)
        .InitSlots(fresh_.data(),
                   static_cast<uint32_t>(table.stats().num_steps));
    RowStatistics(config.statistics).Init(day, fresh_.data() + state_);
  }

  bool is_needed() const { return is_needed_; }

  std::vector<float> Convert(absl::Span<const float> slots,
                             size_t num_rows) const {
    std::vector<float> converted;
    converted.reserve(num_rows * fresh_.size());
    for (size_t i = 0; i < num_rows; ++i) {
      const size_t begin = converted.size();
      converted.insert(converted.end(), fresh_.begin(), fresh_.end());
      const float* const row = slots.data() + i * static_cast<size_t>(from_);
      std::copy_n(row, kept_state_, converted.begin() + begin);
      std::copy_n(row + from_state_, kept_statistics_,
                  converted.begin() + begin + state_);
    }
    return converted;
  }

 private:
  // Numbers of floats of a row.
  const int from_;
  const int from_state_;
  const int state_;
  const int kept_state_;
  const int kept_statistics_;
  const bool is_needed_;
  std::vector<float> fresh_;
};

absl::Status LoadCandidates(const SafetensorsFile& file, int64_t num_keys,
                            uint32_t first, uint32_t last,
                            EmbeddingTable& table) {
  const int width = table.candidate_floats();
  TFSWITCH_ASSIGN_OR_RETURN(const auto key_bytes,
                            file.Get("keys", "I64", {num_keys}));
  TFSWITCH_ASSIGN_OR_RETURN(const auto record_bytes,
                            file.Get("records", "F32", {num_keys, width}));
  const auto* keys = reinterpret_cast<const Key*>(key_bytes.data());
  const auto* records = reinterpret_cast<const float*>(record_bytes.data());
  std::vector<Key> own_keys;
  std::vector<float> own_records;
  for (int64_t i = 0; i < num_keys; ++i) {
    const uint32_t shard =
        VirtualShardOf(keys[i], table.config().num_virtual_shards);
    if (shard < first || shard >= last) continue;
    own_keys.push_back(keys[i]);
    own_records.insert(own_records.end(), records + i * width,
                       records + (i + 1) * width);
  }
  return table.AssignCandidates(own_keys, own_records);
}

absl::Status LoadBloom(const SafetensorsFile& file, int64_t num_shards,
                       uint32_t first, uint32_t last, CountingBloom* bloom) {
  const size_t width = bloom->bytes_per_virtual_shard();
  TFSWITCH_ASSIGN_OR_RETURN(const auto shard_bytes,
                            file.Get("virtual_shards", "I64", {num_shards}));
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto cells,
      file.Get("cells", "U8", {num_shards, static_cast<int64_t>(width)}));
  const auto* shards = reinterpret_cast<const int64_t*>(shard_bytes.data());
  for (int64_t i = 0; i < num_shards; ++i) {
    if (shards[i] < int64_t{first} || shards[i] >= int64_t{last}) continue;
    bloom->Load(static_cast<uint32_t>(shards[i]),
                cells.subspan(static_cast<size_t>(i) * width, width));
  }
  return absl::OkStatus();
}

}  // namespace

RowsToRead FindRowsToRead(const SavedTable& saved, uint32_t shard_index,
                          uint32_t num_shards) {
  const uint32_t num_virtual = saved.config.num_virtual_shards;
  RowsToRead to_read;
  for (const RowFile& file : saved.files) {
    if (file.kind == FileKind::kRows &&
        file.virtual_shards_begin <
            FirstVirtualShardOf(shard_index + 1, num_virtual, num_shards) &&
        file.virtual_shards_end >
            FirstVirtualShardOf(shard_index, num_virtual, num_shards)) {
      to_read.num_rows += file.num_rows;
      to_read.bytes += file.bytes;
    }
  }
  return to_read;
}

bool HasStateOf(const SavedTable& saved, const EmbeddingTable& table) {
  const TableConfig& config = table.config();
  return StateFloats(saved) == StateFloats(table) &&
         HaveEqualState(saved.config.optimizer, config.optimizer, config.dim);
}

absl::Status LoadTable(const std::string& path, const SavedTable& saved,
                       uint32_t shard_index, uint32_t num_shards,
                       const Interrupt& interrupt, EmbeddingTable& table,
                       Progress* progress, LoadedState state) {
  const TableConfig& config = table.config();
  if (saved.config.dim != config.dim) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", saved.config.name, "' in checkpoint '", path,
                     "' has dim ", saved.config.dim, "; the table '",
                     config.name, "' that is there has dim ", config.dim,
                     "; restore it under another name"));
  }
  const bool has_state = HasStateOf(saved, table);
  if (!has_state && state == LoadedState::kSaved) {
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", saved.config.name, "' in checkpoint '", path, "' has ",
        StateFloats(saved), " floats of ",
        OptimizerName(saved.config.optimizer), " state per row; the table '",
        config.name, "' that is there has ", StateFloats(table), " of ",
        OptimizerName(config.optimizer),
        "; restore with state='reset_if_different' to begin that state anew"));
  }
  const bool keeps_statistics = state != LoadedState::kReset;
  const bool keeps_state = has_state && keeps_statistics;
  const uint32_t num_virtual = config.num_virtual_shards;
  const bool same_cut = saved.config.num_virtual_shards == num_virtual;
  const uint32_t first =
      FirstVirtualShardOf(shard_index, num_virtual, num_shards);
  const uint32_t last =
      FirstVirtualShardOf(shard_index + 1, num_virtual, num_shards);
  // Counts go on under another threshold. Weights have optimizer state.
  const bool has_weights =
      config.admission.not_admitted.kind == NotAdmittedKind::kWeight;
  const bool takes_candidates =
      keeps_statistics && table.candidate_floats() > 0 &&
      saved.config.admission.has_candidates() &&
      saved.config.statistics.kind == config.statistics.kind &&
      (saved.config.admission.not_admitted.kind == NotAdmittedKind::kWeight) ==
          has_weights &&
      (keeps_state || !has_weights);
  const auto* saved_bloom =
      std::get_if<BloomMinCountAdmission>(&saved.config.admission.policy);
  const bool takes_bloom = keeps_statistics && table.bloom() != nullptr &&
                           same_cut && saved_bloom != nullptr &&
                           table.bloom()->HasCellsOf(*saved_bloom);
  // All counts and decisions from now on go by the saved days.
  if (keeps_statistics) table.NoteDay(saved.last_day);
  if (config.optimizer.is_dense && keeps_state) {
    TFSWITCH_RETURN_IF_ERROR(table.RestoreSteps(saved.steps));
  }
  const SlotConverter converter(
      saved, table, keeps_state, keeps_statistics,
      table.last_day() >= 0.0f ? table.last_day() : DayOfWallClock());
  // In their order: later rows replace earlier ones, and rows come behind
  // candidates, because a key that has one is no candidate.
  std::vector<const RowFile*> files;
  for (const RowFile& row_file : saved.files) {
    if (same_cut && (row_file.virtual_shards_begin >= last ||
                     row_file.virtual_shards_end <= first)) {
      continue;
    }
    if (row_file.kind == FileKind::kCandidates && !takes_candidates) continue;
    if (row_file.kind == FileKind::kBloom && !takes_bloom) continue;
    files.push_back(&row_file);
  }
  // Each file is read while the rows of the one before are assigned.
  std::future<absl::StatusOr<SafetensorsFile>> next;
  const auto read_next = [&](size_t i, SafetensorsFile former) {
    if (i == files.size()) return;
    // Where there is no thread to be had, get() reads it.
    next = std::async(
        std::launch::async | std::launch::deferred,
        [&path, row_file = files[i], spare = std::move(former)]() mutable {
          return ReadSafetensors(absl::StrCat(path, "/", row_file->name),
                                 row_file->bytes, row_file->crc32,
                                 std::move(spare));
        });
  };
  read_next(0, {});
  SafetensorsFile file;
  for (size_t f = 0; f < files.size(); ++f) {
    const RowFile& row_file = *files[f];
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    SafetensorsFile former = std::move(file);
    TFSWITCH_ASSIGN_OR_RETURN(file, next.get());
    read_next(f + 1, std::move(former));
    const int64_t rows = row_file.num_rows;
    if (row_file.kind == FileKind::kCandidates) {
      TFSWITCH_RETURN_IF_ERROR(LoadCandidates(file, rows, first, last, table));
      continue;
    }
    if (row_file.kind == FileKind::kBloom) {
      TFSWITCH_RETURN_IF_ERROR(
          LoadBloom(file, rows, first, last, table.bloom()));
      continue;
    }
    const int dim = config.dim;
    const int slot_floats = saved.slot_floats;
    TFSWITCH_ASSIGN_OR_RETURN(const auto key_bytes,
                              file.Get("keys", "I64", {rows}));
    if (row_file.kind == FileKind::kRemoved) {
      table.Erase({reinterpret_cast<const Key*>(key_bytes.data()),
                   static_cast<size_t>(rows)});
      continue;
    }
    if (progress != nullptr) progress->Add(rows);
    TFSWITCH_ASSIGN_OR_RETURN(const auto embedding_bytes,
                              file.Get("embeddings", "F32", {rows, dim}));
    absl::Span<const char> slot_bytes;
    if (slot_floats > 0) {
      TFSWITCH_ASSIGN_OR_RETURN(slot_bytes,
                                file.Get("slots", "F32", {rows, slot_floats}));
    }
    const auto* keys = reinterpret_cast<const Key*>(key_bytes.data());
    const auto* embeddings =
        reinterpret_cast<const float*>(embedding_bytes.data());
    const auto* slots = reinterpret_cast<const float*>(slot_bytes.data());
    const auto assign = [&](absl::Span<const Key> k, absl::Span<const float> e,
                            absl::Span<const float> s) {
      if (!converter.is_needed()) return table.AssignRows(k, e, s).status();
      return table.AssignRows(k, e, converter.Convert(s, k.size())).status();
    };
    if (num_shards == 1 ||
        (same_cut && row_file.virtual_shards_begin >= first &&
         row_file.virtual_shards_end <= last)) {
      TFSWITCH_RETURN_IF_ERROR(assign(
          absl::MakeSpan(keys, rows), absl::MakeSpan(embeddings, rows * dim),
          absl::MakeSpan(slots, slots ? rows * slot_floats : 0)));
      continue;
    }
    // Keep the rows this shard owns, in batches.
    constexpr size_t kBatch = 16384;
    std::vector<Key> own_keys;
    std::vector<float> own_embeddings;
    std::vector<float> own_slots;
    const auto flush = [&]() -> absl::Status {
      TFSWITCH_RETURN_IF_ERROR(assign(own_keys, own_embeddings, own_slots));
      own_keys.clear();
      own_embeddings.clear();
      own_slots.clear();
      return absl::OkStatus();
    };
    for (int64_t i = 0; i < rows; ++i) {
      const uint32_t virtual_shard = VirtualShardOf(keys[i], num_virtual);
      if (virtual_shard < first || virtual_shard >= last) continue;
      own_keys.push_back(keys[i]);
      own_embeddings.insert(own_embeddings.end(), embeddings + i * dim,
                            embeddings + (i + 1) * dim);
      if (slots != nullptr) {
        own_slots.insert(own_slots.end(), slots + i * slot_floats,
                         slots + (i + 1) * slot_floats);
      }
      if (own_keys.size() == kBatch) TFSWITCH_RETURN_IF_ERROR(flush());
    }
    TFSWITCH_RETURN_IF_ERROR(flush());
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<WriteMark>> LoadMarks(const std::string& path,
                                                 const SavedServer& server) {
  std::vector<WriteMark> marks;
  for (const RowFile& row_file : server.files) {
    if (row_file.kind != FileKind::kMarks) continue;
    TFSWITCH_ASSIGN_OR_RETURN(
        const SafetensorsFile file,
        ReadSafetensors(absl::StrCat(path, "/", row_file.name), row_file.bytes,
                        row_file.crc32));
    TFSWITCH_ASSIGN_OR_RETURN(
        const auto bytes,
        file.Get("marks", "I64", {row_file.num_rows, kMarkWidth}));
    const auto* numbers = reinterpret_cast<const int64_t*>(bytes.data());
    for (int64_t i = 0; i < row_file.num_rows; ++i, numbers += kMarkWidth) {
      marks.push_back({static_cast<uint64_t>(numbers[0]),
                       static_cast<uint64_t>(numbers[1]), numbers[2]});
    }
  }
  return marks;
}

absl::StatusOr<std::vector<StagedMessage>> LoadStaged(
    const std::string& path, const SavedServer& server) {
  std::vector<StagedMessage> staged;
  for (const RowFile& row_file : server.files) {
    if (row_file.kind != FileKind::kStaged) continue;
    const std::string file_path = absl::StrCat(path, "/", row_file.name);
    TFSWITCH_ASSIGN_OR_RETURN(
        const SafetensorsFile file,
        ReadSafetensors(file_path, row_file.bytes, row_file.crc32));
    const int64_t count = row_file.num_rows;
    TFSWITCH_ASSIGN_OR_RETURN(const auto number_bytes,
                              file.Get("numbers", "I64", {count}));
    TFSWITCH_ASSIGN_OR_RETURN(const auto size_bytes,
                              file.Get("sizes", "I64", {count}));
    const auto* numbers = reinterpret_cast<const int64_t*>(number_bytes.data());
    const auto* sizes = reinterpret_cast<const int64_t*>(size_bytes.data());
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (sizes[i] < 0 || sizes[i] > row_file.bytes - total) {
        return Damaged(absl::StrCat("file '", file_path, "'"), "its sizes");
      }
      total += sizes[i];
    }
    TFSWITCH_ASSIGN_OR_RETURN(const auto bytes,
                              file.Get("bytes", "U8", {total}));
    const char* from = bytes.data();
    for (int64_t i = 0; i < count; from += sizes[i++]) {
      staged.push_back({static_cast<uint64_t>(numbers[i]),
                        std::string(from, static_cast<size_t>(sizes[i]))});
    }
  }
  return staged;
}

}  // namespace tfswitch::checkpoint
