// WriteSafetensors() writes the header and the arrays in one atomic write,
// without copying them. It computes the checksum from the same memory.
//
// Open() compares the length of the file with the expected one before it reads
// the header. ReadSafetensors() first checks that the lengths of the arrays add
// up to the bytes after the header, and only then allocates memory. So a
// damaged header cannot cause a huge allocation. It verifies the checksum
// before it returns. Get() checks type, shape and alignment. ReadMetadata()
// reads only the header and verifies no checksum, because a commit calls it for
// every file.

#include "cc/checkpoint/safetensors.h"

#include <fcntl.h>
#include <libdeflate.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cc/base/checked_math.h"
#include "cc/base/files.h"
#include "cc/base/json.h"
#include "cc/base/status_macros.h"

namespace tfswitch::checkpoint {
namespace {

constexpr size_t kLengthBytes = sizeof(uint64_t);
// The header of our files lists at most three arrays, so it is much shorter
// than this limit.
constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 20;

absl::Status Malformed(const std::string& path, absl::string_view why) {
  return absl::DataLossError(absl::StrCat(
      "checkpoint file '", path, "' is not a well-formed safetensors file: ",
      why, "; restore another checkpoint"));
}

absl::Status ReadBytes(int fd, const std::string& path, char* to, size_t size) {
  while (size > 0) {
    const ssize_t got = read(fd, to, size);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("read", path, errno);
    if (got == 0) return Malformed(path, "it ended while being read");
    to += got;
    size -= static_cast<size_t>(got);
  }
  return absl::OkStatus();
}

bool IsCountList(const Json& entry, const char* field) {
  const auto list = entry.find(field);
  return list != entry.end() && list->is_array() &&
         std::all_of(list->begin(), list->end(), [](const Json& value) {
           return value.is_number_unsigned() &&
                  value.get<uint64_t>() <=
                      uint64_t{std::numeric_limits<int64_t>::max()};
         });
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// An open file whose header has been read.
struct OpenFile {
  explicit OpenFile(int file) : fd(file) {}
  OpenFile(OpenFile&& other) noexcept
      : fd(std::exchange(other.fd, -1)),
        header(std::move(other.header)),
        data_bytes(other.data_bytes) {}
  ~OpenFile() {
    if (fd >= 0) close(fd);
  }

  int fd;
  Json header;
  uint64_t data_bytes = 0;  // The number of bytes after the header.
};

absl::StatusOr<OpenFile> Open(const std::string& path, int64_t expected_bytes) {
  OpenFile file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.fd < 0 && errno != ENOENT) return ErrnoStatus("open", path, errno);
  if (file.fd < 0) {
    return absl::DataLossError(
        absl::StrCat("checkpoint file '", path, "' is missing"));
  }
  struct stat info;
  if (fstat(file.fd, &info) != 0) return ErrnoStatus("examine", path, errno);
  if (info.st_size != expected_bytes) {
    return absl::DataLossError(
        absl::StrCat("checkpoint file '", path, "' has ", info.st_size,
                     " bytes, the manifest says ", expected_bytes,
                     "; it is truncated or belongs to another save"));
  }
  if (info.st_size < static_cast<int64_t>(kLengthBytes)) {
    return Malformed(path, "too short");
  }
  uint64_t length = 0;
  TFSWITCH_RETURN_IF_ERROR(
      ReadBytes(file.fd, path, reinterpret_cast<char*>(&length), kLengthBytes));
  const uint64_t behind_length =
      static_cast<uint64_t>(info.st_size) - kLengthBytes;
  if (length > std::min(kMaxHeaderBytes, behind_length)) {
    return Malformed(path, absl::StrCat("header of ", length, " bytes"));
  }
  std::string text(length, '\0');
  TFSWITCH_RETURN_IF_ERROR(ReadBytes(file.fd, path, text.data(), text.size()));
  absl::StatusOr<Json> header = ParseJson(text);
  if (!header.ok()) {
    return Malformed(path,
                     absl::StrCat("its header: ", header.status().message()));
  }
  if (!header->is_object()) return Malformed(path, "its header is no object");
  file.header = *std::move(header);
  file.data_bytes = behind_length - length;
  return file;
}

}  // namespace

absl::StatusOr<WrittenFile> WriteSafetensors(
    const std::string& path, absl::Span<const TensorToWrite> tensors,
    const std::map<std::string, std::string>& metadata) {
  Json header = Json::object();
  header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorToWrite& tensor : tensors) {
    header[tensor.name] = {
        {"dtype", tensor.dtype},
        {"shape", tensor.shape},
        {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text = header.dump();
  // Adds spaces up to a multiple of 8 bytes, so that the arrays are aligned
  // when the file is mapped into memory.
  text.append((8 - text.size() % 8) % 8, ' ');
  const uint64_t length = text.size();
  std::string prefix(reinterpret_cast<const char*>(&length), kLengthBytes);
  prefix += text;

  std::vector<absl::Span<const char>> pieces = {absl::MakeSpan(prefix)};
  for (const TensorToWrite& tensor : tensors) pieces.push_back(tensor.bytes);
  TFSWITCH_RETURN_IF_ERROR(WriteFileAtomically(path, pieces));
  WrittenFile file;
  for (const absl::Span<const char> piece : pieces) {
    file.bytes += static_cast<int64_t>(piece.size());
    file.crc32 = libdeflate_crc32(file.crc32, piece.data(), piece.size());
  }
  return file;
}

absl::StatusOr<std::map<std::string, std::string>> ReadMetadata(
    const std::string& path, int64_t expected_bytes) {
  TFSWITCH_ASSIGN_OR_RETURN(const OpenFile file, Open(path, expected_bytes));
  std::map<std::string, std::string> metadata;
  const auto found = file.header.find("__metadata__");
  if (found == file.header.end() || !found->is_object()) return metadata;
  for (const auto& [name, value] : found->items()) {
    if (value.is_string()) metadata[name] = value.get<std::string>();
  }
  return metadata;
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path,
                                                int64_t expected_bytes,
                                                uint32_t expected_crc32,
                                                SafetensorsFile former) {
  TFSWITCH_ASSIGN_OR_RETURN(const OpenFile opened, Open(path, expected_bytes));
  // Checks that the arrays of the header fit the file before it allocates
  // memory for them.
  const uint64_t data_bytes = opened.data_bytes;
  uint64_t tensor_bytes = 0;
  SafetensorsFile file;
  file.buffer_ = std::move(former.buffer_);
  file.path_ = path;
  for (const auto& [name, entry] : opened.header.items()) {
    if (name == "__metadata__") continue;
    if (!entry.is_object() || !entry.contains("dtype") ||
        !entry["dtype"].is_string() || !IsCountList(entry, "shape") ||
        !IsCountList(entry, "data_offsets") ||
        entry["data_offsets"].size() != 2) {
      return Malformed(path, absl::StrCat("entry '", name, "'"));
    }
    SafetensorsFile::Tensor tensor;
    tensor.dtype = entry["dtype"].get<std::string>();
    tensor.shape = entry["shape"].get<std::vector<int64_t>>();
    tensor.begin = entry["data_offsets"][0].get<uint64_t>();
    tensor.end = entry["data_offsets"][1].get<uint64_t>();
    if (tensor.begin > tensor.end || tensor.end > data_bytes ||
        !CheckedAdd(tensor_bytes, tensor.end - tensor.begin, &tensor_bytes)) {
      return Malformed(path, absl::StrCat("offsets of '", name, "'"));
    }
    file.tensors_.emplace(name, std::move(tensor));
  }
  if (tensor_bytes != data_bytes) {
    return Malformed(
        path, absl::StrCat("its tensors have ", tensor_bytes, " bytes, and ",
                           data_bytes, " are behind its header"));
  }
  const auto size = static_cast<size_t>(expected_bytes);
  if (!file.buffer_.Reserve(size)) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "no memory for the ", size, " bytes of checkpoint file '", path, "'"));
  }
  TFSWITCH_RETURN_IF_ERROR(ReadFromStart(opened.fd, path, size, file.buffer_));
  file.data_ = file.buffer_.data() + (size - data_bytes);
  const uint32_t crc = libdeflate_crc32(0, file.buffer_.data(), size);
  if (crc != expected_crc32) {
    return absl::DataLossError(absl::StrFormat(
        "checkpoint file '%s': checksum %08x, the manifest says %08x; the file "
        "is damaged, restore another checkpoint",
        path, crc, expected_crc32));
  }
  return file;
}

absl::StatusOr<absl::Span<const char>> SafetensorsFile::Get(
    const std::string& name, const std::string& dtype,
    const std::vector<int64_t>& shape) const {
  const auto it = tensors_.find(name);
  if (it == tensors_.end()) {
    return Malformed(path_, absl::StrCat("no tensor '", name, "'"));
  }
  const Tensor& tensor = it->second;
  const uint64_t element = dtype == "I64" ? 8 : dtype == "U8" ? 1 : 4;
  uint64_t bytes = element;
  bool fits = true;
  for (const int64_t size : shape) {
    fits = fits && CheckedMultiply(bytes, static_cast<uint64_t>(size), &bytes);
  }
  if (tensor.dtype != dtype || tensor.shape != shape || !fits ||
      tensor.end - tensor.begin != bytes || tensor.begin % element != 0) {
    return Malformed(
        path_, absl::StrCat("tensor '", name, "' is ", tensor.dtype,
                            ShapeText(tensor.shape), " in bytes ", tensor.begin,
                            " to ", tensor.end, ", expected ", dtype,
                            ShapeText(shape)));
  }
  return absl::MakeConstSpan(data_ + tensor.begin, bytes);
}

}  // namespace tfswitch::checkpoint
