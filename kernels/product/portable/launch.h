// Host-side description of the portable product (compute capability 8.0 and up): see
// hopper/launch.h, whose shapes, splits and plan it shares. It needs no tensor maps; its kernel
// takes (PackedOperands, ProductArgs, Params), one thread block a tile. In ProductArgs, chunks
// counts slabs of 32.
#pragma once

#include "product/hopper/launch.h"

namespace ingot::portable {

// shared_limit: bytes of dynamic shared memory a thread block may have (cc 8.0: 166912; 8.6, 8.9:
// 101376; 9.0: 232448).
inline hopper::ProductPlan plan_product(const hopper::ProductShape& shape, size_t shared_limit) {
  constexpr size_t kSlabBytes = 320 * 128, kTableBytes = 64 * 4;
  hopper::ProductPlan plan;
  if (shape.m <= 0 || shape.n <= 0 || shape.k <= 0) {
    plan.reason = "an extent is zero";
    return plan;
  }
  const int64_t tiles = hopper::divide_up(shape.m, 64) * hopper::divide_up(shape.n, 256);
  if (tiles > INT32_MAX || shape.k > INT32_MAX / 4) {
    plan.reason = "it has more than 2^31 tiles, or more than 2^29 terms";
    return plan;
  }
  if (shared_limit < 2 * kSlabBytes + kTableBytes) {
    plan.reason = "the GPU has too little shared memory";
    return plan;
  }
  plan.variant = hopper::Variant::portable;
  plan.kernel = "product_portable";
  plan.header = "product/portable/packed.cuh";
  const int slabs = shared_limit >= 4 * kSlabBytes + kTableBytes ? 2 : 1;
  plan.config = "PackedConfig<2, " + std::to_string(slabs) + ">";
  plan.threads = 256;
  plan.shared_bytes = 2 * size_t(slabs) * kSlabBytes + kTableBytes;
  plan.tma_store = false;
  plan.features_per_tile = 256;
  plan.samples_per_tile = 64;
  plan.sample_tiles = hopper::divide_up(shape.m, 64);
  plan.moment_tiles = plan.sample_tiles;
  plan.raster_feature_tiles = int(hopper::divide_up(shape.n, 256));
  plan.raster_group = std::min(8, plan.raster_feature_tiles);
  plan.chunks = int(hopper::divide_up(shape.k, 32));
  plan.grid = unsigned(plan.sample_tiles * plan.raster_feature_tiles);
  hopper::add_split(plan, hopper::SplitStep::Operand::x, shape);
  if (!shape.weight_packed) hopper::add_split(plan, hopper::SplitStep::Operand::w, shape);
  return plan;
}

}  // namespace ingot::portable
