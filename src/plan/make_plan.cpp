#include <algorithm>

#include "plan/cost.h"
#include "plan/describe.h"
#include "plan/normalise.h"
#include "plan/schedule.h"
#include "plan/shapes.h"
#include "plan/sweeps.h"
#include "support/error.h"

namespace ingot {
namespace {

// A graph of so many values is planned once; of a smaller one more plans are compared. Planning is
// part of a user's first call: 20 to 30 µs a value.
constexpr size_t kMostPlannedValues = 20000;

void place_values(Plan& plan) {
  const Graph& graph = plan.graph;
  plan.placements.assign(graph.nodes.size(), {});
  const auto place = [&](ValueId id, Placement::Kind kind, size_t index) {
    plan.placements[static_cast<size_t>(id)] = {kind, static_cast<int>(index)};
  };
  const std::vector<ValueId> leaves = graph.leaves();
  for (size_t i = 0; i < leaves.size(); ++i) place(leaves[i], Placement::Kind::leaf, i);
  for (size_t i = 0; i < graph.results.size(); ++i) {
    place(graph.results[i].value, Placement::Kind::result, i);
  }
  for (size_t i = 0; i < graph.updates.size(); ++i) {
    place(graph.updates[i].value, Placement::Kind::update, i);
  }
  for (size_t s = 0; s < plan.sweeps.size(); ++s) {
    const Sweep& sweep = plan.sweeps[s];
    for (const ValueId id : sweep.stores) {
      if (plan.placements[static_cast<size_t>(id)].kind != Placement::Kind::none) continue;
      place(id, Placement::Kind::workspace, plan.buffers.size());
      const int sweep_index = static_cast<int>(s);
      plan.buffers.push_back({graph[id].shape, graph[id].dtype, sweep_index, sweep_index, id});
    }
    for (const ValueId id : sweep.loads) {
      const Placement& placement = plan.placements[static_cast<size_t>(id)];
      if (placement.kind != Placement::Kind::workspace) continue;
      plan.buffers[static_cast<size_t>(placement.index)].last_sweep = static_cast<int>(s);
    }
  }
}

bool in(const std::vector<ValueId>& list, ValueId id) {
  return std::find(list.begin(), list.end(), id) != list.end();
}

// Whether writing the update where it is computed would overwrite what is still to be read.
bool overwrites_too_early(const Plan& plan, const Update& update) {
  bool written = false;
  for (const Sweep& sweep : plan.sweeps) {
    const bool reads = in(sweep.loads, update.buffer);
    if (written && reads) return true;
    if (!in(sweep.stores, update.value)) continue;
    written = true;
    if (!reads) continue;
    const bool same_element = sweep.shapes.contains(update.buffer) &&
                              sweep.shapes.at(update.buffer) == sweep.shapes.at(update.value);
    if (!same_element) return true;
  }
  return false;
}

// The caller's memory has the axes of its own value: a dense copy under other axes needs a copy in
// turn.
void copy_views_to_callers(Graph& graph) {
  const auto own = [&](ValueId value) {
    return graph[value].kind == NodeKind::view ? append_copy(graph, value) : value;
  };
  // append_copy() moves the graph: nothing of it may be referred to across a call.
  for (size_t i = 0; i < graph.results.size(); ++i) {
    const ValueId value = own(graph.results[i].value);
    graph.results[i].value = value;
  }
  for (size_t i = 0; i < graph.updates.size(); ++i) {
    const ValueId value = own(graph.updates[i].value);
    graph.updates[i].value = value;
  }
}

// Nothing where views leave the values of a sweep without one factoring in which all can be seen.
std::optional<Plan> plan_storing(Graph graph, const Target& target, Precision precision,
                                 bool cut_views, const std::vector<ValueId>& deferred,
                                 const std::vector<ValueId>& unloaded) {
  Plan plan;
  plan.graph = std::move(graph);
  plan.target = target;
  plan.precision = precision;
  std::optional<Schedule> schedule = make_schedule(plan.graph, target, cut_views, deferred);
  if (!schedule) return std::nullopt;
  std::optional<std::vector<Sweep>> sweeps =
      build_sweeps(plan.graph, target, *std::move(schedule), deferred, unloaded);
  if (!sweeps) return std::nullopt;
  plan.sweeps = *std::move(sweeps);
  place_values(plan);
  return plan;
}

// Of sweeps that store several values of each sample for later ones: these.
std::vector<ValueId> stored_together(const Plan& plan) {
  std::vector<ValueId> all;
  for (const Sweep& sweep : plan.sweeps) {
    std::vector<ValueId> own;
    for (const ValueId id : sweep.stores) {
      const bool ours = plan.placements[static_cast<size_t>(id)].kind == Placement::Kind::workspace;
      if (ours && plan.graph[id].shape == sweep.space && sweep.space.batched) own.push_back(id);
    }
    if (own.size() > 1) all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

double predicted_seconds(const Plan& plan) {
  double seconds = 0;
  for (const Sweep& sweep : plan.sweeps) seconds += plan.cost(sweep, kPlanningBatch).seconds;
  return seconds;
}

// Sweeps are built from the last on, each loading what is cheapest for itself. Where two load what
// follows from one another, one of the values may serve both.
std::optional<Plan> plan_once(Graph graph, const Target& target, Precision precision,
                              bool cut_views, const std::vector<ValueId>& deferred) {
  if (cut_views) copy_views_to_callers(graph);
  std::optional<Plan> plan = plan_storing(graph, target, precision, cut_views, deferred, {});
  if (!plan || target.device != Target::Device::cuda) return plan;
  std::vector<ValueId> unloaded;
  size_t planned = 0;
  for (const ValueId id : stored_together(*plan)) {
    planned += graph.nodes.size();
    if (planned > kMostPlannedValues) break;
    unloaded.push_back(id);
    std::optional<Plan> other =
        plan_storing(graph, target, precision, cut_views, deferred, unloaded);
    if (other && predicted_seconds(*other) < predicted_seconds(*plan)) {
      plan = std::move(other);
    } else {
      unloaded.pop_back();
    }
  }
  return plan;
}

Plan plan_seeing_views(const Graph& graph, const Target& target, Precision precision,
                       const std::vector<ValueId>& deferred) {
  for (const bool cut_views : {false, true}) {
    std::optional<Plan> plan = plan_once(graph, target, precision, cut_views, deferred);
    if (plan) return *std::move(plan);
  }
  throw std::logic_error("graph '" + graph.name + "' has no plan even with views as copies");
}

}  // namespace

Plan make_plan(Graph graph, const Target& target, Precision precision) {
  graph.validate();
  graph = normalise_for_planning(graph);
  std::vector<ValueId> deferred;
  Plan plan = plan_seeing_views(graph, target, precision, deferred);
  // Buffers that would be overwritten too early are written by copies at the end instead.
  for (bool again = true; again;) {
    again = false;
    for (size_t i = 0; i < graph.updates.size(); ++i) {
      // In the plan's own graph the update may be a copy; the position is the same.
      if (in(deferred, graph.updates[i].value) ||
          !overwrites_too_early(plan, plan.graph.updates[i])) {
        continue;
      }
      const ValueId copy = append_copy(graph, graph.updates[i].value);
      graph.updates[i].value = copy;
      deferred.push_back(copy);
      again = true;
    }
    if (again) plan = plan_seeing_views(graph, target, precision, deferred);
  }
  plan.readers = readers_of(plan.graph);
  describe_sweeps(plan);
  validate(plan);
  return plan;
}

}  // namespace ingot
