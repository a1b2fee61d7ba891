// What the host passes to the product kernels, by value. Shared by host and device.
#pragma once

#include "common/monoid.cuh"
#include "common/types.cuh"

namespace ingot::hopper {

// An fp32 matrix as the redo reads it: element (row, k) is data[row · row_stride + k · k_stride]. x
// may exist only packed: then its data is nullptr.
struct OperandView {
  const float* data;
  i64 row_stride, k_stride;
};

// Order in which the persistent blocks walk the tiles: groups of `group` feature tiles, inside a
// group all sample tiles, the group's feature tiles fastest. Neighbouring blocks then share the
// weight tiles of a group and one or two sample tiles in L2.
struct TileRaster {
  i32 feature_tiles, sample_tiles, group;

  INGOT_HD i32 count() const { return feature_tiles * sample_tiles; }
  INGOT_HD void locate(i32 index, i32& feature_tile, i32& sample_tile) const {
    const i32 per_group = group * sample_tiles;
    const i32 first = index / per_group * group;
    const i32 rest = index - first * sample_tiles;
    const i32 width = feature_tiles - first < group ? feature_tiles - first : group;
    sample_tile = rest / width;
    feature_tile = first + rest - sample_tile * width;
  }
};

inline constexpr int kMaxMoments = 2;
inline constexpr int kFactorFeatures = 64;  // that share a factor of halves (halves.cuh)

// y[m, n] = Σ_k x[m, k] · w[n, k] for m samples and n features.
struct ProductArgs {
  OperandView x, w;
  const i32* x_exponent;  // [m]: packed x times 2^exponent is x
  const i32* w_exponent;  // [n], only for a packed weight
  float* y;               // [m][n], rows y_stride elements apart; unused if nothing is stored
  i64 y_stride;
  // Each [sample_tiles · slices of K][n]; of a plain sum Sum<float>::State.
  Moments<float>::State* partials[kMaxMoments];
  i32 m, n, k;
  i32 chunks;  // chunks of K, zero-padded to an even number: of 64 (fused split) or of 32 (packed)
  TileRaster raster;
  i32 redo_all;  // tests: recompute every output in fp32 as if it had overflowed
  // Of a batch of products (Config::kBatched), whose samples are counted on from entry to entry: m
  // is one entry's, and the weight's rows follow one another as the samples do.
  i32 entry_tiles;                     // tiles of samples
  i32 x_entry_rows;                    // of packed x from one entry to the next: m, or 0 if shared
  i64 x_entry_stride, w_entry_stride;  // elements of x and w
  // Of a product whose K is cut into slices that meet in memory (streamed.cuh).
  i32 slices;
  float* sums;           // [slices][tiles][values of a tile, as its warps hold them]
  const void* x_packed;  // for the redo, where x exists only packed
  // Of halves that products hand on (halves.cuh): [k/64][factor_rows], [n/64][factor_rows].
  const float* x_factor;
  float* y_factor;
  i32 factor_rows;  // m, to a multiple of 8
};

INGOT_HD i32 entry_of(const ProductArgs& args, i32 sample_tile) {
  return sample_tile / args.entry_tiles;
}

// The arguments as one entry's tiles see them, with samples counted through the batch: m is where
// the entry ends.
INGOT_HD ProductArgs args_of_entry(const ProductArgs& args, i32 entry) {
  ProductArgs own = args;
  const i64 before = static_cast<i64>(entry) * args.m;
  own.m = static_cast<i32>(before) + args.m;
  own.x.data += entry * args.x_entry_stride - before * args.x.row_stride;
  own.w.data += entry * args.w_entry_stride;
  own.x_exponent += static_cast<i64>(entry) * args.x_entry_rows - before;
  own.w_exponent += static_cast<i64>(entry) * args.n;
  return own;
}

// What a tile's consumers and stores go by; without a batch, the arguments themselves.
template <class Config>
INGOT_HD decltype(auto) args_of_tile(const ProductArgs& args, i32 sample_tile) {
  if constexpr (Config::kBatched) {
    return args_of_entry(args, entry_of(args, sample_tile));
  } else {
    return static_cast<const ProductArgs&>(args);
  }
}

// A tile's first sample, counted through the batch; the row of packed x that it is; and the
// weight's row that a feature is.
template <class Config>
INGOT_HD i32 row_of_tile(const ProductArgs& args, i32 sample_tile, i32 entry_rows) {
  if constexpr (Config::kBatched) {
    const i32 entry = entry_of(args, sample_tile);
    return entry * entry_rows + (sample_tile - entry * args.entry_tiles) * Config::kSamples;
  } else {
    return sample_tile * Config::kSamples;
  }
}
template <class Config>
INGOT_HD i32 first_sample(const ProductArgs& args, i32 sample_tile) {
  return row_of_tile<Config>(args, sample_tile, args.m);
}
template <class Config>
INGOT_HD i32 sample_row(const ProductArgs& args, i32 sample_tile) {
  return row_of_tile<Config>(args, sample_tile, args.x_entry_rows);
}
template <class Config>
INGOT_HD i32 weight_row(const ProductArgs& args, i32 sample_tile, i32 feature) {
  if constexpr (Config::kBatched) {
    return entry_of(args, sample_tile) * args.n + feature;
  } else {
    return feature;
  }
}

}  // namespace ingot::hopper
