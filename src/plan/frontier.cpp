#include "plan/frontier.h"

#include <algorithm>
#include <map>
#include <queue>

namespace ingot {
namespace {

// Residual network with real capacities (Edmonds and Karp 1972); networks here have some dozen
// nodes: what has no choice stays out of them.
class Network {
 public:
  explicit Network(size_t nodes) : edges_of_(nodes) {}

  void edge(size_t from, size_t to, double capacity) {
    edges_of_[from].push_back(edges_.size());
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(edges_.size());
    edges_.push_back({from, 0});
  }

  // False where no finite cut separates the two.
  bool saturate(size_t source, size_t sink) {
    while (true) {
      std::vector<size_t> via(edges_of_.size(), kNone);
      if (!reach(source, via) || via[sink] == kNone) return true;
      double flow = kImpossible;
      for (size_t node = sink; node != source; node = edges_[via[node] ^ 1].to) {
        flow = std::min(flow, edges_[via[node]].capacity);
      }
      if (flow == kImpossible) return false;
      for (size_t node = sink; node != source; node = edges_[via[node] ^ 1].to) {
        edges_[via[node]].capacity -= flow;
        edges_[via[node] ^ 1].capacity += flow;
      }
    }
  }

  std::vector<bool> source_side(size_t source) {
    std::vector<size_t> via(edges_of_.size(), kNone);
    reach(source, via);
    std::vector<bool> side(edges_of_.size());
    for (size_t node = 0; node < side.size(); ++node) side[node] = via[node] != kNone;
    side[source] = true;
    return side;
  }

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  struct Edge {
    size_t to;
    double capacity;
  };

  // Breadth first over edges with capacity left; via[node] is the edge that reached it.
  bool reach(size_t source, std::vector<size_t>& via) {
    std::queue<size_t> queue;
    queue.push(source);
    while (!queue.empty()) {
      const size_t node = queue.front();
      queue.pop();
      for (const size_t index : edges_of_[node]) {
        const size_t to = edges_[index].to;
        if (to == source || via[to] != kNone || !(edges_[index].capacity > 0)) continue;
        via[to] = index;
        queue.push(to);
      }
    }
    return true;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<size_t>> edges_of_;
};

// What the targets ask for, whatever it costs, and what is left to choose.
class Search {
 public:
  Search(const Graph& graph, const CostOf& cost_of) : graph_(graph), cost_of_(cost_of) {}

  Frontier run(const std::vector<ValueId>& targets) {
    for (const ValueId target : targets) need(target);
    if (!settle()) return {};
    collect();
    if (!cut()) return {};
    Frontier frontier;
    frontier.feasible = true;
    for (const auto& [value, own] : values_) {
      if (own.needed) (own.computed ? frontier.computed : frontier.loaded).push_back(value);
    }
    return frontier;
  }

 private:
  struct Value {
    AccessCost cost;
    bool needed = false;  // in any case; in the end: whether it is
    bool computed = false;
    bool open = false;  // its cost decides
    size_t number = 0;  // among the open ones
  };

  Value& value(ValueId id) {
    const auto [place, fresh] = values_.try_emplace(id);
    if (fresh) place->second.cost = cost_of_(id);
    return place->second;
  }

  void need(ValueId id) {
    Value& own = value(id);
    if (own.needed) return;
    own.needed = true;
    pending_.push_back(id);
  }

  // A product's operands are loaded as they are, constants read in place.
  template <class Visit>
  void visit_arguments(ValueId id, Visit visit) const {
    if (graph_[id].kind == NodeKind::matmul) return;
    for (const ValueId arg : graph_[id].args) {
      if (graph_[arg].kind != NodeKind::constant) visit(arg);
    }
  }

  // What cannot be loaded is computed, and asks for its arguments. False where neither is possible.
  bool settle() {
    while (!pending_.empty()) {
      const ValueId id = pending_.back();
      pending_.pop_back();
      Value& own = value(id);
      if (own.cost.load != kImpossible) {
        own.open = true;
        continue;
      }
      if (own.cost.compute == kImpossible) return false;
      own.computed = true;
      visit_arguments(id, [&](ValueId arg) { need(arg); });
    }
    return true;
  }

  // All that computing an open value could ask for is open too.
  void collect() {
    for (const auto& [id, own] : values_) {
      if (own.open) pending_.push_back(id);
    }
    while (!pending_.empty()) {
      const ValueId id = pending_.back();
      pending_.pop_back();
      if (value(id).cost.compute == kImpossible) continue;
      visit_arguments(id, [&](ValueId arg) {
        Value& own = value(arg);
        if (own.open || own.computed) return;
        own.open = true;
        pending_.push_back(arg);
      });
    }
  }

  // Two variables a value, true on the source's side of the cut: needed(v), and computed(v), which
  // implies needed(v). Needed but not computed costs a load; computed costs the evaluation and
  // makes the arguments needed.
  bool cut() {
    size_t count = 0;
    for (auto& [id, own] : values_) {
      if (own.open) own.number = count++;
    }
    const size_t source = 2 * count, sink = source + 1;
    Network network(2 * count + 2);
    for (const auto& [id, own] : values_) {
      if (own.open && own.needed) network.edge(source, 2 * own.number, kImpossible);
    }
    for (const auto& [id, own] : values_) {
      if (own.open) add_edges(network, id, own, sink);
    }
    if (!network.saturate(source, sink)) return false;
    const std::vector<bool> side = network.source_side(source);
    for (auto& [id, own] : values_) {
      if (!own.open) continue;
      own.needed = side[2 * own.number];
      own.computed = side[2 * own.number + 1];
    }
    return true;
  }

  void add_edges(Network& network, ValueId id, const Value& own, size_t sink) {
    const size_t needed = 2 * own.number, computed = needed + 1;
    network.edge(needed, computed, own.cost.load);
    network.edge(computed, needed, kImpossible);
    network.edge(computed, sink, own.cost.compute);
    if (own.cost.compute == kImpossible) return;
    visit_arguments(id, [&](ValueId arg) {
      const Value& of_arg = value(arg);
      if (of_arg.open) network.edge(computed, 2 * of_arg.number, kImpossible);
    });
  }

  const Graph& graph_;
  const CostOf& cost_of_;
  std::map<ValueId, Value> values_;  // in graph order
  std::vector<ValueId> pending_;
};

}  // namespace

Frontier cheapest_frontier(const Graph& graph, const CostOf& cost_of,
                           const std::vector<ValueId>& targets) {
  return Search(graph, cost_of).run(targets);
}

}  // namespace ingot
