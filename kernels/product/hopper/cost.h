// How long a product on Hopper takes, by tile, and the library's beside it: what launch.h chooses
// by. Fitted to measured tables; cost_model_test.cpp holds the choice to them.
#pragma once

#include "product/hopper/tiles.h"

namespace ingot::hopper {

// Cycles of a tile: for each element of K, and once for its epilogue.
struct TileCycles {
  double per_k, epilogue;
};

inline TileCycles tile_cycles(const TileChoice& c) {
  if (c.variant == Variant::half) {
    return c.samples == 256 ? TileCycles{16.2, 3500} : TileCycles{9.5, 2200};
  }
  if (c.variant == Variant::fused_split) {
    if (c.samples == 64) return {19.4, 2500};
    return {c.promotion == 2 ? 26.0 : 26.4, 4450};
  }
  if (c.samples == 64) return {18.9, 1950};
  if (c.samples == 160) return {32.3, 4900};
  return c.samples == 192 ? TileCycles{38.9, 6000} : TileCycles{25.7, 3900};
}

// The same of the tf32 product; blocks of a cluster share operands.
inline TileCycles scaled_tile_cycles(const TileChoice& c) {
  const bool shares = c.cluster * c.sample_blocks > 1;
  if (c.variant == Variant::fused_scaled) {
    if (c.samples == 64) return {12.1, 1840};
    if (c.samples == 128) return shares ? TileCycles{14.1, 3120} : TileCycles{14.3, 2400};
    return {22.3, 3490};
  }
  if (c.samples == 128) return {10.2, 1090};
  return c.samples == 192 ? TileCycles{13.1, 2680} : TileCycles{17.4, 3320};
}

// estimate() of the tf32 product. The tensor cores wait for memory and memory for them, in part;
// past 0.4 ms the power limit takes clock. Fitted to bench/results/config-sweep (34 shapes on an
// H200): within 12% of each time.
inline double estimate_scaled(const ProductShape& shape, const TileChoice& c,
                              const DeviceLimits& device) {
  constexpr double kCyclesPerMicrosecond = 1600, kLaunch = 4.5, kSplitLaunch = 2.5;
  constexpr double kSplitPerElement = 1.41e-6, kExchangePerSample = 57;
  constexpr double kReadPerMicrosecond = 4.35e6, kWrittenPerMicrosecond = 3.23e6;
  constexpr double kCool = 400, kHot = 0.2, kApart = 0.3;
  const bool fused = c.variant == Variant::fused_scaled;
  const TileCycles cycles = scaled_tile_cycles(c);
  const int64_t k_step = fused ? 128 : 64;
  const double k = double(divide_up(shape.k, k_step) * k_step);
  double tile = k * cycles.per_k + cycles.epilogue;
  if (c.slices > 1) {
    const double slice = 128 * double(divide_up(divide_up(shape.k, 128), c.slices));
    tile = slice * cycles.per_k + cycles.epilogue / c.slices + kExchangePerSample * c.samples;
  }
  const double m = double(shape.m), n = double(shape.n);
  const int64_t waves = divide_up(tiles_of(shape, c), cluster_slots(c, device));
  double multiplying = double(waves) * tile / kCyclesPerMicrosecond;
  if (multiplying > kCool) multiplying += kHot * (multiplying - kCool);
  const double moving = ((fused ? 4 : 2) * n * k + 2 * m * k) / kReadPerMicrosecond +
                        (shape.stores_result ? 4 * m * n / kWrittenPerMicrosecond : 0);
  double time = std::max(multiplying, moving) + kApart * std::min(multiplying, moving);
  // Where rows are not contiguous in K they are read twice (not measured: by the bytes).
  const auto packing = [&](const OperandShape& operand, double rows) {
    const double passes = operand.k_stride == 1 ? 1 : 10.0 / 6;
    return kSplitLaunch + rows * double(shape.k) * kSplitPerElement * passes;
  };
  time += kLaunch + packing(shape.x, m);
  if (!fused && !shape.weight_packed) time += packing(shape.w, n);
  return time;
}

// Microseconds: waves of tiles, each a number of steps along K and an epilogue, at the clock that
// the power limit leaves; the split passes by their bytes. Fitted to bench/results/config-sweep
// (36 shapes on an H200), where its choice is within 3% of the best; cost_model_test.cpp holds it
// to 5%.
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  if (is_scaled(c.variant)) return estimate_scaled(shape, c, device);
  constexpr double kCyclesPerMicrosecond = 1600, kLaunch = 6.3, kSplitLaunch = 1.8;
  constexpr double kSplitPerElement = 8 / 3.85e6;  // 8 bytes at 3.85 TB/s
  constexpr double kBytesPerMicrosecond = 3.3e6;
  constexpr double kExchangePerSample = 57;  // cycles, where slices of K meet
  constexpr double kCool = 1000, kUnshared = 0.06;
  const bool fused = c.variant == Variant::fused_split;
  const TileCycles cycles = tile_cycles(c);
  const bool half = c.variant == Variant::half;
  const int64_t k_step = half ? 64 : fused ? 128 : 32;
  const double k = double(divide_up(shape.k, k_step) * k_step);
  double tile = k * cycles.per_k + cycles.epilogue;
  if (c.slices > 1) {
    const double slice = 128 * double(divide_up(divide_up(shape.k, 128), c.slices));
    tile = slice * cycles.per_k + cycles.epilogue / c.slices + kExchangePerSample * c.samples;
  }
  const int64_t waves = divide_up(tiles_of(shape, c), cluster_slots(c, device));
  const double weight_bytes = 4 * double(shape.n) * k;
  double time =
      std::max(double(waves) * tile / kCyclesPerMicrosecond, weight_bytes / kBytesPerMicrosecond);
  if (half) {
    const double bytes = 2 * (double(shape.m) + double(shape.n)) * k;
    return std::max(double(waves) * tile / kCyclesPerMicrosecond, bytes / kBytesPerMicrosecond) +
           kLaunch;
  }
  // Blocks that load for themselves alone move more bytes, which costs clock where the power limit
  // has set in.
  if (c.cluster == 1 && time > kCool) time += kUnshared * (time - kCool);
  time += kLaunch + kSplitLaunch + double(shape.m) * k * kSplitPerElement;
  if (!fused && !shape.weight_packed) time += kSplitLaunch + double(shape.n) * k * kSplitPerElement;
  return time;
}

// cuBLAS in fp32: 40 to 50 TF/s, or half the copy bandwidth where the batch is thin; a small
// product takes what one tile takes along K. From the same table. In TF32: 346 TF/s or most of the
// bandwidth. In 16 bits: 740 TF/s, or most of the bandwidth.
inline double estimate_library(const ProductShape& shape) {
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  if (shape.element == Element::f32 && shape.scheme == Scheme::scaled) {
    constexpr double kLess = 0.9;  // below what was measured: ours is to be faster for certain
    return kLess *
           (6.85 + 0.004 * std::min(k, 1024.) +
            std::max(2e-6 * m * n * k / 346, 4 * (m * k + n * k) / 3.05e6 + 4 * m * n / 3.56e6));
  }
  if (shape.element != Element::f32) {
    return 5 + std::max(2e-6 * m * n * k / 740, 2 * (m * k + n * k) / 3.0e6);
  }
  const double start = 10.2 + 0.007 * std::min(k, 1024.);
  return start +
         std::max(1.3 * 2e-6 * m * n * k / 50, 4 * (m * k + n * k) / (m > 1 ? 2.0e6 : 3.0e6));
}

}  // namespace ingot::hopper
