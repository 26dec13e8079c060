#include "cc/checkpoint/safetensors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "nlohmann/json.hpp"

namespace tfswitch::checkpoint {
namespace {

using Json = nlohmann::json;

constexpr size_t kLengthBytes = sizeof(uint64_t);
// A header lists three arrays; anything near this size is not one of ours.
constexpr uint64_t kMaxHeaderBytes = uint64_t{1} << 20;

uint32_t Crc32(uint32_t crc, const char* bytes, size_t size) {
  while (size > 0) {
    const size_t step = std::min(size, size_t{1} << 30);
    crc = static_cast<uint32_t>(
        crc32(crc, reinterpret_cast<const Bytef*>(bytes), step));
    bytes += step;
    size -= step;
  }
  return crc;
}

absl::Status Malformed(const std::string& path, absl::string_view why) {
  return absl::DataLossError(
      absl::StrCat("checkpoint file '", path,
                   "' is not a well-formed safetensors file: ", why));
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
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
  // Spaces up to a multiple of 8, so that the arrays are aligned in a mapping.
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
    file.crc32 = Crc32(file.crc32, piece.data(), piece.size());
  }
  return file;
}

absl::StatusOr<SafetensorsFile> ReadSafetensors(const std::string& path,
                                                int64_t expected_bytes,
                                                uint32_t expected_crc32) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::DataLossError(absl::StrCat(
        "checkpoint file '", path, "' cannot be opened: ", strerror(errno)));
  }
  auto close_file = absl::MakeCleanup([fd] { close(fd); });
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus("examine", path, errno);
  if (info.st_size != expected_bytes) {
    return absl::DataLossError(
        absl::StrCat("checkpoint file '", path, "' has ", info.st_size,
                     " bytes, the manifest says ", expected_bytes,
                     "; it is truncated or belongs to another save"));
  }
  SafetensorsFile file;
  file.path_ = path;
  file.contents_.resize(static_cast<size_t>(expected_bytes));
  size_t done = 0;
  while (done < file.contents_.size()) {
    const ssize_t got =
        read(fd, file.contents_.data() + done, file.contents_.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return ErrnoStatus("read", path, errno);
    if (got == 0) return Malformed(path, "it ended while being read");
    done += static_cast<size_t>(got);
  }
  const uint32_t crc = Crc32(0, file.contents_.data(), file.contents_.size());
  if (crc != expected_crc32) {
    return absl::DataLossError(absl::StrFormat(
        "checkpoint file '%s': checksum %08x, the manifest says %08x; the file "
        "is damaged, restore another checkpoint",
        path, crc, expected_crc32));
  }

  if (file.contents_.size() < kLengthBytes) return Malformed(path, "too short");
  uint64_t length;
  std::memcpy(&length, file.contents_.data(), kLengthBytes);
  const uint64_t data_bytes = file.contents_.size() - kLengthBytes;
  if (length > std::min(kMaxHeaderBytes, data_bytes)) {
    return Malformed(path, absl::StrCat("header of ", length, " bytes"));
  }
  const char* begin = file.contents_.data() + kLengthBytes;
  const Json header = Json::parse(begin, begin + length, nullptr,
                                  /*allow_exceptions=*/false);
  if (!header.is_object()) return Malformed(path, "the header is not JSON");
  const absl::Span<const char> data(begin + length, data_bytes - length);
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    const auto is_count_list = [](const Json& list) {
      return list.is_array() &&
             std::all_of(list.begin(), list.end(), [](const Json& value) {
               return value.is_number_unsigned();
             });
    };
    if (!entry.is_object() || !entry.contains("dtype") ||
        !entry["dtype"].is_string() || !entry.contains("shape") ||
        !is_count_list(entry["shape"]) || !entry.contains("data_offsets") ||
        !is_count_list(entry["data_offsets"]) ||
        entry["data_offsets"].size() != 2) {
      return Malformed(path, absl::StrCat("entry '", name, "'"));
    }
    const uint64_t from = entry["data_offsets"][0].get<uint64_t>();
    const uint64_t to = entry["data_offsets"][1].get<uint64_t>();
    if (from > to || to > data.size()) {
      return Malformed(path, absl::StrCat("offsets of '", name, "'"));
    }
    SafetensorsFile::Tensor tensor;
    tensor.dtype = entry["dtype"].get<std::string>();
    for (const Json& size : entry["shape"]) {
      tensor.shape.push_back(size.get<int64_t>());
    }
    tensor.bytes = data.subspan(from, to - from);
    file.tensors_.emplace(name, std::move(tensor));
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
  int64_t bytes = dtype == "I64" ? 8 : dtype == "U8" ? 1 : 4;
  for (const int64_t size : shape) bytes *= size;
  if (tensor.dtype != dtype || tensor.shape != shape ||
      static_cast<int64_t>(tensor.bytes.size()) != bytes) {
    return Malformed(path_,
                     absl::StrCat("tensor '", name, "' is ", tensor.dtype,
                                  ShapeText(tensor.shape), ", expected ", dtype,
                                  ShapeText(shape)));
  }
  return tensor.bytes;
}

}  // namespace tfswitch::checkpoint
