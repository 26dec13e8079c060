// The fields of configs, each described once.
//
// A config is a struct with a function Fields(), which lists its fields.
// Equality, validation, JSON and protos are made from this list. Some settings
// are a choice between several kinds, for example of optimizers. Then each kind
// is a config, with its name in kName, and a std::variant of these structs
// holds the chosen kind.

#ifndef TFSWITCH_CC_BASE_CONFIG_FIELDS_H_
#define TFSWITCH_CC_BASE_CONFIG_FIELDS_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace tfswitch {

// The values that a field may have. Error messages show `text` as the expected
// value.
struct FieldRange {
  const char* text;
  double min;
  double max;
  bool excludes_min = false;
  bool excludes_max = false;
};

// A number whose type says its range, which validation checks. It is used like
// a T. Its functions are always inlined: kernels for other processors use it,
// and the linker must not choose their copy.
template <typename T, const FieldRange& kRange>
struct Ranged {
  using Value = T;
  static constexpr const FieldRange& range = kRange;
  T value;

  // NOLINTNEXTLINE(google-explicit-constructor)
  [[gnu::always_inline]] constexpr Ranged(T v = T()) : value(v) {}
  // NOLINTNEXTLINE(google-explicit-constructor)
  [[gnu::always_inline]] constexpr operator T() const { return value; }
};

namespace ranges {
inline constexpr double kMax = std::numeric_limits<float>::max();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr FieldRange kUnit{"a number in [0, 1]", 0.0, 1.0};
// The range for coefficients of moving averages. It excludes 1, which would
// cause a division by 0.
inline constexpr FieldRange kDecay{"a number in [0, 1)", 0.0, 1.0, false, true};
inline constexpr FieldRange kRate{"a number in (0, 1]", 0.0, 1.0, true};
inline constexpr FieldRange kNonNegative{"a finite number >= 0", 0.0, kMax};
inline constexpr FieldRange kPositive{"a finite number > 0", 0.0, kMax, true};
inline constexpr FieldRange kNonPositive{"a finite number <= 0", -kMax, 0.0};
inline constexpr FieldRange kSteps{"an integer from 1 to 4294967295", 1.0,
                                   4294967295.0};
inline constexpr FieldRange kLowerBound{"a number below infinity", -kInfinity,
                                        kMax};
inline constexpr FieldRange kUpperBound{"a number above -infinity", -kMax,
                                        kInfinity};
inline constexpr FieldRange kPositiveBound{"a number > 0", 0.0, kInfinity,
                                           true};
inline constexpr FieldRange kFinite{"a finite number", -kMax, kMax};
inline constexpr FieldRange kFraction{"a number between 0 and 1", 0.0, 1.0,
                                      true, true};
inline constexpr FieldRange kCount{"an integer >= 1", 1.0, kInfinity};
}  // namespace ranges

using Unit = Ranged<float, ranges::kUnit>;
// For coefficients of moving averages: with 1 they would divide by 0.
using Decay = Ranged<float, ranges::kDecay>;
using Rate = Ranged<float, ranges::kRate>;
using NonNegative = Ranged<float, ranges::kNonNegative>;
using Positive = Ranged<float, ranges::kPositive>;
using NonPositive = Ranged<float, ranges::kNonPositive>;
using Finite = Ranged<float, ranges::kFinite>;
using Fraction = Ranged<float, ranges::kFraction>;

// Lists the fields of a struct. They have the same names in the struct's
// message, in JSON and in errors.
#define TFSWITCH_FIELDS(...)                           \
  static constexpr const char* kFields = #__VA_ARGS__; \
  auto Fields() { return std::tie(__VA_ARGS__); }      \
  auto Fields() const { return std::tie(__VA_ARGS__); }

// Calls visit(name, field) for each field.
template <typename Struct, typename Visit>
void ForEachField(Struct& config, const Visit& visit) {
  absl::string_view rest = Struct::kFields;
  const auto next = [&rest] {
    std::string name(rest.substr(0, rest.find(',')));
    rest.remove_prefix(name.size());
    absl::ConsumePrefix(&rest, ", ");
    return name;
  };
  std::apply([&](auto&... field) { (visit(next(), field), ...); },
             config.Fields());
}

template <typename Struct, typename = void>
inline constexpr bool kHasFields = false;
template <typename Struct>
inline constexpr bool
    kHasFields<Struct, std::void_t<decltype(Struct::kFields)>> = true;

template <typename Struct, std::enable_if_t<kHasFields<Struct>, int> = 0>
bool operator==(const Struct& a, const Struct& b) {
  return a.Fields() == b.Fields();
}

inline bool IsIn(double value, const FieldRange& range) {
  // All comparisons with NaN are false.
  const bool from = range.excludes_min ? value > range.min : value >= range.min;
  const bool to = range.excludes_max ? value < range.max : value <= range.max;
  return from && to;
}

// A field whose value is out of its range.
struct FieldFault {
  std::string name;
  const char* expected;
  std::string got;
};

// Fields without a range have no fault.
template <typename Field>
std::optional<FieldFault> FaultOf(const std::string&, const Field&) {
  return std::nullopt;
}
template <typename T, const FieldRange& kRange>
std::optional<FieldFault> FaultOf(const std::string& name,
                                  const Ranged<T, kRange>& field) {
  if (IsIn(static_cast<double>(field.value), kRange)) return std::nullopt;
  return FieldFault{name, kRange.text, absl::StrCat(field.value)};
}
template <typename T, const FieldRange& kRange>
std::optional<FieldFault> FaultOf(
    const std::string& name, const std::optional<Ranged<T, kRange>>& field) {
  return field.has_value() ? FaultOf(name, *field) : std::nullopt;
}

// The first fault of the struct's own fields, if there is one.
template <typename Struct>
std::optional<FieldFault> FindFault(const Struct& config) {
  std::optional<FieldFault> fault;
  ForEachField(config, [&](const std::string& name, const auto& field) {
    if (!fault.has_value()) fault = FaultOf(name, field);
  });
  return fault;
}
// Finds the first fault in the fields of the chosen kind. Names it
// "KIND.FIELD".
template <typename... Kinds>
std::optional<FieldFault> FindFault(const std::variant<Kinds...>& kind) {
  return std::visit(
      [](const auto& config) {
        std::optional<FieldFault> fault = FindFault(config);
        if (fault.has_value()) {
          fault->name = absl::StrCat(config.kName, ".", fault->name);
        }
        return fault;
      },
      kind);
}

template <typename... Kinds>
const char* KindName(const std::variant<Kinds...>& kind) {
  return std::visit([](const auto& config) { return config.kName; }, kind);
}

template <typename Variant, typename Visit, size_t... kIndex>
void ForEachKindIn(const Visit& visit, std::index_sequence<kIndex...>) {
  (visit(std::variant_alternative_t<kIndex, Variant>{}), ...);
}
// Calls visit(kind) with each kind's defaults.
template <typename Variant, typename Visit>
void ForEachKind(const Visit& visit) {
  ForEachKindIn<Variant>(
      visit, std::make_index_sequence<std::variant_size_v<Variant>>{});
}

}  // namespace tfswitch

#endif  // TFSWITCH_CC_BASE_CONFIG_FIELDS_H_
