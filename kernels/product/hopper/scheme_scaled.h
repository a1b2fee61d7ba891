// TF32's accuracy: one fp16 value an element under its row's power of two, one product
// (product/scaled_rows.cuh).
#pragma once

#include "product/hopper/scheme.h"

namespace ingot::hopper::scheme_scaled {

inline TileChoice fused_tile(int samples, int sample_blocks, int slices = 1) {
  return {.variant = Variant::fused_scaled,
          .samples = samples,
          .stages = samples == 256   ? 3
                    : samples == 128 ? 5
                                     : 8,
          .weight_stages = samples == 256 ? 3 : 4,
          .sample_blocks = sample_blocks,
          .slices = slices};
}

inline std::vector<TileChoice> tiles(const ProductShape& shape, const DeviceLimits& device) {
  std::vector<TileChoice> menu = {
      {.variant = Variant::scaled, .samples = 128, .stages = 6, .staging = 1}};
  // Stores without TMA's help take registers that large tiles have not.
  const bool roomy = stores_by_tma(shape) || !shape.stores_result;
  // At 256 samples an epilogue with batch norm's operands would spill registers.
  if (roomy) {
    menu.push_back(
        {.variant = Variant::scaled, .samples = 192, .stages = 4, .staging = 2, .cluster = 2});
  }
  if (!shape.w.vector_rows(shape.k) || shape.weight_packed) return menu;
  menu.push_back(fused_tile(64, 1));
  if (roomy) {
    menu.push_back(fused_tile(128, 1));
    menu.push_back(fused_tile(128, 2));
    menu.push_back(fused_tile(256, 2));
  }
  for (const int slices : {2, 4, 8}) {
    if (divide_up(shape.k, 128) < slices) break;
    for (const int samples : {64, 128}) {
      const TileChoice tile = fused_tile(samples, 1, slices);
      if (tiles_of(shape, tile) <= cluster_slots(tile, device)) menu.push_back(tile);
    }
  }
  return menu;
}

// Blocks of a cluster share operands.
inline TileCycles tile_cycles(const TileChoice& c) {
  const bool shares = c.cluster * c.sample_blocks > 1;
  if (c.variant == Variant::fused_scaled) {
    if (c.samples == 64) return {12.1, 1840};
    if (c.samples == 128) return shares ? TileCycles{14.1, 3120} : TileCycles{14.3, 2400};
    return {22.3, 3490};
  }
  if (c.samples == 128) return {10.2, 1090};
  return c.samples == 192 ? TileCycles{13.1, 2680} : TileCycles{17.4, 3320};
}

// The tensor cores wait for memory and memory for them, in part; past 0.4 ms the power limit takes
// clock. Fitted to bench/results/config-sweep (34 shapes on an H200): within 12% of each time.
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  constexpr double kLaunch = 4.5, kSplitLaunch = 2.5, kSplitPerElement = 1.41e-6;
  constexpr double kReadPerMicrosecond = 4.35e6, kWrittenPerMicrosecond = 3.23e6;
  constexpr double kCool = 400, kHot = 0.2, kApart = 0.3;
  const bool fused = is_fused(c.variant);
  const int64_t k_step = fused ? 128 : 64;
  const double k = double(divide_up(shape.k, k_step) * k_step);
  double multiplying = tile_time(shape, c, device, tile_cycles(c), k);
  if (multiplying > kCool) multiplying += kHot * (multiplying - kCool);
  const double m = double(shape.m), n = double(shape.n);
  const double moving = ((fused ? 4 : 2) * n * k + 2 * m * k) / kReadPerMicrosecond +
                        (shape.stores_result ? 4 * m * n / kWrittenPerMicrosecond : 0);
  double time = std::max(multiplying, moving) + kApart * std::min(multiplying, moving);
  const auto packing = [&](double rows) {
    return kSplitLaunch + rows * double(shape.k) * kSplitPerElement;
  };
  time += kLaunch + packing(m);
  if (!fused && !shape.weight_packed) time += packing(n);
  return time;
}

// cuBLAS in TF32: 346 TF/s or most of the bandwidth.
inline double estimate_library(const ProductShape& shape) {
  constexpr double kLess = 0.9;  // below what was measured: ours is to be faster for certain
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  return kLess *
         (6.85 + 0.004 * std::min(k, 1024.) +
          std::max(2e-6 * m * n * k / 346, 4 * (m * k + n * k) / 3.05e6 + 4 * m * n / 3.56e6));
}

inline constexpr SchemeSpec kSpec = {
    .line_k = 64,
    .pack_header = "product/scaled_rows.cuh",
    .pack_rows = "scale_rows",
    .pack_columns = "scale_columns",
    .vectors = 2,
    .most_loads = 4,
    // A sum stays in the tensor core, which rounds it towards zero: of more positive terms than
    // these that would exceed what rounding the operands costs.
    .most_terms = 1 << 15,
    .bound = {.factor = 3, .roundoff = 0x1p-11, .range_floor = 0x1p-36},
    .tiles = tiles,
    .estimate = estimate,
    .estimate_library = estimate_library};

}  // namespace ingot::hopper::scheme_scaled
