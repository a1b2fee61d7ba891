// fp32-accurate product for compute capability 8.0 and up: mma.sync and cp.async.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (hopper/epilogue.cuh: same concept)
//
// Operands   w and x: packed by product/split.cuh, [rows][k/32][32 hi | 32 lo] fp16, one exponent a
//            row. Both share the permuted order of k, so the sum is merely permuted.
// Tile       64·kFeatureWarps features × 64·kSampleWarps samples of yᵀ, one a thread block; K in
//            chunks of 32. A warp owns 64 × 64: four blocks of 16 features, each with the register
//            layout of a wgmma warp, so that the epilogue is shared and a feature's statistics over
//            64 samples stay within a quad of lanes. 16 ldmatrix feed 96 mma.
// Pipeline   kStages chunks in shared memory, one __syncthreads a chunk: 128-byte rows, 16-byte
//            pieces XORed with row & 7 so that ldmatrix meets no bank conflict. With four warps a
//            multiprocessor holds two blocks: one multiplies while the other waits.
// Products   of each k16: lo·hi for all accumulators, then hi·lo and hi·hi.
// Promotion  mma.sync rounds its sums towards zero, so they must stay short: every 128 of K they
//            are added to running sums (round to nearest). Two fp32 sums of 64 × 64 do not fit into
//            the registers of a warp. So the running sum's upper 16 bits lie in shared memory and
//            the accumulator goes on from the exact rest, which is 2^-7 of the sum at most. Each
//            chunk promotes one of the four blocks, between the mma of the others.
#pragma once

#include "product/hopper/store.cuh"
#include "product/portable/args.cuh"

namespace ingot::portable {

using hopper::ProductArgs;
using hopper::ThreadTile;

template <int kFeatureWarps_, int kSampleWarps_, int kStages_>
struct PackedConfig {
  static constexpr int kFeatureWarps = kFeatureWarps_;
  static constexpr int kSampleWarps = kSampleWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kFeatures = 64 * kFeatureWarps;
  static constexpr int kSamples = 64 * kSampleWarps;
  static constexpr int kThreads = 32 * kFeatureWarps * kSampleWarps;
  static constexpr int kStageBytes = (kFeatures + kSamples) * 128;
  static constexpr int kTableBytes = kSamples * 4;
  static constexpr int kRunningBytes = kThreads * 256;  // 128 halves of fp32 numbers a thread
  static constexpr int kSharedBytes = kStages * kStageBytes + kTableBytes + kRunningBytes;
};

inline constexpr int kBlocks = 4;  // of 16 features, of a warp
inline constexpr int kPairs = 4;   // of column groups (16 samples), of a warp

// Accumulators of a warp; block[b][8p …]: 16 features by the 16 samples of pair p.
inline constexpr int kBlockValues = 32;  // a thread's, of a block
struct WarpSum {
  float block[kBlocks][kBlockValues];
};

INGOT_D u32 piece_address(u32 stage, u32 row, u32 piece) {
  return stage + row * 128 + ((piece ^ (row & 7)) << 4);
}

// The upper halves of a thread's running sums in shared memory, two in a word, a vector for each
// block and pair; neighbouring threads' vectors are neighbours.
template <class Config>
struct RunningSums {
  u32 place;  // of this thread

  INGOT_D u32 vector(int block, int pair) const {
    return place + (block * kPairs + pair) * Config::kThreads * 16;
  }
  INGOT_D static float low_half(u32 word) { return __uint_as_float(word << 16); }
  INGOT_D static float high_half(u32 word) { return __uint_as_float(word & 0xffff0000u); }

  INGOT_D void clear() const {
#pragma unroll
    for (int i = 0; i < kBlocks * kPairs; ++i) {
      ptx::store_shared_words(place + i * Config::kThreads * 16, uint4{0, 0, 0, 0});
    }
  }

  INGOT_D static u32 promote_two(u32 upper, float& a, float& b) {
    const float sum_a = a + low_half(upper), sum_b = b + high_half(upper);
    a = sum_a - high_half(__float_as_uint(sum_a));  // exact; NaN where the sum is not finite
    b = sum_b - high_half(__float_as_uint(sum_b));
    return __byte_perm(__float_as_uint(sum_a), __float_as_uint(sum_b), 0x7632);
  }
  INGOT_D void promote(WarpSum& sum, int block, int pair) const {
    uint4 upper = ptx::load_shared_words(vector(block, pair));
    float* values = sum.block[block] + 8 * pair;
    upper.x = promote_two(upper.x, values[0], values[1]);
    upper.y = promote_two(upper.y, values[2], values[3]);
    upper.z = promote_two(upper.z, values[4], values[5]);
    upper.w = promote_two(upper.w, values[6], values[7]);
    ptx::store_shared_words(vector(block, pair), upper);
  }

  INGOT_D static void add_two(u32 upper, float& a, float& b) {
    a += low_half(upper);
    b += high_half(upper);
  }
  INGOT_D void finish(WarpSum& sum) const {
#pragma unroll
    for (int i = 0; i < kBlocks * kPairs; ++i) {
      const uint4 upper = ptx::load_shared_words(vector(i / kPairs, i % kPairs));
      float* values = sum.block[i / kPairs] + 8 * (i % kPairs);
      add_two(upper.x, values[0], values[1]);
      add_two(upper.y, values[2], values[3]);
      add_two(upper.z, values[4], values[5]);
      add_two(upper.w, values[6], values[7]);
    }
  }
};

// Origin of the block's tile; computed again where it is needed, since registers are scarce.
struct TileOrigin {
  i32 feature, sample;
};
template <class Config>
INGOT_D TileOrigin tile_origin(const ProductArgs& args) {
  i32 feature_tile, sample_tile;
  args.raster.locate(ptx::opaque(blockIdx.x), feature_tile, sample_tile);
  return {feature_tile * Config::kFeatures, sample_tile * Config::kSamples};
}

// Copies 128 bytes of each of kRows rows; those past the last row of the matrix repeat it.
template <class Config, int kRows>
INGOT_D void copy_rows(u32 destination, const char* source, i32 last, u32 pitch) {
  constexpr int kStep = Config::kThreads / 8;  // rows that the block copies at a time
  const i32 thread = ptx::opaque(threadIdx.x);
  const i32 row = thread >> 3, piece = thread & 7;
  const u32 place = piece_address(destination, row, piece);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const u32 valid = row + i * kStep < last ? row + i * kStep : last;
    ptx::copy_vector_async(place + i * kStep * 128, source + valid * pitch + piece * 16, true);
  }
}

// Where the next chunk to copy is.
struct Source {
  const char *w, *x;

  // Starts the copies of one chunk, unless K has ended; an empty group keeps the waits' count.
  template <class Config>
  INGOT_D void start(u32 stage, bool any, const TileOrigin& origin, const ProductArgs& args) {
    const u32 pitch = args.chunks * 128u;
    if (any) {
      copy_rows<Config, Config::kFeatures>(stage, w, args.n - 1 - origin.feature, pitch);
      copy_rows<Config, Config::kSamples>(stage + Config::kFeatures * 128, x,
                                          args.m - 1 - origin.sample, pitch);
      w += 128;
      x += 128;
    }
    ptx::copy_commit();
  }
};

INGOT_D void load_weights(u32 (&fragments)[kBlocks][4], u32 address) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    ptx::load_matrices(fragments[block], address + block * 16 * 128);
  }
}

INGOT_D void multiply_pair(WarpSum& sum, const u32 (&w)[kBlocks][4], const u32 (&x)[4], int pair) {
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      ptx::mma(sum.block[block] + 8 * pair + 4 * group, w[block], x[2 * group], x[2 * group + 1]);
    }
  }
}

// sum += the products of one k16; w and x: addresses of the thread's first hi matrices. Promotes
// block `promoted` on the way, unless it is negative.
template <class Config>
INGOT_D void multiply_step(WarpSum& sum, u32 w, u32 x, const RunningSums<Config>& running,
                           int promoted) {
  constexpr u32 kLow = 64;  // bytes from a hi piece to its lo piece, an XOR like the swizzle's
  constexpr u32 kPairBytes = 16 * 128;
  u32 columns[4];  // two column groups of x: (k low, k high) each
  {
    u32 low[kBlocks][4];
    load_weights(low, w ^ kLow);
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      ptx::load_matrices(columns, x + pair * kPairBytes);
      if (promoted >= 0) running.promote(sum, promoted, pair);
      multiply_pair(sum, low, columns, pair);
    }
  }
  u32 high[kBlocks][4];
  load_weights(high, w);
#pragma unroll
  for (int pair = 0; pair < kPairs; ++pair) {
    ptx::load_matrices(columns, (x ^ kLow) + pair * kPairBytes);
    multiply_pair(sum, high, columns, pair);
    ptx::load_matrices(columns, x + pair * kPairBytes);
    multiply_pair(sum, high, columns, pair);
  }
}

// Adds all of K to the warp's sums. The first kStages − 1 chunks are on their way.
template <class Config>
INGOT_D void accumulate(WarpSum& sum, u32 stages, Source& source, const TileOrigin& origin,
                        const RunningSums<Config>& running, const ProductArgs& args) {
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u32 w = piece_address(0, warp % Config::kFeatureWarps * 64 + (lane & 15), lane >> 4);
  const u32 x = piece_address(
      0, Config::kFeatures + warp / Config::kFeatureWarps * 64 + (lane & 7) + ((lane >> 4) << 3),
      (lane >> 3) & 1);
  constexpr u32 kLast = (Config::kStages - 1) * Config::kStageBytes;
  u32 stage = stages;
  i32 left = args.chunks;
  while (left > 0) {
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      ptx::copy_wait<Config::kStages - 2>();
      __syncthreads();  // the chunk has arrived for all; the stage refilled next is read no more
      multiply_step<Config>(sum, stage + w, stage + x, running, block);
      source.start<Config>(stage == stages ? stages + kLast : stage - Config::kStageBytes,
                           left >= Config::kStages, origin, args);
      multiply_step<Config>(sum, (stage + w) ^ 32, (stage + x) ^ 32, running, -1);
      stage = stage == stages + kLast ? stages : stage + Config::kStageBytes;
      if (--left == 0) break;
    }
  }
}

template <class Config, class Epilogue>
INGOT_D void product_portable(const PackedOperands& operands, const ProductArgs& args,
                              const typename Epilogue::Params& params) {
  extern __shared__ __align__(128) unsigned char portable_memory[];
  const u32 stages = ptx::shared_address(portable_memory);
  const u32 table = stages + Config::kStages * Config::kStageBytes;
  const RunningSums<Config> running = {table + Config::kTableBytes +
                                       static_cast<u32>(threadIdx.x) * 16};
  WarpSum sum = {};
  ptx::dependency_wait();
  {
    const TileOrigin origin = tile_origin<Config>(args);
    const i64 pitch = static_cast<i64>(args.chunks) * 128;
    Source source = {static_cast<const char*>(operands.w) + origin.feature * pitch,
                     static_cast<const char*>(operands.x) + origin.sample * pitch};
#pragma unroll
    for (int i = 0; i < Config::kStages - 1; ++i) {
      source.start<Config>(stages + i * Config::kStageBytes, i < args.chunks, origin, args);
    }
    for (i32 i = threadIdx.x; i < Config::kSamples; i += Config::kThreads) {
      const i32 m = hopper::clamp_index(origin.sample + i, args.m);
      ptx::store_shared(table + 4 * i, args.x_exponent[m]);  // read after the barriers below
    }
    running.clear();
    accumulate<Config>(sum, stages, source, origin, running, args);
  }
  running.finish(sum);

  ptx::launch_dependents();
  const TileOrigin origin = tile_origin<Config>(args);
  const i32 thread = ptx::opaque(threadIdx.x);
  const i32 warp = thread >> 5, sample_warp = warp / Config::kFeatureWarps;
  const i32 box_m = origin.sample + sample_warp * 64;
  if (box_m >= args.m) return;
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    const i32 box_n = origin.feature + (warp % Config::kFeatureWarps * kBlocks + block) * 16;
    const ThreadTile tile = hopper::thread_tile(box_n, box_m, 0, thread & 31, 0);
    float(&acc)[kBlockValues] = sum.block[block];
    hopper::TileEpilogue<Epilogue, kBlockValues> epilogue(tile, args, params);
    hopper::finish_product<SplitRow>(
        acc, tile, args.w_exponent[hopper::clamp_index(tile.n0, args.n)],
        args.w_exponent[hopper::clamp_index(tile.n0 + 8, args.n)], table + sample_warp * 256, args);
    hopper::finish_direct(acc, tile, args, epilogue, box_m / 64);
  }
}

}  // namespace ingot::portable
