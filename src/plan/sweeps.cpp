// Sweeps are built from the last to the first: when one is built, all that later sweeps want of it
// is known, and what it loads becomes what earlier ones must store.
#include "plan/sweeps.h"

#include <algorithm>
#include <limits>
#include <set>

#include "plan/cost.h"
#include "plan/frontier.h"
#include "plan/shapes.h"
#include "support/error.h"

namespace ingot {
namespace {

// What a small sweep costs where a target names no launch time: starting and joining threads.
constexpr double kSmallSweepSeconds = 2e-6;

// Of a row that a thread block of a GPU holds in registers.
constexpr int64_t kLongestHeldRow = int64_t{1} << 15;

constexpr int kForever = std::numeric_limits<int>::max();

void add_once(std::vector<ValueId>& list, ValueId id) {
  if (!contains(list, id)) list.push_back(id);
}

struct TimedSweep {
  int time = 0;
  Sweep sweep;
};

class SweepBuilder {
 public:
  SweepBuilder(const Graph& graph, const Target& target, Schedule schedule,
               const std::vector<ValueId>& deferred, const std::vector<ValueId>& unloaded)
      : graph_(graph),
        target_(target),
        schedule_(std::move(schedule)),
        deferred_(deferred),
        unloaded_(unloaded),
        demand_(graph.nodes.size()) {
    release_what_follows_from_kept();
  }

  std::optional<std::vector<Sweep>> run() {
    find_cones();
    // Products load their operands whatever it costs; known first, so that none is stored too late.
    for (const Group& group : schedule_.groups) {
      if (group.matmul == kNoValue) continue;
      for (const ValueId arg : graph_[group.matmul].args) {
        const ValueId source = operand_source(graph_, arg);
        if (graph_[source].kind != NodeKind::leaf) demand(source, group.time);
      }
    }
    for (const Update& update : graph_.updates) demand(update.value, kForever);
    for (const Result& result : graph_.results) {
      demand(result.value, kForever);
      store_where_first_evaluated(result.value);
    }
    int last = 0;
    for (const Label& label : had_) last = std::max(last, label.time);
    for (int time = last; time >= kPrelude; --time) {
      if (!build_time(time)) return std::nullopt;
    }
    std::vector<Sweep> sweeps;
    std::stable_sort(built_.begin(), built_.end(), [](const TimedSweep& a, const TimedSweep& b) {
      return a.time != b.time ? a.time < b.time : a.sweep.kind < b.sweep.kind;
    });
    for (TimedSweep& timed : built_) sweeps.push_back(std::move(timed.sweep));
    return sweeps;
  }

 private:
  static constexpr int kPrelude = -1;  // before all: vectors that are computed once

  struct Demand {
    bool wanted = false;
    int before = kForever;  // the earliest sweep that loads it
    int home = 0;           // time of the sweep that stores it; until it has one, the earliest
  };

  // Which sweep evaluates a value first; from when on, and how, later ones have it.
  const Label& label(ValueId id) const { return schedule_.labels[static_cast<size_t>(id)]; }
  const Label& had(ValueId id) const { return had_[static_cast<size_t>(id)]; }
  Demand& demand_of(ValueId id) { return demand_[static_cast<size_t>(id)]; }

  void demand(ValueId id, int before, int home = 0) {
    Demand& own = demand_of(id);
    own.before = std::min(own.before, before);
    if (own.wanted) return;
    own.wanted = true;
    own.home = had(id).time;
    if (had(id).via == Via::free) {
      own.home = std::min(own.home, had(id).time + home);
      homeless_.insert(id);
      return;
    }
    Group& group = schedule_.groups[static_cast<size_t>(had(id).group)];
    add_once(had(id).via == Via::tail ? group.tail_stores : group.stores, id);
  }

  // Those of the wanted values without a place that fit get one, in graph order.
  template <class Fits, class Place>
  void place_if(int time, Fits fits, Place place) {
    for (auto it = homeless_.begin(); it != homeless_.end();) {
      const ValueId id = *it;
      if (!fits(id)) {
        ++it;
        continue;
      }
      demand_of(id).home = time;
      it = homeless_.erase(it);
      place(id);
    }
  }

  // An epilogue on a GPU stores one value of every element. What follows from that one it may
  // evaluate (for its statistics), but whoever else wants it has it from the stored one: as if it
  // were free from then on.
  void release_what_follows_from_kept() {
    had_ = schedule_.labels;
    if (target_.device != Target::Device::cuda) return;
    for (size_t i = 0; i < graph_.nodes.size(); ++i) {
      const auto id = static_cast<ValueId>(i);
      if (label(id).via != Via::product) continue;
      const ValueId kept = schedule_.groups[static_cast<size_t>(label(id).group)].kept;
      const std::vector<ValueId>& args = graph_[id].args;
      const bool follows = std::any_of(args.begin(), args.end(), [&](ValueId arg) {
        return arg == kept || (label(arg).group == label(id).group && had(arg).via == Via::free);
      });
      if (kept != kNoValue && id != kept && follows) {
        had_[i] = {label(id).time + 1, Via::free, -1};
      }
    }
  }

  // Which free values each group evaluates in any case on the way to what it is for.
  void find_cones() {
    for (const Group& group : schedule_.groups) {
      std::vector<bool> cone(graph_.nodes.size(), false);
      std::vector<ValueId> stack;
      for (const auto* anchors : {&group.reductions, &group.statistics}) {
        for (const ValueId id : *anchors) stack.push_back(graph_[id].args[0]);
      }
      while (!stack.empty()) {
        const ValueId id = stack.back();
        stack.pop_back();
        const Node& node = graph_[id];
        const bool inside = (node.kind == NodeKind::pointwise || node.kind == NodeKind::view) &&
                            label(id).via != Via::stored;
        if (cone[static_cast<size_t>(id)] || !inside) continue;
        cone[static_cast<size_t>(id)] = true;
        stack.insert(stack.end(), node.args.begin(), node.args.end());
      }
      cones_.push_back(std::move(cone));
    }
  }

  // A group before `time` that evaluates the free value, or what it is a copy of, anyway, at full
  // size.
  int host_of(ValueId id, int time) const {
    for (size_t i = 0; i < schedule_.groups.size(); ++i) {
      const Group& group = schedule_.groups[i];
      const bool evaluates =
          cones_[i][static_cast<size_t>(id)] || cones_[i][static_cast<size_t>(behind_copy(id))];
      if (group.time >= had(id).time && group.time < time && evaluates && fills(id, group.space)) {
        return static_cast<int>(i);
      }
    }
    return -1;
  }

  ValueId behind_copy(ValueId id) const {
    const Node& node = graph_[id];
    const bool copies = node.kind == NodeKind::pointwise && node.op == PointwiseOp::cast_ &&
                        graph_[node.args[0]].dtype == node.dtype;
    return copies ? node.args[0] : id;
  }

  // From then on later sweeps may load what they would compute again.
  void store_where_first_evaluated(ValueId id) {
    const int host = homeless_.contains(id) ? host_of(id, demand_of(id).before) : -1;
    if (host < 0) return;
    Group& group = schedule_.groups[static_cast<size_t>(host)];
    group.stores.push_back(id);
    demand_of(id).home = group.time;
    homeless_.erase(id);
  }

  bool fills(ValueId id, const Shape& space) const {
    const Shape& shape = graph_[id].shape;
    return shape.static_elements() == space.static_elements() && shape.batched == space.batched;
  }

  // Whether a sweep that stores a value of each element reads its operands once more for that: rows
  // that are too long for a thread block's registers.
  bool rereads(const Label& label) const {
    if (target_.device != Target::Device::cuda || label.via != Via::rows) return false;
    const Group& group = schedule_.groups[static_cast<size_t>(label.group)];
    return group.space.only(group.axes).static_elements() > kLongestHeldRow;
  }

  // What loading costs a sweep of this time; `wide`: it evaluates per element of a batch.
  double load_cost(ValueId id, int time, bool wide) {
    const double once = bytes_of(graph_, id, kPlanningBatch) / target_.bandwidth;
    const Node& node = graph_[id];
    if (node.kind == NodeKind::leaf) return once;
    if (contains(unloaded_, id)) return kImpossible;
    const Label& own = had(id);
    const Demand& wanted = demand_of(id);
    if (own.via != Via::free) {
      const int from = own.via == Via::stored ? own.time : own.time + 1;
      const bool stored_anyway =
          wanted.wanted || (node.kind == NodeKind::matmul && !target_.fuses_epilogue(node.dtype));
      if (from > time) return kImpossible;
      return stored_anyway ? once : rereads(own) ? 3 * once : 2 * once;
    }
    if (wanted.wanted) return wanted.home < time ? once : kImpossible;
    if (own.time < time && host_of(id, time) >= 0) return 2 * once;
    // A vector may get a small sweep of its own, also before the first.
    const bool vector = wide && !node.shape.batched && node.kind == NodeKind::pointwise;
    if (vector && (own.time < time || own.time == 0) && time > kPrelude) {
      return 2 * once + std::max(target_.launch_seconds, kSmallSweepSeconds);
    }
    return kImpossible;
  }

  bool is_deferred(ValueId id) const { return contains(deferred_, id); }

  double compute_cost(ValueId id, const Group& group) const {
    const Node& node = graph_[id];
    const Label& own = label(id);
    const bool here = own.group >= 0 && &schedule_.groups[static_cast<size_t>(own.group)] == &group;
    const auto elements =
        static_cast<double>(node.shape.batched && group.kind == SweepKind::rows
                                ? std::max(node.shape.elements(kPlanningBatch), int64_t{1})
                                : group.space.elements(kPlanningBatch));
    const double cost = elements * element_flops(node) / scalar_rate(target_);
    switch (node.kind) {
      case NodeKind::leaf:
      case NodeKind::constant:
        return kImpossible;
      case NodeKind::matmul:
        return group.matmul == id ? 0 : kImpossible;
      case NodeKind::reduce:
        return own.via == Via::rows && here ? cost : kImpossible;
      case NodeKind::view:
      case NodeKind::pointwise:
      case NodeKind::scan:
        break;
    }
    if (own.via == Via::stored) return here ? cost : kImpossible;
    if (own.time < group.time || (own.time == group.time && (own.via == Via::free || here))) {
      return cost;
    }
    // Vectors computed before everything else.
    return group.time == kPrelude && own.time == 0 && own.via == Via::free ? cost : kImpossible;
  }

  // This and what it calls: false where a sweep cannot see all its values in one factoring.
  bool build_time(int time) {
    for (size_t i = schedule_.groups.size(); i-- > 0;) {
      if (schedule_.groups[i].time == time && !build_group(i)) return false;
    }
    std::vector<Group> maps;
    place_if(
        time, [&](ValueId id) { return demand_of(id).home == time; },
        [&](ValueId id) { place_free(id, time, maps); });
    for (Group& group : maps) {
      join_later_map(group);
      if (!build_map(group)) return false;
    }
    return true;
  }

  // A free value that nothing of this time evaluates: in a sweep of its shape.
  void place_free(ValueId id, int time, std::vector<Group>& maps) {
    const Shape& shape = graph_[id].shape;
    const Factoring& own = schedule_.factorings[static_cast<size_t>(id)];
    for (Group& group : maps) {
      const auto common = Factoring::common(group.factoring, own, shape.static_elements());
      if (group.space != shape || !common || is_deferred(group.stores.front()) != is_deferred(id)) {
        continue;
      }
      group.factoring = *common;
      group.stores.push_back(id);
      return;
    }
    Group group{.kind = SweepKind::map, .time = time, .space = shape, .stores = {id}};
    group.factoring = own;
    if (time == kPrelude) {
      group.reasons.push_back("a vector is cheaper to compute once than per element");
    } else if (is_deferred(id)) {
      group.reasons.push_back("writes buffers after everything has read them");
    }
    maps.push_back(std::move(group));
  }

  // Free values that could have had a sweep before this one, and that nothing wants until then, of
  // what this one reads anyway: they cost no more than their own bytes here.
  void join_later_map(Group& group) {
    if (group.time == kPrelude || is_deferred(group.stores.front())) return;
    std::set<ValueId> read;
    for (const ValueId id : group.stores) collect_sources(id, read);
    const auto joins = [&](ValueId id) {
      const Demand& own = demand_of(id);
      if (own.home >= group.time || own.before <= group.time || is_deferred(id) ||
          graph_[id].shape != group.space) {
        return false;
      }
      std::set<ValueId> wanted;
      collect_sources(id, wanted);
      return std::includes(read.begin(), read.end(), wanted.begin(), wanted.end()) &&
             Factoring::common(group.factoring, schedule_.factorings[static_cast<size_t>(id)],
                               group.space.static_elements())
                 .has_value();
    };
    place_if(group.time, joins, [&](ValueId id) {
      const Factoring& own = schedule_.factorings[static_cast<size_t>(id)];
      group.factoring = *Factoring::common(group.factoring, own, group.space.static_elements());
      group.stores.push_back(id);
    });
  }

  // What a free value is computed from: leaves, and what is no free value.
  void collect_sources(ValueId id, std::set<ValueId>& found) const {
    std::set<ValueId> seen;
    std::vector<ValueId> ahead = {id};
    while (!ahead.empty()) {
      const ValueId value = ahead.back();
      ahead.pop_back();
      if (!seen.insert(value).second) continue;
      const Node& node = graph_[value];
      if (node.kind == NodeKind::constant) continue;
      if (node.kind == NodeKind::leaf || had(value).via != Via::free) {
        found.insert(value);
      } else {
        ahead.insert(ahead.end(), node.args.begin(), node.args.end());
      }
    }
  }

  bool build_map(const Group& group) {
    Sweep sweep;
    sweep.kind = SweepKind::map;
    return build_body(group, {}, sweep) && finish(group, std::move(sweep));
  }

  bool build_group(size_t index) {
    Group& group = schedule_.groups[index];
    Sweep sweep;
    sweep.kind = group.kind;
    sweep.matmul = group.matmul;
    build_tail(group, sweep);
    if (group.stores.empty() && sweep.statistics.empty()) return true;
    host_free_values(index);
    std::vector<ValueId> targets;
    for (const ValueId id : sweep.statistics) add_once(targets, graph_[id].args[0]);
    return build_body(group, targets, sweep) && finish(group, std::move(sweep));
  }

  // Free values that are wanted and that this group evaluates anyway are stored here.
  void host_free_values(size_t index) {
    Group& group = schedule_.groups[index];
    const auto hosted = [&](ValueId id) {
      const Demand& own = demand_of(id);
      return own.before > group.time && own.home <= group.time &&
             cones_[index][static_cast<size_t>(id)] && fills(id, group.space);
    };
    place_if(group.time, hosted, [&](ValueId id) { group.stores.push_back(id); });
  }

  // The tail, and with it which statistics anyone wants.
  void build_tail(Group& group, Sweep& sweep) {
    if (group.statistics.empty()) return;
    const Shape& reduced = graph_[group.statistics.front()].shape;
    if (!group.tail_stores.empty()) host_small_values(group, reduced);
    if (group.tail_stores.empty()) return;
    const auto cost_of = [&](ValueId id) {
      AccessCost cost;
      if (contains(group.statistics, id)) {
        cost.load = 0;
        return cost;
      }
      cost.load = load_cost(id, group.time, false);
      const Node& node = graph_[id];
      const bool inside = node.kind == NodeKind::pointwise || node.kind == NodeKind::view;
      if (inside && !node.shape.batched) cost.compute = tail_cost(id, group);
      return cost;
    };
    const Frontier frontier = cheapest_frontier(graph_, cost_of, group.tail_stores);
    if (!frontier.feasible) throw std::logic_error("a tail cannot be computed");
    sweep.tail = frontier.computed;
    for (const ValueId id : frontier.loaded) {
      if (contains(group.statistics, id)) {
        sweep.statistics.push_back(id);
      } else {
        add_once(sweep.loads, id);
      }
    }
    sweep.stores = group.tail_stores;
  }

  double tail_cost(ValueId id, const Group& group) const {
    const Label& own = label(id);
    const bool here =
        own.via == Via::tail && &schedule_.groups[static_cast<size_t>(own.group)] == &group;
    const bool earlier = own.time < group.time && own.via != Via::stored;
    if (!here && !earlier && !(own.time == group.time && own.via == Via::free)) return kImpossible;
    return element_flops(graph_[id]) *
           static_cast<double>(graph_[id].shape.elements(kPlanningBatch)) / scalar_rate(target_);
  }

  // Small free values (a counter's increment) ride on a tail rather than cost a launch.
  void host_small_values(Group& group, const Shape& reduced) {
    const auto hosted = [&](ValueId id) {
      const Node& node = graph_[id];
      const Demand& own = demand_of(id);
      const bool small = node.shape.is_scalar() || node.shape == reduced;
      // A tail sees what follows from a caller's tensors by those tensors' own axes.
      const bool whole = schedule_.factorings[static_cast<size_t>(id)] == Factoring(node.shape);
      return own.before == kForever && own.home <= group.time && small && whole &&
             node.kind == NodeKind::pointwise && !is_deferred(id);
    };
    place_if(group.time, hosted, [&](ValueId id) { group.tail_stores.push_back(id); });
  }

  // False where it cannot be computed without what is not to be loaded.
  bool build_body(const Group& group, std::vector<ValueId> targets, Sweep& sweep) {
    targets.insert(targets.end(), group.stores.begin(), group.stores.end());
    const std::set<ValueId> stores(group.stores.begin(), group.stores.end());
    const bool copies = !group.stores.empty() && is_deferred(group.stores.front());
    const auto cost_of = [&](ValueId id) {
      AccessCost cost;
      if (!stores.contains(id)) cost.load = load_cost(id, group.time, group.space.batched);
      const bool copied = !copies || is_deferred(id);
      if (copied) cost.compute = compute_cost(id, group);
      if (copies && !copied && cost.load == kImpossible && label(id).time < group.time) {
        cost.load = 0;  // any value can be stored for a copy
      }
      return cost;
    };
    const Frontier frontier = cheapest_frontier(graph_, cost_of, targets);
    if (!frontier.feasible && !unloaded_.empty()) return false;
    if (!frontier.feasible) throw std::logic_error("a sweep's values cannot be computed");
    for (const ValueId id : frontier.computed) {
      if (id != group.matmul) sweep.body.push_back(id);
    }
    for (const ValueId id : frontier.loaded) add_once(sweep.loads, id);
    if (group.matmul != kNoValue) load_operands(group.matmul, sweep);
    sweep.stores.insert(sweep.stores.begin(), group.stores.begin(), group.stores.end());
    return true;
  }

  void load_operands(ValueId matmul, Sweep& sweep) const {
    for (const ValueId arg : graph_[matmul].args) {
      add_once(sweep.loads, operand_source(graph_, arg));
    }
  }

  bool finish(const Group& group, Sweep sweep) {
    std::sort(sweep.loads.begin(), sweep.loads.end());
    sweep.space = group.matmul != kNoValue
                      ? group.space
                      : group.factoring.shape(group.space.static_elements(), group.space.batched,
                                              group.space);
    if (!assign_shapes(graph_, sweep)) return false;
    sweep.reasons = group.reasons;
    for (const ValueId id : sweep.loads) {
      if (graph_[id].kind == NodeKind::leaf) continue;
      const bool prelude = had(id).via == Via::free && had(id).time == group.time;
      if (had(id).via == Via::free && !demand_of(id).wanted && !prelude) {
        demand(id, group.time);
        store_where_first_evaluated(id);
      } else {
        demand(id, group.time, prelude ? kPrelude : 0);
      }
    }
    built_.push_back({group.time, std::move(sweep)});
    return true;
  }

  const Graph& graph_;
  const Target& target_;
  Schedule schedule_;
  std::vector<Label> had_;
  const std::vector<ValueId>&deferred_, &unloaded_;
  std::vector<Demand> demand_;
  std::set<ValueId> homeless_;            // free values that are wanted and have no place yet
  std::vector<std::vector<bool>> cones_;  // by group
  std::vector<TimedSweep> built_;
};

}  // namespace

std::optional<std::vector<Sweep>> build_sweeps(const Graph& graph, const Target& target,
                                               Schedule schedule,
                                               const std::vector<ValueId>& deferred,
                                               const std::vector<ValueId>& unloaded) {
  return SweepBuilder(graph, target, std::move(schedule), deferred, unloaded).run();
}

}  // namespace ingot
