// The fields of configs, each described once.
//
// A config is a struct with a function Fields(), which lists its fields.
// Equality, validation, JSON and protos are made from this list. Some settings
// are a choice between several kinds, for example of optimizers. Then each kind
// is such a struct, with its name in kName, and a std::variant of the structs
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

namespace ranges {
inline constexpr double kMax = std::numeric_limits<float>::max();
inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr FieldRange kFlag{"true or false", 0.0, 1.0};
inline constexpr FieldRange kUnit{"a number in [0, 1]", 0.0, 1.0};
// For coefficients of moving averages: a coefficient of 1 would cause a
// division by 0.
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

// A field of a config: its name in protos, JSON and error messages; the
// struct's member, which is a float, a bool, a uint32_t or a uint64_t; and the
// range of its values.
template <typename Struct, typename Value>
struct ConfigField {
  const char* name;
  Value Struct::*member;
  FieldRange range;
};
template <typename Struct, typename Value>
ConfigField(const char*, Value Struct::*, FieldRange)
    -> ConfigField<Struct, Value>;

// Calls visit(name, member, range) for each field.
template <typename Struct, typename Visit>
void ForEachField(Struct& config, const Visit& visit) {
  std::apply(
      [&](const auto&... field) {
        (visit(field.name, config.*field.member, field.range), ...);
      },
      std::remove_const_t<Struct>::Fields());
}

template <typename Struct>
bool HaveEqualFields(const Struct& a, const Struct& b) {
  return std::apply(
      [&](const auto&... field) {
        return ((a.*field.member == b.*field.member) && ...);
      },
      Struct::Fields());
}

template <typename Struct, typename = void>
inline constexpr bool kHasFields = false;
template <typename Struct>
inline constexpr bool
    kHasFields<Struct, std::void_t<decltype(Struct::Fields())>> = true;

template <typename Struct, std::enable_if_t<kHasFields<Struct>, int> = 0>
bool operator==(const Struct& a, const Struct& b) {
  return HaveEqualFields(a, b);
}

inline bool IsIn(double value, const FieldRange& range) {
  // All comparisons with NaN are false.
  const bool from = range.excludes_min ? value > range.min : value >= range.min;
  const bool to = range.excludes_max ? value < range.max : value <= range.max;
  return from && to;
}

// A field whose value is out of range.
struct FieldFault {
  std::string name;
  const char* expected;
  std::string got;
};

// The first fault, if there is one.
template <typename Struct>
std::optional<FieldFault> FindFault(const Struct& config) {
  std::optional<FieldFault> fault;
  ForEachField(config, [&](const char* name, const auto& value,
                           const FieldRange& range) {
    if (fault.has_value() || IsIn(static_cast<double>(value), range)) return;
    fault = FieldFault{name, range.text, absl::StrCat(value)};
  });
  return fault;
}
// Finds the first fault of the chosen kind; the fault's name is then
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
