#include "plan/product_bias.h"

#include <algorithm>

namespace ingot {
namespace {

bool is_cast(const Node& node) {
  return node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_;
}

// The load of which `row` is a view, a cast, or a view of a cast; none where it is something else.
ValueId row_in_memory(const Graph& graph, const Sweep& sweep, ValueId row) {
  for (bool cast = false; !contains(sweep.loads, row); row = graph[row].args[0]) {
    const Node& node = graph[row];
    const bool first = is_cast(node) && !cast;
    if (node.kind != NodeKind::view && !first) return kNoValue;
    cast = cast || first;
  }
  return row;
}

bool is_taken(DType dtype) {
  return dtype == DType::f32 || dtype == DType::f16 || dtype == DType::bf16;
}

bool is_row(const Shape& shape, int64_t features) {
  return !shape.batched && shape.rows == 1 && shape.groups == 1 && shape.features == features;
}

}  // namespace

std::optional<ProductBias> product_bias(const Plan& plan, const Sweep& sweep) {
  const Graph& graph = plan.graph;
  const Node& product = graph[sweep.matmul];
  const std::vector<ValueId>& readers = plan.readers.of[static_cast<size_t>(sweep.matmul)];
  const bool stays =
      plan.placements[static_cast<size_t>(sweep.matmul)].kind != Placement::Kind::none;
  if (stays || readers.size() != 1 || !contains(sweep.body, readers[0])) return std::nullopt;
  const ValueId sum = readers[0];
  const Node& node = graph[sum];
  if (node.kind != NodeKind::pointwise || node.op != PointwiseOp::add_ ||
      node.dtype != product.dtype || node.shape != product.shape ||
      dtype_in_memory(plan, sum) != node.dtype) {
    return std::nullopt;
  }
  const ValueId row = node.args[node.args[0] == sweep.matmul ? 1 : 0];
  const ValueId bias = row_in_memory(graph, sweep, row);
  if (bias == kNoValue || !is_row(graph[row].shape, product.shape.features) ||
      !is_row(graph[bias].shape, product.shape.features) || graph[row].dtype != product.dtype ||
      !is_taken(product.dtype) || !is_taken(dtype_in_memory(plan, bias))) {
    return std::nullopt;
  }
  return ProductBias{sum, bias};
}

Plan with_sum_as_product(const Plan& plan, int sweep, const ProductBias& bias) {
  Plan changed = plan;
  Sweep& behind = changed.sweeps[static_cast<size_t>(sweep)];
  behind.matmul = bias.sum;
  std::erase(behind.body, bias.sum);
  return changed;
}

}  // namespace ingot
