// Brings a graph into the form that scheduling takes for granted.
#pragma once

#include "graph/graph.h"

namespace ingot {

// Drops what no result or update needs (leaves stay: they are bound by position), resolves views of
// views, replaces reductions over axes of extent 1, sums columns first where a sum over everything
// can join statistics of columns, and gives every result and update a computed value of its own (a
// copy where it was a leaf, a constant or shared).
Graph normalise_for_planning(const Graph& graph);

// Appends a copy of `value` (a cast to its own dtype).
ValueId append_copy(Graph& graph, ValueId value);

}  // namespace ingot
