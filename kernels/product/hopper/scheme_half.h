// Products of fp16 or bf16 operands as they are.
#pragma once

#include "product/hopper/scheme.h"

namespace ingot::hopper::scheme_half {

inline std::vector<TileChoice> tiles(const ProductShape& shape, const DeviceLimits&) {
  const auto tile = [&](int samples, int stages) -> TileChoice {
    return {.variant = Variant::half,
            .samples = samples,
            .stages = stages,
            .staging = 2,
            .cluster = 2,
            .element = shape.element};
  };
  return {tile(256, 4), tile(128, 6)};
}

inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  constexpr double kLaunch = 6.3, kBytesPerMicrosecond = 3.3e6;
  const TileCycles cycles = c.samples == 256 ? TileCycles{16.2, 3500} : TileCycles{9.5, 2200};
  const double k = double(divide_up(shape.k, 64) * 64);
  const double bytes = 2 * (double(shape.m) + double(shape.n)) * k;
  return std::max(tile_time(shape, c, device, cycles, k), bytes / kBytesPerMicrosecond) + kLaunch;
}

// cuBLAS: 740 TF/s, or most of the bandwidth.
inline double estimate_library(const ProductShape& shape) {
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  return 5 + std::max(2e-6 * m * n * k / 740, 2 * (m * k + n * k) / 3.0e6);
}

inline constexpr SchemeSpec kSpec = {
    .tiles = tiles, .estimate = estimate, .estimate_library = estimate_library};

}  // namespace ingot::hopper::scheme_half
