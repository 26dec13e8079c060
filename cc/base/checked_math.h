// Sums and products of sizes that files and messages give, which may not fit.

#ifndef TFSWITCH_CC_BASE_CHECKED_MATH_H_
#define TFSWITCH_CC_BASE_CHECKED_MATH_H_

namespace tfswitch {

// False if the sum is no T; *sum is then not to be used.
template <typename T>
[[nodiscard]] bool CheckedAdd(T a, T b, T* sum) {
  return !__builtin_add_overflow(a, b, sum);
}

// False if the product is no T; *product is then not to be used.
template <typename T>
[[nodiscard]] bool CheckedMultiply(T a, T b, T* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_CHECKED_MATH_H_
