#include "cc/table/embedding_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cc/base/cpu_features.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/racy_memory.h"
#include "cc/base/spin_wait.h"
#include "cc/base/status_macros.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/batch_kernels.h"
#include "cc/table/initializer.h"
#include "cc/table/row_store.h"
#include "cc/table/stripe_index.h"

namespace tfswitch {
namespace {

// Address space of a table, in terms of physical memory: rows may take twice
// of it and the two index arrays a half each, because keys do not spread
// perfectly evenly over the stripes.
constexpr size_t kRowShare = 8;
constexpr size_t kIndexShare = 32;
constexpr size_t kMinSpanBytes = 2 * kHugePageBytes;

// How far ahead of the key in work buckets and rows are prefetched while a
// stripe is locked.
constexpr uint32_t kLockedDistance = 12;

// Buckets per step of ForEachRow, that is the longest that a stripe is locked.
constexpr uint64_t kMaxBucketsPerVisit = 1024;

struct Stripe {
  Mutex mutex;
  // The mutex guards what the two call thread-compatible; readers go by the
  // rules of bucket.h instead, hence no GUARDED_BY.
  StripeIndex index;
  RowStore rows;
  // Written under the mutex, read by anyone.
  std::atomic<int64_t> inserted_rows{0};
  std::atomic<int64_t> erased_rows{0};
};

// The positions of a block of keys, grouped by stripe; within a stripe in the
// order of the batch.
class StripeGroups {
 public:
  // Takes the positions in `chosen`, or all of them if it is null.
  StripeGroups(const Key* keys, uint32_t num_keys, const uint16_t* chosen) {
    uint32_t counts[kNumStripes] = {};
    for (uint32_t i = 0; i < num_keys; ++i) {
      ++counts[StripeOfHash(HashKey(keys[chosen ? chosen[i] : i]))];
    }
    begins_[0] = 0;
    uint32_t ends[kNumStripes];
    for (int s = 0; s < kNumStripes; ++s) {
      ends[s] = begins_[s];
      begins_[s + 1] = begins_[s] + counts[s];
    }
    for (uint32_t i = 0; i < num_keys; ++i) {
      const uint32_t position = chosen ? chosen[i] : i;
      positions_[ends[StripeOfHash(HashKey(keys[position]))]++] =
          static_cast<uint16_t>(position);
    }
  }

  absl::Span<const uint16_t> operator[](int stripe) const {
    return {positions_ + begins_[stripe],
            begins_[stripe + 1] - begins_[stripe]};
  }

 private:
  uint32_t begins_[kNumStripes + 1];
  uint16_t positions_[kMaxKernelKeys];
};

}  // namespace

class EmbeddingTable::Impl {
 public:
  static absl::StatusOr<std::unique_ptr<Impl>> Create(
      const TableConfig& config);

  absl::StatusOr<int64_t> Find(absl::Span<const Key> keys, float* embeddings);
  absl::Status FindOrInsert(absl::Span<const Key> keys, float* embeddings);
  absl::StatusOr<int64_t> ApplyGradients(absl::Span<const Key> keys,
                                         const float* gradients,
                                         float learning_rate,
                                         bool insert_missing);
  // `slots` may be null: slots stay, or start with their initial values.
  absl::StatusOr<int64_t> Assign(absl::Span<const Key> keys,
                                 const float* embeddings, const float* slots,
                                 bool only_missing);
  int64_t Erase(absl::Span<const Key> keys);
  absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit);
  int64_t size() const;
  TableStats stats();

  // InvalidArgument unless `got` floats are num_keys x width.
  absl::Status CheckFloats(const char* what, size_t num_keys,
                           const char* width_name, int width, size_t got) const;

  const TableConfig config;
  const Optimizer optimizer;

 private:
  // Reads and steps single keys for the kernels, waiting where they did not.
  class PatientSink;

  Impl(const TableConfig& table_config, MemoryReservation reservation);

  bool Init();
  KernelBatch MakeBatch(absl::Span<const Key> block, IndexView* views,
                        PatientSink* retry, uint16_t* missing) const;

  // Calls work(stripe, position) under the stripe's mutex for each position of
  // the groups, prefetching ahead; `work` returns a Status.
  template <typename Work>
  absl::Status ForEachLocked(const Key* keys, const StripeGroups& groups,
                             const Work& work);

  // Gives an absent key a row which fill(floats) has completed: the initial
  // embedding and slots are already there. The stripe's mutex is held.
  template <typename Fill>
  absl::Status InsertLocked(Stripe* stripe, Key key, uint32_t position,
                            const Fill& fill);

  // Calls modify(floats) on the row of an entry with its bucket locked. The
  // stripe's mutex is held, so that the entry stays.
  template <typename Modify>
  void ModifyLocked(Stripe* stripe, StripeIndex::Entry entry,
                    const Modify& modify);

  // Copies floats [0, count) of the row; the stripe's mutex is held.
  void CopyLocked(Stripe* stripe, StripeIndex::Entry entry, float* to,
                  size_t count);

  absl::Status OutOfMemory() const;

  const Initializer initializer_;
  const int row_floats_;
  const size_t stride_;
  const BatchKernels kernels_;
  // Before the stripes, which use it until they are destroyed.
  const MemoryReservation reservation_;
  std::array<Stripe, kNumStripes> stripes_;
};

class EmbeddingTable::Impl::PatientSink final : public RetrySink {
 public:
  PatientSink(const Impl* table, IndexView* views, float learning_rate = 0.0f)
      : table_(table), views_(views), learning_rate_(learning_rate) {}

  const uint32_t& num_refreshes() const { return num_refreshes_; }

  bool Read(Key key, float* embedding) override {
    return Retry(key, [&](Bucket* bucket, uint32_t meta, int, float* row) {
      RacyLoadFloats(embedding, row, static_cast<size_t>(table_->config.dim));
      return IsUnchanged(bucket, meta);
    });
  }

  bool Step(Key key, const float* gradient) override {
    return Retry(
        key, [&](Bucket* bucket, uint32_t meta, int entry, float* row) {
          if (!TryLockBucket(bucket, meta)) return false;
          const bool is_ours = RacyLoad(&bucket->keys[entry]) == key;
          if (is_ours) {
            RacyModifyFloats(row, table_->row_floats_, [&](float* floats) {
              table_->optimizer.Step(floats, gradient, {learning_rate_});
            });
          }
          UnlockBucket(bucket, meta);
          return is_ours;
        });
  }

 private:
  // Searches until use(bucket, meta, entry, row) returns true, or the key is
  // surely absent. Refreshes the view of the stripe for later keys, too.
  template <typename Use>
  bool Retry(Key key, const Use& use) {
    const uint64_t hash = HashKey(key);
    const uint32_t stripe = StripeOfHash(hash);
    IndexView& view = views_[stripe];
    SpinWait wait;
    for (;; wait.Pause()) {
      view = table_->stripes_[stripe].index.View();
      ++num_refreshes_;
      Bucket* bucket = HomeBucket(view, PositionOfHash(hash));
      for (;; ++bucket) {
        const uint32_t meta = LoadMeta(bucket);
        if (!IsReadable(meta)) break;
        const int entry = FindEntry(bucket, meta, key);
        if (entry >= 0) {
          float* const row = reinterpret_cast<float*>(
              view.rows + RacyLoad(&bucket->rows[entry]) * table_->stride_);
          if (use(bucket, meta, entry, row)) return true;
          break;
        }
        if (!IsUnchanged(bucket, meta)) break;
        if (!HasOverflow(meta)) {
          if (IsPhase(view, view.phase)) return false;
          break;
        }
      }
    }
  }

  static int FindEntry(const Bucket* bucket, uint32_t meta, Key key) {
    for (int i = 0; i < static_cast<int>(UsedOf(meta)); ++i) {
      if (RacyLoad(&bucket->keys[i]) == key) return i;
    }
    return -1;
  }

  const Impl* const table_;
  IndexView* const views_;
  uint32_t num_refreshes_ = 0;
  const float learning_rate_;
};

EmbeddingTable::Impl::Impl(const TableConfig& table_config,
                           MemoryReservation reservation)
    : config(table_config),
      optimizer(config.optimizer, config.dim),
      initializer_(config.initializer, config.seed, config.dim),
      row_floats_(config.dim + optimizer.slot_floats()),
      stride_(RowStride(row_floats_)),
      kernels_(ActiveSimdLevel() == SimdLevel::kAvx2
                   ? avx2::FindBatchKernels(config.dim)
                   : scalar::FindBatchKernels(config.dim)),
      reservation_(std::move(reservation)) {}

absl::StatusOr<std::unique_ptr<EmbeddingTable::Impl>>
EmbeddingTable::Impl::Create(const TableConfig& config) {
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  const size_t memory = PhysicalMemoryBytes();
  auto reservation = MemoryReservation::Create(
      kNumStripes * (memory / kRowShare + 2 * (memory / kIndexShare)),
      kNumStripes * 6 * kMinSpanBytes);
  if (!reservation.ok()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "table '", config.name, "': ", reservation.status().message()));
  }
  std::unique_ptr<Impl> impl(new Impl(config, std::move(reservation).value()));
  if (!impl->Init()) return impl->OutOfMemory();
  return impl;
}

bool EmbeddingTable::Impl::Init() {
  // A sixth of it for each of the two index arrays, the rest for rows.
  const size_t stripe_bytes =
      RoundDownTo(reservation_.size() / kNumStripes, kHugePageBytes);
  const size_t index_bytes = RoundDownTo(stripe_bytes / 6, kHugePageBytes);
  for (int s = 0; s < kNumStripes; ++s) {
    const size_t at = s * stripe_bytes;
    const size_t rows_at = at + 2 * index_bytes;
    Stripe& stripe = stripes_[s];
    stripe.rows.Init(reservation_.Span(rows_at, stripe_bytes - 2 * index_bytes),
                     stride_);
    // Growth x1.4 is a sixteenth of it out of step from stripe to stripe, so
    // that the stripes do not grow all at once and the memory per key of the
    // table is always the mean over a cycle.
    const auto num_buckets = static_cast<uint64_t>(
        36.0 * std::pow(1.4, static_cast<double>(s) / kNumStripes));
    if (!stripe.index.Init(reservation_.Span(at, index_bytes),
                           reservation_.Span(at + index_bytes, index_bytes),
                           num_buckets, reservation_.data() + rows_at)) {
      return false;
    }
  }
  return true;
}

absl::Status EmbeddingTable::Impl::OutOfMemory() const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", config.name, "': no memory for another row beside ", size(),
      "; erase rows, or spread the table over more servers"));
}

absl::Status EmbeddingTable::Impl::CheckFloats(const char* what,
                                               size_t num_keys,
                                               const char* width_name,
                                               int width, size_t got) const {
  const size_t expected = num_keys * static_cast<size_t>(width);
  if (got == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "table '", config.name, "': expected ", expected, " floats of ", what,
      " (", num_keys, " keys x ", width_name, " ", width, "), got ", got));
}

KernelBatch EmbeddingTable::Impl::MakeBatch(absl::Span<const Key> block,
                                            IndexView* views,
                                            PatientSink* retry,
                                            uint16_t* missing) const {
  for (int s = 0; s < kNumStripes; ++s) views[s] = stripes_[s].index.View();
  KernelBatch batch;
  batch.keys = block.data();
  batch.num_keys = static_cast<uint32_t>(block.size());
  batch.dim = config.dim;
  batch.row_bytes = static_cast<size_t>(row_floats_) * sizeof(float);
  batch.stride = stride_;
  batch.views = views;
  batch.retry = retry;
  batch.num_refreshes = &retry->num_refreshes();
  batch.missing = missing;
  return batch;
}

template <typename Work>
absl::Status EmbeddingTable::Impl::ForEachLocked(const Key* keys,
                                                 const StripeGroups& groups,
                                                 const Work& work) {
  for (int s = 0; s < kNumStripes; ++s) {
    const absl::Span<const uint16_t> group = groups[s];
    if (group.empty()) continue;
    Stripe& stripe = stripes_[s];
    MutexLock lock(&stripe.mutex);
    for (size_t i = 0; i < group.size(); ++i) {
      if (i + kLockedDistance < group.size()) {
        __builtin_prefetch(stripe.index.Home(
            PositionOfHash(HashKey(keys[group[i + kLockedDistance]]))));
      }
      TFSWITCH_RETURN_IF_ERROR(work(&stripe, uint32_t{group[i]}));
    }
  }
  return absl::OkStatus();
}

template <typename Fill>
absl::Status EmbeddingTable::Impl::InsertLocked(Stripe* stripe, Key key,
                                                uint32_t position,
                                                const Fill& fill) {
  uint32_t row;
  if (!stripe->rows.Allocate(&row)) return OutOfMemory();
  RacyModifyFloats(stripe->rows.At(row), row_floats_, [&](float* floats) {
    initializer_.Fill(key, floats);
    optimizer.InitSlots(floats + config.dim);
    fill(floats);
  });
  if (!stripe->index.Insert(key, position, row)) {
    stripe->rows.Free(row);
    return OutOfMemory();
  }
  stripe->inserted_rows.store(
      stripe->inserted_rows.load(std::memory_order_relaxed) + 1,
      std::memory_order_relaxed);
  return absl::OkStatus();
}

template <typename Modify>
void EmbeddingTable::Impl::ModifyLocked(Stripe* stripe,
                                        StripeIndex::Entry entry,
                                        const Modify& modify) {
  const uint32_t meta = LockBucket(entry.bucket);
  const uint32_t row = RacyLoad(&entry.bucket->rows[entry.at]);
  RacyModifyFloats(stripe->rows.At(row), row_floats_, modify);
  UnlockBucket(entry.bucket, meta);
}

void EmbeddingTable::Impl::CopyLocked(Stripe* stripe, StripeIndex::Entry entry,
                                      float* to, size_t count) {
  const float* const row =
      stripe->rows.At(RacyLoad(&entry.bucket->rows[entry.at]));
  SpinWait wait;
  for (;; wait.Pause()) {
    const uint32_t meta = LoadMeta(entry.bucket);
    if ((meta & kMetaLocked) != 0) continue;
    RacyLoadFloats(to, row, count);
    if (IsUnchanged(entry.bucket, meta)) return;
  }
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Find(absl::Span<const Key> keys,
                                                   float* embeddings) {
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  const size_t dim = static_cast<size_t>(config.dim);
  int64_t num_found = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    float* const to = embeddings + begin * dim;
    const uint32_t num_missing =
        kernels_.read(MakeBatch(block, views, &retry, missing), to);
    for (uint32_t i = 0; i < num_missing; ++i) {
      std::fill_n(to + missing[i] * dim, dim, 0.0f);
    }
    num_found += static_cast<int64_t>(block.size() - num_missing);
  }
  return num_found;
}

absl::Status EmbeddingTable::Impl::FindOrInsert(absl::Span<const Key> keys,
                                                float* embeddings) {
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  const size_t dim = static_cast<size_t>(config.dim);
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    float* const to = embeddings + begin * dim;
    const uint32_t num_missing =
        kernels_.read(MakeBatch(block, views, &retry, missing), to);
    if (num_missing == 0) continue;
    const StripeGroups groups(block.data(), num_missing, missing);
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const Key key = block[i];
          const uint32_t position = PositionOfHash(HashKey(key));
          // Another thread, or the same key earlier in the batch.
          const StripeIndex::Entry entry = stripe->index.Find(key, position);
          if (entry.bucket != nullptr) {
            CopyLocked(stripe, entry, to + i * dim, dim);
            return absl::OkStatus();
          }
          return InsertLocked(stripe, key, position, [&](const float* row) {
            std::copy_n(row, dim, to + i * dim);
          });
        }));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::ApplyGradients(
    absl::Span<const Key> keys, const float* gradients, float learning_rate,
    bool insert_missing) {
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views, learning_rate);
  const size_t dim = static_cast<size_t>(config.dim);
  int64_t num_updated = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const float* const from = gradients + begin * dim;
    const uint32_t num_missing =
        kernels_.step(MakeBatch(block, views, &retry, missing), optimizer, from,
                      learning_rate);
    num_updated += static_cast<int64_t>(block.size() - num_missing);
    if (num_missing == 0 || !insert_missing) continue;
    const StripeGroups groups(block.data(), num_missing, missing);
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const Key key = block[i];
          const uint32_t position = PositionOfHash(HashKey(key));
          const auto step = [&](float* row) {
            optimizer.Step(row, from + i * dim, {learning_rate});
          };
          ++num_updated;
          const StripeIndex::Entry entry = stripe->index.Find(key, position);
          if (entry.bucket != nullptr) {
            ModifyLocked(stripe, entry, step);
            return absl::OkStatus();
          }
          return InsertLocked(stripe, key, position, step);
        }));
  }
  return num_updated;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Assign(absl::Span<const Key> keys,
                                                     const float* embeddings,
                                                     const float* slots,
                                                     bool only_missing) {
  int64_t num_assigned = 0;
  const size_t dim = static_cast<size_t>(config.dim);
  const size_t slot_floats = static_cast<size_t>(optimizer.slot_floats());
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const StripeGroups groups(block.data(), static_cast<uint32_t>(block.size()),
                              nullptr);
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const Key key = block[i];
          const uint32_t position = PositionOfHash(HashKey(key));
          const auto set = [&](float* row) {
            std::copy_n(embeddings + (begin + i) * dim, dim, row);
            if (slots != nullptr) {
              std::copy_n(slots + (begin + i) * slot_floats, slot_floats,
                          row + dim);
            }
          };
          const StripeIndex::Entry entry = stripe->index.Find(key, position);
          if (entry.bucket != nullptr && only_missing) return absl::OkStatus();
          ++num_assigned;
          if (entry.bucket != nullptr) {
            ModifyLocked(stripe, entry, set);
            return absl::OkStatus();
          }
          return InsertLocked(stripe, key, position, set);
        }));
  }
  return num_assigned;
}

int64_t EmbeddingTable::Impl::Erase(absl::Span<const Key> keys) {
  int64_t num_erased = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const StripeGroups groups(block.data(), static_cast<uint32_t>(block.size()),
                              nullptr);
    const absl::Status status =
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const uint32_t position = PositionOfHash(HashKey(block[i]));
          const StripeIndex::Entry entry =
              stripe->index.Find(block[i], position);
          if (entry.bucket == nullptr) return absl::OkStatus();
          const uint32_t row = RacyLoad(&entry.bucket->rows[entry.at]);
          stripe->index.Erase(entry, position);
          // No one can lock the row any more, and a reader that is still
          // copying it will see that its bucket has changed.
          stripe->rows.Free(row);
          stripe->erased_rows.store(
              stripe->erased_rows.load(std::memory_order_relaxed) + 1,
              std::memory_order_relaxed);
          ++num_erased;
          return absl::OkStatus();
        });
    status.IgnoreError();  // The work above cannot fail.
  }
  return num_erased;
}

absl::Status EmbeddingTable::Impl::ForEachRow(
    int64_t max_rows,
    const std::function<absl::Status(const RowChunk&)>& visit) {
  if (max_rows <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", config.name, "': max_rows: expected a positive number, got ",
        max_rows));
  }
  const size_t dim = static_cast<size_t>(config.dim);
  const size_t slot_floats = static_cast<size_t>(optimizer.slot_floats());
  const uint64_t buckets_per_visit = std::clamp<uint64_t>(
      static_cast<uint64_t>(max_rows) / kKeysPerBucket, 1, kMaxBucketsPerVisit);
  std::vector<float> row(row_floats_);
  std::vector<Key> keys;
  std::vector<float> embeddings;
  std::vector<float> slots;
  for (Stripe& stripe : stripes_) {
    // A key's position in the hash never changes, whereas its bucket does when
    // the index grows: so we go through ranges of positions, each under the
    // mutex, and meet a key exactly in the step of its position.
    for (uint64_t begin = 0; begin < (uint64_t{1} << 32);) {
      keys.clear();
      embeddings.clear();
      slots.clear();
      {
        MutexLock lock(&stripe.mutex);
        const uint64_t end = stripe.index.RangeEnd(begin, buckets_per_visit);
        stripe.index.VisitBuckets(begin, end, [&](Bucket* bucket) {
          const int used = static_cast<int>(UsedOf(LoadMeta(bucket)));
          for (int i = 0; i < used; ++i) {
            const Key key = RacyLoad(&bucket->keys[i]);
            const uint32_t position = PositionOfHash(HashKey(key));
            if (position < begin || position >= end) continue;
            CopyLocked(&stripe, {bucket, i}, row.data(), row.size());
            keys.push_back(key);
            embeddings.insert(embeddings.end(), row.begin(), row.begin() + dim);
            slots.insert(slots.end(), row.begin() + dim, row.end());
          }
        });
        begin = end;
      }
      for (size_t i = 0; i < keys.size();) {
        const size_t n =
            std::min(keys.size() - i, static_cast<size_t>(max_rows));
        TFSWITCH_RETURN_IF_ERROR(
            visit({absl::MakeConstSpan(keys).subspan(i, n),
                   absl::MakeConstSpan(embeddings).subspan(i * dim, n * dim),
                   absl::MakeConstSpan(slots).subspan(i * slot_floats,
                                                      n * slot_floats)}));
        i += n;
      }
    }
  }
  return absl::OkStatus();
}

int64_t EmbeddingTable::Impl::size() const {
  int64_t size = 0;
  for (const Stripe& stripe : stripes_) {
    size += stripe.inserted_rows.load(std::memory_order_relaxed) -
            stripe.erased_rows.load(std::memory_order_relaxed);
  }
  return size;
}

TableStats EmbeddingTable::Impl::stats() {
  TableStats stats;
  int64_t row_resident_bytes = 0;
  for (Stripe& stripe : stripes_) {
    MutexLock lock(&stripe.mutex);
    stats.inserted_rows += stripe.inserted_rows.load(std::memory_order_relaxed);
    stats.erased_rows += stripe.erased_rows.load(std::memory_order_relaxed);
    stats.index_bytes += static_cast<int64_t>(stripe.index.resident_bytes());
    row_resident_bytes += static_cast<int64_t>(stripe.rows.resident_bytes());
  }
  stats.num_rows = stats.inserted_rows - stats.erased_rows;
  stats.row_stride_bytes = static_cast<int64_t>(stride_);
  stats.row_bytes = stats.num_rows * stats.row_stride_bytes;
  stats.reserved_bytes = row_resident_bytes - stats.row_bytes;
  return stats;
}

EmbeddingTable::EmbeddingTable(std::unique_ptr<Impl> impl)
    : impl_(std::move(impl)) {}

EmbeddingTable::~EmbeddingTable() = default;

absl::StatusOr<std::unique_ptr<EmbeddingTable>> EmbeddingTable::Create(
    const TableConfig& config) {
  TFSWITCH_ASSIGN_OR_RETURN(std::unique_ptr<Impl> impl, Impl::Create(config));
  return std::unique_ptr<EmbeddingTable>(new EmbeddingTable(std::move(impl)));
}

absl::StatusOr<int64_t> EmbeddingTable::Find(
    absl::Span<const Key> keys, absl::Span<float> embeddings) const {
  TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats("embeddings", keys.size(), "dim",
                                              dim(), embeddings.size()));
  return impl_->Find(keys, embeddings.data());
}

absl::Status EmbeddingTable::FindOrInsert(absl::Span<const Key> keys,
                                          absl::Span<float> embeddings) {
  TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats("embeddings", keys.size(), "dim",
                                              dim(), embeddings.size()));
  return impl_->FindOrInsert(keys, embeddings.data());
}

absl::StatusOr<int64_t> EmbeddingTable::ApplyGradients(
    absl::Span<const Key> keys, absl::Span<const float> gradients,
    float learning_rate, bool insert_missing) {
  TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats("gradients", keys.size(), "dim",
                                              dim(), gradients.size()));
  return impl_->ApplyGradients(keys, gradients.data(), learning_rate,
                               insert_missing);
}

absl::Status EmbeddingTable::Assign(absl::Span<const Key> keys,
                                    absl::Span<const float> embeddings) {
  return AssignRows(keys, embeddings, /*slots=*/{}).status();
}

absl::StatusOr<int64_t> EmbeddingTable::AssignRows(
    absl::Span<const Key> keys, absl::Span<const float> embeddings,
    absl::Span<const float> slots, bool only_missing) {
  TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats("embeddings", keys.size(), "dim",
                                              dim(), embeddings.size()));
  if (!slots.empty()) {
    TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats(
        "slots", keys.size(), "slot_floats", slot_floats(), slots.size()));
  }
  return impl_->Assign(keys, embeddings.data(),
                       slots.empty() ? nullptr : slots.data(), only_missing);
}

int64_t EmbeddingTable::Erase(absl::Span<const Key> keys) {
  return impl_->Erase(keys);
}

absl::Status EmbeddingTable::ForEachRow(
    int64_t max_rows,
    const std::function<absl::Status(const RowChunk&)>& visit) const {
  return impl_->ForEachRow(max_rows, visit);
}

int64_t EmbeddingTable::size() const { return impl_->size(); }

TableStats EmbeddingTable::stats() const { return impl_->stats(); }

const TableConfig& EmbeddingTable::config() const { return impl_->config; }

int EmbeddingTable::dim() const { return impl_->config.dim; }

int EmbeddingTable::slot_floats() const {
  return impl_->optimizer.slot_floats();
}

}  // namespace tfswitch
