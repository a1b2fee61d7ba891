// Product of fp16 or bf16 operands for Hopper.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], summed in fp32, then the fused epilogue (epilogue.cuh)
//
// Operands   w and x as they are: rows contiguous in K, read through TMA boxes of rows × 64 of K
//            (128 bytes) under the 128-byte swizzle. K is zero-padded by TMA.
// Tile       128 features × kSamples samples of yᵀ; K in stages of 64. Blocks, clusters and roles:
//            stages.cuh.
// Pipeline   a consumer issues a stage's four wgmma before it waits for those of the stage before,
//            so that the tensor cores never wait for it.
// Result     16-bit; stmatrix turns yᵀ into rows of y in shared memory. TMA stores them; where y's
//            rows do not start at 16 bytes (50257 words of a vocabulary), a warp each row.
#pragma once

#include "common/scalar.cuh"
#include "product/hopper/stages.cuh"
#include "product/hopper/wgmma.cuh"

namespace ingot::hopper {

template <class Element_, int kSamples_, int kCluster_, int kStages_, int kStagingBuffers_,
          bool kTmaStore_ = true>
struct HalfConfig {
  using Element = Element_;  // f16 or bf16: of the operands and of the result
  static constexpr int kSamples = kSamples_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kStages = kStages_;
  static constexpr int kStagingBuffers = kStagingBuffers_;
  static constexpr bool kTmaStore = kTmaStore_;
  static constexpr bool kBatched = false;
  static constexpr bool kXHalves = false, kYHalves = false;
  static constexpr int kFeatures = 128;
  static constexpr int kThreads = 384;
  static constexpr int kPiece = 64;  // samples that are stored at once
  static constexpr int kWeightBytes = kFeatures * 128;
  static constexpr int kStageBytes = kWeightBytes + kSamples * 128;
  static constexpr int kStagingBytes = kStagingBuffers * kPiece * 128;
  static constexpr int kTableBytes = 0;
  static constexpr int kSharedBytes =
      1024 + kStages * kStageBytes + 2 * kStagingBytes + 16 * kStages;
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kSamples % (8 * kCluster) == 0 && kSamples % kPiece == 0);
};

template <class Config>
struct HalfConsumer {
  static constexpr int kValues = Config::kSamples / 2;

  RingCursor<Config::kStages> cursor;

  INGOT_D static void multiply(float (&sum)[kValues], const ConsumerPlace& place, u32 index,
                               bool first) {
    using Multiply = Wgmma<Config::kSamples, typename Config::Element>;
    const u32 slot = place.ring.slot(index);
    const u64 a = shared_matrix_descriptor(slot + place.group * 64 * 128);
    const u64 b = shared_matrix_descriptor(slot + Config::kWeightBytes);
#pragma unroll
    for (int step = 0; step < 4; ++step)
      Multiply::ss(sum, a + 2 * step, b + 2 * step, step > 0 || !first);
  }

  // All of K; `chunks` of at least one stage.
  INGOT_D void accumulate(float (&sum)[kValues], const ConsumerPlace& place, i32 chunks) {
    u32 before = cursor.slot;
    wait_stage<Config>(place, cursor);
    cursor.advance();
    ptx::wgmma_fence();
    multiply(sum, place, before, true);
    ptx::wgmma_commit();
    for (i32 chunk = 1; chunk < chunks; ++chunk) {
      const u32 now = cursor.slot;
      wait_stage<Config>(place, cursor);
      cursor.advance();
      ptx::wgmma_fence();
      multiply(sum, place, now, false);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      release_stage<Config>(place, before);
      before = now;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(sum);
    release_stage<Config>(place, before);
  }
};

// Rows of 64 features from shared memory to rows of y of any alignment, four at a time by the
// warpgroup's warps, two elements a lane; what lies past the matrix is left out. buffer: kPiece
// rows of 128 bytes under the swizzle; m0: sample of the first.
template <class Config>
INGOT_D void store_rows(u32 buffer, const ThreadTile& tile, i32 m0, const ProductArgs& args) {
  constexpr i32 kWarps = 4, kLanes = 32;
#pragma unroll 4
  for (i32 row = tile.warp; row < Config::kPiece; row += kWarps) {
    if (m0 + row >= args.m) break;
    u16* to = reinterpret_cast<u16*>(args.y) + (m0 + row) * args.y_stride + tile.box_n;
#pragma unroll
    for (i32 feature = tile.lane; feature < 64; feature += kLanes) {
      const u32 chunk = static_cast<u32>((feature >> 3) ^ (row & 7));
      const u32 from = buffer + static_cast<u32>(row) * 128 + (chunk << 4) + (feature & 7) * 2;
      if (tile.box_n + feature < args.n) to[feature] = ptx::load_shared_half(from);
    }
  }
}

// Applies the epilogue and stores, in pieces of 64 samples by the warpgroup's 64 features: rows of
// 128 bytes under the swizzle. Returns with the stores committed but maybe not read yet.
template <class Config, class Epilogue, int kValues>
INGOT_D void finish_half(float (&values)[kValues], const ThreadTile& tile, const TensorMap& y_map,
                         const ProductArgs& args, u32 staging,
                         TileEpilogue<Epilogue, kValues>& epilogue) {
  constexpr int kGroups = Config::kPiece / 8, kBuffers = Config::kStagingBuffers;
  constexpr u32 kPieceBytes = Config::kPiece * 128;
  const bool leader = tile.warp == 0 && tile.lane == 0;
  // The lane's column of the four matrices: sample `row` of a group of eight, 8 of the features.
  const u32 row = tile.lane & 7, chunk = 2 * tile.warp + ((tile.lane >> 3) & 1);
  const u32 line = (8 * (tile.lane >> 4) + row) * 128 + ((chunk ^ row) << 4);
#pragma unroll
  for (int piece = 0; piece < Config::kSamples / Config::kPiece; ++piece) {
    epilogue.template apply<kGroups>(values, kGroups * piece);
    if (Config::kTmaStore && leader && piece >= kBuffers) ptx::bulk_wait_read<kBuffers - 1>();
    ptx::barrier_sync(tile.barrier, 128);
    const u32 buffer = staging + (piece % kBuffers) * kPieceBytes;
#pragma unroll
    for (int group = 0; group < kGroups; group += 2) {
      u32 matrices[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float* pair = values + 4 * (kGroups * piece + group) + 2 * i;
        matrices[i] = narrow_pair(typename Config::Element(), pair[0], pair[1]);
      }
      ptx::store_matrices_transposed(buffer + line + group * 8 * 128, matrices);
    }
    const i32 m0 = tile.box_m + Config::kPiece * piece;
    if constexpr (Config::kTmaStore) {
      ptx::fence_async_proxy();
      ptx::barrier_sync(tile.barrier, 128);
      if (leader) {
        ptx::tma_store(&y_map, buffer, tile.box_n, m0);
        ptx::bulk_commit();
      }
    } else {
      ptx::barrier_sync(tile.barrier, 128);
      store_rows<Config>(buffer, tile, m0, args);
    }
  }
}

template <class Config, class Epilogue>
INGOT_D void product_half(const TensorMap& w_map, const TensorMap& x_map, const TensorMap& y_map,
                          const ProductArgs& args, const typename Epilogue::Params& params) {
  constexpr int kValues = Config::kSamples / 2;
  HalfConsumer<Config> consumer;
  const auto consume = [&](const ConsumerPlace& place, i32 feature_tile, i32 sample_tile) {
    const ThreadTile tile =
        thread_tile(feature_tile * Config::kFeatures + place.group * 64,
                    sample_tile * Config::kSamples, place.warp, place.lane, place.barrier);
    prefetch_operands<Epilogue, Config::kSamples>(params, args, tile.box_m, tile.box_n,
                                                  place.thread);
    float sum[kValues];
    consumer.accumulate(sum, place, args.chunks);
    TileEpilogue<Epilogue, kValues> epilogue(tile, args, params);
    if constexpr (Epilogue::kStore) {
      // The store before this one must have left the staging buffers.
      if (Config::kTmaStore && place.thread == 0) ptx::bulk_wait_read<0>();
      finish_half<Config>(sum, tile, y_map, args, place.staging, epilogue);
    } else {
      epilogue.template apply<kValues / 4>(sum, 0);
    }
    epilogue.write_statistics(sample_tile);
  };
  staged_product<Config, false>(w_map, x_map, args, consume);
}

}  // namespace ingot::hopper
