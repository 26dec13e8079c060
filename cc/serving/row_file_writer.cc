// Add() and Remove() only record keys; rows are written to a spool file.
// Finish() finds the perfect hash and writes the records in the order of their
// slots, so that the file is written from front to back. It reads rows from the
// spool in another order, and prefetches them some slots ahead. The header is
// written last, because it contains the positions of the arrays; blanks reserve
// its place.

#include "cc/serving/row_file_writer.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/base/checksum.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"
#include "cc/serving/perfect_hash.h"
#include "cc/serving/row_file.h"

namespace tfswitch {
namespace {

// Marks a removed key, in place of a row's number.
constexpr uint32_t kRemoved = ~uint32_t{0};
constexpr size_t kMaxKeys = kRemoved;
constexpr size_t kRecordsAlignment = 64;

constexpr uint64_t kBitsPerWord = 64;

void SetBit(uint64_t at, std::vector<uint64_t>* words) {
  (*words)[at / kBitsPerWord] |= uint64_t{1} << (at % kBitsPerWord);
}

}  // namespace

// Slots for all keys.
struct RowFileWriter::Places {
  // A key's number (PerfectHash::PointOf), and the index of the key's call.
  struct Entry {
    uint64_t point;
    uint32_t at;
    // If a key was given several times, its last call comes first.
    bool operator<(const Entry& other) const {
      return point != other.point ? point < other.point : at > other.at;
    }
  };

  PerfectHash hash;
  std::vector<uint8_t> pilots;
  // One entry for each key, ordered by part.
  std::vector<Entry> entries;
  std::vector<size_t> begins;  // Where parts begin, and the end.

  absl::Span<const Entry> Part(uint64_t part) const {
    return absl::MakeSpan(entries).subspan(begins[part],
                                           begins[part + 1] - begins[part]);
  }

  // Sorts the keys. If a key was given more than once, keeps its last call.
  void Sort(const std::vector<Key>& keys) {
    begins.assign(hash.num_parts + 1, 0);
    for (const Key key : keys) {
      ++begins[hash.PartOf(hash.PointOf(HashKey(key))) + 1];
    }
    for (size_t i = 1; i < begins.size(); ++i) begins[i] += begins[i - 1];
    entries.resize(keys.size());
    std::vector<size_t> next = begins;
    for (size_t at = 0; at < keys.size(); ++at) {
      const uint64_t point = hash.PointOf(HashKey(keys[at]));
      entries[next[hash.PartOf(point)]++] = {point, static_cast<uint32_t>(at)};
    }
    size_t size = 0;
    for (uint64_t part = 0; part < hash.num_parts; ++part) {
      Entry* const begin = entries.data() + begins[part];
      Entry* const end = entries.data() + begins[part + 1];
      std::sort(begin, end);
      begins[part] = size;
      Entry* const last = std::unique(
          begin, end,
          [](const Entry& a, const Entry& b) { return a.point == b.point; });
      size = static_cast<size_t>(std::copy(begin, last, entries.data() + size) -
                                 entries.data());
    }
    begins.back() = size;
    entries.resize(size);
  }

  bool FindPilots() {
    size_t max_keys = 0;
    for (uint64_t part = 0; part < hash.num_parts; ++part) {
      max_keys = std::max(max_keys, Part(part).size());
    }
    // All parts get the size of the largest one. Sizes differ by about 1 %,
    // unless somebody chose keys that all belong to one part.
    if (hash.num_parts > 1 &&
        max_keys > entries.size() / hash.num_parts * 11 / 10) {
      return false;
    }
    SizePerfectHash(max_keys, &hash);
    pilots.resize(hash.num_pilots());
    std::vector<uint64_t> points;
    for (uint64_t part = 0; part < hash.num_parts; ++part) {
      points.clear();
      for (const Places::Entry& entry : Part(part))
        points.push_back(entry.point);
      if (!tfswitch::FindPilots(hash, points,
                                pilots.data() + part * hash.pilots_per_part)) {
        return false;
      }
    }
    return true;
  }
};

// Writes the blocks after the header, and computes a checksum of each.
class RowFileWriter::BlockFile {
 public:
  BlockFile(int fd, std::string path, bool is_owned)
      : fd_(fd), path_(std::move(path)), is_owned_(is_owned) {
    pending_.reserve(kBufferBytes);
  }
  ~BlockFile() {
    if (is_owned_) close(fd_);
  }

  const std::string& path() const { return path_; }
  bool is_owned() const { return is_owned_; }
  // The number of bytes written after the header.
  uint64_t position() const { return position_; }

  absl::Status Append(const char* bytes, size_t size) {
    while (size > 0) {
      // Each write ends at a multiple of kBufferBytes in the file. The header
      // counts, because the file begins with it.
      const size_t room =
          kBufferBytes - (kRowFileHeaderBytes + position_) % kBufferBytes;
      const size_t step = std::min(size, room);
      pending_.insert(pending_.end(), bytes, bytes + step);
      position_ += step;
      bytes += step;
      size -= step;
      if (step == room) TFSWITCH_RETURN_IF_ERROR(Flush());
    }
    return absl::OkStatus();
  }

  absl::Status PadTo(size_t multiple) {
    const std::string zeros((multiple - position_ % multiple) % multiple, '\0');
    return Append(zeros.data(), zeros.size());
  }

  // Writes all pending bytes, including an incomplete last block.
  absl::Status Flush() {
    for (size_t at = 0; at < pending_.size(); at += kRowFileBlockBytes) {
      checksums_.push_back(
          Checksum(pending_.data() + at,
                   std::min(kRowFileBlockBytes, pending_.size() - at)));
    }
    absl::Status status =
        WriteAll(fd_, path_, pending_.data(), pending_.size());
    pending_.clear();
    return status;
  }

  const std::vector<uint64_t>& checksums() const { return checksums_; }

  // Writes bytes that are in no block.
  absl::Status WriteRaw(const char* bytes, size_t size) {
    return WriteAll(fd_, path_, bytes, size);
  }
  absl::Status Begin() {
    if (lseek(fd_, 0, SEEK_SET) != 0) return ErrnoStatus("seek", path_, errno);
    return absl::OkStatus();
  }
  absl::Status Sync() {
    // A file in memory needs no flush.
    if (is_owned_ && fsync(fd_) != 0) {
      return ErrnoStatus("flush", path_, errno);
    }
    return absl::OkStatus();
  }

 private:
  // The size of a huge page. If a file system supports it, the page cache keeps
  // data in huge pages if it was written in aligned pieces of this size.
  // Lookups then need fewer TLB entries.
  static constexpr size_t kBufferBytes = size_t{2} << 20;

  const int fd_;
  const std::string path_;
  const bool is_owned_;
  uint64_t position_ = 0;
  std::vector<char> pending_;
  std::vector<uint64_t> checksums_;
};

// Keeps rows in the order of the calls: first in memory, and when there are
// many, in a file. If the new row file is in memory, all rows stay in memory.
class RowFileWriter::Spool {
 public:
  // `path` is the path of the new file; empty if the new file is in memory.
  explicit Spool(std::string path) : path_(std::move(path)) {}
  ~Spool() {
    if (fd_ >= 0) close(fd_);
  }
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  void Reserve(size_t bytes) {
    pending_.reserve(path_.empty() ? bytes : std::min(bytes, kBufferBytes));
  }

  absl::Status Append(const char* bytes, size_t size) {
    pending_.insert(pending_.end(), bytes, bytes + size);
    if (path_.empty() || pending_.size() < kBufferBytes) {
      return absl::OkStatus();
    }
    return Flush();
  }

  // Returns all rows. The pointer is valid as long as this object lives.
  absl::StatusOr<const char*> Read() {
    if (fd_ < 0) return pending_.data();
    TFSWITCH_RETURN_IF_ERROR(Flush());
    // Checks that all rows could be written to the disk. Otherwise the mapped
    // file would contain wrong bytes.
    if (fdatasync(fd_) != 0) return ErrnoStatus("flush rows of", path_, errno);
    TFSWITCH_ASSIGN_OR_RETURN(mapped_, MappedFile::Map(fd_, path_));
    // Rows are read in random order. If they do not all fit into memory,
    // read-ahead would load much data that is evicted before it is needed.
    const auto free_bytes = static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)) *
                            static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    if (mapped_->size() > free_bytes / 2) {
      madvise(const_cast<char*>(mapped_->data()), mapped_->size(), MADV_RANDOM);
    }
    return mapped_->data();
  }

 private:
  static constexpr size_t kBufferBytes = size_t{32} << 20;

  absl::Status Flush() {
    if (fd_ < 0) TFSWITCH_RETURN_IF_ERROR(Open());
    absl::Status status =
        WriteAll(fd_, path_, pending_.data(), pending_.size());
    pending_.clear();
    return status;
  }

  // Opens a file without a name, which the kernel removes with the process.
  absl::Status Open() {
    const size_t slash = path_.rfind('/');
    const std::string folder =
        slash == std::string::npos ? "." : path_.substr(0, slash + 1);
    fd_ = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd_ >= 0) return absl::OkStatus();
    // Some file systems have no unnamed files.
    std::string pattern = folder + "/.rowsXXXXXX";
    fd_ = mkostemp(pattern.data(), O_CLOEXEC);
    if (fd_ < 0) return ErrnoStatus("keep rows beside", path_, errno);
    unlink(pattern.c_str());
    return absl::OkStatus();
  }

  const std::string path_;
  int fd_ = -1;
  std::vector<char> pending_;
  std::unique_ptr<MappedFile> mapped_;
};

RowFileWriter::RowFileWriter(std::unique_ptr<BlockFile> file,
                             const RowFileKind& kind)
    : kind_(kind),
      row_bytes_(RowBytes(kind.format, kind.dim)),
      file_(std::move(file)),
      spool_(std::make_unique<Spool>(file_->is_owned() ? file_->path() : "")),
      row_(row_bytes_) {
  const std::string nothing(kRowFileHeaderBytes, ' ');
  status_ = file_->WriteRaw(nothing.data(), nothing.size());
  if (status_.ok()) {
    status_ =
        file_->Append(reinterpret_cast<const char*>(kind_.default_row.data()),
                      kind_.default_row.size() * sizeof(float));
  }
  if (status_.ok()) status_ = file_->PadTo(kRecordsAlignment);
}

absl::StatusOr<std::unique_ptr<RowFileWriter>> RowFileWriter::Create(
    const std::string& path, const RowFileKind& kind) {
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return ErrnoStatus("create", path, errno);
  return absl::WrapUnique(new RowFileWriter(
      std::make_unique<BlockFile>(fd, path, /*is_owned=*/true), kind));
}

std::unique_ptr<RowFileWriter> RowFileWriter::WriteTo(int fd,
                                                      const std::string& path,
                                                      const RowFileKind& kind) {
  return absl::WrapUnique(new RowFileWriter(
      std::make_unique<BlockFile>(fd, path, /*is_owned=*/false), kind));
}

RowFileWriter::~RowFileWriter() {
  if (!is_finished_ && file_->is_owned()) unlink(file_->path().c_str());
}

absl::Status RowFileWriter::CheckRoom(size_t num_keys) const {
  TFSWITCH_RETURN_IF_ERROR(status_);
  if (keys_.size() + num_keys <= kMaxKeys) return absl::OkStatus();
  return absl::ResourceExhaustedError(
      absl::StrCat("table '", kind_.table, "': a row file has room for ",
                   kMaxKeys, " ids; spread the table over several"));
}

absl::Status RowFileWriter::Add(absl::Span<const Key> keys,
                                absl::Span<const float> embeddings) {
  const auto dim = static_cast<size_t>(kind_.dim);
  if (embeddings.size() != keys.size() * dim) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", kind_.table, "': expected ", keys.size() * dim,
                     " floats for ", keys.size(), " rows of dim ", dim,
                     ", got ", embeddings.size()));
  }
  TFSWITCH_RETURN_IF_ERROR(CheckRoom(keys.size()));
  for (size_t i = 0; i < keys.size(); ++i) {
    const absl::Span<const float> row = embeddings.subspan(i * dim, dim);
    if (kind_.format == RowFormat::kInt8) {
      const auto* const bad =
          std::find_if_not(row.begin(), row.end(),
                           [](float value) { return std::isfinite(value); });
      if (bad != row.end()) {
        return absl::InvalidArgumentError(absl::StrCat(
            "table '", kind_.table, "': the row of id ", keys[i], " has ", *bad,
            ", which int8 cannot hold. Mend the row, or export float32."));
      }
    }
    EncodeRow(kind_.format, row.data(), kind_.dim, row_.data());
    if (is_wanted_ && !is_wanted_(keys[i], row_.data())) continue;
    TFSWITCH_RETURN_IF_ERROR(AddEncoded(keys[i], row_.data()));
  }
  return absl::OkStatus();
}

absl::Status RowFileWriter::AddEncoded(Key key, const char* row) {
  TFSWITCH_RETURN_IF_ERROR(CheckRoom(1));
  keys_.push_back(key);
  rows_.push_back(num_spooled_++);
  status_ = spool_->Append(row, row_bytes_);
  return status_;
}

void RowFileWriter::Reserve(size_t num_keys) {
  keys_.reserve(num_keys);
  rows_.reserve(num_keys);
  spool_->Reserve(num_keys * row_bytes_);
}

void RowFileWriter::Remove(absl::Span<const Key> keys) {
  keys_.insert(keys_.end(), keys.begin(), keys.end());
  rows_.insert(rows_.end(), keys.size(), kRemoved);
}

absl::StatusOr<RowFileWriter::Places> RowFileWriter::FindPlaces() {
  TFSWITCH_RETURN_IF_ERROR(CheckRoom(0));
  Places places;
  if (keys_.empty()) return places;
  places.hash.num_parts = NumPerfectHashParts(keys_.size());
  // The first seed is always the same, so that the same rows give the same
  // file. This seed fails only if somebody chose keys that collide under it.
  // The seeds that follow are random, so nobody can choose keys for them.
  constexpr Key kMaxSeeds = 64;
  for (Key seed = 0; seed < kMaxSeeds; ++seed) {
    places.hash.seed = seed == 0 ? HashKey(seed) : DrawId();
    places.Sort(keys_);
    // The number of parts was computed with repeated keys. Without them fewer
    // parts may be enough.
    if (const uint64_t num_parts = NumPerfectHashParts(places.entries.size());
        num_parts != places.hash.num_parts) {
      places.hash.num_parts = num_parts;
      places.Sort(keys_);
    }
    if (places.FindPilots()) return places;
  }
  return absl::InternalError(absl::StrCat(
      "table '", kind_.table, "': no places for ", keys_.size(), " ids in ",
      kMaxSeeds, " attempts. Please report it, with the ids."));
}

absl::Status RowFileWriter::WriteRecords(const Places& places, const char* rows,
                                         std::vector<uint64_t>* used,
                                         std::vector<uint64_t>* removed) {
  const PerfectHash& hash = places.hash;
  constexpr uint32_t kNobody = ~uint32_t{0};
  // Prefetches this many slots ahead: keys and rows are not read in the order
  // in which they were written, so each costs one or two cache misses.
  constexpr size_t kAhead = 16;
  // How many records are written at once. They should stay in the cache.
  constexpr uint64_t kSlotsPerWrite = 512;
  const size_t record_bytes = sizeof(Key) + row_bytes_;
  std::vector<uint32_t> said(hash.slots_per_part + 2 * kAhead);
  std::vector<char> records;
  for (uint64_t part = 0; part < hash.num_parts; ++part) {
    std::fill(said.begin(), said.end(), kNobody);
    for (const Places::Entry& entry : places.Part(part)) {
      said[hash.SlotInPart(
          entry.point, places.pilots[hash.PilotOf(entry.point)])] = entry.at;
    }
    for (uint64_t i = 0; i < hash.slots_per_part; ++i) {
      if (i % kSlotsPerWrite == 0) {
        TFSWITCH_RETURN_IF_ERROR(file_->Append(records.data(), records.size()));
        // Slots without a row keep these zeros.
        records.assign(
            std::min(kSlotsPerWrite, hash.slots_per_part - i) * record_bytes,
            '\0');
      }
      if (const uint32_t at = said[i + 2 * kAhead]; at != kNobody) {
        __builtin_prefetch(&keys_[at]);
        __builtin_prefetch(&rows_[at]);
      }
      if (const uint32_t at = said[i + kAhead];
          at != kNobody && rows_[at] != kRemoved) {
        __builtin_prefetch(rows + size_t{rows_[at]} * row_bytes_);
      }
      const uint64_t slot = part * hash.slots_per_part + i;
      const uint32_t at = said[i];
      char* const record = records.data() + i % kSlotsPerWrite * record_bytes;
      // An empty slot gets an id whose own slot is another one, so that no
      // search finds it.
      const Key key = keys_[at != kNobody ? at : places.entries.front().at];
      std::memcpy(record, &key, sizeof(key));
      if (at == kNobody) continue;
      SetBit(slot, used);
      if (rows_[at] == kRemoved) {
        SetBit(slot, removed);
      } else {
        std::memcpy(record + sizeof(key), rows + size_t{rows_[at]} * row_bytes_,
                    row_bytes_);
      }
    }
    TFSWITCH_RETURN_IF_ERROR(file_->Append(records.data(), records.size()));
    records.clear();
  }
  return absl::OkStatus();
}

absl::StatusOr<RowFileInfo> RowFileWriter::Finish() {
  TFSWITCH_RETURN_IF_ERROR(status_);
  Json header = Json::object();
  uint64_t begin = 0;
  const auto describe = [&](const char* name, const char* dtype, Json shape,
                            uint64_t end) {
    header[name] = {{"dtype", dtype},
                    {"shape", std::move(shape)},
                    {"data_offsets", {begin, end}}};
    begin = end;
  };
  const auto pad = [&](const char* name, size_t multiple) {
    const uint64_t end = (begin + multiple - 1) / multiple * multiple;
    describe(name, "U8", {end - begin}, end);
    return file_->PadTo(multiple);
  };
  const auto append = [&](const char* name, const char* dtype,
                          const auto& values) {
    const size_t bytes = values.size() * sizeof(values[0]);
    describe(name, dtype, {values.size()}, begin + bytes);
    return file_->Append(reinterpret_cast<const char*>(values.data()), bytes);
  };
  describe("default_row", "F32", {kind_.dim}, kind_.dim * sizeof(float));
  TFSWITCH_RETURN_IF_ERROR(pad("padding_0", kRecordsAlignment));

  RowFileInfo info;
  PerfectHash hash;
  {
    TFSWITCH_ASSIGN_OR_RETURN(const char* const rows, spool_->Read());
    TFSWITCH_ASSIGN_OR_RETURN(const Places places, FindPlaces());
    hash = places.hash;
    for (const Places::Entry& entry : places.entries) {
      ++(rows_[entry.at] == kRemoved ? info.num_removed : info.num_rows);
    }
    const uint64_t num_words =
        (hash.num_slots() + kBitsPerWord - 1) / kBitsPerWord;
    std::vector<uint64_t> used(num_words);
    std::vector<uint64_t> removed(info.num_removed > 0 ? num_words : 0);
    TFSWITCH_RETURN_IF_ERROR(WriteRecords(places, rows, &used, &removed));
    spool_.reset();
    describe("records", "U8", {hash.num_slots(), sizeof(Key) + row_bytes_},
             file_->position());
    TFSWITCH_RETURN_IF_ERROR(append("pilots", "U8", places.pilots));
    TFSWITCH_RETURN_IF_ERROR(pad("padding_1", sizeof(uint64_t)));
    TFSWITCH_RETURN_IF_ERROR(append("used", "U64", used));
    TFSWITCH_RETURN_IF_ERROR(append("removed", "U64", removed));
  }
  TFSWITCH_RETURN_IF_ERROR(file_->Flush());
  const std::vector<uint64_t>& checksums = file_->checksums();
  const auto* const checksum_bytes =
      reinterpret_cast<const char*>(checksums.data());
  const size_t num_checksum_bytes = checksums.size() * sizeof(uint64_t);
  TFSWITCH_RETURN_IF_ERROR(file_->WriteRaw(checksum_bytes, num_checksum_bytes));
  describe("checksums", "U64", {checksums.size()}, begin + num_checksum_bytes);
  info.bytes = static_cast<int64_t>(kRowFileHeaderBytes + begin);

  header["__metadata__"] = {
      {"format", kRowFileFormat},
      {"version", absl::StrCat(kRowFileVersion)},
      {"table", kind_.table},
      {"row_format", std::string(NameOf(kind_.format))},
      {"num_rows", absl::StrCat(info.num_rows)},
      {"num_removed", absl::StrCat(info.num_removed)},
      {"seed", absl::StrCat(hash.seed)},
      {"num_parts", absl::StrCat(hash.num_parts)},
      {"checksums_xxh3",
       absl::StrFormat("%016x", Checksum(checksum_bytes, num_checksum_bytes))}};
  TFSWITCH_ASSIGN_OR_RETURN(info.header_checksum,
                            WriteHeader(DumpJson(header)));
  is_finished_ = true;
  return info;
}

absl::StatusOr<uint64_t> RowFileWriter::WriteHeader(std::string text) {
  constexpr uint64_t kTextBytes = kRowFileHeaderBytes - sizeof(uint64_t);
  if (text.size() > kTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", kind_.table, "': its name is too long for a row file"));
  }
  text.resize(kTextBytes, ' ');
  text.insert(0, reinterpret_cast<const char*>(&kTextBytes),
              sizeof(kTextBytes));
  TFSWITCH_RETURN_IF_ERROR(file_->Begin());
  TFSWITCH_RETURN_IF_ERROR(file_->WriteRaw(text.data(), text.size()));
  TFSWITCH_RETURN_IF_ERROR(file_->Sync());
  return Checksum(text.data(), text.size());
}

}  // namespace tfswitch
