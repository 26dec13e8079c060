// Takes an optimizer step on one row, in place.
//
//   row = | embedding: dim floats | slots of segment 0 | of segment 1 | ...
//
// rules.h lists the slots of each rule. In the formulas w are the weights of a
// segment, g their gradient, D their number, and lr the learning rate.
//
// docs/optimizers.md has the formulas. Rules that Keras 3 also has use the same
// float32 operations in the same order. Adam counts the steps of each row,
// where Keras counts those of the variable: so the correction of a row that is
// seldom in a batch depends on the row's own history.
//
// Order of a step with options:
//
//   1. g = g + l2 w
//   2. CowClip (arXiv 2204.06240): T = cowclip_r count max(|w|, sqrt(D) zeta),
//      g = g min(1, T / |g|)
//   3. each coordinate of g into [-clip_value, clip_value]
//   4. g = g min(1, clip_norm / |g|)
//   5. w = w - w weight_decay lr
//   6. the rule
//   7. each coordinate of w into [min_weight, max_weight]
//   8. w = w n / (|w| + 1e-7), n: |w| into [min_norm, max_norm], as the
//      constraints MinMaxNorm, MaxNorm and UnitNorm of Keras do
//
// Steps 1 and 5 apply only to the rows of a push ("lazily"), unless the config
// says `is_dense`. A row then has one more slot; see missed_steps.h.

#ifndef TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_
#define TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cc/base/cpu_features.h"
#include "cc/optimizer/missed_steps.h"
#include "cc/optimizer/missed_sums.h"
#include "cc/optimizer/optimizer_config.h"

namespace tfswitch {

// The settings of the step that a push takes.
struct StepSettings {
  float learning_rate = 0.0f;
  // The number of the training step, from 1 on, which adagrad_decay needs; 0 if
  // unknown.
  int64_t global_step = 0;

  // How many periods of `length` steps have passed at this step.
  int64_t PeriodsOf(int64_t length) const { return global_step / length; }
  uint64_t StepOr(uint64_t number) const {
    return global_step > 0 ? static_cast<uint64_t>(global_step) : number;
  }
  // Merges the settings of another push of the same round. The round gets the
  // larger step number.
  void JoinRound(const StepSettings& other) {
    global_step = std::max(global_step, other.global_step);
  }
  bool operator<(const StepSettings& other) const {
    return std::tie(learning_rate, global_step) <
           std::tie(other.learning_rate, other.global_step);
  }
};

// The input of a step for one row, apart from the row's gradient.
struct StepInput : StepSettings {
  // How often the batch contains the key; CowClip needs it.
  float count = 1.0f;
  // How often the key was shown, for Paddle's rules. Values up to 0 count as 1.
  float shows = 1.0f;
  // For a dense table: the table's earlier steps. With is_gradient_step, the
  // row takes a step with the gradient after it has caught up with these.
  const StepHistory* history = nullptr;
  bool is_gradient_step = true;
};

struct SegmentStep;

// The constant input of a kernel. The row, the gradient and the StepInput are
// arguments of each call.
struct OptimizerParams : RuleParams {
  using Kernel = void (*)(const OptimizerParams&, float* row, float* slots,
                          const float* gradient, const StepInput& input);

  int dim = 0;
  // Adam's sqrt(1 - beta_2^t) / (1 - beta_1^t) for t < num_corrections.
  const float* corrections = nullptr;
  // The members below are used by kernels that call `rule`. Before and after
  // that call they apply options or missed steps.
  StepOptions options;
  float cowclip_floor = 0.0f;  // sqrt(dim) zeta
  Kernel rule = nullptr;
  // Used by the kernel that steps all segments, one after another.
  const SegmentStep* segments = nullptr;
  int num_segments = 0;
  // For dense tables: the index of the slot with the row's step number, which
  // is the last slot.
  int step_slot = 0;
};

struct SegmentStep {
  OptimizerParams params;
  OptimizerParams::Kernel step = nullptr;
  // The segment's start in embedding and gradient.
  int begin = 0;
  // Where the segment's slots begin among the slots of the row.
  int slots_begin = 0;
  float learning_rate_scale = 1.0f;
  // The first `num_initial` slots start with initial_slot, all others with 0.
  int num_initial = 0;
  float initial_slot = 0.0f;
  int num_slots = 0;
  Averages averages = Averages::kNone;
  std::vector<float> corrections;
  // How rows of a dense table catch up with missed steps, and the kernel that
  // does it.
  MissedPlan missed;
  void (*miss)(const SegmentStep&, float* row, float* slots,
               const MissedInput& input) = nullptr;
};

// Immutable after construction, so thread-safe. But two threads must not step
// the same row at the same time.
class Optimizer {
 public:
  // REQUIRES: ValidateOptimizerConfig(config, dim) is OK and dim > 0.
  Optimizer(const OptimizerConfig& config, int dim,
            SimdLevel level = ActiveSimdLevel());

  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  int dim() const { return dim_; }
  int slot_floats() const { return slot_floats_; }

  // Whether a step depends on the count, shows or step number in StepInput.
  bool reads_counts() const { return reads_counts_; }
  bool reads_shows() const { return reads_shows_; }
  bool reads_steps() const { return reads_steps_; }

  // For a dense table: whether a step without a gradient changes rows, and
  // whether rows have to take missed steps one by one.
  bool moves_idle_rows() const { return moves_idle_rows_; }
  bool takes_missed_steps() const { return takes_missed_steps_; }
  const std::vector<SegmentStep>& segments() const { return segments_; }

  // Writes the initial slots of a new row. In a dense table the row then counts
  // as up to date with step number `step`.
  void InitSlots(float* slots, uint32_t step = 0) const;

  // Takes one step. Both SIMD levels give the same bits. (Always inlined,
  // because files compiled for AVX2 call it, too.)
  [[gnu::always_inline]] void Step(float* embedding, float* slots,
                                   const float* gradient,
                                   const StepInput& input) const {
    step_(params_, embedding, slots, gradient, input);
  }

  // Takes one step on a row in the form above.
  [[gnu::always_inline]] void Step(float* row, const float* gradient,
                                   const StepInput& input) const {
    Step(row, row + dim_, gradient, input);
  }

  // For a dense table: makes the row catch up with the steps that it has
  // missed. If `writes_slots` is false, only the embedding is valid afterwards.
  [[gnu::always_inline]] void CatchUp(const StepHistory& history,
                                      float* embedding, float* slots,
                                      bool writes_slots = true) const {
    if (!moves_idle_rows_) return;
    CatchUpRow(params_, history, writes_slots, embedding, slots);
  }

 private:
  const int dim_;
  int slot_floats_ = 0;
  bool reads_counts_ = false;
  bool reads_shows_ = false;
  bool reads_steps_ = false;
  bool moves_idle_rows_ = false;
  bool takes_missed_steps_ = false;
  std::vector<SegmentStep> segments_;
  // The kernel that Step() calls, and the kernel's parameters. If there are
  // several segments, this kernel calls those of the segments.
  OptimizerParams params_;
  OptimizerParams::Kernel step_ = nullptr;
};

// The number of slot floats of a row, without building an Optimizer.
int SlotFloats(const OptimizerConfig& config, int dim);

// A group of adjacent slots of a row.
struct SlotRun {
  int count = 0;
  // True if each of these slots belongs to a coordinate of the embedding; false
  // if they belong to the whole row.
  bool is_per_coordinate = false;
};

// All slots of a row, in order.
std::vector<SlotRun> SlotRuns(const OptimizerConfig& config, int dim);

// Whether the slots of both configs have the same number and meaning, so that
// rows can be used with either. Knobs and options may differ.
bool HaveEqualState(const OptimizerConfig& a, const OptimizerConfig& b,
                    int dim);

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_OPTIMIZER_H_
