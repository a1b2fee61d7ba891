// By which device function a pointwise operator is computed: its own (common/pointwise.cuh), or a
// shorter one of common/math.cuh, which the ranges of its operands, what they are made of, or what
// is made of its value allow.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "graph/value_range.h"
#include "plan/plan.h"

namespace ingot {

// A number as C++ text of a compute type ("float", "double" or "i64").
std::string literal(double value, const std::string& type);

class DeviceFunctions {
 public:
  explicit DeviceFunctions(const Plan& plan)
      : graph_(plan.graph), readers_(plan.readers), ranges_(plan.graph) {}

  // A node's operator on arguments of a compute type.
  std::string expression(ValueId id, const std::string& type, const std::vector<std::string>& args);

  // A node together with some that lead to it, as a function of what they begin with. text: with
  // {} in the place of the argument.
  struct Composition {
    std::string text;
    ValueId argument = kNoValue;
    std::vector<ValueId> skipped;
  };
  std::optional<Composition> composition(ValueId id);

  // Whether all that follows from a value is rounded to 16 bits.
  bool is_rounded(ValueId id) const { return readers_.rounded[static_cast<size_t>(id)]; }

 private:
  std::string division(const Node& node, const std::string& a, const std::string& b,
                       bool is_rounded);
  std::optional<Composition> one_plus(ValueId id);
  std::optional<Composition> normal_density(ValueId id);
  // Whether a value is the largest or the smallest of others, or at the largest's scale.
  bool is_extreme(ValueId id) const;
  bool is_constant(ValueId id, double number) const;
  const std::vector<ValueId>& readers_of(ValueId id) const {
    return readers_.of[static_cast<size_t>(id)];
  }
  // Whether the value itself is, to bf16.
  bool is_rounded_to_bf16(ValueId id) const;

  const Graph& graph_;
  const Readers& readers_;
  ValueRanges ranges_;
};

}  // namespace ingot
