#include "cc/base/cpu_features.h"

#include <cstdlib>

#include "gtest/gtest.h"

namespace tfswitch {
namespace {

TEST(CpuFeaturesTest, NoWishGivesTheBestLevel) {
  EXPECT_EQ(ResolveSimdLevel(nullptr), BestSimdLevel());
  EXPECT_EQ(ResolveSimdLevel(""), BestSimdLevel());
}

TEST(CpuFeaturesTest, ScalarIsAlwaysGranted) {
  EXPECT_EQ(ResolveSimdLevel("scalar"), SimdLevel::kScalar);
}

TEST(CpuFeaturesTest, WhatIsUnknownOrUnsupportedFallsBackToTheBestLevel) {
  EXPECT_EQ(ResolveSimdLevel("avx2"), BestSimdLevel());
  EXPECT_EQ(ResolveSimdLevel("avx512"), BestSimdLevel());
  EXPECT_EQ(ResolveSimdLevel("AVX2"), BestSimdLevel());
}

TEST(CpuFeaturesTest, TheActiveLevelFollowsTheEnvironment) {
  EXPECT_EQ(ActiveSimdLevel(), ResolveSimdLevel(getenv("TFSWITCH_SIMD")));
}

}  // namespace
}  // namespace tfswitch
