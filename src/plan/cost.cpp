#include "plan/cost.h"

#include <algorithm>

#include "graph/pointwise.h"

namespace ingot {
namespace {

double product_flops(const Graph& graph, const Node& matmul, int64_t batch) {
  const Shape& a = graph[matmul.args[0]].shape;
  return 2.0 * static_cast<double>(matmul.shape.elements(batch)) * static_cast<double>(a.features);
}

}  // namespace

double bytes_of(const Graph& graph, ValueId value, int64_t batch) {
  const Node& node = graph[value];
  return static_cast<double>(node.shape.elements(batch)) * static_cast<double>(size_of(node.dtype));
}

double element_flops(const Node& node) {
  if (node.kind == NodeKind::reduce) {
    return monoid_of(node.finish) == MonoidKind::log_sum_exp ? 25 : 6;
  }
  if (node.kind == NodeKind::scan) return 4;
  return node.kind == NodeKind::pointwise ? pointwise_row(node.op).cost : 0;
}

double scalar_rate(const Target& target) {
  // 128 lanes at about 1.5 GHz an SM; 16 lanes at about 2.5 GHz a core.
  return target.units * (target.device == Target::Device::cuda ? 128 * 1.5e9 : 16 * 2.5e9);
}

Cost Plan::cost(const Sweep& sweep, int64_t batch) const {
  Cost cost;
  for (const ValueId id : sweep.loads) cost.bytes_read += bytes_of(graph, id, batch);
  for (const ValueId id : sweep.stores) cost.bytes_written += bytes_of(graph, id, batch);
  double scalar = 0;
  const auto add = [&](ValueId id, double elements) {
    scalar += elements * element_flops(graph[id]);
  };
  for (const ValueId id : sweep.body) {
    const Node& node = graph[id];
    const ValueId counted = node.kind == NodeKind::reduce ? node.args[0] : id;
    add(id, static_cast<double>(sweep.shapes.at(counted).elements(batch)));
  }
  const auto space = static_cast<double>(sweep.space.elements(batch));
  for (const ValueId id : sweep.statistics) add(id, space);
  for (const ValueId id : sweep.tail) {
    add(id, static_cast<double>(sweep.shapes.at(id).elements(batch)));
  }
  const double product =
      sweep.matmul == kNoValue ? 0 : product_flops(graph, graph[sweep.matmul], batch);
  cost.flops = product + scalar;
  const double memory = (cost.bytes_read + cost.bytes_written) / target.bandwidth;
  const double compute = product / target.product_flops;
  cost.limit_seconds = std::max(memory, compute);
  cost.seconds =
      std::max(cost.limit_seconds, compute + scalar / scalar_rate(target)) + target.launch_seconds;
  return cost;
}

}  // namespace ingot
