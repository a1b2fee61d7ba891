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
// Pipeline   kStages stages of 40 KiB: 128-byte rows, 16-byte pieces XORed with row & 7 so that
//            ldmatrix meets no bank conflict. For each k16: lo·hi, hi·lo, hi·hi.
// Promotion  every 128 of K into fp32 accumulators: mma.sync rounds its sums towards zero too.
#pragma once

#include "product/hopper/epilogue.cuh"

namespace ingot::portable {

using hopper::ProductArgs;
using hopper::ThreadTile;

template <int kStages_>
struct PackedConfig {
  static constexpr int kStages = kStages_;
  static constexpr int kFeatures = 256;
  static constexpr int kSamples = 64;
  static constexpr int kThreads = 256;
  static constexpr int kPromotion = 4;  // stages
  static constexpr int kRows = kFeatures + kSamples;
  static constexpr int kStageBytes = kRows * 128;
  static constexpr int kSharedBytes = kStages * kStageBytes + kSamples * 4;
};

struct PackedOperands {
  const void *w, *x;
};

// Accumulators of a warp: two blocks of 16 features, 64 samples.
struct WarpSum {
  float block[2][32];
};

INGOT_D u32 piece_address(u32 stage, u32 row, u32 piece) {
  return stage + row * 128 + ((piece ^ (row & 7)) << 4);
}

// Starts the copies of one stage: rows of the tile (features, then samples) × eight pieces.
template <class Config>
INGOT_D void load_stage(u32 stage, const PackedOperands& operands, const ProductArgs& args,
                        i32 slab, i32 first_feature, i32 first_sample) {
  constexpr int kPerThread = Config::kRows * 8 / Config::kThreads;
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    const i32 index = i * Config::kThreads + threadIdx.x;
    const i32 row = index >> 3, piece = index & 7;
    const bool is_weight = row < Config::kFeatures;
    const i32 source_row = is_weight ? first_feature + row : first_sample + row - Config::kFeatures;
    const bool valid = source_row < (is_weight ? args.n : args.m);
    const char* base = static_cast<const char*>(is_weight ? operands.w : operands.x);
    const i64 line = static_cast<i64>(valid ? source_row : 0) * args.chunks + slab;
    ptx::copy_vector_async(piece_address(stage, row, piece), base + line * 128 + piece * 16, valid);
  }
}

// sum += this stage's products.
template <class Config>
INGOT_D void multiply_stage(WarpSum& sum, u32 stage, i32 warp, i32 lane) {
  const i32 a_row = warp * 32 + (lane & 15), a_piece = lane >> 4;
  const i32 b_row = Config::kFeatures + (lane & 7) + ((lane >> 4) << 3), b_piece = (lane >> 3) & 1;
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    u32 a_hi[2][4], a_lo[2][4];
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const i32 row = a_row + 16 * block, piece = a_piece + 2 * step;
      ptx::load_matrices(a_hi[block], piece_address(stage, row, piece));
      ptx::load_matrices(a_lo[block], piece_address(stage, row, piece + 4));
    }
#pragma unroll
    for (int pair = 0; pair < Config::kSamples / 16; ++pair) {
      u32 b_hi[4], b_lo[4];  // two column groups: (k low, k high) each
      const i32 row = b_row + 16 * pair, piece = b_piece + 2 * step;
      ptx::load_matrices(b_hi, piece_address(stage, row, piece));
      ptx::load_matrices(b_lo, piece_address(stage, row, piece + 4));
      // One product of every accumulator before the next: dependent mma stand four apart.
#pragma unroll
      for (int product = 0; product < 3; ++product) {
#pragma unroll
        for (int block = 0; block < 2; ++block) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            float* d = sum.block[block] + 4 * (2 * pair + half);
            const u32(&a)[4] = product == 0 ? a_lo[block] : a_hi[block];
            const u32(&b)[4] = product == 1 ? b_lo : b_hi;
            ptx::mma(d, a, b[2 * half], b[2 * half + 1]);
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

  const auto start = [&](i32 slab) {
    if (slab < args.chunks) {
      load_stage<Config>(base + slab % Config::kStages * Config::kStageBytes, operands, args, slab,
                         first_feature, first_sample);
    }
    ptx::copy_commit();  // empty groups keep the count of the waits below
  };
#pragma unroll
  for (int slab = 0; slab < Config::kStages - 1; ++slab) start(slab);
  if (threadIdx.x < Config::kSamples) {
    const i32 m = hopper::clamp_index(first_sample + threadIdx.x, args.m);
    ptx::store_shared(table + 4 * threadIdx.x, args.x_exponent[m]);
  }

  WarpSum acc = {}, sum = {};
  for (i32 slab = 0; slab < args.chunks; ++slab) {
    ptx::copy_wait<Config::kStages - 2>();
    __syncthreads();  // the stage has arrived for all, and the one refilled next is no longer read
    start(slab + Config::kStages - 1);
    multiply_stage<Config>(sum, base + slab % Config::kStages * Config::kStageBytes, warp, lane);
    if ((slab + 1) % Config::kPromotion == 0 || slab + 1 == args.chunks) {
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
