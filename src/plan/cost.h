// What things are predicted to cost. Rough on purpose: it ranks alternatives and states limits.
#pragma once

#include "plan/plan.h"

namespace ingot {

// The batch size for which a plan is chosen: choices must hold for every batch, and at this one
// full-size values dwarf vectors, as they do at the sizes that take time.
inline constexpr int64_t kPlanningBatch = 1024;

double bytes_of(const Graph& graph, ValueId value, int64_t batch);
// Arithmetic of one element of a pointwise node or a reduction, in multiplications.
double element_flops(const Node& node);
// Multiplications and additions outside matrix products, per second.
double scalar_rate(const Target& target);

}  // namespace ingot
