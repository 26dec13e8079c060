#include "cc/serving/row_file_writer.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cc/base/checksum.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/serving/row_file.h"
#include "nlohmann/json.hpp"

namespace tfswitch {
namespace {

using Json = nlohmann::json;

// Beyond it a search goes on in the next bucket more often: 8 in 100 at 3.
constexpr uint64_t kKeysPerHome = 3;

// An index of `keys`, of which the last entry of each counts.
struct Index {
  uint64_t num_homes;
  std::vector<ServedBucket> buckets;
  int64_t num_rows = 0;
  int64_t num_removed = 0;

  Index(const std::vector<Key>& keys, const std::vector<uint32_t>& rows)
      : num_homes(keys.size() / kKeysPerHome + 1) {
    // A few more, for what the last one has no room for.
    buckets.reserve(num_homes + 16);
    buckets.resize(num_homes);
    // From the last one, so that what comes before is passed over.
    for (size_t i = keys.size(); i-- > 0;) Insert(keys[i], rows[i]);
  }

 private:
  void Insert(Key key, uint32_t row) {
    for (uint64_t at = ServedHome(HashKey(key), num_homes);; ++at) {
      if (at == buckets.size()) buckets.emplace_back();
      ServedBucket& bucket = buckets[at];
      const uint32_t used = bucket.meta & kServedUsedMask;
      for (uint32_t i = 0; i < used; ++i) {
        if (bucket.keys[i] == key) return;
      }
      if (used == kServedKeysPerBucket) {
        bucket.meta |= kServedOverflow;
        continue;
      }
      bucket.keys[used] = key;
      bucket.rows[used] = row;
      ++bucket.meta;
      ++(row == kRemovedRow ? num_removed : num_rows);
      return;
    }
  }
};

}  // namespace

// Writes behind the header, with a checksum of each block.
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
  // Behind the header.
  uint64_t position() const { return position_; }

  absl::Status Append(const char* bytes, size_t size) {
    while (size > 0) {
      // Up to the next multiple of it in the file, of which the header is part.
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

  // Also the last, shorter block.
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

  // Without checksums.
  absl::Status WriteRaw(const char* bytes, size_t size) {
    return WriteAll(fd_, path_, bytes, size);
  }
  absl::Status Begin() {
    if (lseek(fd_, 0, SEEK_SET) != 0) return ErrnoStatus("seek", path_, errno);
    return absl::OkStatus();
  }
  absl::Status Sync() {
    // A file in memory has no disk to go to.
    if (is_owned_ && fsync(fd_) != 0) {
      return ErrnoStatus("flush", path_, errno);
    }
    return absl::OkStatus();
  }

 private:
  // A huge page: the page cache keeps what is written in such pieces, at such
  // places, in huge pages where the file system can, and lookups need fewer
  // entries of the TLB.
  static constexpr size_t kBufferBytes = size_t{2} << 20;

  const int fd_;
  const std::string path_;
  const bool is_owned_;
  uint64_t position_ = 0;
  std::vector<char> pending_;
  std::vector<uint64_t> checksums_;
};

RowFileWriter::RowFileWriter(std::unique_ptr<BlockFile> file,
                             const RowFileKind& kind)
    : kind_(kind),
      row_bytes_(RowBytes(kind.format, kind.dim)),
      file_(std::move(file)),
      row_(row_bytes_) {
  // The header's place; it is written last.
  const std::string nothing(kRowFileHeaderBytes, ' ');
  status_ = file_->WriteRaw(nothing.data(), nothing.size());
  if (status_.ok()) {
    status_ =
        file_->Append(reinterpret_cast<const char*>(kind_.default_row.data()),
                      kind_.default_row.size() * sizeof(float));
  }
  if (status_.ok()) status_ = file_->PadTo(sizeof(ServedBucket));
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

absl::Status RowFileWriter::CheckRoom(size_t num_rows) const {
  TFSWITCH_RETURN_IF_ERROR(status_);
  if (static_cast<int64_t>(num_written_ + num_rows) <= kMaxRowsPerFile) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("table '", kind_.table, "': a row file has room for ",
                   kMaxRowsPerFile, " rows; spread the table over several"));
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
    TFSWITCH_RETURN_IF_ERROR(AddEncoded(keys[i], row_.data()));
  }
  return absl::OkStatus();
}

absl::Status RowFileWriter::AddEncoded(Key key, const char* row) {
  TFSWITCH_RETURN_IF_ERROR(CheckRoom(1));
  keys_.push_back(key);
  rows_.push_back(num_written_++);
  return file_->Append(row, row_bytes_);
}

void RowFileWriter::Remove(absl::Span<const Key> keys) {
  keys_.insert(keys_.end(), keys.begin(), keys.end());
  rows_.insert(rows_.end(), keys.size(), kRemovedRow);
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
  const auto describe_padding = [&](const char* name) {
    const uint64_t end = (begin + sizeof(ServedBucket) - 1) /
                         sizeof(ServedBucket) * sizeof(ServedBucket);
    describe(name, "U8", {end - begin}, end);
  };
  describe("default_row", "F32", {kind_.dim}, kind_.dim * sizeof(float));
  describe_padding("padding_0");
  const size_t width = kind_.format == RowFormat::kInt8
                           ? row_bytes_
                           : static_cast<size_t>(kind_.dim);
  describe("embeddings", SafetensorsDtypeOf(kind_.format),
           {num_written_, width}, file_->position());
  TFSWITCH_RETURN_IF_ERROR(file_->PadTo(sizeof(ServedBucket)));
  describe_padding("padding_1");

  RowFileInfo info;
  uint64_t num_homes;
  {
    const Index index(keys_, rows_);
    const size_t bytes = index.buckets.size() * sizeof(ServedBucket);
    TFSWITCH_RETURN_IF_ERROR(file_->Append(
        reinterpret_cast<const char*>(index.buckets.data()), bytes));
    describe("buckets", "I64", {index.buckets.size(), 8}, file_->position());
    info.num_rows = index.num_rows;
    info.num_removed = index.num_removed;
    num_homes = index.num_homes;
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
      {"num_homes", absl::StrCat(num_homes)},
      {"checksums_xxh3",
       absl::StrFormat("%016x", Checksum(checksum_bytes, num_checksum_bytes))}};
  std::string text = header.dump(-1, ' ', /*ensure_ascii=*/false,
                                 Json::error_handler_t::replace);
  constexpr size_t kTextBytes = kRowFileHeaderBytes - sizeof(uint64_t);
  if (text.size() > kTextBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", kind_.table, "': its name is too long for a row file"));
  }
  text.resize(kTextBytes, ' ');
  const uint64_t length = kTextBytes;
  std::string prefix(reinterpret_cast<const char*>(&length), sizeof(length));
  prefix += text;
  TFSWITCH_RETURN_IF_ERROR(file_->Begin());
  TFSWITCH_RETURN_IF_ERROR(file_->WriteRaw(prefix.data(), prefix.size()));
  TFSWITCH_RETURN_IF_ERROR(file_->Sync());
  info.header_checksum = Checksum(prefix.data(), prefix.size());
  is_finished_ = true;
  return info;
}

}  // namespace tfswitch
