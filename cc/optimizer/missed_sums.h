// Computes the effect of a row's missed steps without taking them one by one.
//
// A step without a gradient moves a coordinate by a product of two numbers: X
// depends only on the row, the other number only on the table. The j-th missed
// step moves the coordinate by
//
//   momentum   -v b^j                      X = -v
//   AMSGrad    c_j m b1^j / (s + eps)      X = m / (s + eps), s = sqrt(v_hat)
//   Adam       c_j m b1^j / (s q^j + eps)  X = m / (s + eps), s = sqrt(v),
//            = X c_j w_j(p)                p = eps / (s + eps), q = sqrt(b2)
//
// Here c_j contains the learning rate and Adam's correction, and w_j(p) = b1^j
// / (q^j (1 - p) + p) is between 0 and (b1 / q)^j. w_j is approximated by a
// polynomial in 2p - 1 through Chebyshev points. It has 4 terms if that is
// exact enough for the betas (as for 0.9 and 0.999), else 8. The coefficients
// are summed over the missed steps. A table keeps these sums for each step at
// which a row may have stopped. Only the steps in a window after that step
// matter, so a sum changes for a while and is then final.
//
// With weight decay each step multiplies the row by 1 - decay rate before it
// moves the row. The products of these factors are kept as well.
//
// All this is computed in double, with additions, multiplications, divisions
// and square roots in a fixed order, so that all processors give the same bits.

#ifndef TFSWITCH_CC_OPTIMIZER_MISSED_SUMS_H_
#define TFSWITCH_CC_OPTIMIZER_MISSED_SUMS_H_

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "cc/optimizer/missed_steps.h"

namespace tfswitch {

class Optimizer;
struct SegmentStep;

// Computes base^n for a base from 0 to 1, by repeated multiplication. Results
// below 1e-30 become 0, so that averages do not become denormal numbers.
double Power(double base, uint32_t n);

inline constexpr int kMaxMissedTerms = 8;

// How a segment catches up with missed steps. Constant.
struct MissedPlan {
  enum class Way : uint8_t {
    kNothing,  // A step without a gradient changes nothing.
    kSum,
    kSteps,  // One by one.
  };
  Way way = Way::kNothing;
  int num_terms = 0;
  uint32_t window = 0;
  // The factors of the steps in the window: window x num_terms, in reverse
  // order. The first row is for the last missed step, the last row for the
  // first missed step.
  std::vector<double> weights;
  // If `way` is kSteps: after so many steps only averages change, not weights.
  uint32_t settled_after = std::numeric_limits<uint32_t>::max();
  double weight_decay = 0.0;
  // A step multiplies the first average (or all slots) by keep_1, and the
  // second average by keep_2.
  double keep_1 = 1.0;
  double keep_2 = 1.0;
  // For momentum without decay: the sum of all further moves, as a multiple of
  // the velocity.
  double all_moves = 0.0;

  struct Kept {
    float keep_1 = 1.0f;
    float keep_2 = 1.0f;
    float moves = 0.0f;
  };
  // The same factors after few steps.
  std::vector<Kept> kept;

  Kept KeptAfter(uint32_t steps) const {
    if (steps < kept.size()) return kept[steps];
    const double keep = Power(keep_1, steps);
    return {static_cast<float>(keep), static_cast<float>(Power(keep_2, steps)),
            static_cast<float>(all_moves * (1.0 - keep))};
  }
};

// Sets `missed` of a segment of a table with dense updates.
void PlanMissedSteps(bool is_nesterov, SegmentStep* segment);

// The data with which a kernel applies missed steps to a segment of a row.
struct MissedInput {
  const float* terms = own_terms;  // At least num_terms (of the plan) floats.
  float decay = 1.0f;              // The factor of weights.
  MissedPlan::Kept kept;           // The factors of averages.
  float count = 0.0f;
  // Whether the kernel also updates slots, and not only weights.
  bool writes_slots = true;
  float own_terms[kMaxMissedTerms] = {};
};

// The final sums of a segment for kSteps steps. While a thread reads the
// elements up to its MissedMoment, another thread may write the elements after
// them.
struct MissedBlock {
  // Decay factors are from 0.5 to 1. With this number of steps the product of
  // all their factors is still a normal float.
  static constexpr uint32_t kSteps = 512;
  // kSteps x num_terms.
  std::shared_ptr<float[]> terms;
  // With decay: decays[i] is the product of the factors from the first step of
  // this block to step i. `decay` is the product from the first step of this
  // block to the first step of the last block.
  std::shared_ptr<double[]> decays;
  double decay = 1.0;
};

// The sums of a segment as of one step of the table. Immutable.
struct MissedMoment {
  // The sums that are not final yet. Those for the last step are at the end.
  std::vector<float> recent;
  // The product of the decay factors since the beginning of the last block.
  double decay = 1.0;
  uint32_t first_step = 0;  // The first step of the first block.
  std::shared_ptr<const std::vector<MissedBlock>> blocks;
};

// Computes the sum of the steps of `history` after step `step`. REQUIRES:
// segment.missed.way is kSum and history.moments is not null.
void SumMissedSteps(const SegmentStep& segment, const MissedMoment& moment,
                    const StepHistory& history, uint32_t step,
                    MissedInput* input);

// Updates the sums of all segments of an optimizer at each step of the table.
// With Keras's betas this takes some 0.3 us per step. It keeps sums for the
// last kKeptSteps steps. Each step takes 4 bytes per term, and 8 more with
// weight decay.
//
// Thread-compatible.
class MissedSums {
 public:
  static constexpr uint32_t kKeptSteps = 65536;

  // The optimizer must outlive this object.
  explicit MissedSums(const Optimizer* optimizer);

  // Drops all sums, and continues after step `step`.
  void Reset(uint32_t step);
  void Add(float learning_rate);
  // The sums as of the last step, one per segment. Empty if a decay factor was
  // too small for the products, or if no segment needs sums.
  std::vector<MissedMoment> Now() const;

 private:
  struct Segment {
    const SegmentStep* step = nullptr;
    std::vector<double> sums;  // Those that are not final.
    MissedMoment now;
  };

  void Add(float learning_rate, Segment* segment) const;

  std::vector<Segment> segments_;
  uint32_t step_ = 0;
  bool has_sums_ = false;
};

}  // namespace tfswitch

#endif  // TFSWITCH_CC_OPTIMIZER_MISSED_SUMS_H_
