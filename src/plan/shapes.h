// How each value of a sweep is seen in the sweep's own factoring.
#pragma once

#include "plan/plan.h"

namespace ingot {

// Fills sweep.shapes. Throws NoCommonFactoring, also where one load is used under two arrangements
// that no single one expresses.
void assign_shapes(const Graph& graph, Sweep& sweep);

}  // namespace ingot
