// Names and reasons: what a plan says about itself.
#pragma once

#include "plan/plan.h"

namespace ingot {

// Fills sweep.name, unique within the plan, and adds to sweep.reasons.
void describe_sweeps(Plan& plan);

}  // namespace ingot
