// (x·c₁)·c₂ = x·(c₁·c₂)  where |c₁|, |c₂| ≥ 1, or both ≤ 1;   (x + c₁) + c₂ = x + (c₁ + c₂)  where
// both have one sign;   x / 2ᵏ = x·2⁻ᵏ.
//
// Equal up to rounding for finite x: with both factors at least 1, |x·c₁| ≤ |x·c₁·c₂|, so that the
// first product overflows only where the second does; with both at most 1 nothing overflows, and
// what underflowed on the way only becomes more exact. With one of each, x·c₁ could overflow where
// x·(c₁·c₂) does not. Sums of one sign overflow together in the same way. NaN stays NaN, and
// ±Inf·c and ±Inf + c are the same infinity before and after, since all constants are finite, and
// their products and sums are checked to be; 0·Inf = NaN either way.
#include "rewrite/patterns.h"
#include "rewrite/rules.h"

namespace ingot {
namespace {

constexpr double kSmallestNormal = 0x1p-126, kLargest = 0x1.fffffep127;

bool is_normal_f32(double value) {
  return std::abs(value) >= kSmallestNormal && std::abs(value) <= kLargest;
}

ValueId merge(NodeEdit& edit, PointwiseOp op, ValueId x, double c) {
  const ValueId constant = edit.builder().constant(c);
  return edit.builder().pointwise(op, {x, constant});
}

ValueId merge_factors(NodeEdit& edit, ValueId inner, double c2) {
  const Node node = edit[inner];
  const auto pair = operands_where(edit, node, [&](ValueId id) { return edit.is_constant(id); });
  if (!pair || edit.is_constant(pair->main)) return kNoValue;
  const double c1 = edit[pair->other].constant;
  const bool grow = std::abs(c1) >= 1 && std::abs(c2) >= 1;
  const bool shrink = std::abs(c1) <= 1 && std::abs(c2) <= 1;
  if (!(grow || shrink) || !is_normal_f32(c1 * c2)) return kNoValue;
  return merge(edit, PointwiseOp::mul_, pair->main, c1 * c2);
}

ValueId merge_terms(NodeEdit& edit, ValueId inner, double c2) {
  const Node node = edit[inner];
  const auto pair = operands_where(edit, node, [&](ValueId id) { return edit.is_constant(id); });
  if (!pair || edit.is_constant(pair->main)) return kNoValue;
  const double c1 = edit[pair->other].constant;
  if (c1 * c2 <= 0 || !is_normal_f32(c1 + c2)) return kNoValue;
  return merge(edit, PointwiseOp::add_, pair->main, c1 + c2);
}

bool is_power_of_two(double value) {
  int exponent = 0;
  return std::abs(std::frexp(value, &exponent)) == 0.5;
}

ValueId merge_constant(NodeEdit& edit) {
  const Node node = edit.node();
  const auto pair =
      operands_where(edit, node, [&](ValueId id) { return is_finite_constant(edit, id); });
  if (!pair || node.dtype != DType::f32 || edit[pair->main].dtype != DType::f32) return kNoValue;
  const double c = edit[pair->other].constant;
  if (node.op == PointwiseOp::div_ && is_power_of_two(c) && is_normal_f32(1 / c)) {
    return merge(edit, PointwiseOp::mul_, pair->main, 1 / c);
  }
  if (node.op == PointwiseOp::mul_ && edit.is_pointwise(pair->main, PointwiseOp::mul_)) {
    return merge_factors(edit, pair->main, c);
  }
  if (node.op == PointwiseOp::add_ && edit.is_pointwise(pair->main, PointwiseOp::add_)) {
    return merge_terms(edit, pair->main, c);
  }
  return kNoValue;
}

}  // namespace

const Rule& merge_constants() {
  static const Rule rule = {"merge-constants",
                            "(x·c₁)·c₂ = x·(c₁·c₂), (x + c₁) + c₂ = x + (c₁ + c₂)",
                            RewriteLevel::ieee, stateless<merge_constant>};
  return rule;
}

}  // namespace ingot
