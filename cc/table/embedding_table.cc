// A batch is processed in blocks of kMaxKernelKeys. The kernels read or step
// existing rows without the stripe's mutex, and list the keys that have no row.
// ModifyOrInsert() locks the mutex only for these keys, once for each stripe.
// It searches for each key again, because another thread, or the same key
// earlier in the batch, may have inserted it.
//
// AssignRows, Erase and ReadUsage hold the mutex for all their keys. ForEachRow
// copies rows under the mutex and calls its visitor without it, so that a slow
// visitor does not block other threads.

#include "cc/table/embedding_table.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <utility>
#include <variant>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "cc/base/cpu_features.h"
#include "cc/base/half_floats.h"
#include "cc/base/memory_region.h"
#include "cc/base/mutex.h"
#include "cc/base/racy_memory.h"
#include "cc/base/random_id.h"
#include "cc/base/spin_wait.h"
#include "cc/base/status_macros.h"
#include "cc/optimizer/optimizer.h"
#include "cc/table/embedding_table_impl.h"

namespace tfswitch {
namespace {

// The address space of a table, in terms of the physical memory. Rows get twice
// the physical memory, and each of the two index arrays half of the physical
// memory. This is more than needed on average, because keys are not distributed
// quite evenly over the stripes.
constexpr size_t kRowShare = 8;
constexpr size_t kIndexShare = 32;
constexpr size_t kMinSpanBytes = 2 * kHugePageBytes;

// The additional address space for the candidates of a table.
constexpr size_t kCandidateShare = 8;

// An arbitrary key. The initializer draws its row, which all keys without a row
// of their own share.
constexpr Key kSharedRow = 0x5477697463685f30;

// The admission policy needs at least the statistics of kUsage for candidates.
StatisticsConfig StatisticsOfCandidates(StatisticsConfig config) {
  if (config.kind == StatisticsKind::kNone) {
    config.kind = StatisticsKind::kUsage;
  }
  return config;
}

// A candidate's weight uses the optimizer of the row's first segment.
OptimizerConfig WeightConfig(const TableConfig& config) {
  return OptimizerConfig({config.optimizer.segments[0]});
}

}  // namespace

int CandidateFloats(const TableConfig& config) {
  if (!config.admission.has_candidates()) return 0;
  const bool has_weights =
      config.admission.not_admitted.kind == NotAdmittedKind::kWeight;
  return RowStatistics(StatisticsOfCandidates(config.statistics)).num_floats() +
         (has_weights ? 1 + SlotFloats(WeightConfig(config), 1) : 0);
}

size_t RowBytes(const TableConfig& config) {
  return RowStride(RowCodec(config).num_words()) +
         static_cast<size_t>(RowStatistics(config.statistics).num_floats()) *
             sizeof(float);
}

std::vector<float> MissingRow(const TableConfig& config) {
  std::vector<float> row(static_cast<size_t>(config.dim));
  switch (config.admission.not_admitted.kind) {
    case NotAdmittedKind::kZeros:
    case NotAdmittedKind::kWeight:
      break;
    case NotAdmittedKind::kConstant:
      std::fill(row.begin(), row.end(),
                config.admission.not_admitted.constant.value);
      break;
    case NotAdmittedKind::kShared:
      Initializer(config.initializer, config.seed, config.dim)
          .Fill(&kSharedRow, 1, row.data());
      break;
  }
  return row;
}

EmbeddingTable::Impl::Impl(const TableConfig& config, const KeyedHash& hash,
                           MemoryReservation reservation)
    : EmbeddingTable(config),
      optimizer_(config.optimizer, config.dim),
      statistics_(config.statistics),
      codec_(config),
      step_log_(&optimizer_),
      hash_(hash),
      initializer_(config.initializer, config.seed, config.dim),
      stride_(RowStride(codec_.num_words())),
      statistics_stride_(static_cast<size_t>(statistics_.num_floats()) *
                         sizeof(float)),
      kernels_(ActiveSimdLevel() == SimdLevel::kAvx2
                   ? avx2::FindBatchKernels(config.dim, codec_)
                   : scalar::FindBatchKernels(config.dim, codec_)),
      reservation_(std::move(reservation)),
      candidate_statistics_(StatisticsOfCandidates(config.statistics)),
      candidate_floats_(CandidateFloats(config)),
      missing_row_(MissingRow(config)),
      change_log_id_(DrawId()) {
  if (has_weights()) weight_optimizer_.emplace(WeightConfig(config), 1);
}

absl::StatusOr<std::unique_ptr<EmbeddingTable::Impl>>
EmbeddingTable::Impl::Create(const TableConfig& config, const KeyedHash& hash) {
  TFSWITCH_RETURN_IF_ERROR(config.Validate());
  const size_t memory = PhysicalMemoryBytes();
  const auto reserve =
      [&](size_t stripe_bytes) -> absl::StatusOr<MemoryReservation> {
    auto reservation = MemoryReservation::Create(
        kNumStripes * stripe_bytes, kNumStripes * 6 * kMinSpanBytes);
    if (reservation.ok()) return reservation;
    return absl::ResourceExhaustedError(absl::StrCat(
        "table '", config.name, "': ", reservation.status().message()));
  };
  TFSWITCH_ASSIGN_OR_RETURN(
      MemoryReservation reservation,
      reserve(memory / kRowShare + 2 * (memory / kIndexShare)));
  std::unique_ptr<Impl> impl(new Impl(config, hash, std::move(reservation)));
  if (!impl->Init()) return impl->OutOfMemory();
  if (const auto* bloom =
          std::get_if<BloomMinCountAdmission>(&config.admission.policy)) {
    impl->bloom_ =
        std::make_unique<CountingBloom>(*bloom, config.num_virtual_shards);
    if (!impl->bloom_->is_allocated()) return impl->OutOfMemory();
  }
  if (config.admission.has_candidates()) {
    TFSWITCH_ASSIGN_OR_RETURN(impl->candidate_reservation_,
                              reserve(memory / kCandidateShare));
    if (!impl->InitCandidates()) return impl->OutOfMemory();
  }
  // Starts the clock, so that each changed row gets a stamp. ChooseLeastUsed()
  // reads from the stamps how long ago rows changed.
  if (impl->ranks_uses()) impl->change_clock_.EndEpoch();
  return impl;
}

float EmbeddingTable::Impl::Today() const {
  const float day = last_day_.load(std::memory_order_relaxed);
  return day >= 0.0f ? day : DayOfWallClock();
}

void EmbeddingTable::Impl::NoteDay(float day) {
  if (day >= 0.0f) last_day_.store(day, std::memory_order_relaxed);
}

bool EmbeddingTable::Impl::Init() {
  // Each of the two index arrays gets a sixth of the address space, and rows
  // get the rest.
  const size_t stripe_bytes =
      RoundDownTo(reservation_.size() / kNumStripes, kHugePageBytes);
  const size_t index_bytes = RoundDownTo(stripe_bytes / 6, kHugePageBytes);
  // Makes room for as many statistics and stamps as there is room for rows.
  const auto bytes_of_column = [&](size_t begin, size_t column_stride) {
    if (column_stride == 0) return size_t{0};
    return RoundUpTo(
        begin + (stripe_bytes - 2 * index_bytes) * column_stride /
                    (stride_ + statistics_stride_ + sizeof(uint32_t)),
        kHugePageBytes);
  };
  const size_t statistics_bytes =
      bytes_of_column(RowStore::kStatisticsOffset, statistics_stride_);
  const size_t stamp_bytes = bytes_of_column(0, sizeof(uint32_t));
  for (int s = 0; s < kNumStripes; ++s) {
    const size_t at = s * stripe_bytes;
    const size_t rows_at = at + 2 * index_bytes;
    Stripe& stripe = stripes_[s];
    const size_t row_bytes =
        stripe_bytes - 2 * index_bytes - statistics_bytes - stamp_bytes;
    stripe.rows.Init(reservation_.Span(rows_at, row_bytes), stride_);
    stripe.rows.InitStamps(
        reservation_.Span(rows_at + row_bytes + statistics_bytes, stamp_bytes));
    stamps_[s] = stripe.rows.stamps();
    statistics_data_[s] = nullptr;
    if (statistics_bytes > 0) {
      stripe.rows.InitStatistics(
          reservation_.Span(rows_at + row_bytes, statistics_bytes),
          statistics_stride_);
      statistics_data_[s] = stripe.rows.statistics_data();
    }
    // The initial sizes differ from stripe to stripe by a sixteenth of the
    // growth factor 1.4. So the stripes do not all grow at the same time, and
    // the table's memory per key stays near its mean.
    const auto num_buckets = static_cast<uint64_t>(
        36.0 * std::pow(1.4, static_cast<double>(s) / kNumStripes));
    if (!stripe.index.Init(reservation_.Span(at, index_bytes),
                           reservation_.Span(at + index_bytes, index_bytes),
                           num_buckets, reservation_.data() + rows_at,
                           &hash_)) {
      return false;
    }
  }
  return true;
}

absl::Status EmbeddingTable::Impl::OutOfMemory() const {
  return absl::ResourceExhaustedError(absl::StrCat(
      "table '", config_.name, "': no memory for another row beside ", size(),
      "; erase rows, or spread the table over more servers"));
}

absl::Status EmbeddingTable::Impl::CheckFloats(const char* what,
                                               size_t num_keys,
                                               const char* width_name,
                                               int width, size_t got) const {
  const size_t expected = num_keys * static_cast<size_t>(width);
  if (got == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "table '", config_.name, "': expected ", expected, " floats of ", what,
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
  batch.hash = &hash_;
  batch.dim = config_.dim;
  batch.codec = &codec_;
  batch.statistics = statistics_data_.data();
  batch.statistics_stride = statistics_stride_;
  batch.stamps = stamps_.data();
  batch.stride = stride_;
  batch.views = views;
  batch.retry = retry;
  batch.num_refreshes = &retry->num_refreshes();
  batch.missing = missing;
  return batch;
}

void EmbeddingTable::Impl::RacyLoadEmbedding(const float* words,
                                             const StepHistory& now,
                                             float* embedding) const {
  const bool is_behind = now.last_step > 0 && optimizer_.moves_idle_rows();
  const auto num_words = static_cast<size_t>(
      is_behind ? codec_.num_words() : codec_.embedding_words());
  if (!is_behind && codec_.embedding_type() == FloatType::kFloat32) {
    RacyLoadFloats(embedding, words, num_words);
    return;
  }
  RowBuffer copy(num_words);
  RacyLoadFloats(copy.data(), words, num_words);
  if (!is_behind) {
    codec_.DecodeEmbedding(copy.data(), embedding);
    return;
  }
  RowBuffer row(codec_.num_floats());
  codec_.Decode(copy.data(), row.data());
  optimizer_.CatchUp(now, row.data(), row.data() + config_.dim,
                     /*writes_slots=*/false);
  std::copy_n(row.data(), config_.dim, embedding);
}

void EmbeddingTable::Impl::CopyEmbeddingLocked(Stripe* stripe,
                                               StripeIndex::Entry entry,
                                               const StepHistory& now,
                                               float* embedding) const {
  LoadLocked(stripe, entry, [&](const RowPlace& place) {
    RacyLoadEmbedding(place.words, now, embedding);
  });
}

void EmbeddingTable::Impl::CopyStatisticsLocked(Stripe* stripe,
                                                StripeIndex::Entry entry,
                                                float* row_statistics) const {
  const auto num_floats = static_cast<size_t>(statistics_.num_floats());
  if (num_floats == 0) return;
  LoadLocked(stripe, entry, [&](const RowPlace& place) {
    RacyLoadFloats(row_statistics, place.statistics, num_floats);
  });
}

bool EmbeddingTable::Impl::CopyRowLocked(Stripe* stripe,
                                         StripeIndex::Entry entry,
                                         uint32_t limit, float* row) const {
  const auto num_words = static_cast<size_t>(codec_.num_words());
  const auto num_statistics = static_cast<size_t>(statistics_.num_floats());
  float* const row_statistics = row + codec_.num_floats();
  RowBuffer copy(codec_.is_plain() ? 0 : num_words);
  float* const words = codec_.is_plain() ? row : copy.data();
  bool is_meant = true;
  LoadLocked(stripe, entry, [&](const RowPlace& place) {
    is_meant = limit == kAnyStamp || RacyLoad(place.stamp) < limit;
    if (!is_meant) return;
    RacyLoadFloats(words, place.words, num_words);
    if (num_statistics > 0) {
      RacyLoadFloats(row_statistics, place.statistics, num_statistics);
    }
  });
  if (is_meant && !codec_.is_plain()) codec_.Decode(words, row);
  return is_meant;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Read(
    absl::Span<const Key> keys, bool marks, bool marks_cold,
    absl::Span<float> embeddings) const {
  TFSWITCH_RETURN_IF_ERROR(
      CheckFloats("embeddings", keys.size(), "dim", dim(), embeddings.size()));
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  const std::shared_ptr<const StepHistory> now = Now();
  PatientSink retry(this, views, *now);
  const size_t dim = static_cast<size_t>(config_.dim);
  int64_t num_found = 0;
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    float* const to = embeddings.data() + begin * dim;
    const InsertedRows before =
        has_weights() ? ReadInsertedRows() : InsertedRows();
    const Moves moves = cold_ != nullptr ? ReadMoves() : Moves();
    uint32_t num_missing = ReadBlock(block, *now, views, &retry, missing, to);
    const auto mark = [&](uint16_t i, uint32_t bits) {
      std::fill_n(to + i * dim, dim, FloatOfBits(bits));
    };
    num_found += static_cast<int64_t>(block.size() - num_missing);
    if (num_missing > 0 && has_cold_rows()) {
      if (marks_cold) {
        std::vector<bool> may_be_cold(block.size());
        for (const uint16_t i :
             cold_->tier.FindCandidates(block, {missing, num_missing})) {
          may_be_cold[i] = true;
        }
        num_missing = static_cast<uint32_t>(
            std::remove_if(missing, missing + num_missing,
                           [&](uint16_t i) {
                             const uint32_t stripe =
                                 StripeOfHash(hash_(block[i]));
                             // A row that has moved may have been in a file
                             // that is gone.
                             if (!may_be_cold[i] &&
                                 stripes_[stripe].num_moves == moves[stripe]) {
                               return false;
                             }
                             mark(i, kColdMark);
                             return true;
                           }) -
            missing);
      } else {
        const uint32_t num_absent = num_missing;
        TFSWITCH_RETURN_IF_ERROR(
            ReadColdEmbeddings(block, *now, moves, missing, &num_missing, to));
        num_found += num_absent - num_missing;
      }
    }
    if (marks) {
      for (uint32_t i = 0; i < num_missing; ++i) mark(missing[i], kMissingMark);
    } else {
      FillMissing(block, *now, missing, num_missing, before, to);
    }
  }
  return num_found;
}

RowBuffer EmbeddingTable::Impl::InitialState(float day, uint32_t step) const {
  RowBuffer state(static_cast<size_t>(slot_floats()));
  optimizer_.InitSlots(state.data(), step);
  statistics_.Init(day, state.data() + optimizer_.slot_floats());
  return state;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::FindOrInsert(
    absl::Span<const Key> keys, absl::Span<float> embeddings) {
  if (!config_.admission.is_always()) return Find(keys, embeddings);
  TFSWITCH_RETURN_IF_ERROR(
      CheckFloats("embeddings", keys.size(), "dim", dim(), embeddings.size()));
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  const std::shared_ptr<const StepHistory> now = Now();
  PatientSink retry(this, views, *now);
  const size_t dim = static_cast<size_t>(config_.dim);
  auto num_found = static_cast<int64_t>(keys.size());
  std::optional<RowBuffer> state;
  size_t block_size = kMaxKernelKeys;
  for (size_t begin = 0; begin < keys.size();) {
    const absl::Span<const Key> block = keys.subspan(begin, block_size);
    float* const to = embeddings.data() + begin * dim;
    begin += block.size();
    const uint32_t num_missing =
        ReadBlock(block, *now, views, &retry, missing, to);
    block_size =
        num_missing < block.size() / 4 ? kMaxKernelKeys : kInsertingBlock;
    if (num_missing == 0) continue;
    num_found -= num_missing;
    if (!state.has_value()) state = InitialState(Today(), now->last_step);
    const ChangeClock::Change change(&change_clock_);
    if (has_cold_rows()) {
      std::vector<uint16_t> present;
      TFSWITCH_RETURN_IF_ERROR(
          Revive(block, {missing, num_missing}, change, &present));
      num_found += static_cast<int64_t>(present.size());
    }
    TFSWITCH_RETURN_IF_ERROR(ModifyOrInsert(
        block.data(), StripeGroups(hash_, block.data(), num_missing, missing),
        *state, change,
        [&](const KeyPlace& place, uint32_t i) {
          CopyEmbeddingLocked(place.stripe, place.entry, *now, to + i * dim);
        },
        [&](const KeyPlace&, const RowPlace& row, const float* embedding,
            uint32_t i) {
          if (codec_.embedding_type() == FloatType::kFloat32) {
            RacyCopyRow(embedding, dim, to + i * dim);
          } else {
            codec_.DecodeEmbedding(row.words, to + i * dim);
          }
        }));
  }
  return num_found;
}

RowRounding EmbeddingTable::Impl::RoundingOf(const GradientBatch& batch,
                                             uint64_t number) const {
  if (config_.storage_dtype.rounding == Rounding::kNearest) return {};
  // The push's number determines how its steps are rounded, so that the result
  // does not depend on which threads run the steps.
  number = batch.StepOr(number);
  const uint64_t seed = HashKey(
      static_cast<Key>(HashKey(static_cast<Key>(config_.seed)) + number));
  return {true, static_cast<uint32_t>(seed >> 32)};
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::ApplyGradients(
    const GradientBatch& batch) {
  TFSWITCH_RETURN_IF_ERROR(CheckFloats("gradients", batch.keys.size(), "dim",
                                       dim(), batch.gradients.size()));
  if (is_dense() && batch.history == nullptr) {
    absl::StatusOr<int64_t> num_updated = 0;
    TFSWITCH_RETURN_IF_ERROR(
        TakeStep(batch.learning_rate, [&](const StepHistory* history) {
          GradientBatch step = batch;
          step.history = history;
          num_updated = ApplyGradients(step);
          return num_updated.status();
        }));
    return num_updated;
  }
  IndexView views[kNumStripes];
  uint16_t missing[kMaxKernelKeys];
  PatientSink retry(this, views);
  const size_t dim = static_cast<size_t>(config_.dim);
  const bool admits = !config_.admission.is_always();
  StepBatch steps;
  steps.optimizer = &optimizer_;
  static_cast<StepSettings&>(steps.input) = batch;
  steps.input.history = batch.history;
  if (statistics_.num_floats() > 0) steps.statistics = &statistics_;
  // Records the day even if the table counts nothing, because its checkpoint
  // may be restored into a table that counts.
  NoteDay(batch.day);
  if (steps.statistics != nullptr || admits) steps.day = DayOf(batch.day);
  steps.number = batch.number != 0
                     ? batch.number
                     : num_pushes_.fetch_add(1, std::memory_order_relaxed);
  std::vector<float> scratch;
  if (!codec_.is_plain()) {
    scratch.resize(static_cast<size_t>(codec_.num_floats()));
    steps.rounding = RoundingOf(batch, steps.number);
  }
  NoteUses(batch.keys.size());
  const ChangeClock::Change change(&change_clock_);
  retry.SetSteps(&steps, change.stamp());
  int64_t num_updated = 0;
  std::optional<RowBuffer> state;
  for (size_t begin = 0; begin < batch.keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block =
        batch.keys.subspan(begin, kMaxKernelKeys);
    steps.gradients = batch.gradients.data() + begin * dim;
    steps.observations = batch.observations.subspan(begin, block.size());
    KernelBatch kernel_batch = MakeBatch(block, views, &retry, missing);
    kernel_batch.scratch = scratch.data();
    kernel_batch.stamp = change.stamp();
    uint32_t num_missing = steps.has_observations()
                               ? kernels_.step_and_observe(kernel_batch, steps)
                               : kernels_.step(kernel_batch, steps);
    num_updated += static_cast<int64_t>(block.size() - num_missing);
    const auto modify = [&](const KeyPlace& place, uint32_t i) {
      ModifyLocked(place, steps.RoundingOf(place.key), change.stamp(),
                   [&](const RowFloats& row) {
                     steps.StepAndObserve(config_.dim, row, i);
                   });
    };
    if (num_missing > 0 && has_cold_rows()) {
      std::vector<uint16_t> present;
      TFSWITCH_RETURN_IF_ERROR(
          Revive(block, {missing, num_missing}, change, &present));
      if (!present.empty()) {
        const StripeGroups groups(hash_, block.data(),
                                  static_cast<uint32_t>(present.size()),
                                  present.data());
        TFSWITCH_RETURN_IF_ERROR(ForEachLocked(
            block.data(), groups, [&](const KeyPlace& place, uint32_t i) {
              if (!place.has_row()) return absl::OkStatus();
              modify(place, i);
              ++num_updated;
              return absl::OkStatus();
            }));
        std::sort(present.begin(), present.end());
        num_missing = static_cast<uint32_t>(
            std::remove_if(missing, missing + num_missing,
                           [&](uint16_t i) {
                             return std::binary_search(present.begin(),
                                                       present.end(), i);
                           }) -
            missing);
      }
    }
    if (num_missing == 0 || !(batch.insert_missing || admits)) continue;
    if (admits) num_missing = AdmitMissing(block, steps, missing, num_missing);
    if (!state.has_value()) state = InitialState(steps.day, steps.step());
    const StripeGroups groups(hash_, block.data(), num_missing, missing);
    num_updated += num_missing;
    if (!config_.admission.has_candidates()) {
      TFSWITCH_RETURN_IF_ERROR(ModifyOrInsert(
          block.data(), groups, *state, change, modify,
          [&](const KeyPlace& place, const RowPlace& to, const float*,
              uint32_t i) {
            ModifyRow(to, steps.RoundingOf(place.key), change.stamp(),
                      [&](const RowFloats& row) {
                        steps.StepAndObserve(config_.dim, row, i);
                      });
          }));
      continue;
    }
    TFSWITCH_RETURN_IF_ERROR(ForEachLocked(
        block.data(), groups,
        [&](const KeyPlace& place, uint32_t i) -> absl::Status {
          if (place.has_row()) {
            modify(place, i);
            return absl::OkStatus();
          }
          TFSWITCH_ASSIGN_OR_RETURN(
              const bool is_admitted,
              AdmitCandidateLocked(place, *state, steps, i, change.stamp()));
          num_updated -= is_admitted ? 0 : 1;
          return absl::OkStatus();
        }));
  }
  return num_updated;
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::AssignRows(const RowChunk& rows,
                                                         AssignMode mode) {
  const absl::Span<const Key> keys = rows.keys;
  const absl::Span<const float> embeddings = rows.embeddings;
  const absl::Span<const float> slots = rows.slots;
  TFSWITCH_RETURN_IF_ERROR(
      CheckFloats("embeddings", keys.size(), "dim", dim(), embeddings.size()));
  if (!slots.empty()) {
    TFSWITCH_RETURN_IF_ERROR(CheckFloats("slots", keys.size(), "slot_floats",
                                         slot_floats(), slots.size()));
  }
  const size_t dim = static_cast<size_t>(config_.dim);
  const size_t slot_floats = static_cast<size_t>(this->slot_floats());
  const size_t state_floats = static_cast<size_t>(optimizer_.slot_floats());
  if (mode == AssignMode::kNow && !slots.empty() &&
      optimizer_.moves_idle_rows() && size() == 0) {
    GoOnAfterStepOf(slots);
  }
  const auto end_generation = absl::MakeCleanup([this] { EndGeneration(); });
  const std::shared_ptr<const StepHistory> now = Now();
  const RowBuffer state = InitialState(Today(), now->last_step);
  auto num_assigned = static_cast<int64_t>(keys.size());
  for (size_t begin = 0; begin < keys.size(); begin += kInsertingBlock) {
    const absl::Span<const Key> block = keys.subspan(begin, kInsertingBlock);
    if (cold_ != nullptr && mode == AssignMode::kSaved) {
      TFSWITCH_RETURN_IF_ERROR(cold_->make_room(*this));
    }
    const ChangeClock::Change change(&change_clock_);
    TFSWITCH_RETURN_IF_ERROR(ReviveAbsent(block, change));
    // Sets row i of the block.
    const auto set = [&](const RowFloats& row, size_t i) {
      i += begin;
      // Sets only the embedding. The slots are kept, so the row first catches
      // up with the steps that it has missed.
      if (slots.empty()) optimizer_.CatchUp(*now, row.embedding, row.slots);
      std::copy_n(embeddings.data() + i * dim, dim, row.embedding);
      if (slots.empty()) return;
      const float* const from = slots.data() + i * slot_floats;
      std::copy_n(from, state_floats, row.slots);
      std::copy(from + state_floats, from + slot_floats, row.statistics);
      if (!optimizer_.moves_idle_rows()) return;
      float* const step = row.slots + state_floats - 1;
      SetDenseStepOfSlot(mode == AssignMode::kSaved
                             ? std::min(DenseStepOfSlot(step), now->last_step)
                             : now->last_step,
                         step);
    };
    TFSWITCH_RETURN_IF_ERROR(ModifyOrInsert(
        block.data(),
        StripeGroups(hash_, block.data(), static_cast<uint32_t>(block.size()),
                     nullptr),
        state, change,
        [&](const KeyPlace& place, uint32_t i) {
          if (mode == AssignMode::kNowIfMissing) {
            --num_assigned;
            return;
          }
          ModifyLocked(place, RowRounding(), change.stamp(),
                       [&](const RowFloats& row) { set(row, i); });
        },
        [&](const KeyPlace& place, const RowPlace& to, const float*,
            uint32_t i) {
          ForgetLocked(place, change.stamp());
          ModifyRow(to, RowRounding(), change.stamp(),
                    [&](const RowFloats& row) { set(row, i); });
        }));
  }
  return num_assigned;
}

void EmbeddingTable::Impl::Reserve(uint64_t num_rows) {
  if (num_rows == 0) return;
  num_rows = std::min<uint64_t>(num_rows,
                                AvailableMemoryBytes() / 2 / bytes_per_row());
  // Keys are not distributed quite evenly: few stripes get more than this.
  const auto mean = static_cast<double>(num_rows) / kNumStripes;
  const auto of_stripe =
      static_cast<uint64_t>(mean + 3.0 * std::sqrt(mean)) + 1;
  for (Stripe& stripe : stripes_) {
    MutexLock lock(&stripe.mutex);
    stripe.index.Reserve(of_stripe);
  }
  // In turns, because the rows of a batch go to all stripes.
  const uint64_t at_once = 2 * kHugePageBytes / stride_;
  for (uint64_t end = 0; end < of_stripe;) {
    end = std::min(end + at_once, of_stripe);
    for (Stripe& stripe : stripes_) {
      MutexLock lock(&stripe.mutex);
      stripe.rows.Reserve(end);
    }
  }
}

void EmbeddingTable::Impl::EraseLocked(const KeyPlace& place,
                                       ChangeStamp stamp) {
  Stripe* const stripe = place.stripe;
  const uint32_t row = place.entry.row();
  if (MustKeep(*stripe, row, stamp)) {
    const uint32_t meta = LockBucket(place.entry.bucket);
    // Checks again under the lock, because another thread may have copied the
    // row for the snapshot and changed it meanwhile.
    if (MustKeep(*stripe, row, stamp)) {
      KeepRow(stripe, place.key, row);
    }
    UnlockBucket(place.entry.bucket, meta);
  }
  NoteLossLocked(stripe, place.key, stamp);
  stripe->index.Erase(place.entry, place.position);
  // No other thread can find the row any more, so none can lock its bucket to
  // change it. A reader that is still copying the row will notice that the
  // bucket has changed.
  stripe->rows.Free(row);
  stripe->CountErased();
}

absl::StatusOr<int64_t> EmbeddingTable::Impl::Erase(
    absl::Span<const Key> keys) {
  int64_t num_erased = 0;
  const auto end_generation = absl::MakeCleanup([this] { EndGeneration(); });
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    const ChangeClock::Change change(&change_clock_);
    TFSWITCH_RETURN_IF_ERROR(ReviveAbsent(block, change));
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block, [&](const KeyPlace& place, size_t) {
          ForgetLocked(place, change.stamp());
          if (!place.has_row()) return absl::OkStatus();
          EraseLocked(place, change.stamp());
          ++num_erased;
          return absl::OkStatus();
        }));
  }
  return num_erased;
}

absl::Status EmbeddingTable::Impl::ReadUsage(
    absl::Span<const Key> keys, float day, absl::Span<UsageOfRow> usage,
    absl::Span<KeyState> states) const {
  day = DayOf(day);
  std::vector<float> counts(static_cast<size_t>(statistics_.num_floats()));
  const auto set_row = [&](size_t i, const float* row_statistics) {
    usage[i] = statistics_.Read(row_statistics, day);
    states[i] = KeyState::kRow;
  };
  const auto read = [&](const KeyPlace& place, size_t i) {
    usage[i] = UsageOfRow();
    states[i] = KeyState::kUnknown;
    if (place.has_row()) {
      CopyStatisticsLocked(place.stripe, place.entry, counts.data());
      set_row(i, counts.data());
    } else if (config_.admission.has_candidates()) {
      const float* const record =
          place.stripe->candidates.Find(place.key, place.position);
      if (record != nullptr) {
        usage[i] = candidate_statistics_.Read(record, day);
        states[i] = KeyState::kCandidate;
      }
    }
    return absl::OkStatus();
  };
  const Moves moves = ReadMoves();
  ForEachLocked(keys, read).IgnoreError();  // It cannot fail.
  for (size_t begin = 0; begin < keys.size() && has_cold_rows();
       begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    std::vector<uint16_t> absent;
    for (size_t i = 0; i < block.size(); ++i) {
      if (states[begin + i] != KeyState::kUnknown) continue;
      absent.push_back(static_cast<uint16_t>(i));
    }
    TFSWITCH_RETURN_IF_ERROR(ReadCold(
        block, moves,
        [&](size_t i, const char* record) {
          set_row(begin + i, cold_->tier.format().StatisticsOf(record));
        },
        [&](size_t i, const KeyPlace& place) {
          CopyStatisticsLocked(place.stripe, place.entry, counts.data());
          set_row(begin + i, counts.data());
        },
        &absent));
  }
  return absl::OkStatus();
}

// Gathers rows for the visitor of ForEachRow.
//
// Thread-compatible.
class EmbeddingTable::Impl::RowGatherer {
 public:
  // Add() applies the steps of `now` that a row has missed to its copy.
  RowGatherer(const Impl& table, size_t max_rows,
              std::shared_ptr<const StepHistory> now,
              const std::function<absl::Status(const RowChunk&)>& visit)
      : table_(table),
        max_rows_(max_rows),
        dim_(static_cast<size_t>(table.config_.dim)),
        slot_floats_(static_cast<size_t>(table.slot_floats())),
        now_(std::move(now)),
        visit_(visit),
        row_(static_cast<size_t>(table.row_floats())) {}

  size_t num_rows() const { return num_rows_; }
  // The buffer into which the caller writes the next row before Add().
  float* row() { return row_.data(); }

  // Makes room for `count` more rows.
  void Reserve(size_t count) {
    const size_t end = num_rows_ + count;
    if (end <= keys_.size()) return;
    keys_.resize(end);
    embeddings_.resize(end * dim_);
    slots_.resize(end * slot_floats_);
  }

  // There must be room.
  void Add(Key key) {
    // Changes only the copy of the row, not the table.
    table_.optimizer_.CatchUp(*now_, row_.data(), row_.data() + dim_);
    keys_[num_rows_] = key;
    std::copy(row_.begin(), row_.begin() + dim_,
              embeddings_.begin() + num_rows_ * dim_);
    std::copy(row_.begin() + dim_, row_.end(),
              slots_.begin() + num_rows_ * slot_floats_);
    ++num_rows_;
  }

  // Adds the row in row(), for which there need not be room.
  absl::Status AddAndEmit(Key key) {
    Reserve(1);
    Add(key);
    return num_rows_ < max_rows_ ? absl::OkStatus() : Emit();
  }

  // Adds a former state of a row, as RowUndoLog has kept it.
  absl::Status AddFormer(Key key, const float* floats) {
    const auto num_words = static_cast<size_t>(table_.codec_.num_words());
    if (table_.codec_.is_plain()) {
      std::copy_n(floats, num_words, row_.begin());
    } else {
      table_.codec_.Decode(floats, row_.data());
    }
    std::copy_n(floats + num_words, table_.statistics_.num_floats(),
                row_.begin() + table_.codec_.num_floats());
    return AddAndEmit(key);
  }

  absl::Status Emit() {
    for (size_t begin = 0; begin < num_rows_; begin += max_rows_) {
      const size_t n = std::min(num_rows_ - begin, max_rows_);
      TFSWITCH_RETURN_IF_ERROR(visit_(
          {absl::MakeConstSpan(keys_).subspan(begin, n),
           absl::MakeConstSpan(embeddings_).subspan(begin * dim_, n * dim_),
           absl::MakeConstSpan(slots_).subspan(begin * slot_floats_,
                                               n * slot_floats_)}));
    }
    num_rows_ = 0;
    return absl::OkStatus();
  }

 private:
  const Impl& table_;
  const size_t max_rows_;
  const size_t dim_;
  const size_t slot_floats_;
  const std::shared_ptr<const StepHistory> now_;
  const std::function<absl::Status(const RowChunk&)>& visit_;
  std::vector<float> row_;
  // Only the first num_rows_ elements are valid. The vectors are never
  // shortened, so that their memory is cleared only once.
  std::vector<Key> keys_;
  std::vector<float> embeddings_;
  std::vector<float> slots_;
  size_t num_rows_ = 0;
};

absl::Status EmbeddingTable::Impl::ForEachRow(
    int64_t max_rows, const std::function<absl::Status(const RowChunk&)>& visit,
    const Snapshot* snapshot) const {
  if (max_rows <= 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "table '", config_.name,
        "': max_rows: expected a positive number, got ", max_rows));
  }
  const uint32_t limit =
      snapshot != nullptr ? snapshot->moment.epoch + 1 : kAnyStamp;
  const auto full = static_cast<size_t>(max_rows);
  const uint64_t buckets_per_visit =
      std::clamp<uint64_t>(full / kKeysPerBucket, 1, kMaxBucketsPerVisit);
  RowGatherer gatherer(*this, full, snapshot != nullptr ? snapshot->now : Now(),
                       visit);
  std::vector<std::pair<Key, StripeIndex::Entry>> entries;
  const uint32_t min_stamp = snapshot != nullptr ? snapshot_from_.load() : 0;
  for (int s = 0; s < kNumStripes; ++s) {
    Stripe& stripe = stripes_[s];
    // Makes a bitmap by row number before the visit: stamps are in the order of
    // rows, but the visit is in the order of the index.
    std::vector<bool> changed;
    if (snapshot != nullptr && !snapshot->is_whole) {
      MutexLock lock(&stripe.mutex);
      changed = stripe.rows.RowsWithStamps(snapshot_from_, kAnyStamp);
    }
    const bool is_unchanged =
        snapshot != nullptr && !snapshot->is_whole && changed.empty();
    // The position of a key never changes, but its bucket does when the index
    // grows. So this visits ranges of positions, each under the mutex, and sees
    // each key once.
    for (uint64_t begin = 0; begin < kEndOfPositions;) {
      entries.clear();
      ColdRange cold;
      {
        MutexLock lock(&stripe.mutex);
        const uint64_t from = begin;
        begin = is_unchanged ? kEndOfPositions
                             : stripe.index.VisitEntries(
                                   begin, buckets_per_visit,
                                   [&](Key key, StripeIndex::Entry entry) {
                                     entries.emplace_back(key, entry);
                                   },
                                   changed.empty() ? nullptr : &changed);
        cold = CollectCold(s, from, begin, min_stamp);
        gatherer.Reserve(entries.size());
        for (size_t i = 0; i < entries.size(); ++i) {
          // Prefetches the rows: in memory they are in the order of their
          // creation, and so in another order than in the index.
          if (i + kLockedDistance < entries.size()) {
            const auto* const next = reinterpret_cast<const char*>(
                stripe.rows.At(entries[i + kLockedDistance].second.row()));
            for (size_t at = 0; at < stride_; at += kCacheLineBytes) {
              __builtin_prefetch(next + at);
            }
          }
          const auto& [key, entry] = entries[i];
          if (CopyRowLocked(&stripe, entry, limit, gatherer.row())) {
            gatherer.Add(key);
          }
        }
      }
      TFSWITCH_RETURN_IF_ERROR(
          VisitCold(cold, [&](const ColdHit& hit) -> absl::Status {
            const uint32_t stamp = ColdFormat::StampOf(hit.record);
            if (stamp < min_stamp || stamp >= limit) return absl::OkStatus();
            DecodeRecord(hit.record, gatherer.row());
            return gatherer.AddAndEmit(ColdFormat::KeyOf(hit.record));
          }));
      if (snapshot != nullptr) stripe.undo_log.SetVisited(begin);
      // The next range may have this many.
      if (gatherer.num_rows() + buckets_per_visit * kKeysPerBucket > full) {
        TFSWITCH_RETURN_IF_ERROR(gatherer.Emit());
      }
    }
    if (snapshot != nullptr) {
      TFSWITCH_RETURN_IF_ERROR(
          stripe.undo_log.End([&](Key key, const float* floats) {
            return gatherer.AddFormer(key, floats);
          }));
    }
  }
  return gatherer.Emit();
}

absl::Status EmbeddingTable::Impl::ReadRows(
    absl::Span<const Key> keys,
    const std::function<absl::Status(const RowChunk&)>& visit) const {
  RowGatherer gatherer(*this, keys.size(), Now(), visit);
  gatherer.Reserve(keys.size());
  const auto add = [&](const KeyPlace& place) {
    CopyRowLocked(place.stripe, place.entry, kAnyStamp, gatherer.row());
    gatherer.Add(place.key);
  };
  for (size_t begin = 0; begin < keys.size(); begin += kMaxKernelKeys) {
    const absl::Span<const Key> block = keys.subspan(begin, kMaxKernelKeys);
    std::vector<uint16_t> absent;
    const Moves moves = ReadMoves();
    TFSWITCH_RETURN_IF_ERROR(
        ForEachLocked(block, [&](const KeyPlace& place, size_t i) {
          if (place.has_row()) {
            add(place);
          } else {
            absent.push_back(static_cast<uint16_t>(i));
          }
          return absl::OkStatus();
        }));
    if (!has_cold_rows()) continue;
    TFSWITCH_RETURN_IF_ERROR(ReadCold(
        block, moves,
        [&](size_t i, const char* record) {
          DecodeRecord(record, gatherer.row());
          gatherer.Add(block[i]);
        },
        [&](size_t, const KeyPlace& place) { add(place); }, &absent));
  }
  return gatherer.Emit();
}

absl::Status EmbeddingTable::Impl::RestoreSteps(const SavedSteps& saved) {
  TFSWITCH_RETURN_IF_ERROR(StepLog::Validate(saved));
  step_log_.Restore(saved);
  return absl::OkStatus();
}

int64_t EmbeddingTable::Impl::size() const {
  int64_t size = cold_ != nullptr ? cold_->num_rows.load() : 0;
  for (const Stripe& stripe : stripes_) {
    size += stripe.inserted_rows.load(std::memory_order_relaxed) -
            stripe.erased_rows.load(std::memory_order_relaxed);
  }
  // Not negative even if other threads write: the numbers are read one after
  // another.
  return std::max<int64_t>(size, 0);
}

int64_t EmbeddingTable::Impl::SizeAtMost() const {
  int64_t size = cold_ != nullptr ? cold_->num_rows.load() : 0;
  for (const Stripe& stripe : stripes_) {
    // In this order, because a row may be made and erased between the two.
    size -= stripe.erased_rows.load(std::memory_order_acquire);
    size += stripe.inserted_rows.load(std::memory_order_acquire);
  }
  return size;
}

TableStats EmbeddingTable::Impl::stats() const {
  TableStats stats;
  int64_t row_resident_bytes = 0;
  for (Stripe& stripe : stripes_) {
    MutexLock lock(&stripe.mutex);
    stats.inserted_rows += stripe.inserted_rows.load(std::memory_order_relaxed);
    stats.erased_rows += stripe.erased_rows.load(std::memory_order_relaxed);
    stats.index_bytes += static_cast<int64_t>(stripe.index.resident_bytes());
    row_resident_bytes += static_cast<int64_t>(stripe.rows.resident_bytes());
    if (config_.admission.has_candidates()) {
      stats.num_candidates += stripe.candidates.size();
      stats.free_candidates += stripe.candidates.num_free();
      stats.admission_bytes +=
          static_cast<int64_t>(stripe.candidates.resident_bytes());
    }
    if (!change_clock_.is_running()) continue;
    stats.change_bytes += static_cast<int64_t>(
        stripe.key_changes.resident_bytes() + stripe.rows.stamp_bytes() +
        stripe.candidates.stamp_bytes());
  }
  if (bloom_ != nullptr) {
    stats.admission_bytes += static_cast<int64_t>(bloom_->resident_bytes());
  }
  const int64_t memory_rows = stats.inserted_rows - stats.erased_rows;
  if (cold_ != nullptr) {
    const ColdTier& tier = cold_->tier;
    stats.cold_rows = cold_->num_rows;
    stats.cold_file_bytes = tier.file_bytes();
    stats.cold_memory_bytes = tier.memory_bytes();
    stats.cold_written_bytes = tier.written_bytes();
    stats.cold_block_reads = tier.num_reads();
    // Moves do not count.
    stats.inserted_rows -= counters().Sum(TableCounter::promoted_rows);
    stats.erased_rows -= counters().Sum(TableCounter::demoted_rows);
  }
  stats.num_rows = memory_rows + stats.cold_rows;
  stats.num_steps = step_log_.Now()->last_step;
  stats.row_stride_bytes = static_cast<int64_t>(stride_ + statistics_stride_);
  stats.row_bytes = memory_rows * stats.row_stride_bytes;
  stats.reserved_bytes = row_resident_bytes - stats.row_bytes;
#define TFSWITCH_READ(name) stats.name = counters().Sum(TableCounter::name);
  TFSWITCH_TABLE_COUNTERS(TFSWITCH_READ)
#undef TFSWITCH_READ
  return stats;
}

absl::StatusOr<std::unique_ptr<EmbeddingTable>> EmbeddingTable::Create(
    const TableConfig& config, const KeyedHash& hash) {
  return Impl::Create(config, hash);
}

}  // namespace tfswitch
