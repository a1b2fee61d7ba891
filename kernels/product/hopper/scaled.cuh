// tf32 product for Hopper, both operands packed beforehand.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w and x: packed by product/scaled_rows.cuh, one fp16 value an element and one exponent
//            a row; TMA boxes of rows × 64 of K (128 bytes) under the 128-byte swizzle.
// Tile       128 features × kSamples samples of yᵀ; K in stages of 64. Blocks, clusters and roles:
//            stages.cuh.
// Pipeline   half.cuh's: a stage's four wgmma are issued before those of the stage before are
//            awaited. Sums stay in the tensor core, as in a TF32 product.
#pragma once

#include "product/hopper/half.cuh"

namespace ingot::hopper {

template <int kSamples_, int kCluster_, int kStages_, int kStagingBuffers_>
struct ScaledConfig {
  using Element = f16;
  static constexpr int kSamples = kSamples_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagingBuffers = kStagingBuffers_;  // 0: plain stores
  static constexpr bool kBatched = false;
  static constexpr int kFeatures = 128;
  static constexpr int kThreads = 384;
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kSamples * 128;
  static constexpr int kStagingBytes = kStagingBuffers * 8192;        // of one warpgroup
  static constexpr int kTableBytes = (kSamples + kFeatures / 2) * 4;  // exponents
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + 2 * kStagingBytes + 2 * kTableBytes + 16 * kStages;
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kSamples % (8 * kCluster) == 0);
};

template <class Config, class Epilogue>
INGOT_D void product_scaled(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  constexpr int kValues = Config::kSamples / 2;
  HalfConsumer<Config> consumer;
  const auto consume = [&](const ConsumerPlace& place, i32 feature_tile, i32 sample_tile) {
    const i32 box_m = sample_tile * Config::kSamples;
    const i32 box_n = feature_tile * Config::kFeatures + place.group * 64;
    prefetch_operands<Epilogue, Config::kSamples>(params, args, box_m, box_n, place.thread);
    load_exponents<Config::kSamples, 64>(place.table, args, box_m, box_n, place.thread,
                                         place.barrier);
    float sum[kValues];
    consumer.accumulate(sum, place, args.chunks);
    const ThreadTile tile = thread_tile(box_n, box_m, place.warp, place.lane, place.barrier);
    TileEpilogue<Epilogue, kValues> epilogue(tile, args, params);
    wait_exponents(place.barrier);
    const u32 row_exponent = place.table + 4 * (Config::kSamples + tile.n0 - box_n);
    finish_product(sum, tile, ptx::load_shared_int(row_exponent),
                   ptx::load_shared_int(row_exponent + 4 * 8), place.table, args);
    if constexpr (Epilogue::kStore && Config::kStagingBuffers > 0) {
      // The store before this one must have left the staging buffers.
      if (place.thread == 0) ptx::bulk_wait_read<0>();
      finish_tma<Config::kStagingBuffers>(sum, tile, y_map, place.staging, 8192, epilogue,
                                          sample_tile);
    } else {
      finish_direct(sum, tile, args, epilogue, sample_tile);
    }
  };
  staged_product<Config, false>(w_map, x_map, args, consume);
}

}  // namespace ingot::hopper
