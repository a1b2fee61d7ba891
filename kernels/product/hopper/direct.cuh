// fp32-accurate product without packing, for products that launches or memory bound: mma.sync in
// TF32 on operands as they lie in memory. Compute capability 8.0 and up.
//
//   y[m, n] = Σ_k x[m, k] · w[n, k], then the fused epilogue (hopper/epilogue.cuh)
//
// Operands   fp32, either contiguous along k or along its rows. v = hi + lo: hi = tf32(v) to
//            nearest, lo = v − hi exactly, of which TF32 keeps all but one bit: 23 to 24 bits of an
//            element over fp32's whole range, so that there are no scales and nothing to prepare.
// Products   lo·hi, hi·lo, hi·hi of each k8; lo·lo lies below 2^-24 of the product.
// Tile       16·kFeatureBlocks features × 64·kSampleWarps samples a thread block. A warp owns all
//            features of 64 samples, with the register layout of a wgmma warp for every 16
//            features, so that the epilogue is shared. kDepthWarps warps share K, chunk by chunk in
//            turn; their sums meet in shared memory and are added in the order of the warps.
// Pipeline   each warp has a ring of kStages chunks of its own, filled by cp.async: no barrier
//            until sums meet. A chunk is 16 of k.
//              along k     64 bytes a row; lane t of a quad reads elements 4t … 4t+3 at once
//              along rows  16 rows of k; 16-byte pieces XORed with 2·(k / 4), so that the lanes of
//                          a quad (k = 4t + j) and the eight rows of a fragment meet no bank twice
//                          (of 16 features twice)
//            Both give lane t elements 4t + 2s and 4t + 2s + 1 at step s: the sum over k is
//            permuted alike for both operands.
// Promotion  mma.sync rounds its sums towards zero, so they stay short: every 32 of K they are
//            added to running sums in registers.
#pragma once

#include "product/hopper/store.cuh"
#include "product/hopper/tf32.cuh"

namespace ingot::hopper {
namespace direct {

inline constexpr int kChunk = 16;  // of k
inline constexpr int kWarpSamples = 64;
inline constexpr int kGroups = kWarpSamples / 8;
inline constexpr int kBlockValues = 4 * kGroups;  // accumulators of a thread, of 16 features
inline constexpr int kPromotion = 2;              // chunks

}  // namespace direct

// kWAlongK, kXAlongK: contiguous along k. kVectors: both operands' runs are whole, aligned pieces
// of 16 bytes from one to the next; the last of a run may be cut.
template <int kFeatureBlocks_, int kSampleWarps_, int kDepthWarps_, int kStages_, bool kWAlongK_,
          bool kXAlongK_, bool kVectors_, bool kBatched_ = false>
struct DirectConfig {
  static constexpr int kFeatureBlocks = kFeatureBlocks_;
  static constexpr int kSampleWarps = kSampleWarps_;
  static constexpr int kDepthWarps = kDepthWarps_;
  static constexpr int kStages = kStages_;
  static constexpr bool kWAlongK = kWAlongK_, kXAlongK = kXAlongK_, kVectors = kVectors_;
  static constexpr bool kBatched = kBatched_;  // a weight for every entry of a batch
  static constexpr int kFeatures = 16 * kFeatureBlocks;
  static constexpr int kSamples = direct::kWarpSamples * kSampleWarps;
  static constexpr int kThreads = 32 * kSampleWarps * kDepthWarps;
  static constexpr u32 kWBytes = kFeatures * direct::kChunk * 4;
  static constexpr u32 kStageBytes = kWBytes + direct::kWarpSamples * direct::kChunk * 4;
  static constexpr u32 kRingBytes = kStages * kStageBytes;  // of a warp
  static_assert(kRingBytes >= kFeatureBlocks * direct::kBlockValues * 128,
                "sums meet in the rings");
};

namespace direct {

// Where piece `piece` of a line of kRows rows lies, for that k.
template <int kRows>
INGOT_D u32 swizzled_piece(u32 piece, u32 k) {
  return piece ^ ((k >> 2) * 2 & (kRows / 4 - 1));
}

// An operand's part of a warp's tile: kRows rows from `first` on, of `rows` in the matrix.
template <int kRows, bool kAlongK, bool kVectors>
struct TileSource {
  const float* data;  // of the first row and k = 0
  i64 stride;         // along k: of rows; along rows: of k
  i32 rows;           // that exist

  INGOT_D TileSource(const OperandView& view, i32 first, i32 count)
      : data(view.data + first * view.row_stride),
        stride(kAlongK ? view.row_stride : view.k_stride),
        rows(count - first) {}

  // Starts the copies of chunk k … k + 15; what lies past the matrix is zero.
  INGOT_D void start(u32 stage, i32 k, i32 k_end, i32 lane) const {
    constexpr int kWidth = kVectors ? 4 : 1;  // elements of a copy
    constexpr int kRun = (kAlongK ? kChunk : kRows) / kWidth;
    constexpr int kCopies = kRows * kChunk / kWidth / 32;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const i32 index = i * 32 + lane, line = index / kRun, place = index % kRun * kWidth;
      const i32 row = kAlongK ? line : place, depth = kAlongK ? place : line;
      const i32 left =
          kAlongK ? (row < rows ? k_end - k - depth : 0) : (k + depth < k_end ? rows - row : 0);
      const float* source =
          data + (kAlongK ? line * stride + k + place : (k + line) * stride + place);
      const u32 swizzled =
          kAlongK ? place * 4 : (swizzled_piece<kRows>(place >> 2, line) << 4) + (place & 3) * 4;
      const u32 target = stage + line * (kAlongK ? kChunk : kRows) * 4 + swizzled;
      if constexpr (kVectors) {
        ptx::copy_piece_async(target, source, left >= 4 ? 16 : left > 0 ? 4 * left : 0);
      } else {
        ptx::copy_word_async(target, source, left > 0);
      }
    }
  }
};

// Where a lane's elements of row g = lane / 4 lie in a stage; those of row g + 8·r are reached from
// there by a constant.
template <int kRows, bool kAlongK>
struct FragmentReader {
  u32 base;

  INGOT_D explicit FragmentReader(i32 lane) {
    const u32 g = lane >> 2, t = lane & 3;
    base = kAlongK ? g * 64 + t * 16
                   : t * 4 * kRows * 4 + (swizzled_piece<kRows>(g >> 2, 4 * t) << 4) + (g & 3) * 4;
  }

  // Elements k = 4t … 4t + 3 of row g + 8·r.
  INGOT_D float4 load(u32 stage, int r) const {
    if constexpr (kAlongK) return ptx::load_shared_vector(stage + base + r * 512);
    const u32 at = stage + (base ^ static_cast<u32>(2 * r << 4));
    constexpr u32 kNext = kRows * 4;
    return {ptx::load_shared(at), ptx::load_shared(at + kNext), ptx::load_shared(at + 2 * kNext),
            ptx::load_shared(at + 3 * kNext)};
  }
};

// sum += the products of a chunk.
template <class Config>
INGOT_D void multiply_chunk(float (&sum)[Config::kFeatureBlocks][kBlockValues], u32 stage,
                            const FragmentReader<Config::kFeatures, Config::kWAlongK>& w_reader,
                            const FragmentReader<kWarpSamples, Config::kXAlongK>& x_reader) {
  constexpr int kBlocks = Config::kFeatureBlocks, kBatch = 4;  // groups whose mma alternate
  SplitElements w[kBlocks][2];
#pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    w[block][0].set(w_reader.load(stage, 2 * block));
    w[block][1].set(w_reader.load(stage, 2 * block + 1));
  }
#pragma unroll
  for (int first = 0; first < kGroups; first += kBatch) {
    SplitElements x[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      x[i].set(x_reader.load(stage + Config::kWBytes, first + i));
    }
#pragma unroll
    for (int step = 0; step < 2; ++step) {
#pragma unroll
      for (int term = 0; term < 3; ++term) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
#pragma unroll
          for (int block = 0; block < kBlocks; ++block) {
            const SplitElements &upper = w[block][0], &lower = w[block][1];
            const u32(&a)[2] = term == 0 ? upper.lo[step] : upper.hi[step];
            const u32(&b)[2] = term == 0 ? lower.lo[step] : lower.hi[step];
            const u32(&c)[2] = term == 1 ? x[i].lo[step] : x[i].hi[step];
            ptx::mma_tf32(sum[block] + 4 * (first + i), a[0], b[0], a[1], b[1], c[0], c[1]);
          }
        }
      }
    }
  }
}

// The warp's share of all of K.
template <class Config>
INGOT_D void accumulate(float (&running)[Config::kFeatureBlocks][kBlockValues], u32 ring,
                        i32 feature, i32 sample, i32 depth_warp, i32 lane,
                        const ProductArgs& args) {
  constexpr int kBlocks = Config::kFeatureBlocks, kStep = Config::kDepthWarps * kChunk;
  const TileSource<Config::kFeatures, Config::kWAlongK, Config::kVectors> w(args.w, feature,
                                                                            args.n);
  const TileSource<kWarpSamples, Config::kXAlongK, Config::kVectors> x(args.x, sample, args.m);
  const FragmentReader<Config::kFeatures, Config::kWAlongK> w_reader(lane);
  const FragmentReader<kWarpSamples, Config::kXAlongK> x_reader(lane);
  const auto start = [&](u32 stage, i32 k) {
    if (k < args.k) {
      w.start(stage, k, args.k, lane);
      x.start(stage + Config::kWBytes, k, args.k, lane);
    }
    ptx::copy_commit();
  };
  i32 next = depth_warp * kChunk;
#pragma unroll
  for (int i = 0; i < Config::kStages - 1; ++i, next += kStep) {
    start(ring + i * Config::kStageBytes, next);
  }
  float sum[kBlocks][kBlockValues] = {};
  const auto promote = [&] {
#pragma unroll
    for (int i = 0; i < kBlocks * kBlockValues; ++i) {
      running[i / kBlockValues][i % kBlockValues] += sum[i / kBlockValues][i % kBlockValues];
      sum[i / kBlockValues][i % kBlockValues] = 0.f;
    }
  };
  int held = 0;  // chunks in `sum`
  u32 stage = 0;
  for (i32 k = depth_warp * kChunk; k < args.k; k += kStep, next += kStep) {
    ptx::copy_wait<Config::kStages - 2>();
    __syncwarp();  // the chunk has arrived for all lanes; the stage refilled next is read no more
    const u32 refilled =
        stage == 0 ? Config::kRingBytes - Config::kStageBytes : stage - Config::kStageBytes;
    start(ring + refilled, next);
    multiply_chunk<Config>(sum, ring + stage, w_reader, x_reader);
    stage = stage == Config::kRingBytes - Config::kStageBytes ? 0 : stage + Config::kStageBytes;
    if (++held == kPromotion) {
      promote();
      held = 0;
    }
  }
  promote();
}

// Adds the sums of the warps that share K, in their order; a warp gets those of its blocks, which
// are depth_warp, depth_warp + kDepthWarps, ….
template <class Config>
INGOT_D void meet(float (&sum)[Config::kFeatureBlocks][kBlockValues], u32 rings, i32 depth_warp,
                  i32 lane) {
  constexpr int kVectors = kBlockValues / 4;
  const u32 own = rings + depth_warp * Config::kRingBytes + lane * 16;
  ptx::copy_wait<0>();
  __syncwarp();
#pragma unroll
  for (int i = 0; i < Config::kFeatureBlocks * kVectors; ++i) {
    const float* v = sum[i / kVectors] + i % kVectors * 4;
    ptx::store_shared_words(own + i * 512, uint4{__float_as_uint(v[0]), __float_as_uint(v[1]),
                                                 __float_as_uint(v[2]), __float_as_uint(v[3])});
  }
  __syncthreads();
#pragma unroll
  for (int block = 0; block < Config::kFeatureBlocks; ++block) {
    if (block % Config::kDepthWarps != depth_warp) continue;
#pragma unroll
    for (int i = 0; i < kBlockValues; ++i) sum[block][i] = 0.f;
#pragma unroll
    for (int from = 0; from < Config::kDepthWarps; ++from) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const float4 v = ptx::load_shared_vector(rings + from * Config::kRingBytes + lane * 16 +
                                                 (block * kVectors + i) * 512);
        sum[block][4 * i] += v.x;
        sum[block][4 * i + 1] += v.y;
        sum[block][4 * i + 2] += v.z;
        sum[block][4 * i + 3] += v.w;
      }
    }
  }
}

// Which of the partial statistics those of a warp's samples are: one for each 64 of an entry.
template <class Config>
INGOT_D i32 moment_tile(const ProductArgs& args, i32 sample_tile, i32 sample) {
  if constexpr (Config::kBatched) {
    const i32 entry = entry_of(args, sample_tile);
    return entry * ((args.m + kWarpSamples - 1) / kWarpSamples) +
           (sample - entry * args.m) / kWarpSamples;
  } else {
    return sample / kWarpSamples;
  }
}

}  // namespace direct

template <class Config, class Epilogue>
INGOT_D void product_direct(const TensorMap&, const TensorMap&, const TensorMap&,
                            const ProductArgs& given, const typename Epilogue::Params& params) {
  extern __shared__ __align__(128) unsigned char direct_memory[];
  const u32 memory = ptx::shared_address(direct_memory);
  const i32 warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i32 sample_warp = warp / Config::kDepthWarps, depth_warp = warp % Config::kDepthWarps;
  i32 feature_tile, sample_tile;
  given.raster.locate(blockIdx.x, feature_tile, sample_tile);
  decltype(auto) args = args_of_tile<Config>(given, sample_tile);
  const i32 feature = feature_tile * Config::kFeatures;
  const i32 first = first_sample<Config>(given, sample_tile);
  const i32 sample = first + sample_warp * direct::kWarpSamples;
  const u32 rings = memory + sample_warp * Config::kDepthWarps * Config::kRingBytes;

  float sum[Config::kFeatureBlocks][direct::kBlockValues] = {};
  ptx::dependency_wait();
  if (sample < args.m) {
    direct::accumulate<Config>(sum, rings + depth_warp * Config::kRingBytes, feature, sample,
                               depth_warp, lane, args);
  }
  if constexpr (Config::kDepthWarps > 1) direct::meet<Config>(sum, rings, depth_warp, lane);
  ptx::launch_dependents();
  if (sample >= args.m) return;
#pragma unroll
  for (int block = 0; block < Config::kFeatureBlocks; ++block) {
    if (block % Config::kDepthWarps != depth_warp) continue;
    const ThreadTile tile = thread_tile(feature + 16 * block, sample, 0, lane, 0);
    TileEpilogue<Epilogue, direct::kBlockValues> epilogue(tile, args, params);
    finish_unscaled_product(sum[block], tile, args);
    finish_direct(sum[block], tile, args, epilogue,
                  direct::moment_tile<Config>(given, sample_tile, sample));
  }
}

}  // namespace ingot::hopper
