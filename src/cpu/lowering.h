// A plan, the layouts of a call's tensors and what this machine offers, lowered to what the call
// does on the host. Of the tensors' addresses, only how they are aligned is looked at.
#pragma once

#include <span>

#include "cpu/host_program.h"
#include "cpu/isa.h"
#include "cpu/sweep.h"

namespace ingot::cpu {

// What is the same for all calls of a program.
struct HostPlan {
  HostPlan(Plan plan, const Isa& isa);
  HostPlan(const HostPlan&) = delete;
  HostPlan& operator=(const HostPlan&) = delete;

  Plan plan;
  Isa isa;
  std::deque<HostSweep> sweeps;
  std::vector<Turn> turns;
  size_t leaf_count;
};

// By sweep, the bytes in which the right operand of its product is kept packed; 0 where that is no
// parameter, or where the product's provider gains nothing.
std::vector<size_t> frozen_bytes(const HostPlan& host);

// tensors: leaves, then results. frozen: frozen_bytes() where weights were packed, else nothing.
HostProgram lower(const HostPlan& host, int64_t batch, std::span<const ingot_tensor> tensors,
                  std::span<const size_t> frozen);
// What packs them.
HostProgram lower_packing(const HostPlan& host, int64_t batch,
                          std::span<const ingot_tensor> tensors, std::span<const size_t> frozen);

}  // namespace ingot::cpu
