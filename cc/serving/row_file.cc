// ReadHeader() checks all arrays of the header against the size of the file
// before it makes pointers to them, so that lookups need no bounds checks. The
// header has the checksum of the list of checksums, and the caller knows the
// header's checksum.
//
// verified_ has one bit for each block. Two threads may check one block at
// once; only the thread that sets the bit counts the block. Find() does not
// verify. FindVerified() first verifies the blocks of the pilot and of the
// record. ForEachKey() recognises an empty slot by its id, which belongs to
// another slot.

#include "cc/serving/row_file.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/base/checksum.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

// Returns a string field of the header; empty if it is missing.
std::string TextOf(const Json& metadata, const char* field) {
  const auto it = metadata.find(field);
  return it == metadata.end() || !it->is_string() ? "" : it->get<std::string>();
}

// An array that the header describes, checked against the size of the file.
struct Array {
  std::vector<uint64_t> shape;
  uint64_t begin = 0;
  uint64_t end = 0;

  // Reads the description of an array. False unless the array has this type and
  // exactly shape[0] elements of `element_bytes`.
  bool Read(const Json& header, const char* name, const char* dtype,
            size_t element_bytes, uint64_t limit) {
    const auto it = header.find(name);
    if (it == header.end() || !it->is_object()) return false;
    const auto is_counts = [&](const char* field) {
      const auto list = it->find(field);
      return list != it->end() && list->is_array() && !list->empty() &&
             std::all_of(list->begin(), list->end(), [](const Json& value) {
               return value.is_number_unsigned();
             });
    };
    if (TextOf(*it, "dtype") != dtype || !is_counts("shape") ||
        !is_counts("data_offsets") || (*it)["data_offsets"].size() != 2) {
      return false;
    }
    shape = (*it)["shape"].get<std::vector<uint64_t>>();
    begin = (*it)["data_offsets"][0].get<uint64_t>();
    end = (*it)["data_offsets"][1].get<uint64_t>();
    return begin <= end && end <= limit &&
           shape[0] <= (end - begin) / element_bytes &&
           shape[0] * element_bytes == end - begin;
  }
  // Reads an array of 64-bit words, which must be aligned.
  bool ReadWords(const Json& header, const char* name, uint64_t limit) {
    return Read(header, name, "U64", sizeof(uint64_t), limit) &&
           begin % sizeof(uint64_t) == 0;
  }
};

// Reads the perfect hash. A file without slots has none.
bool ReadHash(const Json& metadata, uint64_t num_slots, uint64_t num_pilots,
              PerfectHash* hash) {
  if (num_slots == 0) return num_pilots == 0;
  if (!absl::SimpleAtoi(TextOf(metadata, "seed"), &hash->seed) ||
      !absl::SimpleAtoi(TextOf(metadata, "num_parts"), &hash->num_parts) ||
      hash->num_parts == 0 || num_pilots == 0 ||
      num_slots % hash->num_parts != 0 || num_pilots % hash->num_parts != 0) {
    return false;
  }
  hash->slots_per_part = num_slots / hash->num_parts;
  hash->pilots_per_part = num_pilots / hash->num_parts;
  return hash->slots_per_part <= UINT32_MAX;
}

}  // namespace

RowFile::RowFile(std::unique_ptr<MappedFile> file, std::string path,
                 const RowFileInfo& info)
    : file_(std::move(file)), path_(std::move(path)), info_(info) {}

absl::StatusOr<std::shared_ptr<const RowFile>> RowFile::Make(
    absl::StatusOr<std::unique_ptr<MappedFile>> mapped, const std::string& path,
    const RowFileInfo& expected, int watched_fd) {
  auto close_file = absl::MakeCleanup([watched_fd] { close(watched_fd); });
  TFSWITCH_RETURN_IF_ERROR(mapped.status());
  if (watched_fd >= 0) TFSWITCH_RETURN_IF_ERROR(FileWatch::StartThread());
  std::shared_ptr<RowFile> file(
      new RowFile(*std::move(mapped), path, expected));
  std::move(close_file).Cancel();
  if (watched_fd >= 0) {
    file->watch_ = std::make_unique<FileWatch>(watched_fd, *file->file_);
  }
  TFSWITCH_RETURN_IF_ERROR(file->ReadHeader());
  return file;
}

absl::StatusOr<std::shared_ptr<const RowFile>> RowFile::Open(
    const std::string& path, const RowFileInfo& expected) {
  TFSWITCH_ASSIGN_OR_RETURN(const int fd, OpenRegularFile(path));
  return Make(MappedFile::Map(fd, path), path, expected, fd);
}

absl::StatusOr<std::shared_ptr<const RowFile>> RowFile::Map(
    int fd, const std::string& path, const RowFileInfo& expected) {
  return Make(MappedFile::Map(fd, path), path, expected);
}

absl::StatusOr<std::shared_ptr<const RowFile>> RowFile::Copy(
    int fd, const std::string& path, const RowFileInfo& expected) {
  return Make(MappedFile::Copy(fd, path), path, expected);
}

absl::Status RowFile::Damaged(absl::string_view why) const {
  return absl::DataLossError(
      absl::StrCat("row file '", path_, "' is damaged: ", why,
                   ". Copy it again, or export the table again."));
}

absl::Status RowFile::Changed() const {
  return absl::DataLossError(absl::StrCat(
      "row file '", path_,
      "' was changed, or could not be read, while it was served, so its rows "
      "are refused. Never write to a file that is served: publish a new "
      "export, or rename a whole copy to this path."));
}

absl::StatusOr<Json> RowFile::ParseHeader() const {
  if (file_->size() != static_cast<uint64_t>(info_.bytes)) {
    return Damaged(absl::StrCat("it has ", file_->size(),
                                " bytes, its manifest says ", info_.bytes));
  }
  if (file_->size() < kRowFileHeaderBytes) return Damaged("it is too short");
  const char* const data = file_->data();
  const uint64_t checksum = Checksum(data, kRowFileHeaderBytes);
  if (checksum != info_.header_checksum) {
    return Damaged(absl::StrFormat(
        "its header has checksum %016x, its manifest says %016x", checksum,
        info_.header_checksum));
  }
  absl::StatusOr<Json> parsed = ParseJson(
      {data + sizeof(uint64_t), kRowFileHeaderBytes - sizeof(uint64_t)});
  if (!parsed.ok()) {
    return Damaged(absl::StrCat("its header: ", parsed.status().message()));
  }
  const Json& header = *parsed;
  if (!header.is_object() || !header.contains("__metadata__") ||
      !header["__metadata__"].is_object() ||
      TextOf(header["__metadata__"], "format") != kRowFileFormat) {
    return Damaged("its header is not that of a row file");
  }
  const std::string version = TextOf(header["__metadata__"], "version");
  if (version != absl::StrCat(kRowFileVersion)) {
    return absl::FailedPreconditionError(absl::StrCat(
        "row file '", path_, "' is of format version ", version,
        ", this tfswitch reads version ", kRowFileVersion,
        ". Serve it with the tfswitch that wrote it, or export again."));
  }
  return parsed;
}

absl::Status RowFile::ReadHeader() {
  TFSWITCH_ASSIGN_OR_RETURN(const Json header, ParseHeader());
  const Json& metadata = header["__metadata__"];
  const auto format = RowFormatOf(TextOf(metadata, "row_format"));
  if (!format.ok()) return Damaged(format.status().message());
  kind_.format = *format;
  kind_.table = TextOf(metadata, "table");

  blocks_ = file_->data() + kRowFileHeaderBytes;
  const uint64_t limit = file_->size() - kRowFileHeaderBytes;
  Array default_row;
  Array records;
  Array pilots;
  Array used;
  Array removed;
  Array checksums;
  if (!default_row.Read(header, "default_row", "F32", sizeof(float), limit) ||
      default_row.shape[0] == 0 || default_row.shape[0] > INT32_MAX) {
    return Damaged("array 'default_row' of its header");
  }
  kind_.dim = static_cast<int>(default_row.shape[0]);
  view_.record_bytes = sizeof(Key) + RowBytes(kind_.format, kind_.dim);
  if (!records.Read(header, "records", "U8", view_.record_bytes, limit)) {
    return Damaged("array 'records' of its header");
  }
  view_.num_slots = records.shape[0];
  if (!pilots.Read(header, "pilots", "U8", 1, limit) ||
      !ReadHash(metadata, view_.num_slots, pilots.shape[0], &view_.hash)) {
    return Damaged("array 'pilots' of its header");
  }
  const auto counts_fit = [this](int64_t a, int64_t b) {
    return a >= 0 && b >= 0 && static_cast<uint64_t>(a) <= view_.num_slots &&
           static_cast<uint64_t>(b) <=
               view_.num_slots - static_cast<uint64_t>(a);
  };
  if (!counts_fit(info_.num_rows, info_.num_removed)) {
    return Damaged(absl::StrCat("it has ", view_.num_slots,
                                " slots, its manifest says ", info_.num_rows,
                                " rows and ", info_.num_removed, " removed"));
  }
  const uint64_t num_words = NumWords(view_.num_slots);
  if (!used.ReadWords(header, "used", limit) || used.shape[0] != num_words) {
    return Damaged("array 'used' of its header");
  }
  if (!removed.ReadWords(header, "removed", limit) ||
      (removed.shape[0] != 0 && removed.shape[0] != num_words)) {
    return Damaged("array 'removed' of its header");
  }
  if (!checksums.ReadWords(header, "checksums", limit) ||
      checksums.begin < std::max({default_row.end, records.end, pilots.end,
                                  used.end, removed.end}) ||
      checksums.shape[0] !=
          (checksums.begin + kRowFileBlockBytes - 1) / kRowFileBlockBytes) {
    return Damaged("array 'checksums' of its header");
  }
  const uint64_t of_checksums =
      Checksum(blocks_ + checksums.begin, checksums.end - checksums.begin);
  if (absl::StrFormat("%016x", of_checksums) !=
      TextOf(metadata, "checksums_xxh3")) {
    return Damaged("its list of checksums");
  }

  decoder_ = FindRowDecoder(kind_.format);
  view_.records = blocks_ + records.begin;
  view_.pilots = reinterpret_cast<const uint8_t*>(blocks_ + pilots.begin);
  if (removed.shape[0] != 0) {
    view_.removed = reinterpret_cast<const uint64_t*>(blocks_ + removed.begin);
  }
  checksums_ = reinterpret_cast<const uint64_t*>(blocks_ + checksums.begin);
  blocks_bytes_ = checksums.begin;
  verified_ = std::vector<std::atomic<uint64_t>>(
      (static_cast<size_t>(checksums.shape[0]) + 63) / 64);
  num_unverified_ = static_cast<size_t>(checksums.shape[0]);
  kind_.default_row.resize(static_cast<size_t>(kind_.dim));
  TFSWITCH_RETURN_IF_ERROR(VerifyBytes(blocks_ + default_row.begin,
                                       default_row.end - default_row.begin));
  std::memcpy(kind_.default_row.data(), blocks_ + default_row.begin,
              default_row.end - default_row.begin);
  return absl::OkStatus();
}

absl::Status RowFile::VerifyBlock(size_t block) const {
  std::atomic<uint64_t>& word = verified_[block / 64];
  const uint64_t bit = uint64_t{1} << (block % 64);
  if ((word.load(std::memory_order_relaxed) & bit) != 0) {
    return absl::OkStatus();
  }
  TFSWITCH_RETURN_IF_ERROR(CheckUnchanged());
  const size_t begin = block * kRowFileBlockBytes;
  const size_t size = std::min(kRowFileBlockBytes, blocks_bytes_ - begin);
  if (Checksum(blocks_ + begin, size) != checksums_[block]) {
    return Damaged(absl::StrCat("the checksum of bytes ",
                                kRowFileHeaderBytes + begin, " to ",
                                kRowFileHeaderBytes + begin + size));
  }
  if ((word.fetch_or(bit, std::memory_order_relaxed) & bit) == 0) {
    num_unverified_.fetch_sub(1, std::memory_order_release);
  }
  return absl::OkStatus();
}

absl::Status RowFile::VerifyBytes(const void* begin, size_t size) const {
  const size_t from =
      static_cast<size_t>(static_cast<const char*>(begin) - blocks_);
  for (size_t block = from / kRowFileBlockBytes;
       block <= (from + size - 1) / kRowFileBlockBytes; ++block) {
    TFSWITCH_RETURN_IF_ERROR(VerifyBlock(block));
  }
  return absl::OkStatus();
}

absl::Status RowFile::Verify(const std::function<bool()>& is_cancelled) const {
  if (is_verified()) return absl::OkStatus();
  const size_t num_blocks =
      (blocks_bytes_ + kRowFileBlockBytes - 1) / kRowFileBlockBytes;
  for (size_t block = 0; block < num_blocks; ++block) {
    constexpr size_t kBlocksPerLook = 256;
    if (block % kBlocksPerLook == 0 && is_cancelled && is_cancelled()) {
      return absl::CancelledError(
          absl::StrCat("row file '", path_, "' is no longer verified"));
    }
    TFSWITCH_RETURN_IF_ERROR(VerifyBlock(block));
  }
  return absl::OkStatus();
}

absl::Status RowFile::VerifyRecord(uint64_t slot) const {
  TFSWITCH_RETURN_IF_ERROR(VerifyBytes(view_.Record(slot), view_.record_bytes));
  if (view_.removed == nullptr) return absl::OkStatus();
  return VerifyBytes(view_.removed + slot / 64, sizeof(uint64_t));
}

RowFile::Found RowFile::FoundIn(uint64_t slot, Key key) const {
  const char* const record = view_.Record(slot);
  if (KeyOf(record) != key) return {};
  return {true, view_.IsRemoved(slot) ? nullptr : RowOf(record), slot};
}

RowFile::Found RowFile::Find(Key key) const {
  if (view_.num_slots == 0) return {};
  return FoundIn(view_.Slot(view_.hash.PointOf(HashKey(key))), key);
}

absl::StatusOr<RowFile::Found> RowFile::FindVerified(Key key) const {
  if (view_.num_slots == 0) return Found{};
  const uint64_t point = view_.hash.PointOf(HashKey(key));
  TFSWITCH_RETURN_IF_ERROR(VerifyPilot(point));
  const uint64_t slot = view_.Slot(point);
  TFSWITCH_RETURN_IF_ERROR(VerifyRecord(slot));
  return FoundIn(slot, key);
}

void RowFile::BuildFilter() const {
  std::call_once(build_filter_, [this] {
    auto filter = std::make_unique<KeyFilter>(
        static_cast<size_t>(num_rows() + num_removed()));
    ForEachKey([&filter](Key key, const char*) {
      filter->Add(HashKey(key));
      return absl::OkStatus();
    }).IgnoreError();  // The function above returns no errors.
    filter_storage_ = std::move(filter);
    filter_.store(filter_storage_.get(), std::memory_order_release);
  });
}

absl::Status RowFile::ForEachKey(
    const std::function<absl::Status(Key, const char*)>& visit) const {
  for (uint64_t slot = 0; slot < view_.num_slots; ++slot) {
    const char* const record = view_.Record(slot);
    if (view_.Slot(view_.hash.PointOf(HashKey(KeyOf(record)))) != slot) {
      continue;
    }
    TFSWITCH_RETURN_IF_ERROR(
        visit(KeyOf(record), view_.IsRemoved(slot) ? nullptr : RowOf(record)));
  }
  return absl::OkStatus();
}

}  // namespace tfswitch
