#include "cpu/sweep.h"

#include <algorithm>

namespace ingot::cpu {
namespace {

bool is_among(const std::vector<ValueId>& values, ValueId value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

std::vector<SharedState> states_among(const Graph& graph, const Sweep& sweep,
                                      const std::vector<ValueId>& nodes) {
  std::vector<ValueId> reductions;
  for (const ValueId value : nodes) {
    if (graph[value].kind == NodeKind::reduce) reductions.push_back(value);
  }
  return shared_states(graph, sweep, reductions);
}

int readers_of(const Graph& graph, ValueId value) {
  int readers = 0;
  for (const Node& node : graph.nodes) {
    readers += std::find(node.args.begin(), node.args.end(), value) != node.args.end();
  }
  return readers;
}

// The value itself or, where the body only casts it, what it casts; kNoValue where it is computed.
ValueId loaded_source(const Graph& graph, const Sweep& sweep, ValueId value) {
  if (is_among(sweep.loads, value)) return value;
  const Node& node = graph[value];
  const bool casts = node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_;
  return casts && is_among(sweep.loads, node.args[0]) ? node.args[0] : kNoValue;
}

// As a product's provider would do it: one row of the product's type and width.
AddedRow row_added_by(const Graph& graph, const Sweep& sweep, ValueId value) {
  const Node& sum = graph[value];
  if (sum.kind != NodeKind::pointwise || sum.op != PointwiseOp::add_) return {};
  for (const size_t first : {0, 1}) {
    const ValueId product = sum.args[first], row = sum.args[1 - first];
    const Node& added = graph[row];
    const bool one_row = !added.shape.batched && added.shape.rows == 1 && added.shape.groups == 1;
    const ValueId source = loaded_source(graph, sweep, row);
    if (graph[product].kind == NodeKind::matmul && is_among(sweep.loads, product) &&
        source != kNoValue && one_row && added.shape.features == graph[product].shape.features &&
        added.dtype == sum.dtype && graph[product].dtype == sum.dtype &&
        readers_of(graph, product) == 1) {
      return {product, row, value, source};
    }
  }
  return {};
}

AddedRow added_row_of(const Graph& graph, const HostSweep& host) {
  const Sweep& sweep = host.sweep;
  if (sweep.matmul != kNoValue) return {};
  for (const ValueId value : sweep.body) {
    AddedRow found = row_added_by(graph, sweep, value);
    if (found.product == kNoValue || is_among(host.tail.loads, found.product)) continue;
    found.is_all =
        !host.has_tail && !host.gathers() && sweep.body.size() == 1 && sweep.stores == sweep.body;
    // What runs on the blocks of an fp32 product reads it in cache, and adds the row for nothing.
    const bool on_blocks = graph[found.product].dtype == DType::f32;
    return found.is_all || !on_blocks ? found : AddedRow{};
  }
  return {};
}

// Whether a body that reads a product can run on its blocks; or, of types of which none are handed
// out, behind a row that its provider adds.
bool can_follow(const Graph& graph, const HostSweep& host, ValueId product) {
  const auto read = host.sweep.shapes.find(product);
  if (!host.has_body || host.sweep.matmul != kNoValue || read == host.sweep.shapes.end()) {
    return false;
  }
  const Node& node = graph[product];
  if (node.dtype != DType::f32) return host.added_row.product == product;
  const Shape &seen = read->second, &space = host.sweep.space;
  const bool fills = seen.batched && space.batched && seen.rows == space.rows &&
                     seen.groups == space.groups && seen.features == space.features;
  return fills && node.shape.batched && node.shape.rows == 1 && node.shape.groups == 1;
}

// The first sweep that reads a product, if it can follow; -1 where there is none.
int follower_of(const Plan& plan, const std::deque<HostSweep>& sweeps, size_t product) {
  const ValueId value = plan.sweeps[product].matmul;
  for (size_t i = product + 1; value != kNoValue && i < sweeps.size(); ++i) {
    if (is_among(plan.sweeps[i].loads, value)) {
      return can_follow(plan.graph, sweeps[i], value) ? static_cast<int>(i) : -1;
    }
    if (plan.sweeps[i].matmul != kNoValue) return -1;
  }
  return -1;
}

bool is_read_beside(const Plan& plan, ValueId value, int reader) {
  for (size_t i = 0; i < plan.sweeps.size(); ++i) {
    if (static_cast<int>(i) != reader && is_among(plan.sweeps[i].loads, value)) return true;
  }
  const auto is = [&](ValueId other) {
    return other == value || behind_views(plan.graph, other) == value;
  };
  for (const Result& result : plan.graph.results) {
    if (is(result.value)) return true;
  }
  for (const Update& update : plan.graph.updates) {
    if (is(update.value)) return true;
  }
  return false;
}

}  // namespace

HostSweep::HostSweep(const Plan& plan, const Sweep& from) : sweep(from) {
  const Graph& graph = plan.graph;
  const std::vector<SharedState> statistics = shared_states(graph, sweep, sweep.statistics);
  std::vector<ValueId> body_stores, tail_stores;
  for (const ValueId value : sweep.stores) {
    if (value == sweep.matmul) continue;
    const bool late = is_among(sweep.tail, value) || is_among(sweep.statistics, value);
    (late ? tail_stores : body_stores).push_back(value);
  }
  has_body = !statistics.empty() || !body_stores.empty();
  has_tail = !tail_stores.empty();
  if (has_body && sweep.matmul != kNoValue) {
    throw std::logic_error("a host product with a body of its own");
  }
  AxisMask reduced = 0;
  for (const SharedState& state : statistics) reduced |= state.axes;
  kept = sweep.space.without(reduced);
  const auto lowered = [&](const std::map<ValueId, Shape>& shapes,
                           const std::vector<ValueId>& loads, const std::vector<ValueId>& nodes) {
    Phase phase = lower_phase(graph, sweep.space, shapes, loads, nodes,
                              states_among(graph, sweep, nodes), statistics, body_stores);
    phase.whole_axes = static_cast<AxisMask>(phase.whole_axes | (reduced & ~axis_bit(kBatch)));
    return phase;
  };
  if (has_body) body = lowered(sweep.shapes, sweep.loads, sweep.body);
  if (has_tail) {
    std::vector<ValueId> loads = sweep.loads;
    loads.insert(loads.end(), sweep.statistics.begin(), sweep.statistics.end());
    tail = lower_phase(graph, kept, sweep.shapes, loads, sweep.tail,
                       states_among(graph, sweep, sweep.tail), {}, tail_stores);
  }
  added_row = added_row_of(graph, *this);
  if (added_row.product == kNoValue || added_row.is_all) return;
  std::vector<ValueId> nodes = sweep.body, loads = sweep.loads;
  std::erase(nodes, added_row.sum);
  std::erase(body_stores, added_row.sum);
  loads.push_back(added_row.sum);
  std::map<ValueId, Shape> shapes = sweep.shapes;
  shapes.insert_or_assign(added_row.sum, shapes.at(added_row.product));
  behind_row = lowered(shapes, loads, nodes);
}

std::vector<Turn> turns_of(const std::deque<HostSweep>& sweeps, Plan* plan) {
  std::vector<Turn> turns;
  const int count = static_cast<int>(sweeps.size());
  for (int i = 0; i < count; ++i) {
    const int next = follower_of(*plan, sweeps, static_cast<size_t>(i));
    if (next < 0) {
      turns.push_back({i});
      continue;
    }
    for (int between = i + 1; between < next; ++between) turns.push_back({between});
    const ValueId product = plan->sweeps[static_cast<size_t>(i)].matmul;
    turns.push_back({i, next, is_read_beside(*plan, product, next)});
    for (WorkspaceBuffer& buffer : plan->buffers) {
      if (buffer.first_sweep > i && buffer.first_sweep <= next) buffer.first_sweep = i;
      if (buffer.last_sweep >= i && buffer.last_sweep < next) buffer.last_sweep = next;
    }
    i = next;
  }
  return turns;
}

}  // namespace ingot::cpu
