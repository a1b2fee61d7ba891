// What tests of generated sweeps plan for.
#pragma once

#include "codegen/kernel_source.h"
#include "graph/builder.h"
#include "plan/plan.h"

namespace ingot {

inline Target hopper_target() {
  Target target;
  target.device = Target::Device::cuda;
  target.product_flops = 2e14;
  target.bandwidth = 4e12;
  target.launch_seconds = 2e-6;
  target.units = 132;
  target.shared_bytes = 227 * 1024;
  return target;
}

// The kernels of a graph of one sweep.
inline KernelSource source_of(GraphBuilder& builder, ValueId result) {
  builder.result(result, "y");
  return generate(make_plan(builder.take(), hopper_target(), Precision::ieee)).at(0);
}

}  // namespace ingot
