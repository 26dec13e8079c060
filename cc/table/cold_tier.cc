#include "cc/table/cold_tier.h"

#include <unistd.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cc/base/random_id.h"
#include "cc/base/status_macros.h"

namespace tfswitch {
namespace {

constexpr char kSuffix[] = ".cold";
// Records are read in order in parts of about this size.
constexpr size_t kReadBytes = size_t{256} << 10;

// This many segments of similar size are merged into one. A row is then written
// about once for each factor of 8 between the rows of a demotion and all rows.
constexpr size_t kMergedSegments = 8;
constexpr int kLevelBits = 3;
constexpr size_t kMaxSources = 256;
// A segment with fewer live rows is written again, because the memory for its
// filter stays.
constexpr double kMinLiveShare = 0.6;
// The memory of a row during a merge: its origin, and bits of the filter.
constexpr int64_t kBytesOfMergedRow = 3;

int LevelOf(const ColdSegment& segment) {
  const auto rows =
      static_cast<uint64_t>(std::max<int64_t>(1, segment.num_live()));
  return (63 - __builtin_clzll(rows)) / kLevelBits;
}

// Reads the live records of a part of a segment in order.
//
// Thread-compatible.
class RecordReader {
 public:
  explicit RecordReader(const ColdRange::Part& part)
      : part_(part),
        format_(part.segment->format()),
        blocks_per_read_(
            std::max<uint64_t>(1, kReadBytes / format_.block_bytes)),
        first_bit_(part.begin * format_.rows_per_block / 64 * 64),
        row_(part.begin * format_.rows_per_block),
        end_row_(std::min(part.segment->num_rows(),
                          part.end * format_.rows_per_block)),
        read_end_(part.begin) {}

  // Goes to the next record. False at the end.
  absl::StatusOr<bool> Next() {
    if (record_ != nullptr) ++row_;
    record_ = nullptr;
    for (; row_ < end_row_; ++row_) {
      const uint64_t bit = row_ - first_bit_;
      const uint64_t word = part_.live[bit / 64] >> bit % 64;
      if (word == 0) row_ = std::min(end_row_, (row_ / 64 + 1) * 64) - 1;
      if ((word & 1) != 0) break;
    }
    if (row_ >= end_row_) return false;
    const uint64_t block = row_ / format_.rows_per_block;
    if (block >= read_end_) {
      read_begin_ = block;
      read_end_ = std::min(part_.end, block + blocks_per_read_);
      if (!buffer_.Reserve(blocks_per_read_ * format_.block_bytes)) {
        return absl::ResourceExhaustedError("no memory to read rows on disk");
      }
      TFSWITCH_RETURN_IF_ERROR(
          part_.segment->ReadBlocks(read_begin_, read_end_, buffer_.data()));
    }
    record_ = buffer_.data() + (block - read_begin_) * format_.block_bytes +
              row_ % format_.rows_per_block * format_.record_bytes;
    return true;
  }

  const char* record() const { return record_; }
  uint64_t row() const { return row_; }

 private:
  const ColdRange::Part& part_;
  const ColdFormat& format_;
  const uint64_t blocks_per_read_;
  const uint64_t first_bit_;
  uint64_t row_;
  const uint64_t end_row_;
  uint64_t read_begin_ = 0;
  uint64_t read_end_;
  PageBuffer buffer_;
  const char* record_ = nullptr;
};

// The search for a key on disk.
struct Search {
  size_t i;  // The index of the key.
  // The segment that may have the key. Newer ones do not have it.
  size_t segment = std::numeric_limits<size_t>::max();
  // Its blocks that may have the key.
  uint64_t begin = 0;
  uint64_t end = 0;
};

std::vector<Search> SearchesOf(absl::Span<const uint16_t> chosen) {
  std::vector<Search> searches;
  searches.reserve(chosen.size());
  for (const uint16_t i : chosen) searches.push_back({i});
  return searches;
}

// Lets each search go on to the next older segment that may have its key.
// Removes the searches for which there is none. It is faster to ask one filter
// after another for all keys, because their bits can be prefetched.
void Advance(const ColdSegments& all, absl::Span<const Key> keys,
             std::vector<Search>* searches) {
  constexpr size_t kAhead = 8;
  std::vector<Search> found;
  found.reserve(searches->size());
  for (size_t n = all.size(); n-- > 0 && !searches->empty();) {
    size_t num_left = 0;
    for (size_t s = 0; s < searches->size(); ++s) {
      if (s + kAhead < searches->size()) {
        all[n]->Prefetch(keys[(*searches)[s + kAhead].i]);
      }
      Search& search = (*searches)[s];
      if (n < search.segment && all[n]->MayContain(keys[search.i])) {
        search.segment = n;
        found.push_back(search);
      } else {
        (*searches)[num_left++] = search;
      }
    }
    searches->resize(num_left);
  }
  searches->swap(found);
}

// The blocks [begin, end) of a segment, with the rows that are live now.
ColdRange::Part PartOf(std::shared_ptr<ColdSegment> segment, uint64_t begin,
                       uint64_t end) {
  const uint64_t rows_per_block = segment->format().rows_per_block;
  const uint64_t end_row = std::min(segment->num_rows(), end * rows_per_block);
  std::vector<uint64_t> live =
      segment->LiveBits(begin * rows_per_block / 64, (end_row + 63) / 64);
  return {std::move(segment), begin, end, std::move(live)};
}

}  // namespace

ColdFolder::ColdFolder(std::string path, std::unique_ptr<FolderLock> lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

absl::StatusOr<std::shared_ptr<ColdFolder>> ColdFolder::Open(
    const std::string& path) {
  const std::string folder = AbsolutePath(path);
  TFSWITCH_RETURN_IF_ERROR(CreateFolders(folder));
  TFSWITCH_ASSIGN_OR_RETURN(auto lock,
                            FolderLock::Take(folder, absl::ZeroDuration(),
                                             [] { return absl::OkStatus(); }));
  TFSWITCH_ASSIGN_OR_RETURN(const std::vector<std::string> names,
                            ListFolder(folder));
  for (const std::string& name : names) {
    if (absl::EndsWith(name, kSuffix)) {
      unlink(absl::StrCat(folder, "/", name).c_str());
    }
  }
  auto opened = absl::WrapUnique(new ColdFolder(folder, std::move(lock)));
  // Fails now if the disk is full or read-only, and not when memory is full.
  TFSWITCH_ASSIGN_OR_RETURN(
      const auto writer,
      ColdSegmentWriter::Create(ColdFormat(1, 0), opened->NextFile(), 1));
  const std::vector<char> record(ColdFormat(1, 0).record_bytes);
  TFSWITCH_RETURN_IF_ERROR(writer->Add(0, record.data()));
  TFSWITCH_RETURN_IF_ERROR(writer->Finish().status());
  return std::shared_ptr<ColdFolder>(std::move(opened));
}

std::string ColdFolder::NextFile() {
  return absl::StrCat(path_, "/", ++num_files_, kSuffix);
}

int64_t ColdTier::file_bytes() const {
  int64_t bytes = 0;
  const auto all = segments();
  for (const auto& segment : *all) {
    bytes += static_cast<int64_t>(segment->file_bytes());
  }
  return bytes;
}

int64_t ColdTier::memory_bytes() const {
  int64_t bytes = merge_bytes_;
  const auto all = segments();
  for (const auto& segment : *all) {
    bytes += static_cast<int64_t>(segment->memory_bytes());
  }
  return bytes;
}

std::vector<uint16_t> ColdTier::FindCandidates(
    absl::Span<const Key> keys, absl::Span<const uint16_t> chosen) const {
  std::vector<Search> searches = SearchesOf(chosen);
  Advance(*segments(), keys, &searches);
  std::vector<uint16_t> found;
  found.reserve(searches.size());
  for (const Search& search : searches) {
    found.push_back(static_cast<uint16_t>(search.i));
  }
  return found;
}

absl::Status ColdTier::Find(absl::Span<const Key> keys,
                            absl::Span<const uint16_t> chosen,
                            ColdBatch* batch) const {
  batch->segments = segments();
  const ColdSegments& all = *batch->segments;
  std::vector<Search> pending = SearchesOf(chosen);
  using Request = std::pair<size_t, uint64_t>;  // A segment and a block.
  std::vector<Request> requests;
  for (;;) {
    Advance(all, keys, &pending);
    if (pending.empty()) return absl::OkStatus();
    requests.clear();
    for (Search& key : pending) {
      const ColdPlace place = place_of_(keys[key.i]);
      std::tie(key.begin, key.end) =
          all[key.segment]->BlocksOf(place, place + 1);
      for (uint64_t block = key.begin; block < key.end; ++block) {
        requests.emplace_back(key.segment, block);
      }
    }
    std::sort(requests.begin(), requests.end());
    requests.erase(std::unique(requests.begin(), requests.end()),
                   requests.end());
    PageBuffer& buffer = batch->buffers.emplace_back();
    if (!buffer.Reserve(requests.size() * format_.block_bytes)) {
      return absl::ResourceExhaustedError("no memory to read rows on disk");
    }
    num_reads_ += static_cast<int64_t>(requests.size());
    std::vector<FileRead> reads;
    reads.reserve(requests.size());
    for (const auto& [segment, block] : requests) {
      reads.push_back(all[segment]->ReadOf(
          block, buffer.data() + reads.size() * format_.block_bytes));
    }
    std::vector<absl::Status> statuses(requests.size());
    folder_->reads().Run(reads, [&](size_t r, bool whole) {
      const auto& [segment, block] = requests[r];
      statuses[r] =
          whole ? all[segment]->Check(block, block + 1, reads[r].to)
                : all[segment]->ReadBlocks(block, block + 1, reads[r].to);
    });
    for (const absl::Status& status : statuses) {
      TFSWITCH_RETURN_IF_ERROR(status);
    }
    const auto find_in_block = [&](const Search& key, uint64_t block) {
      const auto at = std::lower_bound(requests.begin(), requests.end(),
                                       Request(key.segment, block));
      const char* record =
          buffer.data() +
          static_cast<size_t>(at - requests.begin()) * format_.block_bytes;
      ColdSegment* const segment = all[key.segment].get();
      const uint64_t num_rows = segment->RowsInBlock(block);
      for (uint64_t n = 0; n < num_rows; ++n, record += format_.record_bytes) {
        if (ColdFormat::KeyOf(record) != keys[key.i]) continue;
        const uint64_t row = block * format_.rows_per_block + n;
        if (!segment->IsLive(row)) return false;
        batch->hits.push_back({key.i, segment, row, record});
        return true;
      }
      return false;
    };
    pending.erase(std::remove_if(pending.begin(), pending.end(),
                                 [&](const Search& key) {
                                   for (uint64_t b = key.begin; b < key.end;
                                        ++b) {
                                     if (find_in_block(key, b)) return true;
                                   }
                                   return false;
                                 }),
                  pending.end());
  }
}

ColdRange ColdTier::Collect(ColdPlace begin, ColdPlace end,
                            uint32_t min_stamp) const {
  ColdRange range{begin, end, {}};
  const auto all = segments();
  for (const auto& segment : *all) {
    if (segment->max_stamp() < min_stamp) continue;
    const auto [first, last] = segment->BlocksOf(begin, end);
    if (first < last) range.parts.push_back(PartOf(segment, first, last));
  }
  return range;
}

absl::Status ColdTier::Visit(
    const ColdRange& range,
    absl::FunctionRef<absl::Status(const ColdHit& hit)> visit) const {
  for (const ColdRange::Part& part : range.parts) {
    for (RecordReader reader(part);;) {
      TFSWITCH_ASSIGN_OR_RETURN(const bool has_more, reader.Next());
      if (!has_more) break;
      const ColdPlace place = place_of_(ColdFormat::KeyOf(reader.record()));
      if (place < range.begin || place >= range.end) continue;
      TFSWITCH_RETURN_IF_ERROR(
          visit({0, part.segment.get(), reader.row(), reader.record()}));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<ColdSegmentWriter>> ColdTier::NewSegment(
    uint64_t max_rows) const {
  return ColdSegmentWriter::Create(format_, folder_->NextFile(), max_rows);
}

void ColdTier::Add(std::shared_ptr<ColdSegment> segment) {
  written_bytes_ += static_cast<int64_t>(segment->file_bytes());
  MutexLock lock(&mutex_);
  auto changed = std::make_shared<ColdSegments>(*segments_);
  changed->push_back(std::move(segment));
  segments_ = std::move(changed);
}

ColdSegments ColdTier::ChooseRun() const {
  const auto all = segments();
  int max_level = 0;
  for (const auto& segment : *all) {
    max_level = std::max(max_level, LevelOf(*segment));
  }
  // The newest segment is left out, because its rows may not be live yet.
  const size_t size = all->empty() ? 0 : all->size() - 1;
  for (size_t i = 0; i < size; ++i) {
    if ((*all)[i]->num_live() == 0) return {(*all)[i]};
  }
  for (int level = 0; level <= max_level; ++level) {
    size_t begin = 0;
    size_t num_of_level = 0;
    for (size_t i = 0; i < size; ++i) {
      const int its_level = LevelOf(*(*all)[i]);
      if (its_level > level || (*all)[i]->is_damaged()) {
        begin = i + 1;
        num_of_level = 0;
        continue;
      }
      // A merge of many small segments with one large one would write the large
      // one again and again.
      if (its_level == level) ++num_of_level;
      if (num_of_level < kMergedSegments && i + 1 - begin < kMaxSources) {
        continue;
      }
      return {all->begin() + static_cast<std::ptrdiff_t>(begin),
              all->begin() + static_cast<std::ptrdiff_t>(i + 1)};
    }
  }
  for (size_t i = 0; i < size; ++i) {
    const auto& segment = (*all)[i];
    if (!segment->is_damaged() &&
        static_cast<double>(segment->num_live()) <
            kMinLiveShare * static_cast<double>(segment->num_rows())) {
      return {segment};
    }
  }
  return {};
}

absl::StatusOr<std::unique_ptr<ColdMerge>> ColdTier::WriteMerge(
    const std::atomic<bool>& stops) const {
  const ColdSegments run = ChooseRun();
  if (run.empty()) return nullptr;
  auto merge = std::make_unique<ColdMerge>();
  std::vector<ColdRange::Part> parts;
  uint64_t num_rows = 0;
  for (const auto& segment : run) {
    parts.push_back(PartOf(segment, 0, segment->num_blocks()));
    merge->sources.push_back({segment, parts.back().live, 0});
    for (const uint64_t word : parts.back().live) {
      num_rows += static_cast<uint64_t>(__builtin_popcountll(word));
    }
  }
  if (num_rows == 0) return merge;
  std::vector<RecordReader> readers;
  readers.reserve(parts.size());
  // The next record of each source, the lowest place last.
  std::vector<std::pair<ColdPlace, size_t>> next;
  const auto advance = [&](size_t source) -> absl::Status {
    TFSWITCH_ASSIGN_OR_RETURN(const bool has_more, readers[source].Next());
    if (!has_more) return absl::OkStatus();
    const std::pair<ColdPlace, size_t> record{
        place_of_(ColdFormat::KeyOf(readers[source].record())), source};
    next.insert(
        std::lower_bound(next.begin(), next.end(), record, std::greater<>()),
        record);
    return absl::OkStatus();
  };
  for (size_t source = 0; source < parts.size(); ++source) {
    readers.emplace_back(parts[source]);
    TFSWITCH_RETURN_IF_ERROR(advance(source));
  }
  TFSWITCH_ASSIGN_OR_RETURN(const auto writer, NewSegment(num_rows));
  merge->origins.reserve(num_rows);
  merge_bytes_ = static_cast<int64_t>(num_rows) * kBytesOfMergedRow;
  const absl::Cleanup end = [this] { merge_bytes_ = 0; };
  int stripe = 0;
  while (!next.empty()) {
    if (stops) return absl::CancelledError("the table ends");
    const auto [place, source] = next.back();
    next.pop_back();
    for (; stripe < static_cast<int>(place >> 32); ++stripe) {
      merge->begins[stripe + 1] = merge->origins.size();
    }
    TFSWITCH_RETURN_IF_ERROR(writer->Add(place, readers[source].record()));
    merge->origins.push_back(static_cast<uint8_t>(source));
    TFSWITCH_RETURN_IF_ERROR(advance(source));
  }
  for (; stripe < kNumStripes; ++stripe) {
    merge->begins[stripe + 1] = merge->origins.size();
  }
  TFSWITCH_ASSIGN_OR_RETURN(merge->target, writer->Finish());
  written_bytes_ += static_cast<int64_t>(merge->target->file_bytes());
  return merge;
}

void ColdTier::BeginMove(const ColdMerge& merge) {
  if (merge.target == nullptr) return;
  MutexLock lock(&mutex_);
  auto changed = std::make_shared<ColdSegments>(*segments_);
  // In the place of the sources, so that the list stays sorted by age.
  changed->insert(std::find(changed->begin(), changed->end(),
                            merge.sources.front().segment),
                  merge.target);
  segments_ = std::move(changed);
}

void ColdTier::MoveStripe(int stripe, ColdMerge* merge) {
  for (uint64_t row = merge->begins[stripe]; row < merge->begins[stripe + 1];
       ++row) {
    ColdMerge::Source& source = merge->sources[merge->origins[row]];
    uint64_t word = source.live[source.next / 64] >> source.next % 64;
    while (word == 0) {
      source.next = (source.next / 64 + 1) * 64;
      word = source.live[source.next / 64];
    }
    const uint64_t from =
        source.next + static_cast<uint64_t>(__builtin_ctzll(word));
    source.next = from + 1;
    // The row may have gone back to memory since it was copied.
    if (!source.segment->IsLive(from)) continue;
    merge->target->SetLive(row);
    source.segment->EndLife(from);
  }
}

void ColdTier::EndMove(const ColdMerge& merge) {
  MutexLock lock(&mutex_);
  auto changed = std::make_shared<ColdSegments>();
  for (const auto& segment : *segments_) {
    const bool is_source = std::any_of(
        merge.sources.begin(), merge.sources.end(),
        [&](const auto& source) { return source.segment == segment; });
    if (!is_source) changed->push_back(segment);
  }
  segments_ = std::move(changed);
}

}  // namespace tfswitch
