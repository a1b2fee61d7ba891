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
  // Of rows that are stored element by element.
  constexpr double kElementsPerMicrosecond = 1.5e6;
  const bool by_elements = shape.stores_result && !stores_by_tma(shape);
  const double stored = by_elements ? double(shape.m) * double(shape.n) : 0;
  return std::max(tile_time(shape, c, device, cycles, k), bytes / kBytesPerMicrosecond) +
         stored / kElementsPerMicrosecond + kLaunch;
}

// cuBLAS's TF/s: where rows do not start at 16 bytes it takes kernels of other GPUs. (H100, bf16:
// 4096×768→50257 3.3 ms, 4096×768→3074 106 µs.)
inline double library_rate(const ProductShape& shape) {
  int64_t strides = shape.stores_result ? shape.y_stride : 0;
  for (const OperandShape& operand : {shape.x, shape.w}) {
    strides |= operand.k_stride == 1 ? operand.row_stride : operand.k_stride;
  }
  return strides % 8 == 0 ? 740 : strides % 2 == 0 ? 180 : 95;
}

// At that rate, or at most of the bandwidth.
inline double estimate_library(const ProductShape& shape) {
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  return 5 + std::max(2e-6 * m * n * k / library_rate(shape), 2 * (m * k + n * k) / 3.0e6);
}

inline constexpr SchemeSpec kSpec = {
    .tiles = tiles, .estimate = estimate, .estimate_library = estimate_library};

}  // namespace ingot::hopper::scheme_half
