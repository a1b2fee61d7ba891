// A plan's sweeps as the host runs them, whatever the batch size and the tensors: their phases, and
// which of them run on a product's blocks.
#pragma once

#include <deque>
#include <vector>

#include "cpu/phase.h"
#include "plan/plan.h"

namespace ingot::cpu {

// A row that a body adds to a product, which nothing else reads. source: the row as it is loaded,
// which a body may cast. is_all: it does nothing else.
struct AddedRow {
  ValueId product = kNoValue, row = kNoValue, sum = kNoValue, source = kNoValue;
  bool is_all = false;
};

struct HostSweep {
  HostSweep(const Plan& plan, const Sweep& sweep);

  bool gathers() const { return !body.statistics.empty(); }

  const Sweep& sweep;
  bool has_body = false, has_tail = false;
  Phase body, tail;
  Shape kept;  // the space less the axes that statistics reduce
  AddedRow added_row;
  Phase behind_row;  // the body, where the sum is there already; none of where that is all
};

// A sweep, or a product's and the first one that reads it and can be part of its step.
struct Turn {
  int sweep = 0, next = -1;
  bool kept = true;  // something else reads the product too
};

// In the order in which they run: sweeps between a product and its follower do not read it, and go
// before. All of them are then at work at one time: the lifetimes of the plan's buffers are
// lengthened.
std::vector<Turn> turns_of(const std::deque<HostSweep>& sweeps, Plan* plan);

}  // namespace ingot::cpu
