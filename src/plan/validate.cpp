#include <algorithm>
#include <set>
#include <stdexcept>

#include "plan/plan.h"
#include "support/error.h"

namespace ingot {
namespace {

class PlanChecker {
 public:
  explicit PlanChecker(const Plan& plan) : plan_(plan), graph_(plan.graph) {}

  void run() {
    for (const ValueId id : graph_.leaves()) stored_.insert(id);
    for (index_ = 0; index_ < plan_.sweeps.size(); ++index_) check_sweep(plan_.sweeps[index_]);
    for (const Result& result : graph_.results) {
      check(stored_.contains(result.value), "every result is stored", result.value);
    }
    for (const Update& update : graph_.updates) {
      check(stored_.contains(update.value), "every update is stored", update.value);
    }
  }

 private:
  void check(bool holds, std::string_view rule, ValueId id) const {
    if (holds) return;
    throw std::logic_error(fmt::format("plan of {}, sweep {}, value {}: broken rule: {}",
                                       graph_.name, index_, id, rule));
  }

  void check_sweep(const Sweep& sweep) {
    std::set<ValueId> ready;
    for (const ValueId id : sweep.loads) {
      check(stored_.contains(id), "loads are leaves or stored by an earlier sweep", id);
      check(graph_[id].kind != NodeKind::constant, "constants are not loaded", id);
      check(!overwritten_.contains(id), "an overwritten buffer is not read", id);
      check_placement(sweep, id);
      ready.insert(id);
    }
    check_kind(sweep, ready);
    for (const ValueId id : sweep.body) {
      check_body_node(sweep, id, ready);
      ready.insert(id);
    }
    check_statistics(sweep, ready);
    check_tail(sweep, ready);
    for (const ValueId id : sweep.stores) {
      check(ready.contains(id), "a store is a value of its sweep", id);
      check(stored_.insert(id).second, "a value is stored once", id);
      check_placement(sweep, id);
      const bool dense =
          plan_.placements[static_cast<size_t>(id)].kind == Placement::Kind::workspace;
      check(dense || graph_[id].shape.elements(1) > 0, "a store has a place", id);
    }
    for (const Update& update : graph_.updates) check_update(sweep, update);
  }

  void check_placement(const Sweep& sweep, ValueId id) const {
    const Placement& placement = plan_.placements[static_cast<size_t>(id)];
    check(placement.kind != Placement::Kind::none, "what crosses sweeps has a place", id);
    if (placement.kind == Placement::Kind::workspace) {
      const WorkspaceBuffer& buffer = plan_.buffers[static_cast<size_t>(placement.index)];
      const int now = static_cast<int>(index_);
      check(buffer.first_sweep <= now && now <= buffer.last_sweep, "a buffer is alive in use", id);
      return;
    }
    if (!sweep.shapes.contains(id)) return;  // an operand of the product
    try {
      strides_in(graph_[id].shape, {1, 1, 1, 1}, sweep.shapes.at(id));
    } catch (const std::logic_error&) {
      check(false, "the caller's axes are split, never merged", id);
    }
  }

  void check_kind(const Sweep& sweep, std::set<ValueId>& ready) const {
    const bool product = sweep.kind == SweepKind::product;
    check(product == (sweep.matmul != kNoValue), "a product sweep has a matmul", sweep.matmul);
    check(sweep.statistics.empty() || product || sweep.kind == SweepKind::columns,
          "statistics come from products and columns sweeps", kNoValue);
    check(!sweep.stores.empty(), "a sweep stores something", kNoValue);
    if (!product) return;
    check(sweep.space == graph_[sweep.matmul].shape, "the space is the product's", sweep.matmul);
    for (const int operand : {0, 1}) {
      const ValueId id = product_operand(graph_, sweep, operand);
      check(ready.contains(id), "a product's operands are loaded", id);
    }
    ready.insert(sweep.matmul);
  }

  void check_args(ValueId id, const std::set<ValueId>& ready) const {
    for (const ValueId arg : graph_[id].args) {
      const bool there = graph_[arg].kind == NodeKind::constant || ready.contains(arg);
      check(there, "arguments come before their users", id);
    }
  }

  void check_shape(const Sweep& sweep, ValueId id) const {
    check(sweep.shapes.contains(id), "every value is seen in some shape", id);
    const Shape& seen = sweep.shapes.at(id);
    check(seen.elements(1) == graph_[id].shape.elements(1), "shapes keep the element count", id);
    check(!seen.batched || sweep.space.batched, "shapes fit the space", id);
    for (const Axis axis : {kRows, kGroups, kFeatures}) {
      const int64_t extent = seen.extent(axis, 1);
      check(extent == 1 || extent == sweep.space.extent(axis, 1), "shapes fit the space", id);
    }
  }

  void check_body_node(const Sweep& sweep, ValueId id, const std::set<ValueId>& ready) const {
    check_args(id, ready);
    check_shape(sweep, id);
    for (const ValueId arg : graph_[id].args) {
      if (graph_[arg].kind != NodeKind::constant) check_shape(sweep, arg);
    }
    const NodeKind kind = graph_[id].kind;
    if (kind == NodeKind::reduce) {
      check(sweep.kind == SweepKind::rows, "only rows sweeps reduce in their body", id);
      check(sweep.shapes.at(graph_[id].args[0]) == sweep.space,
            "a row reduction's argument is full", id);
      check(!(reduced_axes(graph_, sweep, id) & axis_bit(kBatch)), "rows do not reduce the batch",
            id);
    } else if (kind == NodeKind::scan) {
      check(sweep.kind == SweepKind::scan && sweep.stores == std::vector<ValueId>{id},
            "a scan is all that its sweep stores", id);
      check(sweep.shapes.at(graph_[id].args[0]) == sweep.space, "what is scanned is full", id);
      check(sweep.space.features == graph_[id].shape.features, "a row is scanned whole", id);
    } else {
      check(kind == NodeKind::pointwise || kind == NodeKind::view, "a body holds pointwise nodes",
            id);
    }
  }

  void check_statistics(const Sweep& sweep, std::set<ValueId>& ready) const {
    for (const ValueId id : sweep.statistics) {
      check_args(id, ready);
      check_shape(sweep, id);
      check(sweep.shapes.at(graph_[id].args[0]) == sweep.space, "a statistic's argument is full",
            id);
      check(reduced_axes(graph_, sweep, id) == reduced_axes(graph_, sweep, sweep.statistics[0]),
            "the statistics of a sweep reduce the same axes", id);
    }
    ready.insert(sweep.statistics.begin(), sweep.statistics.end());
  }

  void check_tail(const Sweep& sweep, std::set<ValueId>& ready) const {
    if (sweep.tail.empty()) return;
    check(!sweep.statistics.empty(), "a tail follows statistics", sweep.tail[0]);
    const Shape& kept = sweep.shapes.at(sweep.statistics[0]);
    const auto fits = [&](ValueId id) {
      const Shape& seen = sweep.shapes.at(id);
      bool inside = !seen.batched || kept.batched;
      for (const Axis axis : {kRows, kGroups, kFeatures}) {
        inside = inside && (seen.extent(axis, 1) == 1 || kept.extent(axis, 1) != 1);
      }
      return inside;
    };
    for (const ValueId id : sweep.tail) {
      check_args(id, ready);
      check_shape(sweep, id);
      check(fits(id), "a tail varies along kept axes only", id);
      for (const ValueId arg : graph_[id].args) {
        if (graph_[arg].kind == NodeKind::constant) continue;
        check(fits(arg), "a tail reads what varies along kept axes only", arg);
        check(!in_body(sweep, arg), "a tail reads no value of the body", arg);
      }
      ready.insert(id);
    }
  }

  static bool in_body(const Sweep& sweep, ValueId id) {
    return std::find(sweep.body.begin(), sweep.body.end(), id) != sweep.body.end() &&
           std::find(sweep.tail.begin(), sweep.tail.end(), id) == sweep.tail.end();
  }

  void check_update(const Sweep& sweep, const Update& update) {
    const auto in = [](const std::vector<ValueId>& list, ValueId id) {
      return std::find(list.begin(), list.end(), id) != list.end();
    };
    if (!in(sweep.stores, update.value)) return;
    overwritten_.insert(update.buffer);
    if (!in(sweep.loads, update.buffer)) return;
    check(sweep.shapes.at(update.buffer) == sweep.shapes.at(update.value),
          "a buffer that its sweep reads is overwritten element by element", update.buffer);
  }

  const Plan& plan_;
  const Graph& graph_;
  size_t index_ = 0;
  std::set<ValueId> stored_, overwritten_;
};

}  // namespace

void validate(const Plan& plan) {
  PlanChecker(plan).run();
}

}  // namespace ingot
