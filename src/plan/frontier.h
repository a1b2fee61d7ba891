// What a sweep computes and what it loads, chosen together: the cheapest set of stored values from
// which its targets follow. Exact, as a minimum cut.
#pragma once

#include <functional>
#include <limits>
#include <vector>

#include "graph/graph.h"

namespace ingot {

inline constexpr double kImpossible = std::numeric_limits<double>::infinity();

// What a value costs a sweep that needs it; kImpossible where that way is closed.
struct AccessCost {
  double load = kImpossible;     // seconds to read it (and to write it, where nobody has yet)
  double compute = kImpossible;  // seconds to evaluate it from its arguments
};

struct Frontier {
  std::vector<ValueId> computed, loaded;  // each in graph order
  bool feasible = false;
};

// Asked once for each value that the targets could lead to, and for no other.
using CostOf = std::function<AccessCost(ValueId)>;

// Targets are needed. Arguments of computed values are needed in turn, except constants.
Frontier cheapest_frontier(const Graph& graph, const CostOf& cost_of,
                           const std::vector<ValueId>& targets);

}  // namespace ingot
