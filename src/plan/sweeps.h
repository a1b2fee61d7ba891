// From a schedule to sweeps: what each computes, loads and stores.
#pragma once

#include <optional>

#include "plan/plan.h"
#include "plan/schedule.h"

namespace ingot {

// Sweeps in the order in which they run; nothing where one cannot see all its values in one
// factoring. unloaded: values that no sweep is to load; nothing where one cannot do without.
std::optional<std::vector<Sweep>> build_sweeps(const Graph& graph, const Target& target,
                                               Schedule schedule,
                                               const std::vector<ValueId>& deferred,
                                               const std::vector<ValueId>& unloaded = {});

}  // namespace ingot
