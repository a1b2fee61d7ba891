// Host-side description of the portable product (compute capability 8.0 and up): see
// hopper/launch.h, whose shapes, splits and plan it shares. It needs no tensor maps; its kernel
// takes (PackedOperands, ProductArgs, Params), one thread block a tile. In ProductArgs, chunks
// counts slabs of 32.
#pragma once

#include "product/arch.h"
#include "product/hopper/launch.h"
#include "product/portable/args.cuh"

namespace ingot::portable {

using DeviceRates = ArchSpec::PortableProduct;
inline DeviceRates rates_of(const ArchSpec& arch, int multiprocessors) {
  DeviceRates rates = arch.portable;
  rates.library_tflops *= double(multiprocessors) / rates.multiprocessors;
  rates.multiprocessors = multiprocessors;
  return rates;
}

// Fills in the plan's estimates, in microseconds.
inline void estimate(hopper::ProductPlan& plan, const hopper::ProductShape& shape, bool two_blocks,
                     const DeviceRates& rates) {
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  const int64_t tiles = int64_t(plan.grid);
  const int64_t slots = int64_t(rates.multiprocessors) * (two_blocks ? 2 : 1);
  const bool alone = two_blocks && tiles <= rates.multiprocessors;
  const double chunk = alone ? rates.lone_chunk_us : rates.chunk_us;
  const double split = 1.5 + m * k * 8 / rates.bytes_per_us;
  plan.estimated_us = 5 + split + double(hopper::divide_up(tiles, slots) * plan.chunks) * chunk;
  if (!shape.weight_packed) plan.estimated_us += 1.5 + n * k * 8 / rates.bytes_per_us;
  plan.library_us = 8 + std::max(2e-6 * m * n * k / rates.library_tflops,
                                 4 * (m * k + n * k + m * n) / rates.bytes_per_us);
  plan.library_faster = plan.library_us < plan.estimated_us;
}

// shared_limit: bytes of dynamic shared memory a thread block may have (cc 8.0: 166912; 8.6, 8.9:
// 101376; 9.0: 232448). Two blocks of 128 × 128 a multiprocessor are fastest; where they do not
// fit, one of 256 × 128, or of 128 × 128 where that does not fit either (docs/kernel-log.md).
inline hopper::ProductPlan plan_product(const hopper::ProductShape& shape, size_t shared_limit,
                                        const DeviceRates& rates = {}) {
  constexpr int kStages = 2, kSamples = 128;
  constexpr int64_t kMostTerms = 1 << 22;  // a tile's rows are addressed by 32-bit offsets
  const auto shared_bytes = [](int features) {
    return size_t(kStages) * size_t(features + kSamples) * 128 + kSamples * 4 +
           size_t(features) * kSamples * 2;
  };
  hopper::ProductPlan plan;
  if (shape.m <= 0 || shape.n <= 0 || shape.k <= 0) {
    plan.reason = "an extent is zero";
    return plan;
  }
  if (shared_limit < shared_bytes(128)) {
    plan.reason = "the GPU has too little shared memory";
    return plan;
  }
  const bool two_blocks = two_fit(shared_bytes(128), shared_limit);
  const int features = !two_blocks && shared_limit >= shared_bytes(256) ? 256 : 128;
  const int64_t sample_tiles = hopper::divide_up(shape.m, kSamples);
  const int64_t feature_tiles = hopper::divide_up(shape.n, features);
  if (shape.m > INT32_MAX / 2 || shape.n > INT32_MAX / 2 || shape.k > kMostTerms ||
      sample_tiles * feature_tiles > INT32_MAX) {
    plan.reason = "an extent exceeds 2^30 (2^22 for the terms), or it has more than 2^31 tiles";
    return plan;
  }
  plan.variant = hopper::Variant::portable;
  plan.kernel = "product_portable";
  plan.header = "product/portable/packed.cuh";
  plan.config = features == 256 ? "PackedConfig<4, 2, 2>" : "PackedConfig<2, 2, 2>";
  plan.threads = unsigned(features);
  plan.shared_bytes = shared_bytes(features);
  plan.tma_store = false;
  plan.tile_samples = kSamples;
  plan.sample_tiles = sample_tiles;
  plan.moment_tiles = hopper::divide_up(shape.m, 64);  // one a warp
  plan.raster_feature_tiles = int(feature_tiles);
  plan.raster_group = std::min(8, plan.raster_feature_tiles);
  plan.chunks = hopper::chunks_of(plan.variant, shape.k);
  plan.grid = unsigned(sample_tiles * feature_tiles);
  estimate(plan, shape, two_blocks, rates);
  hopper::add_split(plan, hopper::SplitStep::Operand::x, shape, false);
  if (!shape.weight_packed) hopper::add_split(plan, hopper::SplitStep::Operand::w, shape, false);
  return plan;
}

}  // namespace ingot::portable
