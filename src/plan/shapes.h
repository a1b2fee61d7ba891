// How each value of a sweep is seen in the sweep's own factoring.
#pragma once

#include "plan/plan.h"

namespace ingot {

// Fills sweep.shapes. False where views leave the values without one factoring in which all can be
// seen, also where one load is used under two arrangements that no single one expresses.
bool assign_shapes(const Graph& graph, Sweep& sweep);

}  // namespace ingot
