// Slices of K that meet in memory, for products whose tiles alone do not fill the GPU: blocks of
// their own multiply each slice of a tile (streamed_slices, split_both_slices) and store its sums
// as warps hold them; a second kernel (product_merged) adds the slices in order and runs the
// epilogue.
//
//   struct Config {
//     static constexpr int kFeatures, kSamples;            // of a tile
//     static constexpr int kFeatureBlocks, kSampleGroups;  // of 16 and of 8, of a warp
//     static constexpr int kFeatureWarps, kGroupWarps;     // across, and of a tile
//     static constexpr int kWarpValues;                    // of a thread
//     static constexpr bool kBatched;                      // a weight for every entry of a batch
//   };
#pragma once

#include "product/hopper/store.cuh"

namespace ingot::hopper {
namespace slices {

inline constexpr int kMergeWarps = 16;      // of a block of product_merged
inline constexpr int kMostMergeGroups = 2;  // of samples, of a warp there

// The chunks of K of one slice, and the tile: unit `index` of the grid's work.
struct Work {
  i32 feature_tile, sample_tile, first, chunks;

  INGOT_D Work(const ProductArgs& args, i32 index, bool sliced) {
    const i32 tiles = args.raster.count();
    const i32 slice = sliced ? index / tiles : 0, slices = sliced ? args.slices : 1;
    args.raster.locate(index - slice * tiles, feature_tile, sample_tile);
    const i32 each = args.chunks / slices, rest = args.chunks - each * slices;
    first = slice * each + (slice < rest ? slice : rest);
    chunks = each + (slice < rest ? 1 : 0);
  }
};

// Of the grid: tiles, or slices of them.
INGOT_D i32 units(const ProductArgs& args, bool sliced) {
  return args.raster.count() * (sliced ? args.slices : 1);
}

// Which of the partial statistics those of samples from `sample` on are: one for each kRows of an
// entry.
template <class Config, int kRows>
INGOT_D i32 moment_tile(const ProductArgs& args, i32 sample_tile, i32 sample) {
  if constexpr (Config::kBatched) {
    const i32 entry = entry_of(args, sample_tile);
    return entry * ((args.m + kRows - 1) / kRows) + (sample - entry * args.m) / kRows;
  } else {
    return sample / kRows;
  }
}

// From sums to what is stored, of kGroups groups of samples of a block of features.
template <class Config, class Epilogue, int kGroups>
INGOT_D void finish(float (&values)[4 * kGroups], i32 feature, i32 sample, i32 sample_tile,
                    i32 lane, const ProductArgs& given, const typename Epilogue::Params& params) {
  decltype(auto) args = args_of_tile<Config>(given, sample_tile);
  if (sample >= args.m) return;
  const ThreadTile tile = thread_tile(feature, sample, 0, lane, 0);
  TileEpilogue<Epilogue, 4 * kGroups> epilogue(tile, args, params);
  finish_unscaled_product(values, tile, args);
  finish_direct(values, tile, args, epilogue,
                moment_tile<Config, 8 * kGroups>(given, sample_tile, sample));
}

// Where the sums of a warp of a unit of work lie, of this lane: 512 bytes for each block of
// features and group of samples.
template <class Config>
INGOT_D float* place_of_sums(const ProductArgs& args, i32 unit, i32 warp, i32 block, i32 group,
                             i32 lane) {
  constexpr i32 kVectors = Config::kWarpValues / 4;
  const i64 vector = (static_cast<i64>(unit) * Config::kGroupWarps + warp) * kVectors +
                     block * Config::kSampleGroups + group;
  return args.sums + vector * 128 + lane * 4;
}

template <class Config, int kGroups>
INGOT_D void store_sums(const float* values, float* to) {
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    *reinterpret_cast<float4*>(to + 128 * i) =
        float4{values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]};
  }
}

}  // namespace slices

// Adds the slices' sums: a block for 16 features and a few groups of samples of a tile, whose warps
// share the slices in turn and add theirs in order, then warp 0 the warps' in order.
template <class Config, class Epilogue>
INGOT_D void product_merged(const TensorMap&, const TensorMap&, const TensorMap&,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  constexpr int kGroups = Config::kSampleGroups < slices::kMostMergeGroups
                              ? Config::kSampleGroups
                              : slices::kMostMergeGroups;
  constexpr i32 kFeatureParts = Config::kFeatures / 16;
  constexpr i32 kPieces = kFeatureParts * (Config::kSamples / (8 * kGroups));
  __shared__ float4 met[slices::kMergeWarps][kGroups][32];
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i32 tile = blockIdx.x / kPieces, piece = blockIdx.x % kPieces;
  const i32 feature_part = piece % kFeatureParts, group = piece / kFeatureParts * kGroups;
  const i32 owner =
      group / Config::kSampleGroups * Config::kFeatureWarps + feature_part / Config::kFeatureBlocks;
  const i32 tiles = args.raster.count();
  i32 feature_tile, sample_tile;
  args.raster.locate(tile, feature_tile, sample_tile);
  const i32 feature = feature_tile * Config::kFeatures + 16 * feature_part;
  const i32 sample = first_sample<Config>(args, sample_tile) + 8 * group;
  ptx::dependency_wait();
  ptx::launch_dependents();
  if (feature >= args.n || sample >= args.m) return;  // of a tile that reaches past the result
  float sum[4 * kGroups] = {};
#pragma unroll 4
  for (i32 slice = warp; slice < args.slices; slice += slices::kMergeWarps) {
    const float* from = slices::place_of_sums<Config>(args, slice * tiles + tile, owner,
                                                      feature_part % Config::kFeatureBlocks,
                                                      group % Config::kSampleGroups, lane);
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float4 v = *reinterpret_cast<const float4*>(from + 128 * i);
      sum[4 * i] += v.x;
      sum[4 * i + 1] += v.y;
      sum[4 * i + 2] += v.z;
      sum[4 * i + 3] += v.w;
    }
  }
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    met[warp][i][lane] = float4{sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]};
  }
  __syncthreads();
  if (warp > 0) return;
  for (int from = 1; from < slices::kMergeWarps; ++from) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const float4 v = met[from][i][lane];
      sum[4 * i] += v.x;
      sum[4 * i + 1] += v.y;
      sum[4 * i + 2] += v.z;
      sum[4 * i + 3] += v.w;
    }
  }
  slices::finish<Config, Epilogue, kGroups>(sum, feature, sample, sample_tile, lane, args, params);
}

}  // namespace ingot::hopper
