#include "cpu/phase.h"

#include <algorithm>
#include <optional>
#include <set>

#include "cpu/arrange.h"
#include "support/error.h"

namespace ingot::cpu {
namespace {

std::array<bool, kAxes> varying_axes(const Shape& shape) {
  return {shape.batched, shape.rows > 1, shape.groups > 1, shape.features > 1};
}

ReduceMonoid primitive_of(MonoidKind monoid) {
  switch (monoid) {
    case MonoidKind::sum:
      return ReduceMonoid::sum;
    case MonoidKind::max:
      return ReduceMonoid::max;
    case MonoidKind::min:
      return ReduceMonoid::min;
    case MonoidKind::argmax:
      return ReduceMonoid::argmax;
    case MonoidKind::moments:
      return ReduceMonoid::moments;
    case MonoidKind::log_sum_exp:
      return ReduceMonoid::log_sum_exp;
    case MonoidKind::average:
      break;  // a GPU's alone
  }
  fail(INGOT_FAILED, "unknown monoid");
}

class Lowering {
 public:
  Lowering(const Graph& graph, const std::map<ValueId, Shape>& shapes,
           const std::vector<ValueId>& loads, const std::vector<ValueId>& nodes, Phase* phase)
      : graph_(graph),
        shapes_(shapes),
        loads_(loads.begin(), loads.end()),
        nodes_(nodes),
        phase_(*phase) {}

  int load(ValueId value) {
    Slot slot;
    slot.kind = Slot::Kind::load;
    slot.dtype = graph_[value].dtype;
    slot.cls = class_of(slot.dtype);
    slot.varies = varying_axes(shapes_.at(value));
    slot.load = static_cast<int>(phase_.loads.size());
    phase_.loads.push_back(value);
    phase_.load_slots.push_back(add(slot));
    return slot_of_[value] = phase_.load_slots.back();
  }

  int slot_for(ValueId value) {
    if (const auto found = slot_of_.find(value); found != slot_of_.end()) return found->second;
    if (loads_.contains(value)) return load(value);
    const Node& node = graph_[value];
    if (node.kind == NodeKind::view) return slot_of_[value] = slot_for(node.args[0]);
    if (node.kind == NodeKind::constant) {
      Slot slot;
      slot.kind = Slot::Kind::constant;
      slot.cls = class_of(node.dtype);
      slot.constant = node.constant;
      return slot_of_[value] = add(slot);
    }
    fail(INGOT_FAILED, "CPU: value {} of '{}' is used before it is computed", value, graph_.name);
  }

  void pointwise(ValueId value) {
    if (slot_of_.contains(value)) return;
    const Node& node = graph_[value];
    const Class result = class_of(node.dtype);
    if (node.op == PointwiseOp::cast_) {
      const int from = slot_for(node.args[0]);
      if (holds_all(from, node)) {
        slot_of_[value] = from;
        return;
      }
      const int out = add(computed(result, varying_axes(shapes_.at(value))));
      convert(from, out, node.dtype);
      slot_of_[value] = out;
      return;
    }
    std::vector<int> args;
    std::optional<Class> compute;
    for (const ValueId arg : node.args) {
      const int slot = slot_for(arg);
      args.push_back(slot);
      const Slot& s = phase_.slots[static_cast<size_t>(slot)];
      if (s.kind != Slot::Kind::constant) {
        compute = std::max(compute.value_or(Class::single), s.cls);
      }
    }
    const Class cls = compute.value_or(result);
    Step step;
    step.op = node.op;
    step.cls = cls;
    step.arity = static_cast<int>(args.size());
    for (size_t i = 0; i < args.size(); ++i) step.in[i] = as_class(args[i], cls);
    const auto varies = varying_axes(shapes_.at(value));
    step.out = add(computed(cls, varies));
    slot_of_[value] = step.out;
    append(step);
    if (cls != result) {
      const int out = add(computed(result, varies));
      convert(step.out, out, node.dtype);
      slot_of_[value] = out;
    }
  }

  // Makes the state once, where its first reading stands.
  void reduce(ValueId value, const std::vector<SharedState>& states) {
    if (slot_of_.contains(value)) return;
    for (const SharedState& state : states) {
      if (std::find(state.finishes.begin(), state.finishes.end(), value) == state.finishes.end()) {
        continue;
      }
      if (!reduce_exponentials(state)) append_reduction(state_step(state, true));
      return;
    }
    fail(INGOT_FAILED, "CPU: reduction {} of '{}' has no state", value, graph_.name);
  }

  void statistic(const SharedState& state) {
    phase_.statistics.push_back(state_step(state, false));
  }

  void store(ValueId value) { phase_.stores.push_back({value, slot_for(value)}); }

 private:
  void append_reduction(const StateStep& state) {
    Step step;
    step.kind = Step::Kind::reduce;
    step.in[0] = state.arg;
    step.arity = 1;
    step.state = static_cast<int>(phase_.reductions.size());
    phase_.whole_axes |= state.axes;
    phase_.reductions.push_back(state);
    append(step);
  }

  ValueId find_node(PointwiseOp op, const std::vector<ValueId>& args) const {
    for (const ValueId value : nodes_) {
      const Node& node = graph_[value];
      if (node.kind == NodeKind::pointwise && node.op == op && node.args == args) return value;
    }
    return kNoValue;
  }

  // Where exp(x − max) is a value of the body, as in a softmax, its sum is taken from there: the
  // maximum first, then the exponentials, once, then their sum.
  bool reduce_exponentials(const SharedState& state) {
    if (state.monoid != MonoidKind::log_sum_exp || state.finishes.size() != 2) return false;
    ValueId top = kNoValue, sum = kNoValue;
    for (const ValueId finish : state.finishes) {
      if (graph_[finish].finish == Finish::max_exponent) top = finish;
      if (graph_[finish].finish == Finish::sum_exp) sum = finish;
    }
    if (top == kNoValue || sum == kNoValue) return false;
    const ValueId difference = find_node(PointwiseOp::sub_, {state.arg, top});
    const ValueId exponential = find_node(PointwiseOp::exp_, {difference});
    if (exponential == kNoValue) return false;
    const auto part = [&](MonoidKind monoid, ValueId arg, ValueId finish, Finish reading) {
      StateStep step = state_step({monoid, arg, state.axes, {finish}}, true);
      step.reads[0].finish = reading;
      append_reduction(step);
    };
    part(MonoidKind::max, state.arg, top, Finish::max);
    pointwise(difference);
    pointwise(exponential);
    part(MonoidKind::sum, exponential, sum, Finish::sum);
    return true;
  }

  static Slot computed(Class cls, const std::array<bool, kAxes>& varies) {
    Slot slot;
    slot.cls = cls;
    slot.varies = varies;
    return slot;
  }

  int add(const Slot& slot) {
    phase_.slots.push_back(slot);
    return static_cast<int>(phase_.slots.size()) - 1;
  }

  void append(Step step) { phase_.steps.push_back(step); }

  // Whether a cast changes nothing: a slot holds numbers of its class whatever their type was.
  bool holds_all(int from, const Node& cast) const {
    const Slot& slot = phase_.slots[static_cast<size_t>(from)];
    const DType whole = slot.cls == Class::wide ? DType::f64 : DType::f32;
    return slot.kind != Slot::Kind::constant && cast.dtype == whole;
  }

  // Rounding in a class goes with the other pointwise steps.
  void convert(int from, int out, DType dtype) {
    Step step;
    const auto slot = [&](int index) -> const Slot& {
      return phase_.slots[static_cast<size_t>(index)];
    };
    const bool rounds = slot(from).cls == slot(out).cls;
    const bool half = dtype == DType::f16 || dtype == DType::bf16;
    step.kind = rounds && half ? Step::Kind::pointwise : Step::Kind::convert;
    step.op = PointwiseOp::cast_;
    step.cls = slot(out).cls;
    step.dtype = dtype;
    step.in[0] = from;
    step.arity = 1;
    step.out = out;
    append(step);
  }

  int as_class(int slot, Class cls) {
    const Slot s = phase_.slots[static_cast<size_t>(slot)];
    if (s.cls == cls) return slot;
    if (s.kind == Slot::Kind::constant) {
      Slot twin = s;
      twin.cls = cls;
      return add(twin);
    }
    const int out = add(computed(cls, s.varies));
    convert(slot, out, cls == Class::wide ? DType::f64 : DType::f32);
    return out;
  }

  StateStep state_step(const SharedState& state, bool inside_tile) {
    StateStep step;
    step.monoid = primitive_of(state.monoid);
    step.arg = slot_for(state.arg);
    step.axes = state.axes;
    for (const ValueId finish : state.finishes) {
      int slot = -1;
      if (inside_tile) {
        slot = add(computed(class_of(graph_[finish].dtype), varying_axes(shapes_.at(finish))));
        slot_of_[finish] = slot;
      }
      step.reads.push_back({graph_[finish].finish, slot, finish});
    }
    return step;
  }

  const Graph& graph_;
  const std::map<ValueId, Shape>& shapes_;
  const std::set<ValueId> loads_;
  const std::vector<ValueId>& nodes_;
  Phase& phase_;
  std::map<ValueId, int> slot_of_;
};

}  // namespace

Class class_of(DType dtype) {
  return dtype == DType::f64 || dtype == DType::i64 ? Class::wide : Class::single;
}

bool Phase::space_is_one(size_t axis) const {
  return !varying_axes(space)[axis];
}

Phase lower_phase(const Graph& graph, const Shape& space, const std::map<ValueId, Shape>& shapes,
                  const std::vector<ValueId>& loads, const std::vector<ValueId>& nodes,
                  const std::vector<SharedState>& reductions,
                  const std::vector<SharedState>& statistics, const std::vector<ValueId>& stores) {
  Phase phase;
  phase.space = space;
  Lowering lowering(graph, shapes, loads, nodes, &phase);
  for (const ValueId value : nodes) {
    const Node& node = graph[value];
    if (node.kind == NodeKind::pointwise) lowering.pointwise(value);
    if (node.kind == NodeKind::reduce) lowering.reduce(value, reductions);
    if (node.kind == NodeKind::scan) {
      fail(INGOT_UNSUPPORTED, "{}: running sums run on GPUs alone", node.source);
    }
  }
  for (const SharedState& state : statistics) lowering.statistic(state);
  for (const ValueId value : stores) lowering.store(value);
  compose(&phase);
  arrange(&phase);
  // The register of a stored value may be the memory where it goes: the first store of each slot.
  for (size_t i = 0; i < phase.stores.size(); ++i) {
    Slot& slot = phase.slots[static_cast<size_t>(phase.stores[i].slot)];
    if (slot.kind == Slot::Kind::computed && slot.store < 0) slot.store = static_cast<int>(i);
  }
  assign_buffers(&phase);
  return phase;
}

}  // namespace ingot::cpu
