// fp32-accurate product for compute capability 8.0 and up: mma.sync and cp.async.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (hopper/epilogue.cuh: same concept)
//
// Operands   w and x: packed by product/split.cuh, [rows][k/32][32 hi | 32 lo] fp16, one exponent a
//            row. Both share the permuted order of k, so the sum is merely permuted.
// Tile       256 features × 64 samples of yᵀ, one a thread block; K in stages of 32.
// Threads    256: eight warps of 32 features × all 64 samples, so that a feature's statistics stay
//            within a quad of one warp. A warp's two 16-row halves have the register layout of a
//            wgmma warp, which lets the epilogue be shared.
// Pipeline   kStages stages of kSlabs slabs of 40 KiB, one __syncthreads a stage: 128-byte rows,
//            16-byte pieces XORed with row & 7 so that ldmatrix meets no bank conflict. For each
//            k16: lo·hi, hi·lo, hi·hi, each for eight accumulators before the next.
// Promotion  every 128 of K into fp32 accumulators: mma.sync rounds its sums towards zero too.
#pragma once

#include "product/hopper/epilogue.cuh"
#include "product/portable/args.cuh"

namespace ingot::portable {

using hopper::ProductArgs;
using hopper::ThreadTile;

template <int kStages_, int kSlabs_>
struct PackedConfig {
  static constexpr int kStages = kStages_;
  static constexpr int kSlabs = kSlabs_;  // of 32 of K in a stage
  static constexpr int kFeatures = 256;
  static constexpr int kSamples = 64;
  static constexpr int kThreads = 256;
  static constexpr int kPromotion = 4 / kSlabs;  // stages
  static constexpr int kRows = kFeatures + kSamples;
  static constexpr int kSlabBytes = kRows * 128;
  static constexpr int kStageBytes = kSlabs * kSlabBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + kSamples * 4;
};

// Accumulators of a warp: two blocks of 16 features, 64 samples.
struct WarpSum {
  float block[2][32];
};

INGOT_D u32 piece_address(u32 stage, u32 row, u32 piece) {
  return stage + row * 128 + ((piece ^ (row & 7)) << 4);
}

// Starts the copies of one slab: rows of the tile (features, then samples) × eight pieces; zeroes
// past the matrices and past the last slab.
template <class Config>
INGOT_D void load_slab(u32 destination, const PackedOperands& operands, const ProductArgs& args,
                       i32 slab, i32 first_feature, i32 first_sample) {
  constexpr int kPerThread = Config::kRows * 8 / Config::kThreads;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const i32 index = i * Config::kThreads + threadIdx.x;
    const i32 row = index >> 3, piece = index & 7;
    const bool is_weight = row < Config::kFeatures;
    const i32 source_row = is_weight ? first_feature + row : first_sample + row - Config::kFeatures;
    const bool valid = source_row < (is_weight ? args.n : args.m) && slab < args.chunks;
    const char* base = static_cast<const char*>(is_weight ? operands.w : operands.x);
    const i64 line = valid ? static_cast<i64>(source_row) * args.chunks + slab : 0;
    ptx::copy_vector_async(piece_address(destination, row, piece), base + line * 128 + piece * 16,
                           valid);
  }
}

// sum += the products of one slab.
template <class Config>
INGOT_D void multiply_slab(WarpSum& sum, u32 slab, i32 warp, i32 lane) {
  const i32 a_row = warp * 32 + (lane & 15), a_piece = lane >> 4;
  const i32 b_row = Config::kFeatures + (lane & 7) + ((lane >> 4) << 3), b_piece = (lane >> 3) & 1;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    u32 a_hi[2][4], a_lo[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const i32 row = a_row + 16 * block, piece = a_piece + 2 * step;
      ptx::load_matrices(a_hi[block], piece_address(slab, row, piece));
      ptx::load_matrices(a_lo[block], piece_address(slab, row, piece + 4));
    }
#pragma unroll
    for (int part = 0; part < Config::kSamples / 32; ++part) {
      u32 b_hi[2][4], b_lo[2][4];  // of two pairs of column groups: (k low, k high) each
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const i32 row = b_row + 32 * part + 16 * pair, piece = b_piece + 2 * step;
        ptx::load_matrices(b_hi[pair], piece_address(slab, row, piece));
        ptx::load_matrices(b_lo[pair], piece_address(slab, row, piece + 4));
      }
#pragma unroll
      for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int group = 0; group < 4; ++group) {
#pragma unroll
          for (int block = 0; block < 2; ++block) {
            float* d = sum.block[block] + 4 * (4 * part + group);
            const u32(&a)[4] = product == 0 ? a_lo[block] : a_hi[block];
            const u32* b = (product == 1 ? b_lo : b_hi)[group >> 1] + 2 * (group & 1);
            ptx::mma(d, a, b[0], b[1]);
          }
        }
      }
    }
  }
}

template <class Config, class Epilogue>
INGOT_D void product_portable(const PackedOperands& operands, const ProductArgs& args,
                              const typename Epilogue::Params& params) {
  extern __shared__ unsigned char shared_memory[];
  const u32 base = ptx::shared_address(shared_memory);
  const u32 table = base + Config::kStages * Config::kStageBytes;
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  i32 feature_tile, sample_tile;
  args.raster.locate(blockIdx.x, feature_tile, sample_tile);
  const i32 first_feature = feature_tile * Config::kFeatures;
  const i32 first_sample = sample_tile * Config::kSamples;
  ptx::dependency_wait();

  const auto stage_address = [&](i32 stage) {
    return base + stage % Config::kStages * Config::kStageBytes;
  };
  const auto start = [&](i32 stage) {
#pragma unroll
    for (int i = 0; i < Config::kSlabs; ++i) {
      load_slab<Config>(stage_address(stage) + i * Config::kSlabBytes, operands, args,
                        stage * Config::kSlabs + i, first_feature, first_sample);
    }
    ptx::copy_commit();  // empty groups keep the count of the waits below
  };
#pragma unroll
  for (int stage = 0; stage < Config::kStages - 1; ++stage) start(stage);
  if (threadIdx.x < Config::kSamples) {
    const i32 m = hopper::clamp_index(first_sample + threadIdx.x, args.m);
    ptx::store_shared(table + 4 * threadIdx.x, args.x_exponent[m]);
  }

  WarpSum acc = {}, sum = {};
  const i32 stages = (args.chunks + Config::kSlabs - 1) / Config::kSlabs;
  for (i32 stage = 0; stage < stages; ++stage) {
    ptx::copy_wait<Config::kStages - 2>();
    __syncthreads();  // the stage has arrived for all, and the one refilled next is no longer read
    start(stage + Config::kStages - 1);
#pragma unroll
    for (int i = 0; i < Config::kSlabs; ++i) {
      multiply_slab<Config>(sum, stage_address(stage) + i * Config::kSlabBytes, warp, lane);
    }
    if ((stage + 1) % Config::kPromotion == 0 || stage + 1 == stages) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        acc.block[i >> 5][i & 31] += sum.block[i >> 5][i & 31];
        sum.block[i >> 5][i & 31] = 0.f;
      }
    }
  }

  ptx::launch_dependents();
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const ThreadTile tile =
        hopper::thread_tile(first_feature + warp * 32 + block * 16, first_sample, 0, lane, 0);
    hopper::finish_product<Epilogue>(acc.block[block], tile,
                                     args.w_exponent[hopper::clamp_index(tile.n0, args.n)],
                                     args.w_exponent[hopper::clamp_index(tile.n0 + 8, args.n)],
                                     table, args, params, sample_tile);
    if constexpr (Epilogue::kStore) hopper::store_direct(acc.block[block], tile, args);
  }
}

}  // namespace ingot::portable
