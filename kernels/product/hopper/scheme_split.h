// fp32's accuracy: two fp16 halves an element, three products (product/split.cuh). Its costs are
// fitted to measured tables; cost_model_test.cpp holds the choice to them.
#pragma once

#include "product/hopper/split_both_tiles.h"

namespace ingot::hopper::scheme_split {

inline TileChoice fused_tile(int samples, int promotion = 1, int slices = 1,
                             bool w_along_k = true) {
  return {.variant = Variant::fused_split,
          .samples = samples,
          .stages = samples == 64 ? 6 : 4,
          .weight_stages = 3,
          .slices = slices,
          .promotion = promotion,
          .w_along_k = w_along_k};
}

// Whether the product can split the weight as it lies in memory.
inline bool splits_weight(const ProductShape& shape) {
  if (shape.weight_packed || !shape.weights_follow()) return false;
  return shape.w.vector_rows(shape.k) || (shape.batches == 1 && shape.w.vector_columns(shape.k));
}

// Summing 128 of K instead of 64 is 1.5% faster; the coarser rounding (4e-7 instead of 2e-7) still
// lies below the library's where sums are this long.
inline int promotion_of(const ProductShape& shape) {
  return shape.k >= 8192 ? 2 : 1;
}

// Those in which several blocks share a tile, where `waves` of blocks hold them all.
inline void add_sliced_tiles(std::vector<TileChoice>& menu, const ProductShape& shape,
                             const DeviceLimits& device, int waves) {
  for (const int slices : {2, 4, 8}) {
    if (divide_up(shape.k, 128) < slices) break;
    for (const int samples : {64, 128}) {
      const TileChoice tile = fused_tile(samples, 1, slices, shape.w.k_stride == 1);
      if (tiles_of(shape, tile) <= waves * cluster_slots(tile, device)) menu.push_back(tile);
    }
  }
}

// Of products that hand halves on, or are handed some: beside six stages' factors there is room for
// one buffer.
inline std::vector<TileChoice> halves_tiles(std::vector<TileChoice> packed,
                                            const ProductShape& shape) {
  for (TileChoice& tile : packed) {
    tile.x_halves = shape.x_halves;
    tile.y_halves = shape.y_halves;
    if (tile.x_halves && tile.samples == 128) tile.staging = 1;
  }
  return packed;
}

inline std::vector<TileChoice> tiles(const ProductShape& shape, const DeviceLimits& device) {
  std::vector<TileChoice> menu = {
      {.variant = Variant::packed, .samples = 128, .stages = 6, .staging = 2},
      {.variant = Variant::packed, .samples = 160, .stages = 5, .staging = 2},
      {.variant = Variant::packed, .samples = 192, .stages = 5, .staging = 1, .cluster = 2}};
  if (shape.x_halves || shape.y_halves) return halves_tiles(std::move(menu), shape);
  if (splits_weight(shape)) {
    const bool along_k = shape.w.k_stride == 1;
    const TileChoice thin = fused_tile(64, 1, 1, along_k);
    if (shape.m <= 64 || tiles_of(shape, thin) <= device.multiprocessors) menu.push_back(thin);
    menu.push_back(fused_tile(128, promotion_of(shape), 1, along_k));
    add_sliced_tiles(menu, shape, device, 1);
  } else {
    const TileChoice thin = {.variant = Variant::packed, .samples = 64, .stages = 8, .staging = 1};
    if (tiles_of(shape, thin) <= device.multiprocessors) menu.push_back(thin);
  }
  if (shape.unpacked != Unpacked::none) add_split_both_tile(menu, shape);
  if (shape.unpacked == Unpacked::any) {
    add_streamed_tiles(menu, shape, device);
    add_split_both_slices(menu, shape, device);
  }
  return menu;
}

inline TileCycles tile_cycles(const TileChoice& c) {
  if (c.variant == Variant::fused_split) {
    if (c.samples == 64) return {19.4, 2500};
    return {c.promotion == 2 ? 26.0 : 26.4, 4450};
  }
  if (c.samples == 64) return {18.9, 1950};
  if (c.samples == 160) return {32.3, 4900};
  return c.samples == 192 ? TileCycles{38.9, 6000} : TileCycles{25.7, 3900};
}

// Tiles at the clock that the power limit leaves; the split passes by their bytes. Fitted to
// bench/results/config-sweep (36 shapes on an H200), where its choice is within 3% of the best.
inline double estimate(const ProductShape& shape, const TileChoice& c, const DeviceLimits& device) {
  if (c.variant == Variant::streamed) return estimate_streamed(shape, c, device);
  if (c.variant == Variant::split_both) {
    // A module's epilogue is work that the other tiles hide behind their products.
    const double exposed = shape.unpacked == Unpacked::any ? 1 : 1.1;
    return exposed * estimate_split_both(shape, c, device);
  }
  constexpr double kLaunch = 6.3, kSplitLaunch = 1.8;
  constexpr double kSplitPerElement = 8 / 3.85e6;  // 8 bytes at 3.85 TB/s
  constexpr double kBytesPerMicrosecond = 3.3e6;
  constexpr double kCool = 1000, kUnshared = 0.06;
  constexpr double kHalvesPerSample = 10;  // cycles of an epilogue that writes halves
  const bool fused = is_fused(c.variant);
  const int64_t k_step = fused ? 128 : 32;
  const double k = double(divide_up(shape.k, k_step) * k_step);
  const double weight_bytes = 4 * double(shape.w_rows()) * k;
  TileCycles cycles = tile_cycles(c);
  if (c.y_halves) cycles.epilogue += kHalvesPerSample * c.samples;
  double time =
      std::max(tile_time(shape, c, device, cycles, k), weight_bytes / kBytesPerMicrosecond);
  // Blocks that load for themselves alone move more bytes, which costs clock where the power limit
  // has set in.
  if (c.cluster == 1 && time > kCool) time += kUnshared * (time - kCool);
  time += kLaunch;
  if (!shape.x_halves) time += kSplitLaunch + double(shape.x_rows()) * k * kSplitPerElement;
  if (!fused && !shape.weight_packed)
    time += kSplitLaunch + double(shape.w_rows()) * k * kSplitPerElement;
  return time;
}

// cuBLAS in fp32: 50 TF/s where products are large, 40 where they are not, or half the copy
// bandwidth where the batch is thin; a small product takes what one tile takes along K; results are
// written on top. From the same tables.
inline double estimate_library(const ProductShape& shape) {
  constexpr double kUneven = 0.32, kMostUneven = 10;  // waves that are not full
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  const double batches = double(shape.batches);
  const double start = 10.2 + 0.007 * std::min(k, 1024.);
  const double busy = 0.98 * 2e-6 * batches * m * n * k / 50;
  const double read = batches * 4 * (m * k + n * k) / (m > 1 ? 2.0e6 : 3.0e6);
  const double written = batches * 4 * m * n / 3.6e6;
  return start + std::max(busy + std::min(kUneven * busy, kMostUneven), read) + written;
}

inline constexpr SchemeSpec kSpec = {
    .line_k = 32,
    .pack_header = "product/split.cuh",
    .pack_rows = "split_rows",
    .pack_columns = "split_columns",
    .vectors = 1,
    .most_loads = 8,
    .bound = {.factor = 6, .roundoff = 0x1p-22, .range_floor = 0x1p-36},
    .tiles = tiles,
    .estimate = estimate,
    .estimate_library = estimate_library};

}  // namespace ingot::hopper::scheme_split
