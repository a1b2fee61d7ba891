// How each value of a sweep is seen in the sweep's own factoring.
#pragma once

#include "plan/plan.h"

namespace ingot {

// One load is used under two arrangements that no single one expresses.
struct ShapeConflict {};

// Fills sweep.shapes. Throws ShapeConflict.
void assign_shapes(const Graph& graph, Sweep& sweep);

}  // namespace ingot
