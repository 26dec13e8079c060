// Files are loaded in the order of the manifest. A key that got its row during
// the save may also be in a file of candidates; then it gets the row.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <future>
#include <optional>
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
#include "cc/checkpoint/safetensors.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/counting_bloom.h"
#include "cc/table/embedding_table.h"
#include "cc/table/row_statistics.h"
#include "cc/wire/table_config_conversion.h"

namespace tfswitch::checkpoint {
namespace {

// A saved table with its parsed config.
struct Saved {
  explicit Saved(const v1::CheckpointTable& saved)
      : table(saved), config(FromProto(saved.config())) {}

  const v1::CheckpointTable& table;
  const TableConfig config;
};

int StateFloats(const Saved& saved) {
  return saved.table.slot_floats() -
         RowStatistics(saved.config.statistics).num_floats();
}
int StatisticsFloats(const EmbeddingTable& table) {
  return RowStatistics(table.config().statistics).num_floats();
}
int StateFloats(const EmbeddingTable& table) {
  return table.slot_floats() - StatisticsFloats(table);
}

// Converts saved slots (the optimizer's state, then statistics) for a table
// with different statistics, or whose state is reset. Statistics that both the
// saved rows and the table have are kept.
class SlotConverter {
 public:
  // If a saved row has no day of its last use, the row counts as used on `day`.
  SlotConverter(const Saved& saved, const EmbeddingTable& table,
                bool keeps_state, bool keeps_statistics, float day)
      : from_(saved.table.slot_floats()),
        from_state_(StateFloats(saved)),
        state_(StateFloats(table)),
        kept_state_(keeps_state ? state_ : 0),
        kept_statistics_(keeps_statistics ? std::min(StatisticsFloats(table),
                                                     from_ - from_state_)
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
  // These members count floats of a row.
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
  const int width = CandidateFloats(table.config());
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

// The virtual shards [first, last) that a shard owns.
struct VirtualShards {
  VirtualShards(uint32_t shard, uint32_t num_shards, uint32_t num_virtual)
      : first(FirstVirtualShardOf(shard, num_virtual, num_shards)),
        last(FirstVirtualShardOf(shard + 1, num_virtual, num_shards)) {}

  bool HasSomeOf(const v1::CheckpointFile& file) const {
    return file.virtual_shards_begin() < last &&
           file.virtual_shards_end() > first;
  }
  bool HasAllOf(const v1::CheckpointFile& file) const {
    return file.virtual_shards_begin() >= first &&
           file.virtual_shards_end() <= last;
  }

  const uint32_t first;
  const uint32_t last;
};

bool HasState(const Saved& saved, const EmbeddingTable& table) {
  const TableConfig& config = table.config();
  return StateFloats(saved) == StateFloats(table) &&
         HaveEqualState(saved.config.optimizer, config.optimizer, config.dim);
}

bool HasWeights(const TableConfig& config) {
  return config.admission.not_admitted.kind == NotAdmittedKind::kWeight;
}

absl::StatusOr<SafetensorsFile> ReadFile(const std::string& path,
                                         const v1::CheckpointFile& file,
                                         SafetensorsFile former = {}) {
  return ReadSafetensors(absl::StrCat(path, "/", file.name()), file.bytes(),
                         file.crc32(), std::move(former));
}

// Loads the files of a saved table into an existing table.
//
// Not thread-safe.
class TableLoader {
 public:
  TableLoader(const std::string& path, const Saved& saved, uint32_t shard_index,
              uint32_t num_shards, LoadedState state, EmbeddingTable& table)
      : path_(path),
        saved_(saved),
        state_(state),
        table_(table),
        config_(table.config()),
        own_(shard_index, num_shards, config_.num_virtual_shards),
        owns_all_(num_shards == 1),
        same_cut_(saved_.config.num_virtual_shards ==
                  config_.num_virtual_shards),
        keeps_statistics_(state != LoadedState::kReset),
        keeps_state_(keeps_statistics_ && HasState(saved_, table)) {}

  // Sets the state of the table that is in the manifest, not in files.
  // FailedPrecondition if the saved rows do not fit the table.
  absl::Status Begin() {
    TFSWITCH_RETURN_IF_ERROR(CheckFits());
    // Sets the day of the table to the saved day, because the counts and
    // decisions below use it.
    if (keeps_statistics_ && saved_.table.has_last_day()) {
      table_.NoteDay(saved_.table.last_day());
    }
    if (config_.optimizer.is_dense && keeps_state_) {
      TFSWITCH_RETURN_IF_ERROR(table_.RestoreSteps(StepsOf(saved_.table)));
    }
    converter_.emplace(
        saved_, table_, keeps_state_, keeps_statistics_,
        table_.last_day() >= 0.0f ? table_.last_day() : DayOfWallClock());
    return absl::OkStatus();
  }

  // Returns the files in the order in which they must be read. Later rows
  // replace earlier ones. Candidates come before rows, because a key that has a
  // row is no longer a candidate.
  std::vector<const v1::CheckpointFile*> FilesToRead() const {
    std::vector<const v1::CheckpointFile*> files;
    for (const v1::CheckpointFile& file : saved_.table.files()) {
      if (same_cut_ && !own_.HasSomeOf(file)) continue;
      if (file.kind() == v1::CheckpointFile::CANDIDATES && !TakesCandidates()) {
        continue;
      }
      if (file.kind() == v1::CheckpointFile::BLOOM && !TakesBloom()) continue;
      files.push_back(&file);
    }
    return files;
  }

  absl::Status Load(const v1::CheckpointFile& described,
                    const SafetensorsFile& file) {
    const int64_t rows = described.num_rows();
    switch (described.kind()) {
      case v1::CheckpointFile::CANDIDATES:
        return LoadCandidates(file, rows, own_.first, own_.last, table_);
      case v1::CheckpointFile::BLOOM:
        return LoadBloom(file, rows, own_.first, own_.last, table_.bloom());
      case v1::CheckpointFile::REMOVED: {
        TFSWITCH_ASSIGN_OR_RETURN(const auto keys,
                                  file.Get("keys", "I64", {rows}));
        return table_
            .Erase({reinterpret_cast<const Key*>(keys.data()),
                    static_cast<size_t>(rows)})
            .status();
      }
      default:
        return LoadRows(described, file);
    }
  }

 private:
  absl::Status CheckFits() const {
    const TableConfig& saved = saved_.config;
    if (saved.dim != config_.dim) {
      return absl::FailedPreconditionError(absl::StrCat(
          "table '", saved.name, "' in checkpoint '", path_, "' has dim ",
          saved.dim, "; the table '", config_.name, "' that is there has dim ",
          config_.dim, "; restore it under another name"));
    }
    if (state_ != LoadedState::kSaved || keeps_state_) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat(
        "table '", saved.name, "' in checkpoint '", path_, "' has ",
        StateFloats(saved_), " floats of ", OptimizerName(saved.optimizer),
        " state per row; the table '", config_.name, "' that is there has ",
        StateFloats(table_), " of ", OptimizerName(config_.optimizer),
        "; restore with state='reset_if_different' to begin that state anew"));
  }

  // Whether the saved counts of candidates can be used. A different threshold
  // does not matter. Records with weights also contain optimizer state, which
  // must fit.
  bool TakesCandidates() const {
    const TableConfig& saved = saved_.config;
    return keeps_statistics_ && CandidateFloats(config_) > 0 &&
           saved.admission.has_candidates() &&
           saved.statistics.kind == config_.statistics.kind &&
           HasWeights(saved) == HasWeights(config_) &&
           (keeps_state_ || !HasWeights(config_));
  }

  bool TakesBloom() const {
    const auto* const saved =
        std::get_if<BloomMinCountAdmission>(&saved_.config.admission.policy);
    return keeps_statistics_ && table_.bloom() != nullptr && same_cut_ &&
           saved != nullptr && table_.bloom()->HasCellsOf(*saved);
  }

  absl::Status Assign(absl::Span<const Key> keys,
                      absl::Span<const float> embeddings,
                      absl::Span<const float> slots) {
    std::vector<float> converted;
    RowChunk rows{keys, embeddings, slots};
    if (converter_->is_needed()) {
      converted = converter_->Convert(slots, keys.size());
      rows.slots = converted;
    }
    return table_.AssignRows(rows, AssignMode::kSaved).status();
  }

  absl::Status LoadRows(const v1::CheckpointFile& described,
                        const SafetensorsFile& file) {
    const int64_t rows = described.num_rows();
    const int dim = config_.dim;
    const int slot_floats = saved_.table.slot_floats();
    TFSWITCH_ASSIGN_OR_RETURN(const auto key_bytes,
                              file.Get("keys", "I64", {rows}));
    TFSWITCH_ASSIGN_OR_RETURN(const auto embedding_bytes,
                              file.Get("embeddings", "F32", {rows, dim}));
    absl::Span<const char> slot_bytes;
    if (slot_floats > 0) {
      TFSWITCH_ASSIGN_OR_RETURN(slot_bytes,
                                file.Get("slots", "F32", {rows, slot_floats}));
    }
    const auto floats = [](absl::Span<const char> bytes) {
      return absl::MakeSpan(reinterpret_cast<const float*>(bytes.data()),
                            bytes.size() / sizeof(float));
    };
    const absl::Span<const Key> keys =
        absl::MakeSpan(reinterpret_cast<const Key*>(key_bytes.data()),
                       static_cast<size_t>(rows));
    if (owns_all_ || (same_cut_ && own_.HasAllOf(described))) {
      return Assign(keys, floats(embedding_bytes), floats(slot_bytes));
    }
    return AssignOwn(keys, floats(embedding_bytes), floats(slot_bytes));
  }

  // Assigns those of the rows that this shard owns, in batches.
  absl::Status AssignOwn(absl::Span<const Key> keys,
                         absl::Span<const float> embeddings,
                         absl::Span<const float> slots) {
    constexpr size_t kBatch = 16384;
    const auto dim = static_cast<size_t>(config_.dim);
    const auto slot_floats = static_cast<size_t>(saved_.table.slot_floats());
    std::vector<Key> own_keys;
    std::vector<float> own_embeddings;
    std::vector<float> own_slots;
    const auto append = [](absl::Span<const float> row,
                           std::vector<float>* to) {
      to->insert(to->end(), row.begin(), row.end());
    };
    for (size_t i = 0; i < keys.size(); ++i) {
      const uint32_t virtual_shard =
          VirtualShardOf(keys[i], config_.num_virtual_shards);
      if (virtual_shard < own_.first || virtual_shard >= own_.last) continue;
      own_keys.push_back(keys[i]);
      append(embeddings.subspan(i * dim, dim), &own_embeddings);
      append(slots.subspan(i * slot_floats, slot_floats), &own_slots);
      if (own_keys.size() < kBatch) continue;
      TFSWITCH_RETURN_IF_ERROR(Assign(own_keys, own_embeddings, own_slots));
      own_keys.clear();
      own_embeddings.clear();
      own_slots.clear();
    }
    return Assign(own_keys, own_embeddings, own_slots);
  }

  const std::string& path_;
  const Saved saved_;
  const LoadedState state_;
  EmbeddingTable& table_;
  const TableConfig& config_;
  const VirtualShards own_;
  const bool owns_all_;
  const bool same_cut_;
  const bool keeps_statistics_;
  const bool keeps_state_;
  std::optional<SlotConverter> converter_;
};

}  // namespace

RowsToRead FindRowsToRead(const v1::CheckpointTable& saved,
                          uint32_t shard_index, uint32_t num_shards) {
  const uint32_t num_virtual = FromProto(saved.config()).num_virtual_shards;
  const VirtualShards own(shard_index, num_shards, num_virtual);
  RowsToRead to_read;
  for (const v1::CheckpointFile& file : saved.files()) {
    if (file.kind() != v1::CheckpointFile::ROWS || !own.HasSomeOf(file)) {
      continue;
    }
    to_read.num_rows += file.num_rows();
    to_read.bytes += file.bytes();
  }
  return to_read;
}

bool HasStateOf(const v1::CheckpointTable& saved, const EmbeddingTable& table) {
  return HasState(Saved(saved), table);
}

absl::Status LoadTable(const std::string& path,
                       const v1::CheckpointTable& saved, uint32_t shard_index,
                       uint32_t num_shards, const Interrupt& interrupt,
                       EmbeddingTable& table, Progress* progress,
                       LoadedState state) {
  TableLoader loader(path, Saved(saved), shard_index, num_shards, state, table);
  TFSWITCH_RETURN_IF_ERROR(loader.Begin());
  const std::vector<const v1::CheckpointFile*> files = loader.FilesToRead();
  // Reads each file while the rows of the previous file are assigned.
  std::future<absl::StatusOr<SafetensorsFile>> next;
  const auto read_next = [&](size_t i, SafetensorsFile former) {
    if (i == files.size()) return;
    // If no thread can be started, get() reads the file on this thread.
    next = std::async(
        std::launch::async | std::launch::deferred,
        [&path, file = files[i], spare = std::move(former)]() mutable {
          return ReadFile(path, *file, std::move(spare));
        });
  };
  read_next(0, {});
  SafetensorsFile file;
  for (size_t i = 0; i < files.size(); ++i) {
    TFSWITCH_RETURN_IF_ERROR(interrupt());
    SafetensorsFile former = std::move(file);
    TFSWITCH_ASSIGN_OR_RETURN(file, next.get());
    read_next(i + 1, std::move(former));
    if (progress != nullptr && files[i]->kind() == v1::CheckpointFile::ROWS) {
      progress->Add(files[i]->num_rows());
    }
    TFSWITCH_RETURN_IF_ERROR(loader.Load(*files[i], file));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<WriteMark>> LoadMarks(
    const std::string& path, const v1::CheckpointServer& server) {
  std::vector<WriteMark> marks;
  for (const v1::CheckpointFile& described : server.files()) {
    if (described.kind() != v1::CheckpointFile::MARKS) continue;
    TFSWITCH_ASSIGN_OR_RETURN(const SafetensorsFile file,
                              ReadFile(path, described));
    const int64_t count = described.num_rows();
    TFSWITCH_ASSIGN_OR_RETURN(const auto bytes,
                              file.Get("marks", "I64", {count, kMarkWidth}));
    const auto* numbers = reinterpret_cast<const int64_t*>(bytes.data());
    for (int64_t i = 0; i < count; ++i, numbers += kMarkWidth) {
      marks.push_back({static_cast<uint64_t>(numbers[0]),
                       static_cast<uint64_t>(numbers[1]), numbers[2]});
    }
  }
  return marks;
}

absl::StatusOr<std::vector<StagedMessage>> LoadStaged(
    const std::string& path, const v1::CheckpointServer& server) {
  std::vector<StagedMessage> staged;
  for (const v1::CheckpointFile& described : server.files()) {
    if (described.kind() != v1::CheckpointFile::STAGED) continue;
    TFSWITCH_ASSIGN_OR_RETURN(const SafetensorsFile file,
                              ReadFile(path, described));
    const int64_t count = described.num_rows();
    TFSWITCH_ASSIGN_OR_RETURN(const auto number_bytes,
                              file.Get("numbers", "I64", {count}));
    TFSWITCH_ASSIGN_OR_RETURN(const auto size_bytes,
                              file.Get("sizes", "I64", {count}));
    const auto* numbers = reinterpret_cast<const int64_t*>(number_bytes.data());
    const auto* sizes = reinterpret_cast<const int64_t*>(size_bytes.data());
    int64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      if (sizes[i] < 0 || sizes[i] > described.bytes() - total) {
        return absl::DataLossError(absl::StrCat("checkpoint file '", path, "/",
                                                described.name(),
                                                "' is damaged: its sizes"));
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
