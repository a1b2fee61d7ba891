// Who reads a graph's values, and what becomes of these.
#pragma once

#include <vector>

#include "graph/graph.h"

namespace ingot {

struct Readers {
  std::vector<std::vector<ValueId>> of;  // Graph::users()
  // Whether all that follows from an element of a value is rounded to 16 bits before it is kept,
  // compared or reduced.
  std::vector<bool> rounded;
};

Readers readers_of(const Graph& graph);

}  // namespace ingot
