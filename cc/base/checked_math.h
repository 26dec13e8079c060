// Sums and products of sizes from files and messages, which may overflow.

#ifndef TFSWITCH_CC_BASE_CHECKED_MATH_H_
#define TFSWITCH_CC_BASE_CHECKED_MATH_H_

namespace tfswitch {

// False if the sum does not fit a T; then *sum has no meaning.
template <typename T>
[[nodiscard]] bool CheckedAdd(T a, T b, T* sum) {
  return !__builtin_add_overflow(a, b, sum);
}

// False if the product does not fit a T; then *product has no meaning.
template <typename T>
[[nodiscard]] bool CheckedMultiply(T a, T b, T* product) {
  return !__builtin_mul_overflow(a, b, product);
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_CHECKED_MATH_H_
