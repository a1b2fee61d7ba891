// Some 16 bits at TF32's speed: one fp16 product and two cross terms in FP8
// (product/crossed_rows.cuh). Where its tiles are not worth their packing, or do not serve, fp32's
// scheme stands in, tile by tile.
#pragma once

#include "product/hopper/scheme_split.h"

namespace ingot::hopper::scheme_high {

inline TileChoice tile(int samples, int cluster = 2) {
  return {.variant = Variant::crossed,
          .samples = samples,
          .stages = samples == 256   ? 4
                    : samples == 192 ? 5
                                     : 6,
          .staging = 1,
          .cluster = cluster};
}

inline std::vector<TileChoice> tiles(const ProductShape& shape, const DeviceLimits& device) {
  std::vector<TileChoice> menu;
  if (shape.batches == 1) {
    menu = {tile(128), tile(128, 1), tile(192)};
    // Stores without TMA's help take registers that this one has not.
    if (stores_by_tma(shape) || !shape.stores_result) menu.push_back(tile(256));
  }
  if (shape.weight_packed) return menu;
  const std::vector<TileChoice> rest = scheme_split::tiles(as_split(shape), device);
  menu.insert(menu.end(), rest.begin(), rest.end());
  return menu;
}

inline TileCycles tile_cycles(const TileChoice& c) {
  if (c.samples == 128) return {c.cluster == 2 ? 18.6 : 23, 2500};
  return c.samples == 192 ? TileCycles{26, 4800} : TileCycles{34.2, 4400};
}

// Fitted to five products of 2048³ to 16384×4096→4096 on an H200 (bench/hopper/high.cu): within 4%
// of each. Packing moves the bytes that fp32's does.
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  if (c.variant != Variant::crossed) return scheme_split::estimate(as_split(shape), c, device);
  constexpr double kLaunch = 6.3, kPackLaunch = 1.8;
  constexpr double kPackPerElement = 8 / 3.85e6, kBytesPerMicrosecond = 3.3e6;
  const double k = double(divide_up(shape.k, 64) * 64);
  const double bytes = 4 * double(shape.n) * k;
  double time =
      std::max(tile_time(shape, c, device, tile_cycles(c), k), bytes / kBytesPerMicrosecond);
  time += kLaunch + kPackLaunch + double(shape.m) * k * kPackPerElement;
  if (!shape.weight_packed) time += kPackLaunch + double(shape.n) * k * kPackPerElement;
  return time;
}

inline constexpr SchemeSpec kSpec = {
    .line_k = 32,
    .whole_k = 64,
    .pack_header = "product/crossed_rows.cuh",
    .pack_rows = "cross_rows",
    .pack_columns = "cross_columns",
    .vectors = 2,
    .most_loads = 4,
    .bound = {.factor = 12, .roundoff = 0x1p-16, .range_floor = 0x1p-30},
    .tiles = tiles,
    .estimate = estimate,
    .estimate_library = scheme_split::estimate_library};

}  // namespace ingot::hopper::scheme_high
