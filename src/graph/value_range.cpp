#include "graph/value_range.h"

#include <cmath>

#include "graph/pointwise.h"

namespace ingot {

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
  return pointwise_row(node.op).range(a, node.args.size() > 1 ? of(node.args[1]) : ValueRange());
}

}  // namespace ingot
