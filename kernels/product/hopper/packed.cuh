// fp32-accurate product for Hopper, both operands split beforehand ("variant A").
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (epilogue.cuh)
//
// Operands   w and x: packed by product/split.cuh, [rows][k/32][32 hi | 32 lo] fp16 and one
//            exponent a row; TMA boxes of rows × 128 bytes under the 128-byte swizzle. x, and the
//            result, may be halves that products hand on (halves.cuh).
// Tile       128 features × kSamples samples of yᵀ; K in stages of 32. Blocks, clusters and roles:
//            stages.cuh.
// Promotion  every two stages (64 of K) into fp32 accumulators. The consumers' batches of 12 wgmma
//            alternate: one promotes while the other multiplies. Where statistics make both end a
//            tile at the same moment, or factors of halves promotion longer, they would lock in
//            phase, and take turns by barrier.
#pragma once

#include "product/hopper/stages.cuh"
#include "product/hopper/wgmma.cuh"

namespace ingot::hopper {

template <int kSamples, int kCluster, int kStages, int kStagingBuffers, bool kBatched_ = false,
          bool kXHalves = false, bool kYHalves_ = false>
struct PackedConfig : PackedStages<kSamples, kCluster, kStages, kStagingBuffers, kXHalves> {
  static constexpr bool kBatched = kBatched_;
  static constexpr bool kYHalves = kYHalves_;
  using RedoRow = SplitRow;
  static_assert(!kBatched || !(kXHalves || kYHalves));
};

template <class Config, bool kTurns>
struct PackedConsumer {
  static constexpr int kValues = Config::kSamples / 2;

  RingCursor<Config::kStages> cursor;

  // The terms of one stage that contain a low half; hi·hi.
  INGOT_D static void multiply_cross(float (&sum)[kValues], const ConsumerPlace& place, u32 index,
                                     bool first) {
    constexpr u64 kLowPlane = 64 / 16;
    const u32 slot = place.ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + place.group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const u64 ah = a + 2 * step, bh = b + 2 * step;
      Wgmma<Config::kSamples>::ss(sum, ah + kLowPlane, bh, step > 0 || !first);
      Wgmma<Config::kSamples>::ss(sum, ah, bh + kLowPlane, 1);
    }
  }
  INGOT_D static void multiply_main(float (&sum)[kValues], const ConsumerPlace& place, u32 index) {
    const u32 slot = place.ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + place.group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 2; ++step)
      Wgmma<Config::kSamples>::ss(sum, a + 2 * step, b + 2 * step, 1);
  }

  // Two stages at a time (`chunks` is even), the cross terms of both first: wgmma truncates the
  // whole sum at every step, which costs nothing while the sum is 2^-11 of what it will be.
  INGOT_D void accumulate(float (&acc)[kValues], const ConsumerPlace& place, i32 chunks) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) acc[i] = 0.f;
    for (i32 left = chunks; left > 0; left -= 2) {
      float sum[kValues];
      const u32 one = cursor.slot, factors = factor_slot<Config::kStages>(one, cursor.parity);
      wait_stage<Config>(place, cursor);
      cursor.advance();
      await_turn<kTurns>(place);
      ptx::wgmma_fence();
      multiply_cross(sum, place, one, true);
      const u32 two = cursor.slot;
      wait_stage<Config>(place, cursor);
      cursor.advance();
      ptx::wgmma_fence();
      multiply_cross(sum, place, two, false);
      multiply_main(sum, place, one);
      multiply_main(sum, place, two);
      pass_turn<kTurns>(place);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::pin(sum);
      release_stage<Config>(place, one);
      release_stage<Config>(place, two);
      if constexpr (Config::kXHalves) {
        promote_halves(acc, sum, place.factors + factors * Config::kSamples * 4, place.lane);
      } else {
#pragma unroll
        for (int i = 0; i < kValues; ++i) acc[i] += sum[i];
      }
    }
  }
};

template <class Config, class Epilogue>
INGOT_D void product_packed(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  constexpr bool kTurns = Epilogue::kMoments > 0 || Config::kXHalves;
  packed_product<Config, Epilogue, PackedConsumer<Config, kTurns>, kTurns>(w_map, x_map, y_map,
                                                                           args, params);
}

}  // namespace ingot::hopper
