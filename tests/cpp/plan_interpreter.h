// Runs a plan sweep by sweep in fp64, reading and writing only where the plan says: the reference
// for what a backend does with a plan.
#pragma once

#include <span>

#include "ingot/ingot.h"
#include "plan/plan.h"

namespace ingot::testing {

// tensors: leaves, then results, all f64 on the host. Buffers of updates are written in place.
// hosts: as hosting_results() has them, of dense results.
void interpret(const Plan& plan, int64_t batch, std::span<const ingot_tensor> tensors,
               std::span<const int> hosts = {});

}  // namespace ingot::testing
