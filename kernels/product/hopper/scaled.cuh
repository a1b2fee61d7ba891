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

template <int kSamples, int kCluster, int kStages, int kStagingBuffers>
struct ScaledConfig : PackedStages<kSamples, kCluster, kStages, kStagingBuffers> {
  using Element = f16;
};

template <class Config, class Epilogue>
INGOT_D void product_scaled(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                            const ProductArgs& args, const typename Epilogue::Params& params) {
  packed_product<Config, Epilogue, HalfConsumer<Config>, false>(w_map, x_map, y_map, args, params);
}

}  // namespace ingot::hopper
