// Host side of a standalone file: a product of fp32 operands, packed into fp16 ones before it or
// split on the way. Which tile is quickest for how many samples, the library found out when the
// file was written.
#pragma once

#include "launch/runtime_maps.h"
#include "product/hopper/args.cuh"
#include "product/pack_args.cuh"
#include "product/portable/args.cuh"
#include "standalone/call.h"

namespace ingot::standalone {

// What packs an operand, `rows` rows a block or cluster.
struct Packing {
  void (*kernel)(SplitArgs);
  int threads, rows;
  unsigned cluster;  // blocks; 0: none
  size_t shared_bytes;
};

struct Tile {
  int threads;
  size_t shared_bytes;
  int samples, feature_tiles;  // of a tile, of the product
  int chunk, steps;            // K of a chunk, and the kernel's steps along it
  int cluster, slices;  // blocks of a cluster, and of those that share a tile; the portable: 0
  int partials;         // statistics from a tile; 0: one of every 64 samples
  bool tma_store, by_columns;  // the latter: fp32 weights are contiguous in their features
  int x_box, w_box;            // rows that the copy engine brings at once
  int row_k, row_bytes;        // of a packed row as many bytes as K has such parts
  const Packing *x, *w;        // nullptr where the kernel reads fp32: w, or both
};

constexpr int kPortableTiles = 2;  // the first of a shape's; those for Hopper follow

struct Range {
  i64 extent;  // m, or k, up to
  int tile;    // of those for Hopper
};

// Of x [m, k] times the transpose of w [n, k].
struct Shape {
  i64 n;
  bool by_k;                 // k differs from call to call, not m
  hopper::OperandView x, w;  // strides
  const Tile* tiles;
  const Range* ranges;
};

inline int tile_of(const Shape& shape, i64 m, i64 k) {
#if defined(INGOT_HOPPER)
  if (attribute_of_device(cudaDevAttrComputeCapabilityMajor) == 9) {
    const Range* range = shape.ranges;
    while (range->extent < (shape.by_k ? k : m)) ++range;
    return kPortableTiles + range->tile;
  }
#endif
  const size_t most = size_t(attribute_of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const bool two = portable::two_fit(shape.tiles[0].shared_bytes, most);
  return !two && shape.tiles[1].shared_bytes <= most ? 1 : 0;
}

// A product of m samples: its tile, and what lies where in its workspace, behind packed x.
struct Planned {
  const Shape& shape;
  const Tile& tile;
  const void* kernel;
  i64 m, k, row_bytes, sample_tiles, partials;
  int moments = 0;
  size_t x_exponent = 0, w_packed = 0, w_exponent = 0, statistics = 0;
  size_t statistic[hopper::kMaxMoments] = {};
  size_t bytes = 0;
};

// kernels: by tile; states: bytes of a state of each statistic that the epilogue emits.
inline Planned plan(const Shape& shape, const void* const* kernels,
                    std::initializer_list<int> states, i64 m, i64 k) {
  if (m >= 1 << 30) throw std::runtime_error("a product has 2^30 samples or more");
  const int which = tile_of(shape, m, k);
  const Tile& tile = shape.tiles[which];
  const i64 tiles = divide_up(m, tile.samples);
  const i64 partials = tile.partials ? tiles * tile.partials : divide_up(m, 64);
  const i64 row_bytes = divide_up(k, tile.row_k) * tile.row_bytes;
  Planned at = {shape, tile, kernels[which], m, k, row_bytes, tiles, partials};
  Pieces pieces;
  if (tile.x) pieces.take(m * row_bytes);
  if (tile.x) at.x_exponent = pieces.take(m * 4);
  if (tile.w) at.w_packed = pieces.take(shape.n * row_bytes);
  if (tile.w) at.w_exponent = pieces.take(shape.n * 4);
  at.statistics = pieces.bytes;
  size_t end = pieces.bytes;
  for (const int bytes : states) {
    at.statistic[at.moments++] = end;
    end += size_t(partials * shape.n * bytes + 15) / 16 * 16;
  }
  pieces.take(i64(end - at.statistics));
  at.bytes = pieces.bytes;
  return at;
}

// Packs the operands, multiplies, runs the epilogue with `params`; y: nullptr where none is stored.
// at.partials statistics of each feature are at workspace + at.statistics then.
template <class Params>
void run(const Launcher& launch, const Planned& at, void* x, void* w, void* y,
         unsigned char* workspace, Params params) {
  const Shape& shape = at.shape;
  const Tile& tile = at.tile;
  hopper::ProductArgs args = {};
  args.x = shape.x;
  args.w = shape.w;
  args.x.data = static_cast<const float*>(x);
  args.w.data = static_cast<const float*>(w);
  args.x_exponent = reinterpret_cast<i32*>(workspace + at.x_exponent);
  args.w_exponent = reinterpret_cast<i32*>(workspace + at.w_exponent);
  args.y = static_cast<float*>(y);
  args.y_stride = shape.n;
  for (int i = 0; i < at.moments; ++i) {
    args.partials[i] = reinterpret_cast<Moments<float>::State*>(workspace + at.statistic[i]);
  }
  args.m = i32(at.m);
  args.n = i32(shape.n);
  args.k = i32(at.k);
  args.chunks = i32(divide_up(at.k, tile.chunk) * tile.steps);
  args.raster = {tile.feature_tiles, i32(at.sample_tiles), std::min(8, tile.feature_tiles)};

  const auto pack = [&](const Packing& by, const hopper::OperandView& from, i64 rows, void* packed,
                        const i32* exponent) {
    const i64 blocks = divide_up(rows, by.rows) * std::max(by.cluster, 1u);
    launch(by.kernel, Grid{blocks, by.threads, by.shared_bytes, by.cluster},
           SplitArgs{from.data, from.row_stride, from.k_stride, i32(rows), args.k, packed,
                     const_cast<i32*>(exponent)});
  };
  void *const x_packed = workspace, *const w_packed = workspace + at.w_packed;
  if (tile.x) pack(*tile.x, args.x, at.m, x_packed, args.x_exponent);
  if (tile.w) pack(*tile.w, args.w, shape.n, w_packed, args.w_exponent);

  const i64 tiles = at.sample_tiles * tile.feature_tiles;
  Grid grid = {tiles, tile.threads, tile.shared_bytes, unsigned(tile.cluster)};
  if (tile.cluster == 0) {
    portable::PackedOperands operands = {w_packed, x_packed};
    launch(at.kernel, grid, {&operands, &args, &params});
    return;
  }
  using namespace hopper;
  TensorMap y_map = {};
  const bool x_by_columns = args.x.k_stride != 1;
  TensorMap x_map =
      tile.x ? encode_map(packed_map(at.row_bytes, at.m, tile.x_box), x_packed)
             : encode_map(x_by_columns ? matrix_map(at.m, at.k, args.x.k_stride, tile.x_box)
                                       : matrix_map(at.k, at.m, args.x.row_stride, tile.x_box),
                          x);
  TensorMap w_map =
      tile.w
          ? encode_map(packed_map(at.row_bytes, shape.n, tile.w_box), w_packed)
          : encode_map(tile.by_columns ? columns_map(shape.n, at.k, args.w.k_stride)
                                       : matrix_map(at.k, shape.n, args.w.row_stride, tile.w_box),
                       w);
  if (tile.tma_store) y_map = encode_map(matrix_map(shape.n, at.m, shape.n, 32), y);
  grid.blocks = persistent_blocks(tiles, tile.cluster, tile.slices,
                                  attribute_of_device(cudaDevAttrMultiProcessorCount));
  launch(at.kernel, grid, {&w_map, &x_map, &y_map, &args, &params});
}

}  // namespace ingot::standalone
