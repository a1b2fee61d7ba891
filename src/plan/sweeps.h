// From a schedule to sweeps: what each computes, loads and stores.
#pragma once

#include "plan/plan.h"
#include "plan/schedule.h"

namespace ingot {

// Sweeps in the order in which they run. Throws NoCommonFactoring where a sweep cannot see all its
// values in one factoring.
std::vector<Sweep> build_sweeps(const Graph& graph, const Target& target, Schedule schedule,
                                const std::vector<ValueId>& deferred);

}  // namespace ingot
