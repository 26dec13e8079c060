// A record consists of its length (8 bytes), the checksum of the length, its
// bytes, and their checksum. A damaged length may be very large, so memory is
// allocated only as bytes are really read.

#include "cc/predictor/record_reader.h"

#include <libdeflate.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <new>
#include <streambuf>
#include <utility>

#include "absl/strings/match.h"
#include "cc/predictor/errors.h"
#include "cc/predictor/whole_file.h"

namespace tfswitch {
namespace {

constexpr uint64_t kChunk = uint64_t{1} << 20;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) {
      crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78 : 0);
    }
    table[byte] = crc;
  }
  return table;
}

struct FreeDecompressor {
  void operator()(libdeflate_decompressor* decompressor) const {
    libdeflate_free_decompressor(decompressor);
  }
};

// Decompresses a gzip file, which may consist of several members (gzip
// streams). An error if it is not a gzip file or is damaged, or if the result
// has more than `max_bytes`.
Result<std::string> Inflate(std::string_view bytes, uint64_t max_bytes) {
  const std::unique_ptr<libdeflate_decompressor, FreeDecompressor> decompressor(
      libdeflate_alloc_decompressor());
  if (decompressor == nullptr) throw std::bad_alloc();
  std::string inflated;
  size_t size = 0;  // The number of bytes that earlier members have filled.
  while (!bytes.empty()) {
    size_t used = 0;
    size_t written = 0;
    const libdeflate_result result = libdeflate_gzip_decompress_ex(
        decompressor.get(), bytes.data(), bytes.size(), inflated.data() + size,
        inflated.size() - size, &used, &written);
    if (result == LIBDEFLATE_SUCCESS) {
      bytes.remove_prefix(used);
      size += written;
    } else if (result != LIBDEFLATE_INSUFFICIENT_SPACE) {
      return Error(StatusCode::kDataLoss, "is not a gzip file, or is damaged");
    } else if (inflated.size() >= max_bytes) {
      return Error(StatusCode::kResourceExhausted, "inflates to more than the ",
                   max_bytes,
                   " bytes that are read at once; inflate it with gunzip");
    } else {  // Decompresses the member again, into twice as much memory.
      inflated.resize(
          std::min(max_bytes, std::max<uint64_t>(kChunk, 2 * inflated.size())));
    }
  }
  inflated.resize(size);
  return inflated;
}

// A stream that reads from bytes in memory. Unlike std::istringstream it does
// not copy them.
class BytesStream : private std::streambuf, public std::istream {
 public:
  explicit BytesStream(std::string bytes)
      : std::istream(this), bytes_(std::move(bytes)) {
    setg(bytes_.data(), bytes_.data(), bytes_.data() + bytes_.size());
  }

 private:
  std::string bytes_;
};

}  // namespace

uint32_t MaskedCrc32c(std::string_view bytes) {
  static constexpr std::array<uint32_t, 256> kTable = MakeTable();
  uint32_t crc = ~uint32_t{0};
  for (const char c : bytes) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<uint8_t>(c)) & 0xff];
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8;
}

Result<RecordReader> RecordReader::Open(const std::string& path,
                                        uint64_t max_inflated_bytes) try {
  RecordReader reader;
  if (absl::EndsWith(path, ".gz")) {
    const Result<std::string> bytes = ReadWholeFile(path, max_inflated_bytes);
    if (!bytes.ok()) return bytes.status();
    Result<std::string> inflated = Inflate(*bytes, max_inflated_bytes);
    if (!inflated.ok()) {
      return WithContext(inflated.status(), "'", path, "' ");
    }
    reader.file_ = std::make_unique<BytesStream>(*std::move(inflated));
    return reader;
  }
  auto file = std::make_unique<std::ifstream>(path, std::ios::binary);
  if (!file->is_open()) {
    return Error(StatusCode::kNotFound, "cannot read '", path,
                 "': ", std::strerror(errno));
  }
  reader.file_ = std::move(file);
  return reader;
} catch (const std::bad_alloc&) {
  return Error(StatusCode::kResourceExhausted, "no memory for '", path,
               "', which is inflated; inflate it with gunzip");
}

std::string RecordReader::ReadBytes(uint64_t size) {
  std::string bytes;
  while (bytes.size() < size) {
    const size_t before = bytes.size();
    const auto chunk = std::min<uint64_t>(size - before, kChunk);
    bytes.resize(before + chunk);
    file_->read(&bytes[before], static_cast<int64_t>(chunk));
    const auto got = static_cast<size_t>(file_->gcount());
    bytes.resize(before + got);
    if (got < chunk) break;
  }
  offset_ += bytes.size();
  return bytes;
}

Result<std::string> RecordReader::ReadChecked(uint64_t size) {
  std::string bytes = ReadBytes(size);
  const std::string checksum =
      bytes.size() < size ? "" : ReadBytes(sizeof(uint32_t));
  const bool is_whole = checksum.size() == sizeof(uint32_t);
  uint32_t expected = 0;
  if (is_whole) std::memcpy(&expected, checksum.data(), sizeof(expected));
  if (is_whole && expected == MaskedCrc32c(bytes)) return bytes;
  return Error(StatusCode::kDataLoss, is_whole ? "corrupted" : "truncated",
               " record at ", record_offset_);
}

bool RecordReader::IsAtEnd() {
  return file_->peek() == std::istream::traits_type::eof() && !file_->bad();
}

Result<std::string> RecordReader::Read() {
  record_offset_ = offset_;
  if (IsAtEnd()) return Error(StatusCode::kOutOfRange, "end of file");
  uint64_t size = 0;
  const Result<std::string> header = ReadChecked(sizeof(size));
  if (!header.ok()) return header.status();
  std::memcpy(&size, header->data(), sizeof(size));
  return ReadChecked(size);
}

}  // namespace tfswitch
