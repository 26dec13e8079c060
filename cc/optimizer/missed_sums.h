// Computes the effect of a row's missed steps without taking them one by one.
//
// A step without a gradient moves a coordinate by a product of X, which depends
// on the row, and a number that depends on the table alone. The j-th missed
// step moves it by
//
//   momentum   -v b^j                      X = -v
//   AMSGrad    c_j m b1^j / (s + eps)      X = m / (s + eps), s = sqrt(v_hat)
//   Adam       c_j m b1^j / (s q^j + eps)  X = m / (s + eps), s = sqrt(v),
//            = X c_j w_j(p)                p = eps / (s + eps), q = sqrt(b2)
//
// where c_j has the learning rate and the correction of Adam, and
// w_j(p) = b1^j / (q^j (1 - p) + p) is between 0 and (b1 / q)^j. A polynomial
// in 2p - 1 through Chebyshev points stands for w_j, with 4 terms where the
// betas allow it (0.9 and 0.999), else 8. Its coefficients are sums over the
// missed steps: a table keeps them for each step at which a row may have
// stopped. Only a window of steps after it weighs, so that such a sum changes
// for a while and is final then.
//
// Weight decay multiplies the row by 1 - decay rate in each step, before the
// move. The products are kept beside the sums.
//
// All of it is in double, by additions, multiplications, divisions and square
// roots in one order, so that all processors give the same bits.

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

// base^n for a base from 0 to 1, by multiplication. Results below 1e-30 become
// 0, so that averages do not become denormal numbers.
double Power(double base, uint32_t n);

inline constexpr int kMaxMissedTerms = 8;

// How a segment makes up for missed steps. Constant.
struct MissedPlan {
  enum class Way : uint8_t {
    kNothing,  // A step without a gradient changes nothing.
    kSum,
    kSteps,  // One by one.
  };
  Way way = Way::kNothing;
  int num_terms = 0;
  uint32_t window = 0;
  // window x num_terms: the weights of missed step number `window` are first,
  // those of the first missed step last.
  std::vector<double> weights;
  // With kSteps: after so many steps only averages change.
  uint32_t settled_after = std::numeric_limits<uint32_t>::max();
  double weight_decay = 0.0;
  // The factor of a step for the first average, or for all slots, and for the
  // second average.
  double keep_1 = 1.0;
  double keep_2 = 1.0;
  // With momentum and without decay: the sum of all moves, divided by the
  // velocity.
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

// Sets segment->missed for segments of tables with dense updates.
void PlanMissedSteps(bool is_nesterov, SegmentStep* segment);

// The sums that a kernel applies to a segment of a row.
struct MissedInput {
  const float* terms = own_terms;  // At least as many as the plan has.
  float decay = 1.0f;              // The factor of weights.
  MissedPlan::Kept kept;           // The factors of averages.
  float count = 0.0f;
  // Whether slots change; else the caller only wants the weights.
  bool writes_slots = true;
  float own_terms[kMaxMissedTerms] = {};
};

// The sums of a segment for kSteps steps, once they are final. Elements behind
// those that a moment knows may be written while others are read.
struct MissedBlock {
  // Products of so many decays, from 0.5 to 1, are normal numbers.
  static constexpr uint32_t kSteps = 512;
  std::shared_ptr<float[]> terms;  // kSteps x num_terms.
  // With decay: the product from the first step of the block to each step, and
  // to the first step of the last block.
  std::shared_ptr<double[]> decays;
  double decay = 1.0;
};

// The sums of a segment at one step of the table. Immutable.
struct MissedMoment {
  // Sums that are not final; the last step's are last.
  std::vector<float> recent;
  double decay = 1.0;  // The product from the beginning of the last block on.
  uint32_t first_step = 0;  // The first step of the first block.
  std::shared_ptr<const std::vector<MissedBlock>> blocks;
};

// Writes the sum of the steps of `history` after step `step`. REQUIRES:
// segment.missed.way is kSum and history.moments is not null.
void SumMissedSteps(const SegmentStep& segment, const MissedMoment& moment,
                    const StepHistory& history, uint32_t step,
                    MissedInput* input);

// Keeps the sums of all segments of an optimizer as the table steps. This takes
// some 0.3 us a step with Keras's betas, and 4 bytes a term for each of the
// last kKeptSteps steps, and 8 with weight decay.
//
// Thread-compatible.
class MissedSums {
 public:
  static constexpr uint32_t kKeptSteps = 65536;

  // The optimizer must outlive this object.
  explicit MissedSums(const Optimizer* optimizer);

  // Drops all sums, and continues from a step.
  void Reset(uint32_t step);
  void Add(float learning_rate);
  // One for each segment; empty if a rate was too large for the products, or if
  // no segment needs sums.
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
