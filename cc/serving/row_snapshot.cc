// A lookup works on blocks of kBlock keys. For each block it reads the files
// from the newest to the oldest. `left` has the indices of keys that were not
// found so far. Within a file the pilot of a key is prefetched 2 * kAhead keys
// before it is needed, and its record kAhead keys before, so that cache misses
// overlap. A delta's filter skips most keys that the delta does not have.
//
// ReadFrom() is compiled in two versions, because a fully verified file needs
// no checks during reads. MergeNewest() keeps the list of removed keys, because
// older files may have rows for them.

#include "cc/serving/row_snapshot.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/base/files.h"
#include "cc/base/racy_memory.h"
#include "cc/base/status_macros.h"
#include "cc/serving/row_file_writer.h"

namespace tfswitch {
namespace {

// The number of keys that are looked up together.
constexpr size_t kBlock = 1024;
// How many searches run at the same time, so that their cache misses overlap.
constexpr size_t kAhead = 32;
// Prefetches into the second-level cache, which can wait for more lines at a
// time.
constexpr int kLocality = 2;
constexpr size_t kLineBytes = 64;
// For longer rows, the hardware prefetches the further lines itself.
constexpr size_t kMaxPrefetchLines = 8;

// Always inlined, because compilers remove calls of functions that do nothing
// but prefetch.
TFSWITCH_ALWAYS_INLINE void PrefetchRecord(const char* record, size_t bytes) {
  bytes = std::min(bytes, kMaxPrefetchLines * kLineBytes);
  for (size_t at = 0; at < bytes; at += kLineBytes) {
    __builtin_prefetch(record + at, /*rw=*/0, kLocality);
  }
  // The record may begin inside a cache line, so its last byte may be in one
  // more line.
  __builtin_prefetch(record + bytes - 1, /*rw=*/0, kLocality);
}

// Divides `left` by the filter. Keys that are certainly not in the file come
// first; the others follow. Returns how many come first.
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
    // Writes to both lists, because a branch would cost more. The entry in the
    // wrong list is overwritten later.
    maybe[num_maybe] = i;
    left[num_passed] = i;
    num_maybe += static_cast<size_t>(is_maybe);
    num_passed += static_cast<size_t>(!is_maybe);
  }
  std::copy(maybe, maybe + num_maybe, left + num_passed);
  return num_passed;
}

// Reads the rows of keys from one file. At the start `left` has the indices of
// the keys that no newer file has. At the end it has those that this file does
// not have, either.
template <bool kIsVerified>
absl::Status ReadFrom(const RowFile& file, const Key* keys,
                      const uint64_t* hashes, uint16_t* left, size_t* num_left,
                      const float* default_row, float* embeddings) {
  // Makes a copy of the view, so that compilers know that stores to
  // `embeddings` do not change the view.
  const RowFile::View view = file.view();
  if (view.num_slots == 0) return absl::OkStatus();
  const KeyFilter* const filter = file.filter();
  const size_t begin =
      filter == nullptr ? 0 : PassOver(*filter, hashes, left, *num_left);
  const size_t end = *num_left;
  const RowDecoder decode = file.decoder();
  const int dim = file.kind().dim;
  uint64_t points[kBlock];
  uint64_t slots[kBlock];
  const auto find_pilot = [&](size_t n) {
    if (n >= end) return;
    points[n] = view.hash.PointOf(hashes[left[n]]);
    __builtin_prefetch(view.Pilot(points[n]));
  };
  const auto find_slot = [&](size_t n) -> absl::Status {
    if (n >= end) return absl::OkStatus();
    if (!kIsVerified) TFSWITCH_RETURN_IF_ERROR(file.VerifyPilot(points[n]));
    slots[n] = view.Slot(points[n]);
    PrefetchRecord(view.Record(slots[n]), view.record_bytes);
    return absl::OkStatus();
  };
  for (size_t n = begin; n < begin + 2 * kAhead; ++n) find_pilot(n);
  for (size_t n = begin; n < begin + kAhead; ++n) {
    TFSWITCH_RETURN_IF_ERROR(find_slot(n));
  }
  size_t still_left = begin;
  for (size_t n = begin; n < end; ++n) {
    find_pilot(n + 2 * kAhead);
    TFSWITCH_RETURN_IF_ERROR(find_slot(n + kAhead));
    const uint64_t slot = slots[n];
    if (!kIsVerified) TFSWITCH_RETURN_IF_ERROR(file.VerifyRecord(slot));
    const char* const record = view.Record(slot);
    const uint16_t i = left[n];
    if (RowFile::KeyOf(record) != keys[i]) {
      left[still_left++] = i;
      continue;
    }
    float* const to = embeddings + i * static_cast<size_t>(dim);
    if (view.IsRemoved(slot)) {
      std::copy(default_row, default_row + dim, to);
    } else {
      decode(RowFile::RowOf(record), dim, to);
    }
  }
  *num_left = still_left;
  return absl::OkStatus();
}

}  // namespace

absl::Status RowLayers::CheckUnchanged() const {
  for (const std::shared_ptr<const RowFile>& file : files) {
    TFSWITCH_RETURN_IF_ERROR(file->CheckUnchanged());
  }
  return absl::OkStatus();
}

absl::Status RowLayers::Lookup(absl::Span<const Key> keys,
                               float* embeddings) const {
  TFSWITCH_RETURN_IF_ERROR(CheckUnchanged());
  const auto width = static_cast<size_t>(dim);
  const float* const default_row = files.front()->kind().default_row.data();
  uint64_t hashes[kBlock];
  uint16_t left[kBlock];
  for (size_t begin = 0; begin < keys.size(); begin += kBlock) {
    const absl::Span<const Key> block = keys.subspan(begin, kBlock);
    float* const to = embeddings + begin * width;
    for (size_t i = 0; i < block.size(); ++i) {
      hashes[i] = HashKey(block[i]);
      left[i] = static_cast<uint16_t>(i);
    }
    size_t num_left = block.size();
    for (const std::shared_ptr<const RowFile>& file : files) {
      if (num_left == 0) break;
      const auto read =
          file->is_verified() ? &ReadFrom<true> : &ReadFrom<false>;
      TFSWITCH_RETURN_IF_ERROR(
          read(*file, block.data(), hashes, left, &num_left, default_row, to));
    }
    for (size_t n = 0; n < num_left; ++n) {
      std::copy(default_row, default_row + width, to + left[n] * width);
    }
  }
  return CheckUnchanged();
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
  writer->Reserve(static_cast<size_t>(newer.num_rows() + newer.num_removed() +
                                      older.num_rows() + older.num_removed()));
  std::vector<float> floats(static_cast<size_t>(dim));
  const auto copy = [&](const RowFile& file, Key key,
                        const char* row) -> absl::Status {
    if (row == nullptr) {
      writer->Remove({&key, 1});
      return absl::OkStatus();
    }
    if (file.kind().format == newer.kind().format) {
      return writer->AddEncoded(key, row);
    }
    file.decoder()(row, dim, floats.data());
    return writer->Add({&key, 1}, floats);
  };
  for (const RowFile* const file : {&older, &newer}) {
    TFSWITCH_RETURN_IF_ERROR(
        file->ForEachKey([&](Key key, const char* row) -> absl::Status {
          if (file == &older && newer.MayHave(key) && newer.Find(key).is_here) {
            return absl::OkStatus();
          }
          return copy(*file, key, row);
        }));
  }
  // Checks that the two files did not change during the merge. Changes after
  // this do not affect the merged file, which is a copy.
  TFSWITCH_RETURN_IF_ERROR(newer.CheckUnchangedNow());
  TFSWITCH_RETURN_IF_ERROR(older.CheckUnchangedNow());
  TFSWITCH_ASSIGN_OR_RETURN(const RowFileInfo info, writer->Finish());
  TFSWITCH_ASSIGN_OR_RETURN(std::shared_ptr<const RowFile> merged,
                            RowFile::Copy(fd, name, info));
  TFSWITCH_RETURN_IF_ERROR(merged->Verify());
  merged->BuildFilter();
  files.erase(files.begin());
  files[0] = std::move(merged);
  return absl::OkStatus();
}

}  // namespace tfswitch
