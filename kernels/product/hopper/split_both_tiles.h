// The tile of the product that splits both operands on the way (split_both.cuh), and what it takes.
// Plain C++, no CUDA header.
#pragma once

#include <optional>

#include "product/hopper/streamed_tiles.h"

namespace ingot::hopper {

inline constexpr TileChoice kSplitBothTile = {.variant = Variant::split_both,
                                              .samples = 128,
                                              .stages = 2,
                                              .weight_stages = 3,
                                              .features = 128,
                                              .feature_warps = 8};

// As its operands lie; nothing where TMA cannot read them.
inline std::optional<TileChoice> split_both_tile(const ProductShape& shape) {
  if (!streams(shape)) return std::nullopt;
  TileChoice tile = kSplitBothTile;
  tile.w_along_k = shape.w.k_stride == 1;
  tile.x_along_k = shape.x.k_stride == 1;
  return tile;
}

// Of a sum that grows chunk by chunk: behind 4096 of them the worst error was 0.1 · 2^-22 Σ|x||w|.
inline constexpr int64_t kSplitBothMostChunks = 4096;

// Of whole sums.
inline void add_split_both_tile(std::vector<TileChoice>& menu, const ProductShape& shape) {
  const std::optional<TileChoice> tile = split_both_tile(shape);
  if (tile && divide_up(shape.k, kSplitBothChunk) <= kSplitBothMostChunks) menu.push_back(*tile);
}

// With the slices of K that fill the GPU once, or half of it.
inline void add_split_both_slices(std::vector<TileChoice>& menu, const ProductShape& shape,
                                  const DeviceLimits& device) {
  constexpr int64_t kLeastTerms = 2048, kLeastChunks = 4;  // of a sum that is cut, of a slice
  if (shape.batches > 1 || shape.k < kLeastTerms) return;
  std::optional<TileChoice> tile = split_both_tile(shape);
  if (!tile) return;
  const int64_t chunks = divide_up(shape.k, kSplitBothChunk);
  const int64_t most =
      std::min(device.multiprocessors / tiles_of(shape, *tile), chunks / kLeastChunks);
  for (const int64_t slices : {most, most / 2}) {
    if (slices < 2 || divide_up(chunks, slices) > kSplitBothMostChunks) continue;
    tile->slices = int(slices);
    menu.push_back(*tile);
  }
}

// Microseconds, launches included. Fitted on an H200 to the table of estimate_streamed(): whole
// sums 6 % off on average, where tiles are not mostly empty, those of slices 7 % (14 at most).
inline double estimate_split_both(const ProductShape& shape, const TileChoice& c,
                                  const DeviceLimits& device) {
  constexpr double kCached = 5.3e6;  // bytes a microsecond, of L2
  const double m = double(shape.m), n = double(shape.n), k = double(shape.k);
  const int64_t tiles = tiles_of(shape, c);
  const double chunks = double(divide_up(divide_up(shape.k, kSplitBothChunk), c.slices));
  const double cached = double(tiles * c.slices) * chunks * double(kSplitBothChunkBytes) / kCached;
  if (c.slices == 1) {
    // A block's tiles one behind another, as fast as it multiplies and stores.
    constexpr double kLaunch = 6, kChunk = 1.25, kStore = 3.5, kMoved = 2.6e6;
    const double batches = double(shape.batches), operands = double(shape.x_rows()) + batches * n;
    const double written = shape.stores_result ? batches * m * n : 0;
    const double each = double(divide_up(tiles, device.multiprocessors));
    const double moved = 4 * (operands * k + written) / kMoved;
    return kLaunch + std::max({each * (chunks * kChunk + kStore), cached, moved});
  }
  // A slice, then the slices' sums, written and read, in many small blocks a tile.
  constexpr double kLaunch = 8.24, kChunk = 1.34, kTile = 0.458, kRead = 4.06e6, kSums = 2.42e6;
  const double read = 4 * (m + n) * k / kRead, sums = 8 * double(c.slices) * m * n / kSums;
  return kLaunch + std::max({chunks * kChunk, cached, read}) + sums + kTile * double(tiles);
}

}  // namespace ingot::hopper
