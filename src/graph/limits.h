// Which batch sizes a graph can be run with at all.
#pragma once

#include "graph/graph.h"

namespace ingot {

// Of one value, its batch included: far more than any memory holds, and few enough that sizes and
// offsets in bytes, with all that padding and partial sums add, stay within 64 bits.
inline constexpr int64_t kMostElements = int64_t{1} << 48;

// The largest batch size with which no value has more than kMostElements elements.
int64_t largest_batch(const Graph& graph);

// Throws Error where the batch is negative, or larger than that, naming a value that it is too
// large for.
void check_batch(const Graph& graph, int64_t batch);

}  // namespace ingot
