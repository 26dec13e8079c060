#include "cc/serving/row_snapshot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/status_macros.h"
#include "cc/serving/row_file_writer.h"

namespace tfswitch {
namespace {

// Keys that are looked up together. What is prefetched for them fits into the
// second level of the cache.
constexpr size_t kBlock = 256;
// Searches whose cache misses overlap.
constexpr size_t kAhead = 24;
constexpr size_t kLineBytes = 64;
// Beyond this many lines the hardware has noticed the stream.
constexpr size_t kMaxPrefetchLines = 8;

void PrefetchRow(const char* row, size_t bytes) {
  bytes = std::min(bytes, kMaxPrefetchLines * kLineBytes);
  for (size_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(row + at);
  }
  // A row need not begin with a line.
  __builtin_prefetch(row + bytes - 1);
}

// Where the rows of a block of keys are.
struct Places {
  const RowFile* files[kBlock];  // Null: no row.
  const char* rows[kBlock];
};

// Moves those of `left` that the filter does not have to its front, and returns
// how many they are; the others follow.
size_t PassOver(const KeyFilter& filter, const uint64_t* hashes, uint16_t* left,
                size_t num_left) {
  uint16_t maybe[kBlock];
  size_t num_maybe = 0;
  size_t num_passed = 0;
  for (size_t n = 0; n < num_left; ++n) {
    if (n + kAhead < num_left) {
      __builtin_prefetch(filter.Word(hashes[left[n + kAhead]]));
    }
    const uint16_t i = left[n];
    const bool is_maybe =
        KeyFilter::MayHave(*filter.Word(hashes[i]), hashes[i]);
    // Without a branch; what is written in vain is written over.
    maybe[num_maybe] = i;
    left[num_passed] = i;
    num_maybe += static_cast<size_t>(is_maybe);
    num_passed += static_cast<size_t>(!is_maybe);
  }
  std::copy(maybe, maybe + num_maybe, left + num_passed);
  return num_passed;
}

// Finds keys in one file. `left` has the positions of those that no newer file
// knows, and keeps those that this one does not know either.
absl::Status FindIn(const RowFile& file, const Key* keys,
                    const uint64_t* hashes, uint16_t* left, size_t* num_left,
                    Places* places) {
  const bool is_verified = file.is_verified();
  const KeyFilter* const filter = file.filter();
  const size_t num_passed =
      filter == nullptr ? 0 : PassOver(*filter, hashes, left, *num_left);
  const ServedBucket* homes[kBlock];
  for (size_t n = num_passed; n < *num_left; ++n) {
    homes[n] = file.Home(hashes[left[n]]);
  }
  for (size_t n = num_passed; n < std::min(num_passed + kAhead, *num_left);
       ++n) {
    __builtin_prefetch(homes[n]);
  }
  size_t still_left = num_passed;
  for (size_t n = num_passed; n < *num_left; ++n) {
    if (n + kAhead < *num_left) __builtin_prefetch(homes[n + kAhead]);
    const uint16_t i = left[n];
    int64_t row;
    if (is_verified) {
      row = file.Search(homes[n], keys[i]);
    } else {
      TFSWITCH_ASSIGN_OR_RETURN(row, file.SearchVerified(homes[n], keys[i]));
    }
    if (row == RowFile::kNoRow) {
      left[still_left++] = i;
    } else if (file.IsRow(row)) {
      if (!is_verified) TFSWITCH_RETURN_IF_ERROR(file.VerifyRow(row));
      places->files[i] = &file;
      places->rows[i] = file.Row(row);
      PrefetchRow(places->rows[i], file.row_bytes());
    } else if (row != int64_t{kRemovedRow}) {
      return file.BadRow(keys[i], row);
    }
  }
  *num_left = still_left;
  return absl::OkStatus();
}

}  // namespace

absl::Status RowLayers::Lookup(absl::Span<const Key> keys,
                               float* embeddings) const {
  const auto width = static_cast<size_t>(dim);
  const std::vector<float>& default_row = files.front()->kind().default_row;
  uint64_t hashes[kBlock];
  uint16_t left[kBlock];
  Places places;
  for (size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const absl::Span<const Key> block = keys.subspan(begin, kBlock);
    for (size_t i = 0; i < block.size(); ++i) {
      hashes[i] = HashKey(block[i]);
      left[i] = static_cast<uint16_t>(i);
      places.files[i] = nullptr;
    }
    size_t num_left = block.size();
    for (const std::shared_ptr<const RowFile>& file : files) {
      if (num_left == 0) break;
      TFSWITCH_RETURN_IF_ERROR(
          FindIn(*file, block.data(), hashes, left, &num_left, &places));
    }
    float* to = embeddings + begin * width;
    for (size_t i = 0; i < block.size(); ++i, to += width) {
      if (places.files[i] != nullptr) {
        places.files[i]->decoder()(places.rows[i], dim, to);
      } else {
        std::copy(default_row.begin(), default_row.end(), to);
      }
    }
  }
  return absl::OkStatus();
}

bool RowLayers::IsWorthMerging() const {
  if (files.size() < 3) return false;
  const auto num_keys = [](const RowFile& file) {
    return file.num_rows() + file.num_removed();
  };
  return num_keys(*files[0]) * 2 >= num_keys(*files[1]);
}

absl::Status RowLayers::MergeNewest() {
  const RowFile& newer = *files[0];
  const RowFile& older = *files[1];
  TFSWITCH_RETURN_IF_ERROR(newer.Verify());
  TFSWITCH_RETURN_IF_ERROR(older.Verify());
  const std::string name = absl::StrCat("changes of table '", table, "'");
  const int fd = memfd_create("tfswitch-rows", MFD_CLOEXEC);
  if (fd < 0) return ErrnoStatus("make room for", name, errno);
  auto close_file = absl::MakeCleanup([fd] { close(fd); });
  const std::unique_ptr<RowFileWriter> writer =
      RowFileWriter::WriteTo(fd, name, newer.kind());
  std::vector<float> floats(static_cast<size_t>(dim));
  const auto copy = [&](const RowFile& file, Key key,
                        int64_t row) -> absl::Status {
    if (row == int64_t{kRemovedRow}) {
      writer->Remove({&key, 1});
      return absl::OkStatus();
    }
    if (!file.IsRow(row)) return file.BadRow(key, row);
    if (file.kind().format == newer.kind().format) {
      return writer->AddEncoded(key, file.Row(row));
    }
    file.decoder()(file.Row(row), dim, floats.data());
    return writer->Add({&key, 1}, floats);
  };
  TFSWITCH_RETURN_IF_ERROR(
      older.ForEachKey([&](Key key, int64_t row) -> absl::Status {
        if (newer.Search(newer.Home(HashKey(key)), key) != RowFile::kNoRow) {
          return absl::OkStatus();
        }
        return copy(older, key, row);
      }));
  TFSWITCH_RETURN_IF_ERROR(newer.ForEachKey(
      [&](Key key, int64_t row) { return copy(newer, key, row); }));
  TFSWITCH_ASSIGN_OR_RETURN(const RowFileInfo info, writer->Finish());
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<const RowFile> merged,
                            RowFile::Map(fd, name, info));
  // It has just been written; this has its pages mapped.
  TFSWITCH_RETURN_IF_ERROR(merged->Verify());
  merged->BuildFilter();
  files.erase(files.begin());
  files[0] = std::move(merged);
  return absl::OkStatus();
}

}  // namespace tfswitch
