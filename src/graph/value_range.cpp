#include "graph/value_range.h"

#include <algorithm>
#include <cmath>

namespace ingot {
namespace {

// 0 · ∞ counts as 0: elements that are themselves infinite have a product of NaN, those that come
// near have one near 0.
double product(double a, double b) {
  return a == 0 || b == 0 ? 0 : a * b;
}

ValueRange multiply(ValueRange a, ValueRange b) {
  const auto [low, high] = std::minmax({product(a.low, b.low), product(a.low, b.high),
                                        product(a.high, b.low), product(a.high, b.high)});
  return {low, high};
}

// Of an operator that never decreases.
template <class Function>
ValueRange rising(ValueRange a, Function function) {
  return {function(a.low), function(a.high)};
}

}  // namespace

ValueRange ValueRanges::of(ValueId value) {
  if (const auto found = known_.find(value); found != known_.end()) return found->second;
  ValueRange range = find(graph_[value]);
  if (std::isnan(range.low) || std::isnan(range.high)) range = {};
  return known_[value] = range;
}

ValueRange ValueRanges::find(const Node& node) {
  if (node.kind == NodeKind::constant) return {node.constant, node.constant};
  if (node.kind == NodeKind::view) return of(node.args[0]);
  if (node.kind != NodeKind::pointwise) return {};
  const ValueRange a = of(node.args[0]);
  const ValueRange b = node.args.size() > 1 ? of(node.args[1]) : ValueRange();
  switch (node.op) {
    case PointwiseOp::add_:
      return {a.low + b.low, a.high + b.high};
    case PointwiseOp::sub_:
      return {a.low - b.high, a.high - b.low};
    case PointwiseOp::mul_:
      return multiply(a, b);
    case PointwiseOp::neg_:
      return {-a.high, -a.low};
    case PointwiseOp::abs_:
    case PointwiseOp::square_:
    case PointwiseOp::sqrt_:
      return {0, std::numeric_limits<double>::infinity()};
    case PointwiseOp::exp_:
      return rising(a, [](double x) { return std::exp(x); });
    case PointwiseOp::relu_:
      return rising(a, [](double x) { return std::max(x, 0.0); });
    case PointwiseOp::sigmoid_:
      return {0, 1};
    case PointwiseOp::tanh_:
    case PointwiseOp::erf_:
      return {-1, 1};
    case PointwiseOp::maximum_:
      return {std::max(a.low, b.low), std::max(a.high, b.high)};
    case PointwiseOp::minimum_:
      return {std::min(a.low, b.low), std::min(a.high, b.high)};
    default:
      return {};
  }
}

}  // namespace ingot
