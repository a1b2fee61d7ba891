// What the host passes to the product kernels, by value. Shared by host and device.
#pragma once

#include "common/monoid.cuh"
#include "common/types.cuh"

namespace ingot::hopper {

// An fp32 matrix as the redo reads it: element (row, k) is data[row · row_stride + k · k_stride].
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

// y[m, n] = Σ_k x[m, k] · w[n, k] for m samples and n features.
struct ProductArgs {
  OperandView x, w;
  const i32* x_exponent;  // [m]: packed x times 2^exponent is x
  const i32* w_exponent;  // [n], only for a packed weight
  float* y;               // [m][n], rows y_stride elements apart; unused if nothing is stored
  i64 y_stride;
  Moments<float>::State* partials[kMaxMoments];  // each [sample_tiles · slices of K][n]
  i32 m, n, k;
  i32 chunks;  // chunks of K, zero-padded to an even number: of 64 (fused split) or of 32 (packed)
  TileRaster raster;
  i32 redo_all;  // tests: recompute every output in fp32 as if it had overflowed
};

}  // namespace ingot::hopper
