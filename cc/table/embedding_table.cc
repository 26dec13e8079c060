#include "cc/table/embedding_table.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "cc/base/cpu_features.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/racy_memory.h"
#include "cc/base/spin_wait.h"
#include "cc/base/status_macros.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/batch_kernels.h"
#include "cc/table/candidates.h"
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

// Address space for the candidates of a table, beside that.
constexpr size_t kCandidateShare = 8;

// Buckets per step of ForEachRow, that is the longest that a stripe is locked.
constexpr uint64_t kMaxBucketsPerVisit = 1024;

// Positions in a stripe are below it.
constexpr uint64_t kEndOfPositions = uint64_t{1} << 32;

// The key from which the initializer draws the row that all keys without one
// share. Any would do.
constexpr Key kSharedRow = 0x5477697463685f30;

struct Stripe {
  Mutex mutex;
  // The mutex guards what these call thread-compatible; readers go by the rules
  // of bucket.h instead, hence no GUARDED_BY.
  StripeIndex index;
  RowStore rows;
  // Written under the mutex, read by anyone.
  std::atomic<int64_t> inserted_rows{0};
  std::atomic<int64_t> erased_rows{0};
  // Unused, and without memory, where the admission policy has none.
  Candidates candidates;
  // Numbers what is drawn for admission by probability. Under the mutex.
  uint64_t draws = 0;

  void CountErased() {
    erased_rows.store(erased_rows.load(std::memory_order_relaxed) + 1,
                      std::memory_order_relaxed);
  }
};

// What candidates are counted by: at least the policies need it.
StatisticsConfig StatisticsOfCandidates(StatisticsConfig config) {
  if (config.kind == StatisticsKind::kNone) {
    config.kind = StatisticsKind::kUsage;
  }
  return config;
}

// How the weight of a candidate learns: as the first segment of a row.
OptimizerConfig WeightConfig(const TableConfig& config) {
  return OptimizerConfig({config.optimizer.segments[0]});
}
int WeightSlotFloats(const TableConfig& config) {
  return SlotFloats(WeightConfig(config), 1);
}

// In [0, 1), by a hash of the arguments.
float Draw(uint64_t seed, Key key, uint64_t number) {
  const uint64_t mixed = HashKey(static_cast<Key>(
      seed ^ HashKey(static_cast<Key>(HashKey(key) + number))));
  return static_cast<float>(mixed >> 40) * 0x1p-24f;
}

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
  absl::StatusOr<int64_t> ApplyGradients(const GradientBatch& batch);
  // `slots` may be null: slots stay, or start with their initial values.
  absl::StatusOr<int64_t> Assign(absl::Span<const Key> keys,
                                 const float* embeddings, const float* slots,
                                 bool only_missing);
  int64_t Erase(absl::Span<const Key> keys);
  absl::StatusOr<ShrinkReport> Shrink(const EvictionConfig& rules, float day,
                                      bool dry_run);
  void ReadUsage(absl::Span<const Key> keys, float day,
                 absl::Span<UsageOfRow> usage, absl::Span<KeyState> states);
  absl::Status ForEachRow(
      int64_t max_rows,
      const std::function<absl::Status(const RowChunk&)>& visit);
  absl::Status ForEachCandidate(
      int64_t max_keys,
      const std::function<absl::Status(const CandidateChunk&)>& visit);
  absl::Status AssignCandidates(absl::Span<const Key> keys,
                                const float* records);
  void NoteDay(float day);
  int64_t size() const;
  TableStats stats();

  // InvalidArgument unless `got` floats are num_keys x width.
  absl::Status CheckFloats(const char* what, size_t num_keys,
                           const char* width_name, int width, size_t got) const;

  int slot_floats() const { return row_floats_ - config.dim; }
  int candidate_floats() const {
    return config.admission.has_candidates() ? candidate_floats_ : 0;
  }

  const TableConfig config;
  const Optimizer optimizer;
  const RowStatistics statistics;
  std::unique_ptr<CountingBloom> bloom;  // Constant after Create().

 private:
  // Reads and steps single keys for the kernels, waiting where they did not.
  class PatientSink;

  Impl(const TableConfig& table_config, MemoryReservation reservation);

  bool Init();
  bool InitCandidates();
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

  // Forgets what is noted of a key without a row; the stripe's mutex is held.
  void ForgetLocked(Stripe* stripe, Key key, uint32_t position) {
    if (config.admission.has_candidates()) {
      stripe->candidates.Erase(key, position);
    }
  }

  // Removes the row of an entry; the stripe's mutex is held.
  void EraseLocked(Stripe* stripe, StripeIndex::Entry entry, uint32_t position);

  // Notes what gradient i of a push says of its key, which has no row, and
  // gives it one if the admission policy says so, with its step. Returns
  // whether it has. The stripe's mutex is held.
  absl::StatusOr<bool> AdmitLocked(Stripe* stripe, Key key, uint32_t position,
                                   const StepBatch& batch, uint32_t i);
  // The same where the policy keeps a record of the key.
  absl::StatusOr<bool> AdmitCandidateLocked(Stripe* stripe, Key key,
                                            uint32_t position,
                                            const StepBatch& batch, uint32_t i);
  // Whether a candidate is one no longer.
  bool IsAdmitted(const float* record, float day) const;

  // What keys without a row read as.
  void FillMissing(absl::Span<const Key> block, const uint16_t* missing,
                   uint32_t num_missing, float* embeddings);

  // Calls visit(key, entry) for the entries of a range of positions; the
  // stripe's mutex is held. Nothing may be inserted or erased meanwhile.
  static void VisitEntries(
      const Stripe& stripe, uint64_t begin, uint64_t end,
      const std::function<void(Key, StripeIndex::Entry)>& visit);
  // Calls visit(key, row) for all rows, with the stripe's mutex held, and
  // erases those for which it returns true.
  void SiftRows(const std::function<bool(Key, const float*)>& visit);
  // The same for the candidates; returns how many went.
  int64_t SiftCandidates(const std::function<bool(const float*)>& visit);
  // Moves rows of a stripe together and gives memory back.
  void Compact(Stripe* stripe);

  bool has_weights() const {
    return config.admission.not_admitted.kind == NotAdmittedKind::kWeight;
  }
  // Floats of a row before its statistics.
  int statistics_at() const { return config.dim + optimizer.slot_floats(); }

  // What a call's day is: the server's if it says none.
  float DayOf(float day);
  float Today() const;

  absl::Status OutOfMemory() const;

  const Initializer initializer_;
  const int row_floats_;
  const size_t stride_;
  const BatchKernels kernels_;
  // Before the stripes, which use it until they are destroyed.
  const MemoryReservation reservation_;
  const RowStatistics candidate_statistics_;
  // A candidate's weight, where not_admitted has one: it learns as the first
  // segment of the row.
  std::optional<Optimizer> weight_optimizer_;  // Constant after construction.
  // | statistics | weight | its slots |
  const int candidate_floats_;
  std::vector<float> missing_row_;           // Constant after construction.
  MemoryReservation candidate_reservation_;  // Constant after Create().
  // Of the last call that said it.
  std::atomic<float> last_day_{kServersDay};
  // One shrink at a time.
  Mutex shrink_mutex_;
  std::array<Stripe, kNumStripes> stripes_;
};

class EmbeddingTable::Impl::PatientSink final : public RetrySink {
 public:
  PatientSink(const Impl* table, IndexView* views)
      : table_(table), views_(views) {}

  // What Step() has to do; it must live on.
  void SetSteps(const StepBatch* steps) { steps_ = steps; }

  const uint32_t& num_refreshes() const { return num_refreshes_; }

  bool Read(Key key, float* embedding) override {
    return Retry(key, [&](Bucket* bucket, uint32_t meta, int, float* row) {
      RacyLoadFloats(embedding, row, static_cast<size_t>(table_->config.dim));
      return IsUnchanged(bucket, meta);
    });
  }

  bool Step(Key key, uint32_t i) override {
    return Retry(
        key, [&](Bucket* bucket, uint32_t meta, int entry, float* row) {
          if (!TryLockBucket(bucket, meta)) return false;
          const bool is_ours = RacyLoad(&bucket->keys[entry]) == key;
          if (is_ours) {
            RacyModifyFloats(row, table_->row_floats_, [&](float* floats) {
              steps_->StepAndObserve(table_->config.dim, floats, i);
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
  const StepBatch* steps_ = nullptr;
};

EmbeddingTable::Impl::Impl(const TableConfig& table_config,
                           MemoryReservation reservation)
    : config(table_config),
      optimizer(config.optimizer, config.dim),
      statistics(config.statistics),
      initializer_(config.initializer, config.seed, config.dim),
      row_floats_(config.dim + optimizer.slot_floats() +
                  statistics.num_floats()),
      stride_(RowStride(row_floats_)),
      kernels_(ActiveSimdLevel() == SimdLevel::kAvx2
                   ? avx2::FindBatchKernels(config.dim)
                   : scalar::FindBatchKernels(config.dim)),
      reservation_(std::move(reservation)),
      candidate_statistics_(StatisticsOfCandidates(config.statistics)),
      candidate_floats_(candidate_statistics_.num_floats() +
                        (has_weights() ? 1 + WeightSlotFloats(config) : 0)),
      missing_row_(static_cast<size_t>(config.dim)) {
  switch (config.admission.not_admitted.kind) {
    case NotAdmittedKind::kZeros:
    case NotAdmittedKind::kWeight:
      break;
    case NotAdmittedKind::kConstant:
      std::fill(missing_row_.begin(), missing_row_.end(),
                config.admission.not_admitted.constant);
      break;
    case NotAdmittedKind::kShared:
      initializer_.Fill(kSharedRow, missing_row_.data());
      break;
  }
  if (has_weights()) weight_optimizer_.emplace(WeightConfig(config), 1);
}

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
  if (const auto* bloom =
          std::get_if<BloomMinCountAdmission>(&config.admission.policy)) {
    impl->bloom =
        std::make_unique<CountingBloom>(*bloom, config.num_virtual_shards);
    if (!impl->bloom->is_allocated()) return impl->OutOfMemory();
  }
  if (config.admission.has_candidates()) {
    auto candidates =
        MemoryReservation::Create(kNumStripes * (memory / kCandidateShare),
                                  kNumStripes * 6 * kMinSpanBytes);
    if (!candidates.ok()) {
      return absl::ResourceExhaustedError(absl::StrCat(
          "table '", config.name, "': ", candidates.status().message()));
    }
    impl->candidate_reservation_ = *std::move(candidates);
    if (!impl->InitCandidates()) return impl->OutOfMemory();
  }
  return impl;
}

bool EmbeddingTable::Impl::InitCandidates() {
  const size_t stripe_bytes =
      RoundDownTo(candidate_reservation_.size() / kNumStripes, kHugePageBytes);
  // Records are not much longer than their place in the index.
  const size_t index_bytes = RoundDownTo(stripe_bytes / 4, kHugePageBytes);
  for (int s = 0; s < kNumStripes; ++s) {
    const size_t at = s * stripe_bytes;
    Stripe& stripe = stripes_[s];
    MutexLock lock(&stripe.mutex);
    if (!stripe.candidates.Init(
            candidate_reservation_.Span(at, index_bytes),
            candidate_reservation_.Span(at + index_bytes, index_bytes),
            candidate_reservation_.Span(at + 2 * index_bytes,
                                        stripe_bytes - 2 * index_bytes),
            candidate_floats_)) {
      return false;
    }
  }
  return true;
}

float EmbeddingTable::Impl::Today() const {
  const float day = last_day_.load(std::memory_order_relaxed);
  return day >= 0.0f ? day : DayOfWallClock();
}

void EmbeddingTable::Impl::NoteDay(float day) {
  if (day >= 0.0f) last_day_.store(day, std::memory_order_relaxed);
}

float EmbeddingTable::Impl::DayOf(float day) {
  NoteDay(day);
  return day < 0.0f ? Today() : day;
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
    if (statistics.num_floats() > 0) {
      statistics.Init(Today(), floats + statistics_at());
    }
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
    FillMissing(block, missing, num_missing, to);
    num_found += static_cast<int64_t>(block.size() - num_missing);
  }
  return num_found;
}

void EmbeddingTable::Impl::FillMissing(absl::Span<const Key> block,
                                       const uint16_t* missing,
                                       uint32_t num_missing,
                                       float* embeddings) {
  const size_t dim = missing_row_.size();
  for (uint32_t i = 0; i < num_missing; ++i) {
    std::copy_n(missing_row_.data(), dim, embeddings + missing[i] * dim);
  }
  if (num_missing == 0 || !has_weights()) return;
  const StripeGroups groups(block.data(), num_missing, missing);
  const absl::Status status =
      ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
        const uint32_t position = PositionOfHash(HashKey(block[i]));
        const float* const record = stripe->candidates.Find(block[i], position);
        if (record != nullptr) {
          embeddings[i * dim] = record[candidate_statistics_.num_floats()];
          return absl::OkStatus();
        }
        // It may have been admitted since.
        const StripeIndex::Entry entry = stripe->index.Find(block[i], position);
        if (entry.bucket != nullptr) {
          CopyLocked(stripe, entry, embeddings + i * dim, dim);
        }
        return absl::OkStatus();
      });
  status.IgnoreError();  // The work above cannot fail.
}

absl::Status EmbeddingTable::Impl::FindOrInsert(absl::Span<const Key> keys,
                                                float* embeddings) {
  if (!config.admission.is_always()) return Find(keys, embeddings).status();
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
    const GradientBatch& batch) {
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  const size_t dim = static_cast<size_t>(config.dim);
  const bool admits = !config.admission.is_always();
  StepBatch steps;
  steps.optimizer = &optimizer;
  steps.input.learning_rate = batch.learning_rate;
  steps.input.global_step = batch.global_step;
  if (statistics.num_floats() > 0) steps.statistics = &statistics;
  steps.statistics_at = statistics_at();
  if (steps.statistics != nullptr || admits) steps.day = DayOf(batch.day);
  retry.SetSteps(&steps);
  int64_t num_updated = 0;
  for (size_t begin = 0; begin < batch.keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block =
        batch.keys.subspan(begin, kMaxKernelKeys);
    steps.gradients = batch.gradients.data() + begin * dim;
    steps.observations = batch.observations.subspan(begin, block.size());
    const KernelBatch kernel_batch = MakeBatch(block, views, &retry, missing);
    const uint32_t num_missing =
        steps.has_observations()
            ? kernels_.step_and_observe(kernel_batch, steps)
            : kernels_.step(kernel_batch, steps);
    num_updated += static_cast<int64_t>(block.size() - num_missing);
    if (num_missing == 0 || !(batch.insert_missing || admits)) continue;
    const StripeGroups groups(block.data(), num_missing, missing);
    TFSWITCH_RETURN_IF_ERROR(ForEachLocked(
        block.data(), groups, [&](Stripe* stripe, uint32_t i) -> absl::Status {
          const Key key = block[i];
          const uint32_t position = PositionOfHash(HashKey(key));
          const StripeIndex::Entry entry = stripe->index.Find(key, position);
          if (entry.bucket != nullptr) {
            ++num_updated;
            ModifyLocked(stripe, entry, [&](float* row) {
              steps.StepAndObserve(config.dim, row, i);
            });
            return absl::OkStatus();
          }
          TFSWITCH_ASSIGN_OR_RETURN(
              const bool is_admitted,
              AdmitLocked(stripe, key, position, steps, i));
          num_updated += is_admitted ? 1 : 0;
          return absl::OkStatus();
        }));
  }
  return num_updated;
}

absl::StatusOr<bool> EmbeddingTable::Impl::AdmitLocked(Stripe* stripe, Key key,
                                                       uint32_t position,
                                                       const StepBatch& batch,
                                                       uint32_t i) {
  if (config.admission.has_candidates()) {
    return AdmitCandidateLocked(stripe, key, position, batch, i);
  }
  const float count = batch.InputOf(i).count;
  if (const auto* rule =
          std::get_if<BloomMinCountAdmission>(&config.admission.policy)) {
    const auto occurrences = static_cast<uint32_t>(
        std::min(count, static_cast<float>(rule->min_count)));
    if (bloom->Add(key, occurrences) < rule->min_count) return false;
  }
  if (const auto* rule =
          std::get_if<ProbabilityAdmission>(&config.admission.policy)) {
    const double refused =
        std::pow(1.0 - static_cast<double>(rule->probability),
                 static_cast<double>(count));
    if (Draw(config.seed, key, stripe->draws++) < static_cast<float>(refused)) {
      return false;
    }
  }
  TFSWITCH_RETURN_IF_ERROR(InsertLocked(stripe, key, position, [&](float* row) {
    batch.StepAndObserve(config.dim, row, i);
  }));
  return true;
}

bool EmbeddingTable::Impl::IsAdmitted(const float* record, float day) const {
  const UsageOfRow usage = candidate_statistics_.Read(record, day);
  if (const auto* rule =
          std::get_if<MinCountAdmission>(&config.admission.policy)) {
    return usage.count >= static_cast<float>(rule->min_count);
  }
  return candidate_statistics_.Score(usage.show, usage.click) >=
         std::get<ShowClickAdmission>(config.admission.policy).embedx_threshold;
}

absl::StatusOr<bool> EmbeddingTable::Impl::AdmitCandidateLocked(
    Stripe* stripe, Key key, uint32_t position, const StepBatch& batch,
    uint32_t i) {
  const int weight_at = candidate_statistics_.num_floats();
  float* record = stripe->candidates.Find(key, position);
  if (record == nullptr) {
    record = stripe->candidates.Insert(key, position);
    if (record == nullptr) return OutOfMemory();
    candidate_statistics_.Init(batch.day, record);
    if (has_weights()) {
      std::vector<float> row(static_cast<size_t>(config.dim));
      initializer_.Fill(key, row.data());
      record[weight_at] = row[0];
      weight_optimizer_->InitSlots(record + weight_at + 1);
    }
  }
  const StepInput input = batch.InputOf(i);
  candidate_statistics_.Observe(input.count, input.shows, batch.ClicksOf(i),
                                batch.day, record);
  const float* const gradient =
      batch.gradients + static_cast<size_t>(i) * config.dim;
  if (!IsAdmitted(record, batch.day)) {
    if (has_weights()) {
      weight_optimizer_->Step(record + weight_at, gradient, input);
    }
    return false;
  }
  TFSWITCH_RETURN_IF_ERROR(InsertLocked(stripe, key, position, [&](float* row) {
    if (has_weights()) {
      // The weight goes on where it is; its slots are the row's first.
      row[0] = record[weight_at];
      std::copy_n(record + weight_at + 1, weight_optimizer_->slot_floats(),
                  row + config.dim);
    }
    std::copy_n(record, statistics.num_floats(), row + statistics_at());
    // The gradient that brought the key in is not lost.
    optimizer.Step(row, gradient, input);
  }));
  stripe->candidates.Erase(key, position);
  return true;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Assign(absl::Span<const Key> keys,
                                                     const float* embeddings,
                                                     const float* slots,
                                                     bool only_missing) {
  int64_t num_assigned = 0;
  const size_t dim = static_cast<size_t>(config.dim);
  const size_t slot_floats = static_cast<size_t>(this->slot_floats());
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
          ForgetLocked(stripe, key, position);
          return InsertLocked(stripe, key, position, set);
        }));
  }
  return num_assigned;
}

void EmbeddingTable::Impl::EraseLocked(Stripe* stripe, StripeIndex::Entry entry,
                                       uint32_t position) {
  const uint32_t row = RacyLoad(&entry.bucket->rows[entry.at]);
  stripe->index.Erase(entry, position);
  // No one can lock the row any more, and a reader that is still copying it
  // will see that its bucket has changed.
  stripe->rows.Free(row);
  stripe->CountErased();
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
          ForgetLocked(stripe, block[i], position);
          if (entry.bucket == nullptr) return absl::OkStatus();
          EraseLocked(stripe, entry, position);
          ++num_erased;
          return absl::OkStatus();
        });
    status.IgnoreError();  // The work above cannot fail.
  }
  return num_erased;
}

void EmbeddingTable::Impl::VisitEntries(
    const Stripe& stripe, uint64_t begin, uint64_t end,
    const std::function<void(Key, StripeIndex::Entry)>& visit) {
  stripe.index.VisitBuckets(begin, end, [&](Bucket* bucket) {
    const int used = static_cast<int>(UsedOf(LoadMeta(bucket)));
    for (int i = 0; i < used; ++i) {
      const Key key = RacyLoad(&bucket->keys[i]);
      const uint32_t position = PositionOfHash(HashKey(key));
      if (position >= begin && position < end) visit(key, {bucket, i});
    }
  });
}

void EmbeddingTable::Impl::SiftRows(
    const std::function<bool(Key, const float*)>& visit) {
  std::vector<float> row(static_cast<size_t>(row_floats_));
  std::vector<Key> chosen;
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      MutexLock lock(&stripe.mutex);
      const uint64_t end = stripe.index.RangeEnd(begin, kMaxBucketsPerVisit);
      chosen.clear();
      VisitEntries(stripe, begin, end, [&](Key key, StripeIndex::Entry entry) {
        CopyLocked(&stripe, entry, row.data(), row.size());
        if (visit(key, row.data())) chosen.push_back(key);
      });
      for (const Key key : chosen) {
        const uint32_t position = PositionOfHash(HashKey(key));
        EraseLocked(&stripe, stripe.index.Find(key, position), position);
      }
      begin = end;
    }
  }
}

int64_t EmbeddingTable::Impl::SiftCandidates(
    const std::function<bool(const float*)>& visit) {
  if (!config.admission.has_candidates()) return 0;
  int64_t num_chosen = 0;
  std::vector<Key> chosen;
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      MutexLock lock(&stripe.mutex);
      chosen.clear();
      begin = stripe.candidates.Visit(begin, kMaxBucketsPerVisit,
                                      [&](Key key, const float* record) {
                                        if (visit(record)) {
                                          chosen.push_back(key);
                                        }
                                      });
      for (const Key key : chosen) {
        stripe.candidates.Erase(key, PositionOfHash(HashKey(key)));
      }
      num_chosen += static_cast<int64_t>(chosen.size());
    }
  }
  return num_chosen;
}

namespace {

// Which of the rows that no other rule takes go beyond a limit: those that come
// first in the order, by a value that grows along it.
class Surplus {
 public:
  // Of `values`, all but `limit` go.
  Surplus(std::vector<float> values, uint64_t limit) {
    if (values.size() <= limit) return;
    const size_t surplus = values.size() - static_cast<size_t>(limit);
    std::nth_element(values.begin(),
                     values.begin() + static_cast<std::ptrdiff_t>(surplus - 1),
                     values.end());
    last_ = values[surplus - 1];
    num_equal_ = static_cast<int64_t>(surplus) -
                 std::count_if(values.begin(), values.end(),
                               [this](float value) { return value < last_; });
  }

  // Whether a row with this value goes. Of those with the last value that does,
  // only as many say yes as there are to go.
  bool Takes(float value) {
    if (value < last_) return true;
    return value == last_ && num_equal_-- > 0;
  }

 private:
  float last_ = -std::numeric_limits<float>::infinity();
  int64_t num_equal_ = 0;
};

float SquaredNorm(const float* row, int dim) {
  float sum = 0.0f;
  for (int i = 0; i < dim; ++i) sum += row[i] * row[i];
  return sum;
}

}  // namespace

absl::StatusOr<ShrinkReport> EmbeddingTable::Impl::Shrink(
    const EvictionConfig& rules, float day, bool dry_run) {
  if (absl::Status valid = ValidateEviction(rules, config.statistics);
      !valid.ok()) {
    return absl::FailedPreconditionError(
        absl::StrCat("table '", config.name, "': ", valid.message()));
  }
  day = DayOf(day);
  MutexLock lock(&shrink_mutex_);
  ShrinkReport report;
  // The counter of the first rule that takes it; null if none does.
  const auto rule_for = [&](const RowStatistics& counted,
                            const float* row_statistics) -> int64_t* {
    const UsageOfRow usage = counted.Read(row_statistics, day);
    if (rules.delete_after_unseen_days.has_value() &&
        day - usage.last_seen_day > *rules.delete_after_unseen_days) {
      return &report.by_ttl;
    }
    if (rules.delete_threshold.has_value() &&
        counted.Score(usage.show, usage.click) < *rules.delete_threshold) {
      return &report.by_show_click_score;
    }
    return nullptr;
  };
  const auto rule_for_row = [&](const float* row) -> int64_t* {
    int64_t* const rule = rule_for(statistics, row + statistics_at());
    if (rule != nullptr || !rules.min_l2_norm.has_value()) return rule;
    const float min_square = *rules.min_l2_norm * *rules.min_l2_norm;
    return SquaredNorm(row, config.dim) < min_square ? &report.by_l2_norm
                                                     : nullptr;
  };
  const auto order_of = [&](const float* row) {
    const UsageOfRow usage = statistics.Read(row + statistics_at(), day);
    return rules.order == EvictionOrder::kLfu ? usage.count
                                              : usage.last_seen_day;
  };
  std::vector<float> order;
  if (rules.max_rows.has_value()) {
    order.reserve(static_cast<size_t>(size()));
    SiftRows([&](Key, const float* row) {
      if (rule_for_row(row) == nullptr) order.push_back(order_of(row));
      return false;
    });
  }
  Surplus surplus(std::move(order), rules.max_rows.value_or(
                                        std::numeric_limits<uint64_t>::max()));
  SiftRows([&](Key, const float* row) {
    int64_t* rule = rule_for_row(row);
    if (rule == nullptr && rules.max_rows.has_value() &&
        surplus.Takes(order_of(row))) {
      rule = &report.by_max_rows;
    }
    if (rule == nullptr) {
      ++report.remaining_rows;
      return false;
    }
    ++*rule;
    ++report.evicted_rows;
    return !dry_run;
  });
  report.evicted_bytes = report.evicted_rows * static_cast<int64_t>(stride_);
  // They are not rows, and counted apart.
  const ShrinkReport rows_only = report;
  int64_t num_candidates = 0;
  SiftCandidates([&](const float* record) {
    if (rule_for(candidate_statistics_, record) == nullptr) return false;
    ++num_candidates;
    return !dry_run;
  });
  report = rows_only;
  report.evicted_candidates = num_candidates;
  if (!dry_run) {
    for (Stripe& stripe : stripes_) Compact(&stripe);
  }
  return report;
}

void EmbeddingTable::Impl::Compact(Stripe* stripe) {
  uint64_t limit = 0;
  {
    MutexLock lock(&stripe->mutex);
    if (!stripe->rows.IsWorthCompacting()) return;
    limit = stripe->rows.SortFreeRows();
  }
  std::vector<StripeIndex::Entry> beyond;
  std::vector<uint32_t> left;
  std::vector<float> floats(static_cast<size_t>(row_floats_));
  for (uint64_t begin = 0; begin < kEndOfPositions;) {
    MutexLock lock(&stripe->mutex);
    const uint64_t end = stripe->index.RangeEnd(begin, kMaxBucketsPerVisit);
    beyond.clear();
    VisitEntries(*stripe, begin, end, [&](Key, StripeIndex::Entry entry) {
      if (RacyLoad(&entry.bucket->rows[entry.at]) >= limit) {
        beyond.push_back(entry);
      }
    });
    for (const StripeIndex::Entry& entry : beyond) {
      uint32_t row;
      if (!stripe->rows.AllocateBelow(limit, &row)) break;
      // Whoever reads or steps the row in its old place goes by the bucket.
      const uint32_t meta = LockBucket(entry.bucket);
      const uint32_t old_row = RacyLoad(&entry.bucket->rows[entry.at]);
      RacyLoadFloats(floats.data(), stripe->rows.At(old_row), floats.size());
      RacyModifyFloats(stripe->rows.At(row), row_floats_, [&](float* to) {
        std::copy(floats.begin(), floats.end(), to);
      });
      RacyStore(&entry.bucket->rows[entry.at], row);
      UnlockBucket(entry.bucket, meta);
      left.push_back(old_row);
    }
    begin = end;
  }
  {
    MutexLock lock(&stripe->mutex);
    for (const uint32_t row : left) stripe->rows.Free(row);
    stripe->rows.SortFreeRows();
  }
  for (bool is_more = true; is_more;) {
    MutexLock lock(&stripe->mutex);
    is_more = stripe->rows.ReleaseTail();
  }
}

void EmbeddingTable::Impl::ReadUsage(absl::Span<const Key> keys, float day,
                                     absl::Span<UsageOfRow> usage,
                                     absl::Span<KeyState> states) {
  if (day < 0.0f) day = Today();
  std::vector<float> row(static_cast<size_t>(row_floats_));
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const StripeGroups groups(block.data(), static_cast<uint32_t>(block.size()),
                              nullptr);
    const absl::Status status =
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const uint32_t position = PositionOfHash(HashKey(block[i]));
          const StripeIndex::Entry entry =
              stripe->index.Find(block[i], position);
          UsageOfRow& to = usage[begin + i];
          KeyState& state = states[begin + i];
          to = UsageOfRow();
          state = KeyState::kUnknown;
          if (entry.bucket != nullptr) {
            CopyLocked(stripe, entry, row.data(), row.size());
            to = statistics.Read(row.data() + statistics_at(), day);
            state = KeyState::kRow;
          } else if (config.admission.has_candidates()) {
            const float* const record =
                stripe->candidates.Find(block[i], position);
            if (record != nullptr) {
              to = candidate_statistics_.Read(record, day);
              state = KeyState::kCandidate;
            }
          }
          return absl::OkStatus();
        });
    status.IgnoreError();  // The work above cannot fail.
  }
}

absl::Status EmbeddingTable::Impl::ForEachCandidate(
    int64_t max_keys,
    const std::function<absl::Status(const CandidateChunk&)>& visit) {
  if (!config.admission.has_candidates()) return absl::OkStatus();
  const size_t width = static_cast<size_t>(candidate_floats_);
  const uint64_t buckets_per_visit = std::clamp<uint64_t>(
      static_cast<uint64_t>(max_keys) / kKeysPerBucket, 1, kMaxBucketsPerVisit);
  std::vector<Key> keys;
  std::vector<float> records;
  for (Stripe& stripe : stripes_) {
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      keys.clear();
      records.clear();
      {
        MutexLock lock(&stripe.mutex);
        begin = stripe.candidates.Visit(
            begin, buckets_per_visit, [&](Key key, const float* record) {
              keys.push_back(key);
              records.insert(records.end(), record, record + width);
            });
      }
      if (keys.empty()) continue;
      TFSWITCH_RETURN_IF_ERROR(visit({keys, records}));
    }
  }
  return absl::OkStatus();
}

absl::Status EmbeddingTable::Impl::AssignCandidates(absl::Span<const Key> keys,
                                                    const float* records) {
  const size_t width = static_cast<size_t>(candidate_floats_);
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const StripeGroups groups(block.data(), static_cast<uint32_t>(block.size()),
                              nullptr);
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block.data(), groups, [&](Stripe* stripe, uint32_t i) {
          const uint32_t position = PositionOfHash(HashKey(block[i]));
          if (stripe->index.Find(block[i], position).bucket != nullptr) {
            return absl::OkStatus();
          }
          float* record = stripe->candidates.Find(block[i], position);
          if (record == nullptr) {
            record = stripe->candidates.Insert(block[i], position);
          }
          if (record == nullptr) return OutOfMemory();
          std::copy_n(records + (begin + i) * width, width, record);
          return absl::OkStatus();
        }));
  }
  return absl::OkStatus();
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
  const size_t slot_floats = static_cast<size_t>(this->slot_floats());
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
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      keys.clear();
      embeddings.clear();
      slots.clear();
      {
        MutexLock lock(&stripe.mutex);
        const uint64_t end = stripe.index.RangeEnd(begin, buckets_per_visit);
        VisitEntries(stripe, begin, end,
                     [&](Key key, StripeIndex::Entry entry) {
                       CopyLocked(&stripe, entry, row.data(), row.size());
                       keys.push_back(key);
                       embeddings.insert(embeddings.end(), row.begin(),
                                         row.begin() + dim);
                       slots.insert(slots.end(), row.begin() + dim, row.end());
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
    if (config.admission.has_candidates()) {
      stats.num_candidates += stripe.candidates.size();
      stats.admission_bytes +=
          static_cast<int64_t>(stripe.candidates.resident_bytes());
    }
  }
  if (bloom != nullptr) {
    stats.admission_bytes += static_cast<int64_t>(
        bloom->bytes_per_virtual_shard() * config.num_virtual_shards);
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
    const GradientBatch& batch) {
  TFSWITCH_RETURN_IF_ERROR(impl_->CheckFloats(
      "gradients", batch.keys.size(), "dim", dim(), batch.gradients.size()));
  return impl_->ApplyGradients(batch);
}

absl::StatusOr<int64_t> EmbeddingTable::ApplyGradients(
    absl::Span<const Key> keys, absl::Span<const float> gradients,
    float learning_rate, bool insert_missing) {
  GradientBatch batch;
  batch.keys = keys;
  batch.gradients = gradients;
  batch.learning_rate = learning_rate;
  batch.insert_missing = insert_missing;
  return ApplyGradients(batch);
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

int EmbeddingTable::slot_floats() const { return impl_->slot_floats(); }

int EmbeddingTable::statistics_floats() const {
  return impl_->statistics.num_floats();
}

int EmbeddingTable::candidate_floats() const {
  return impl_->candidate_floats();
}

absl::StatusOr<ShrinkReport> EmbeddingTable::Shrink(const EvictionConfig& rules,
                                                    float day, bool dry_run) {
  return impl_->Shrink(rules, day, dry_run);
}

void EmbeddingTable::ReadUsage(absl::Span<const Key> keys, float day,
                               absl::Span<UsageOfRow> usage,
                               absl::Span<KeyState> states) const {
  impl_->ReadUsage(keys, day, usage, states);
}

absl::Status EmbeddingTable::ForEachCandidate(
    int64_t max_keys,
    const std::function<absl::Status(const CandidateChunk&)>& visit) const {
  return impl_->ForEachCandidate(max_keys, visit);
}

absl::Status EmbeddingTable::AssignCandidates(absl::Span<const Key> keys,
                                              absl::Span<const float> records) {
  TFSWITCH_RETURN_IF_ERROR(
      impl_->CheckFloats("records", keys.size(), "candidate_floats",
                         candidate_floats(), records.size()));
  return impl_->AssignCandidates(keys, records.data());
}

void EmbeddingTable::NoteDay(float day) { impl_->NoteDay(day); }

CountingBloom* EmbeddingTable::bloom() const { return impl_->bloom.get(); }

void ShrinkReport::Add(const ShrinkReport& other) {
  evicted_rows += other.evicted_rows;
  evicted_bytes += other.evicted_bytes;
  by_ttl += other.by_ttl;
  by_show_click_score += other.by_show_click_score;
  by_l2_norm += other.by_l2_norm;
  by_max_rows += other.by_max_rows;
  evicted_candidates += other.evicted_candidates;
  remaining_rows += other.remaining_rows;
}

}  // namespace tfswitch
