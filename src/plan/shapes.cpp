#include "plan/shapes.h"

#include "plan/factoring.h"

namespace ingot {
namespace {

bool fits(const Shape& shape, const Shape& space) {
  for (const Axis axis : {kRows, kGroups, kFeatures}) {
    if (shape.extent(axis, 1) != 1 && shape.extent(axis, 1) != space.extent(axis, 1)) return false;
  }
  return true;
}

class ShapeAssignment {
 public:
  ShapeAssignment(const Graph& graph, Sweep& sweep) : graph_(graph), sweep_(sweep) {
    for (const auto* list : {&sweep.body, &sweep.statistics, &sweep.tail}) {
      nodes_.insert(nodes_.end(), list->begin(), list->end());
    }
  }

  bool run() {
    seed();
    propagate();
    // What is not tied to a full-size value may stand as it is.
    for (const ValueId id : nodes_) settle(id);
    for (const ValueId id : sweep_.loads) {
      if (!is_operand(id)) settle(id);
    }
    if (sweep_.matmul != kNoValue) sweep_.shapes[sweep_.matmul] = sweep_.space;
    return consistent_;
  }

 private:
  bool known(ValueId id) const { return sweep_.shapes.contains(id); }

  // Read by the product alone.
  bool is_operand(ValueId id) const {
    if (sweep_.matmul == kNoValue) return false;
    for (const ValueId node : nodes_) {
      for (const ValueId arg : graph_[node].args) {
        if (arg == id) return false;
      }
    }
    return true;
  }

  void set(ValueId id, Shape shape) {
    if (graph_[id].kind == NodeKind::constant) return;
    shape.batched = graph_[id].shape.batched;
    const auto [place, fresh] = sweep_.shapes.emplace(id, shape);
    consistent_ = consistent_ && place->second == shape;
    changed_ = changed_ || fresh;
  }

  void seed() {
    const int64_t total = sweep_.space.static_elements();
    const auto full = [&](ValueId id) {
      if (graph_[id].shape.static_elements() == total) set(id, sweep_.space);
    };
    for (const ValueId id : nodes_) full(id);
    for (const ValueId id : sweep_.loads) {
      if (!is_operand(id)) full(id);
    }
    if (sweep_.matmul != kNoValue) set(sweep_.matmul, sweep_.space);
  }

  void propagate() {
    do {
      changed_ = false;
      for (const ValueId id : nodes_) relate(id);
    } while (changed_);
  }

  void relate(ValueId id) {
    const Node& node = graph_[id];
    if (node.kind == NodeKind::matmul) return;
    for (const ValueId arg : node.args) {
      const Shape& own = graph_[arg].shape;
      const bool same = own.static_elements() == node.shape.static_elements();
      if (node.kind == NodeKind::reduce) {
        if (known(arg)) {
          set(id, seen_through_broadcast(own, sweep_.shapes.at(arg), node.shape));
        }
      } else if (node.kind == NodeKind::view) {
        if (known(id)) set(arg, sweep_.shapes.at(id));
        if (known(arg)) set(id, sweep_.shapes.at(arg));
      } else {
        if (known(id)) set(arg, seen_through_broadcast(node.shape, sweep_.shapes.at(id), own));
        if (known(arg) && same) set(id, sweep_.shapes.at(arg));
      }
    }
  }

  void settle(ValueId id) {
    if (known(id)) return;
    consistent_ = consistent_ && fits(graph_[id].shape, sweep_.space);
    set(id, graph_[id].shape);
    propagate();
  }

  const Graph& graph_;
  Sweep& sweep_;
  std::vector<ValueId> nodes_;
  bool changed_ = false, consistent_ = true;
};

}  // namespace

bool assign_shapes(const Graph& graph, Sweep& sweep) {
  sweep.shapes.clear();
  return ShapeAssignment(graph, sweep).run();
}

}  // namespace ingot
