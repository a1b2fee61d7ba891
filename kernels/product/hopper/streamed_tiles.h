// Tiles of the product that streams fp32 operands as they lie in memory (streamed.cuh), and what
// they take. Plain C++, no CUDA header.
#pragma once

#include <vector>

#include "product/hopper/scheme.h"

namespace ingot::hopper {

// Whether TMA can read an operand: along k in rows of whole pieces of 16 bytes, or along its rows
// with k in whole eights.
inline bool streams(const OperandShape& operand, int64_t k) {
  if (!operand.aligned || operand.batch_stride % 4 != 0) return false;
  if (operand.k_stride == 1) return operand.row_stride % 4 == 0;
  return operand.row_stride == 1 && operand.k_stride % 4 == 0 && k % 8 == 0;
}
inline bool streams(const ProductShape& shape) {
  return !shape.weight_packed && shape.element == Element::f32 && streams(shape.x, shape.k) &&
         streams(shape.w, shape.k);
}

// Tiles in order of what they are for: few samples, few features, small products, deep ones, short
// sums over many samples.
inline constexpr TileChoice kStreamedTiles[] = {
    {.variant = Variant::streamed, .samples = 16, .stages = 16, .features = 32, .depth_warps = 4},
    {.variant = Variant::streamed, .samples = 8, .stages = 8, .features = 64, .depth_warps = 4},
    {.variant = Variant::streamed,
     .samples = 128,
     .stages = 4,
     .features = 16,
     .depth_warps = 2,
     .sample_warps = 2},
    {.variant = Variant::streamed, .samples = 32, .stages = 8, .features = 32, .depth_warps = 4},
    {.variant = Variant::streamed,
     .samples = 32,
     .stages = 12,
     .features = 64,
     .depth_warps = 4,
     .feature_warps = 2},
    {.variant = Variant::streamed,
     .samples = 64,
     .stages = 8,
     .features = 64,
     .depth_warps = 4,
     .feature_warps = 2},
    {.variant = Variant::streamed,
     .samples = 128,
     .stages = 6,
     .features = 128,
     .feature_warps = 4,
     .sample_warps = 2},
    {.variant = Variant::streamed,
     .samples = 64,
     .stages = 6,
     .features = 64,
     .feature_warps = 2,
     .sample_warps = 2},
    {.variant = Variant::streamed,
     .samples = 128,
     .stages = 4,
     .features = 64,
     .feature_warps = 2,
     .sample_warps = 2},
    {.variant = Variant::streamed, .samples = 256, .stages = 3, .features = 32, .sample_warps = 4},
};

// With the slices of K that fill the GPU once, where tiles alone do not.
inline void add_streamed_tiles(std::vector<TileChoice>& menu, const ProductShape& shape,
                               const DeviceLimits& device) {
  constexpr int64_t kLeastChunks = 2;  // of a slice
  // Of a sum that one warp makes, two promotions a chunk: behind 65 of them in one chain the worst
  // error was 1.4 · 2^-22 Σ|x||w|, behind 257 4.4, behind 512 6.6.
  constexpr int64_t kMostChunks = 64;
  if (!streams(shape)) return;
  const int64_t chunks = divide_up(shape.k, kStreamedChunk);
  for (TileChoice tile : kStreamedTiles) {
    tile.w_along_k = shape.w.k_stride == 1;
    tile.x_along_k = shape.x.k_stride == 1;
    const int64_t tiles = tiles_of(shape, tile);
    if (tiles > INT32_MAX) continue;
    const auto add = [&](int64_t slices) {
      if (tile.depth_warps == 1 && divide_up(chunks, slices) > kMostChunks) return;
      tile.slices = int(slices);
      menu.push_back(tile);
    };
    add(1);
    if (shape.batches > 1) continue;
    const int64_t slots = int64_t(device.multiprocessors) * streamed_resident(tile);
    const int64_t most = std::min(slots / tiles, chunks / kLeastChunks);
    for (const int64_t slices : {most, most / 2}) {
      if (slices > 1) add(slices);
    }
  }
}

// Microseconds, launches included. Fitted on an H200 to bench/results/config-sweep's table of 56
// shapes in up to 30 tiles and slices: its choice takes 3 % more than the best on average, 21 at
// most. Rows of that table begin anywhere; of those that fill whole lines it is right on the safe
// side.
inline double estimate_streamed(const ProductShape& shape, const TileChoice& c,
                                const DeviceLimits& device) {
  constexpr double kLaunch = 5.17, kMerge = 2.53;
  // Of a multiprocessor: of a block; of 16 × 8 products of 8 of K; of a warp's 512 values, and of
  // none, for a chunk.
  constexpr double kBlock = 1.12, kMma = 1.13e-3, kValues = 0.265, kNone = 0.095;
  // Bytes a microsecond: into a multiprocessor's ring and out of its registers, of L2 and memory.
  constexpr double kFilled = 75.5e3, kStored = 25.6e3, kCached = 4.29e6;
  constexpr double kRead = 2.66e6, kWritten = 2.0e6;
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  const double batches = double(shape.batches);
  const int64_t units = tiles_of(shape, c) * c.slices;
  const int64_t each = divide_up(units, device.multiprocessors);  // of the busiest one
  const double resident = double(std::min<int64_t>(each, streamed_resident(c)));
  const double chunks = double(divide_up(divide_up(shape.k, kStreamedChunk), c.slices));
  const double values = double(c.features) * c.samples;
  const double fill = 128.0 * (c.features + c.samples);  // zeros where there are fewer
  const double wait = (kValues * values / (512 * c.feature_warps * c.sample_warps) + kNone) /
                      (c.depth_warps * resident);
  const double chunk = std::max({values / 128 * 12 * kMma, fill / kFilled, wait});
  const double work = double(each) * (chunks * chunk + kBlock / resident + 4 * values / kStored);
  const double read = 4 * (double(shape.x_rows()) * k + batches * n * k) / kRead;
  const double written = shape.stores_result ? 4 * batches * m * n / kWritten : 0;
  const double cached = double(units) * chunks * fill / kCached;
  const double merge = c.slices == 1 ? 0 : kMerge + 8 * double(units) * values / kRead;
  return kLaunch + std::max({work, read + written, cached}) + merge;
}

}  // namespace ingot::hopper
