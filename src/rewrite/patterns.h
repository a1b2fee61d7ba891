// Questions that several rules ask.
#pragma once

#include <cmath>
#include <optional>

#include "rewrite/edit.h"

namespace ingot {

// The operands of a two-argument node, the second being the one that `wanted` holds for; either
// order is tried where the operator commutes.
struct OperandPair {
  ValueId main = kNoValue, other = kNoValue;
};
template <class Wanted>
std::optional<OperandPair> operands_where(const NodeEdit& edit, const Node& node, Wanted wanted) {
  if (node.kind != NodeKind::pointwise || node.args.size() != 2) return std::nullopt;
  const ValueId a = node.args[0], b = node.args[1];
  const bool commutes = node.op == PointwiseOp::add_ || node.op == PointwiseOp::mul_;
  (void)edit;
  if (wanted(b)) return OperandPair{a, b};
  if (commutes && wanted(a)) return OperandPair{b, a};
  return std::nullopt;
}

inline bool is_finite_constant(const NodeEdit& edit, ValueId id) {
  return edit.is_constant(id) && std::isfinite(edit[id].constant);
}

// Whether `other` does not vary along those of the axes along which `full` does.
inline bool constant_along(const Shape& other, const Shape& full, AxisMask axes) {
  for (const Axis axis : {kBatch, kRows, kGroups, kFeatures}) {
    if ((axes & axis_bit(axis)) && full.extent(axis, 2) != 1 && other.extent(axis, 2) != 1) {
      return false;
    }
  }
  return true;
}

inline bool all_f32(const NodeEdit& edit, std::initializer_list<ValueId> ids) {
  for (const ValueId id : ids) {
    if (!edit.is_constant(id) && edit[id].dtype != DType::f32) return false;
  }
  return true;
}

}  // namespace ingot
