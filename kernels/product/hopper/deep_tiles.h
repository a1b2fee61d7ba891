// The tile of the product that splits both operands on the way (deep.cuh), and what it takes. Plain
// C++, no CUDA header.
#pragma once

#include "product/hopper/streamed_tiles.h"

namespace ingot::hopper {

inline constexpr TileChoice kDeepTile = {.variant = Variant::deep,
                                         .samples = 128,
                                         .stages = 2,
                                         .weight_stages = 3,
                                         .features = 128,
                                         .feature_warps = 8};

// With the slices of K that fill the GPU once, and half as many.
inline void add_deep_tiles(std::vector<TileChoice>& menu, const ProductShape& shape,
                           const DeviceLimits& device) {
  constexpr int64_t kLeastTerms = 2048, kLeastChunks = 4;  // of a sum, of a slice
  // Of a sum that grows chunk by chunk: behind 4096 of them the worst error was 0.1 · 2^-22
  // Σ|x||w|.
  constexpr int64_t kMostChunks = 4096;
  if (shape.batches > 1 || shape.k < kLeastTerms || !streams(shape)) return;
  TileChoice tile = kDeepTile;
  tile.w_along_k = shape.w.k_stride == 1;
  tile.x_along_k = shape.x.k_stride == 1;
  const int64_t chunks = divide_up(shape.k, kDeepChunk), tiles = tiles_of(shape, tile);
  const int64_t most = std::min(device.multiprocessors / tiles, chunks / kLeastChunks);
  for (const int64_t slices : {most, most / 2}) {
    if (slices < 2 || divide_up(chunks, slices) > kMostChunks) continue;
    tile.slices = int(slices);
    menu.push_back(tile);
  }
}

// Microseconds, launches included: a block's chunks as fast as it multiplies, L2 or memory gives
// them, then the slices' sums, written and read, in many small blocks a tile. Fitted on an H200 to
// the table of estimate_streamed(): 7 % off on average, 14 at most.
inline double estimate_deep(const ProductShape& shape, const TileChoice& c) {
  constexpr double kLaunch = 8.24, kChunk = 1.34, kTile = 0.458;
  constexpr double kCached = 5.3e6, kRead = 4.06e6, kSums = 2.42e6;  // bytes a microsecond
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  const double tiles = double(tiles_of(shape, c)), slices = double(c.slices);
  const double chunks = double(divide_up(divide_up(shape.k, kDeepChunk), c.slices));
  const double cached = tiles * slices * chunks * double(kDeepChunkBytes) / kCached;
  const double read = 4 * (m + n) * k / kRead, sums = 8 * slices * m * n / kSums;
  return kLaunch + std::max({chunks * kChunk, cached, read}) + sums + kTile * tiles;
}

}  // namespace ingot::hopper
