// Measures one step of each optimizer on one core, compared with Adagrad's.
//
//   optimizers_bench [--rows=N] [--dim=D] [--reps=R]
// Rows are in one array on huge pages, each on its own cache lines. They are
// updated in random order and prefetched 24 ahead. Speed is CPU time of the
// thread in ns per row; the optimizers take turns within each repetition, in
// reversed order every second time. Figures are the median, and the median of
// the ratio to Adagrad in the same repetition. The floor is Adagrad's
// arithmetic in a simple loop, without an Optimizer.

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "benchmarks/bench_support.h"
#include "cc/base/config_fields.h"
#include "cc/base/cpu_features.h"
#include "cc/optimizer/optimizer.h"

namespace tfswitch {
namespace {

constexpr int64_t kSteps = 1000000;  // Per repetition and optimizer.
constexpr int kPrefetchDistance = 24;
constexpr size_t kHugePage = 2u << 20;
constexpr size_t kLine = 64;

int64_t num_rows = 2000000;
int dim = 16;
int reps = 9;

struct Variant {
  std::string name;
  std::unique_ptr<Optimizer> optimizer;
  size_t stride = 0;
};

void Add(const std::string& name, const OptimizerConfig& config,
         std::vector<Variant>* variants) {
  Check(ValidateOptimizerConfig(config, dim));
  variants->push_back({name, std::make_unique<Optimizer>(config, dim)});
}

std::vector<Variant> MakeVariants() {
  std::vector<Variant> variants;
  Add("adagrad", AdagradConfig{}, &variants);
  ForEachKind<RuleConfig>([&](const auto& rule) {
    if (std::string(rule.kName) == "adagrad") return;
    Add(rule.kName, rule, &variants);
    if (std::string(rule.kName) == "sgd") {
      Add("momentum", SgdConfig{0.9f, false}, &variants);
    }
    if (std::string(rule.kName) == "rmsprop") {
      Add("rmsprop centered momentum", RmspropConfig{0.9f, 0.9f, 1e-7f, true},
          &variants);
    }
  });
  FtrlConfig power;
  power.learning_rate_power = -0.4f;
  Add("ftrl, power -0.4", power, &variants);

  const auto with = [&](const char* name, auto StepOptions::*option,
                        float value) {
    StepOptions options;
    options.*option = value;
    Add(std::string("adagrad, ") + name, {AdagradConfig{}, options}, &variants);
  };
  with("l2", &StepOptions::l2, 1e-5f);
  with("weight decay", &StepOptions::weight_decay, 1e-5f);
  with("clip by value", &StepOptions::clip_value, 0.005f);
  with("clip by norm", &StepOptions::clip_norm, 0.005f);
  with("bounds", &StepOptions::max_weight, 10.0f);
  with("cowclip", &StepOptions::cowclip_r, 1e-3f);
  StepOptions cowclip;
  cowclip.l2 = 1e-5f;
  cowclip.cowclip_r = 1e-3f;
  Add("adam, l2 and cowclip", {AdamConfig{}, cowclip}, &variants);
  Add("segments: ftrl 1, adagrad rest",
      OptimizerConfig(std::vector<SegmentConfig>{
          {1, 1.0f, FtrlConfig{}, {}}, {0, 1.0f, AdagradConfig{}, {}}}),
      &variants);
  for (Variant& variant : variants) {
    const int floats = dim + variant.optimizer->slot_floats();
    variant.stride = (floats * sizeof(float) + kLine - 1) / kLine * kLine;
  }
  return variants;
}

// Calls step(row) for each of `order`.
template <typename Step>
void ForEachRow(char* rows, size_t stride, const std::vector<uint32_t>& order,
                const Step& step) {
  const size_t lines = std::min<size_t>(stride, 512);
  for (size_t i = 0; i < order.size(); ++i) {
    if (i + kPrefetchDistance < order.size()) {
      const char* const ahead = rows + order[i + kPrefetchDistance] * stride;
      for (size_t at = 0; at < lines; at += kLine) {
        __builtin_prefetch(ahead + at, 1);
      }
    }
    step(reinterpret_cast<float*>(rows + order[i] * stride));
  }
}

void Run(const Variant& variant, char* rows, const std::vector<uint32_t>& order,
         const float* gradient) {
  const Optimizer& optimizer = *variant.optimizer;
  StepInput input;
  input.learning_rate = 0.01f;
  ForEachRow(rows, variant.stride, order,
             [&](float* row) { optimizer.Step(row, gradient, input); });
}

void Measure() {
  const std::vector<Variant> variants = MakeVariants();
  size_t stride = 0;
  for (const Variant& variant : variants) {
    stride = std::max(stride, variant.stride);
  }
  const size_t bytes =
      (num_rows * stride + kHugePage - 1) / kHugePage * kHugePage;
  // All variants use one array: each fills it before it runs.
  char* const rows = static_cast<char*>(aligned_alloc(kHugePage, bytes));
  if (rows == nullptr) Die("no memory for the rows");
  madvise(rows, bytes, MADV_HUGEPAGE);
  std::mt19937_64 random(1);
  std::vector<uint32_t> order(kSteps);
  for (uint32_t& at : order) at = static_cast<uint32_t>(random() % num_rows);
  std::vector<float> gradient(dim);
  for (float& g : gradient) {
    g = std::uniform_real_distribution<float>(-0.01f, 0.01f)(random);
  }
  const auto reset = [&](const Variant& variant) {
    for (int64_t i = 0; i < num_rows; ++i) {
      float* const row = reinterpret_cast<float*>(rows + i * variant.stride);
      std::fill_n(row, dim, 0.01f);
      variant.optimizer->InitSlots(row + dim);
    }
  };
  std::vector<std::vector<double>> ns(variants.size());
  for (int rep = -1; rep < reps; ++rep) {  // One to warm up.
    for (size_t i = 0; i < variants.size(); ++i) {
      const size_t v = rep % 2 == 0 ? i : variants.size() - 1 - i;
      reset(variants[v]);
      const double begin = Seconds(CLOCK_THREAD_CPUTIME_ID);
      Run(variants[v], rows, order, gradient.data());
      const double taken = Seconds(CLOCK_THREAD_CPUTIME_ID) - begin;
      if (rep >= 0) ns[v].push_back(taken * 1e9 / kSteps);
    }
  }
  free(rows);

  printf("%ld rows, dim %d, %s, medians of %d repetitions\n", num_rows, dim,
         std::string(SimdLevelName(ActiveSimdLevel())).c_str(), reps);
  printf("%-32s %10s %10s %8s %18s\n", "optimizer", "slot bytes", "row bytes",
         "ns", "x adagrad (range)");
  for (size_t v = 0; v < variants.size(); ++v) {
    std::vector<double> ratios = Ratios(ns[v], ns[0]);
    std::sort(ratios.begin(), ratios.end());
    const size_t slots = variants[v].optimizer->slot_floats();
    const std::string row = "speed | " + variants[v].name + " | ";
    Report(row + "slots", "B", {static_cast<double>(slots * sizeof(float))});
    Report(row + "row", "B", {static_cast<double>(variants[v].stride)});
    Report(row + "step", "ns", ns[v]);
    Report(row + "times Adagrad", "", ratios);
    printf("%-32s %10zu %10zu %8.1f %6.2f (%.2f-%.2f)\n",
           variants[v].name.c_str(), slots * sizeof(float), variants[v].stride,
           Median(ns[v]), Median(ratios), ratios.front(), ratios.back());
  }
}

}  // namespace
}  // namespace tfswitch

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&](const char* name) {
      const std::string prefix = std::string("--") + name + "=";
      return argument.rfind(prefix, 0) == 0
                 ? std::atoll(argument.c_str() + prefix.size())
                 : -1;
    };
    if (value("rows") > 0) {
      tfswitch::num_rows = value("rows");
    } else if (value("dim") > 0 && value("dim") <= tfswitch::kMaxSegmentDim) {
      tfswitch::dim = static_cast<int>(value("dim"));
    } else if (value("reps") > 0) {
      tfswitch::reps = static_cast<int>(value("reps"));
    } else {
      tfswitch::Die("usage: optimizers_bench [--rows=N] [--dim=D] [--reps=R]");
    }
  }
  tfswitch::Measure();
  return 0;
}
