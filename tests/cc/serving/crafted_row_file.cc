#include "tests/cc/serving/crafted_row_file.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_format.h"
#include "cc/base/checksum.h"
#include "cc/base/files.h"
#include "cc/serving/row_file.h"
#include "cc/serving/row_file_writer.h"
#include "cc/serving/row_snapshot.h"
#include "tests/cc/testing/choices.h"

namespace tfswitch {
namespace {

constexpr const char* kArrays[] = {"default_row", "records", "pilots",
                                   "used",        "removed", "checksums"};
constexpr size_t kNumArrays = 6;

// One that may stand in the place of `number`.
uint64_t Instead(Choices* choices, uint64_t number) {
  switch (choices->Byte() % 6) {
    case 0:
      return 0;
    case 1:
      return choices->Word();
    case 2:
      return std::numeric_limits<uint64_t>::max() - choices->Byte();
    case 3:
      return number + 64 * uint64_t{choices->Byte()};
    case 4:
      return number - 8 * uint64_t{choices->Byte()};
    default:
      return number ^ choices->Byte();
  }
}

std::string WholeFile(int fd) {
  std::string bytes(static_cast<size_t>(lseek(fd, 0, SEEK_END)), '\0');
  if (pread(fd, bytes.data(), bytes.size(), 0) !=
      static_cast<ssize_t>(bytes.size())) {
    bytes.clear();
  }
  return bytes;
}

void ChangeHeader(Choices* choices, Json* header) {
  Json& array = (*header)[kArrays[choices->Byte() % kNumArrays]];
  switch (choices->Byte() % 6) {
    case 0:
    case 1:
      for (Json& offset : array["data_offsets"]) {
        if (choices->Byte() % 2 == 0) {
          offset = Instead(choices, offset.get<uint64_t>());
        }
      }
      return;
    case 2:
      array["shape"][0] = Instead(choices, array["shape"][0].get<uint64_t>());
      return;
    case 3: {
      // An array elsewhere, whose size fits.
      const auto begin = array["data_offsets"][0].get<uint64_t>();
      const auto end = array["data_offsets"][1].get<uint64_t>();
      const uint64_t moved = Instead(choices, begin);
      array["data_offsets"] = {moved, moved + (end - begin)};
      return;
    }
    case 4:
      (*header)["__metadata__"]
               [choices->Byte() % 2 == 0 ? "num_parts" : "seed"] =
                   std::to_string(Instead(choices, 1));
      return;
    default:
      array["dtype"] = choices->Byte() % 2 == 0 ? Json("F16") : Json(7);
      return;
  }
}

// Makes the checksums those of what the file says, as far as that makes sense.
void FixChecksums(Json* header, std::string* body) {
  const Json& offsets = (*header)["checksums"]["data_offsets"];
  const auto begin = offsets[0].get<uint64_t>();
  const auto end = offsets[1].get<uint64_t>();
  if (begin > end || end > body->size()) return;
  std::vector<uint64_t> checksums;
  for (uint64_t at = 0; at < begin; at += kRowFileBlockBytes) {
    checksums.push_back(Checksum(
        body->data() + at, std::min<uint64_t>(kRowFileBlockBytes, begin - at)));
  }
  const uint64_t size = std::min<uint64_t>(end - begin, checksums.size() * 8);
  if (size > 0) std::memcpy(body->data() + begin, checksums.data(), size);
  (*header)["__metadata__"]["checksums_xxh3"] =
      absl::StrFormat("%016x", Checksum(body->data() + begin, end - begin));
}

// Reads everything; "" unless two ways to read differ.
std::string ReadAll(const std::shared_ptr<const RowFile>& file) {
  RowLayers layers{"t", file->kind().dim, {file}};
  std::vector<Key> keys = {std::numeric_limits<Key>::min(), -1,
                           std::numeric_limits<Key>::max()};
  for (Key key = 0; key < 300; ++key) keys.push_back(key);
  const size_t size = keys.size() * static_cast<size_t>(layers.dim);
  std::vector<float> first(size);
  std::vector<float> second(size);
  const absl::Status unverified = layers.Lookup(keys, first.data());
  if (!file->Verify().ok()) return "";
  const absl::Status verified = layers.Lookup(keys, second.data());
  if (unverified.code() != verified.code() ||
      (verified.ok() &&
       std::memcmp(first.data(), second.data(), size * sizeof(float)) != 0)) {
    return "a lookup before all is verified differs from one after it";
  }
  int64_t num_keys = 0;
  file->ForEachKey([&](Key, const char*) {
        ++num_keys;
        return absl::OkStatus();
      })
      .IgnoreError();  // It has no error of its own.
  const int fd = memfd_create("empty", MFD_CLOEXEC);
  if (fd < 0) return "no file in memory";
  const auto close_file = absl::MakeCleanup([fd] { close(fd); });
  const auto info = RowFileWriter::WriteTo(fd, "empty", file->kind())->Finish();
  if (!info.ok()) return std::string(info.status().message());
  layers.files.push_back(RowFile::Map(fd, "empty", *info).value());
  if (layers.MergeNewest().ok() && verified.ok()) {
    // Ids of before and after: the default row may have changed with them.
    if (!layers.Lookup(keys, first.data()).ok() ||
        std::memcmp(first.data(), second.data(), size * sizeof(float)) != 0) {
      return "a lookup before files are merged differs from one after it";
    }
  }
  return "";
}

}  // namespace

CraftedResult ReadCrafted(absl::Span<const uint8_t> bytes) {
  CraftedResult result;
  Choices choices(bytes);
  RowFileKind kind;
  kind.table = "t";
  kind.dim = 1 + choices.Byte() % 20;
  kind.format = static_cast<RowFormat>(choices.Byte() % 3);
  kind.default_row.assign(static_cast<size_t>(kind.dim), 0.5f);
  const int fd = memfd_create("crafted", MFD_CLOEXEC);
  if (fd < 0) return {false, "no file in memory"};
  const auto close_file = absl::MakeCleanup([fd] { close(fd); });
  const auto writer = RowFileWriter::WriteTo(fd, "crafted", kind);
  const Key num_keys = choices.Byte();
  for (Key key = 0; key < num_keys; ++key) {
    const absl::Status added = writer->Add(
        {&key, 1},
        std::vector<float>(kind.default_row.size(), static_cast<float>(key)));
    if (!added.ok()) return {false, std::string(added.message())};
  }
  const Key removed = num_keys;
  // Bases have none.
  if (choices.Byte() % 2 == 0) writer->Remove({&removed, 1});
  if (!writer->Finish().ok()) return {false, "the file cannot be written"};

  const std::string whole = WholeFile(fd);
  std::string body = whole.substr(kRowFileHeaderBytes);
  Json header = Json::parse(
      whole.substr(sizeof(uint64_t), kRowFileHeaderBytes - sizeof(uint64_t)));
  const int num_changes = choices.Byte() % 4;
  for (int i = 0; i < num_changes; ++i) ChangeHeader(&choices, &header);
  while (!choices.IsOver()) {
    const uint64_t word = choices.Word();
    body[(word >> 8) % body.size()] = static_cast<char>(word);
  }
  FixChecksums(&header, &body);
  std::string text = header.dump();
  text.resize(kRowFileHeaderBytes - sizeof(uint64_t), ' ');
  const uint64_t length = text.size();
  text.insert(0, reinterpret_cast<const char*>(&length), sizeof(length));
  RowFileInfo info;
  info.bytes = static_cast<int64_t>(text.size() + body.size());
  info.header_checksum = Checksum(text.data(), text.size());
  text += body;

  const int crafted_fd = memfd_create("crafted", MFD_CLOEXEC);
  if (crafted_fd < 0) return {false, "no file in memory"};
  const auto close_crafted =
      absl::MakeCleanup([crafted_fd] { close(crafted_fd); });
  if (!WriteAll(crafted_fd, "crafted", text.data(), text.size()).ok()) {
    return {false, "the file cannot be written"};
  }
  const auto file = RowFile::Map(crafted_fd, "crafted", info);
  result.is_open = file.ok();
  if (file.ok()) {
    result.fault = ReadAll(*file);
  } else if (file.status().code() != absl::StatusCode::kDataLoss) {
    result.fault = file.status().ToString();
  }
  return result;
}

}  // namespace tfswitch
