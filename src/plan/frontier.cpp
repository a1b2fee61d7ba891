#include "plan/frontier.h"

#include <algorithm>
#include <queue>

namespace ingot {
namespace {

// Residual network with real capacities (Edmonds and Karp 1972); graphs here have some hundred
// nodes.
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

}  // namespace

Frontier cheapest_frontier(const Graph& graph, const std::vector<AccessCost>& costs,
                           const std::vector<ValueId>& targets) {
  // Two variables a value, true on the source's side of the cut: needed(v), and computed(v), which
  // implies needed(v). Needed but not computed costs a load; computed costs the evaluation and
  // makes the arguments needed.
  const size_t count = graph.nodes.size();
  const size_t source = 2 * count, sink = source + 1;
  const auto needed = [](size_t v) { return 2 * v; };
  const auto computed = [](size_t v) { return 2 * v + 1; };
  Network network(2 * count + 2);
  for (const ValueId target : targets) {
    network.edge(source, needed(static_cast<size_t>(target)), kImpossible);
  }
  for (size_t v = 0; v < count; ++v) {
    network.edge(needed(v), computed(v), costs[v].load);
    network.edge(computed(v), needed(v), kImpossible);
    network.edge(computed(v), sink, costs[v].compute);
    if (graph.nodes[v].kind == NodeKind::matmul) continue;  // its operands are loaded as they are
    for (const ValueId arg : graph.nodes[v].args) {
      if (graph[arg].kind == NodeKind::constant) continue;
      network.edge(computed(v), needed(static_cast<size_t>(arg)), kImpossible);
    }
  }
  Frontier frontier;
  frontier.feasible = network.saturate(source, sink);
  if (!frontier.feasible) return frontier;
  const std::vector<bool> side = network.source_side(source);
  for (size_t v = 0; v < count; ++v) {
    if (!side[needed(v)]) continue;
    (side[computed(v)] ? frontier.computed : frontier.loaded).push_back(static_cast<ValueId>(v));
  }
  return frontier;
}

}  // namespace ingot
