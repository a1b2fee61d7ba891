// What the products have in common that convert fp32 weights inside the kernel (fused_split.cuh,
// fused_scaled.cuh): shared memory, fragments and scales of weights, shares of blocks, the end of a
// tile.
#pragma once

#include "product/hopper/ring.cuh"
#include "product/hopper/store.cuh"
#include "product/hopper/wgmma.cuh"

namespace ingot::hopper {

// kSampleElementBytes: of a packed element of x.
template <int kSamples_, int kWeightStages_, int kSampleStages_, bool kTmaStore_, int kSlices_,
          int kSampleElementBytes>
struct FusedConfig {
  static constexpr int kSamples = kSamples_;
  static constexpr int kWeightStages = kWeightStages_;
  static constexpr int kSampleStages = kSampleStages_;
  static constexpr bool kTmaStore = kTmaStore_;
  static constexpr int kSlices = kSlices_;  // of K: 1, 2, 4 or 8 blocks
  static constexpr int kFeatures = 128;
  using RedoRow = PlainRow;  // of x (product/redo.cuh)
  static constexpr int kChunk = 64;
  static constexpr int kThreads = 384;
  static constexpr int kWeightBytes = kFeatures * kChunk * 4;
  static constexpr int kSampleBytes = kSamples * kChunk * kSampleElementBytes;
  static constexpr int kTableBytes = kSamples * 4;
  static constexpr int kBarrierBytes = 16 * (kWeightStages + kSampleStages);
  // 1024 for aligning the rings to the swizzle's period.
  static constexpr int kSharedBytes = 1024 + kWeightStages * kWeightBytes +
                                      kSampleStages * kSampleBytes + 2 * kTableBytes +
                                      kBarrierBytes;
  static_assert(kSharedBytes <= 232448, "more shared memory than a Hopper block can have");
  static_assert(kSlices == 1 || !kTmaStore, "what is left of a tile is too narrow for a TMA box");
  static_assert(kSlices == 1 || kExchangeBytes<kSlices, kSamples> <= kWeightStages * kWeightBytes,
                "sums are exchanged in the ring of weights");
};

// Where it lies.
template <class Config>
struct FusedMemory {
  u32 base = aligned_shared_memory();
  u32 x_slots = base + Config::kWeightStages * Config::kWeightBytes;
  u32 tables = x_slots + Config::kSampleStages * Config::kSampleBytes;
  u32 barriers = tables + 2 * Config::kTableBytes;
  u32 x_barriers = barriers + 16 * Config::kWeightStages;
  Ring w = {base, Config::kWeightBytes, barriers, barriers + 8 * Config::kWeightStages};
  Ring x = {x_slots, Config::kSampleBytes, x_barriers, x_barriers + 8 * Config::kSampleStages};
};

// A row's scale puts its first chunk's maximum at 2^10 … 2^11. Elements up to 2^12 certainly keep
// |lo| < 2, which is what a chunk is checked for: larger ones may ask for a new scale, those that
// overflow (2^16) always do. More head room would cost accuracy of the small elements (scale.cuh),
// less would split chunks twice on ordinary data.
inline constexpr i32 kRunningTarget = 10;

// Scales of the thread's two weight rows, g and g + 8: fp32 value = split value · 2^exponent.
struct RowScales {
  float scale[2];  // 2^-exponent
  i32 exponent[2];
};

// Where a thread finds its two rows in a slot: byte offsets of its pieces 2c and 2c+1 of row g; the
// other row is 1024 bytes on, the next 32 columns kFeatures · 128.
struct FragmentSource {
  static constexpr int kStepsAtOnce = 4;  // in choose_scales()
  u32 even, odd;
};

INGOT_D float4 load_piece(const FragmentSource& source, u32 slot, int step, int row) {
  constexpr u32 kSlabBytes = 128 * 128;
  return ptx::load_shared_vector(slot + (step & 1 ? source.odd : source.even) +
                                 (step >> 1) * kSlabBytes + row * 1024);
}

template <class Source>
INGOT_D void choose_scales(const Source& source, u32 slot, RowScales& rows, bool grow_only) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    float amax = 0.f;
#pragma unroll(Source::kStepsAtOnce)
    for (int step = 0; step < 4; ++step) {
      amax = max_magnitude(amax, load_piece(source, slot, step, row));
    }
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
    amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
    const i32 exponent = scale_exponent(amax, kRunningTarget);
    if (!grow_only || exponent > rows.exponent[row]) rows.exponent[row] = exponent;
    rows.scale[row] = pow2(-rows.exponent[row]);
  }
}

// Converts a chunk by convert(), which says whether something overflowed: then at a new scale.
// Where a scale had to change, shift[] (zero before) becomes kRetried + the number of bits. A loop,
// so that the second attempt shares the code of the first; one more is enough for finite values,
// and Inf or NaN are left to the redo. Every branch hangs on a vote: ptxas then knows it uniform
// and keeps the descriptors of the wgmma in uniform registers (otherwise 50 instead of 20
// instructions between 12 of them).
inline constexpr i32 kRetried = 1024;
template <class Source, class Convert>
INGOT_D void convert_at_some_scale(const Source& source, u32 slot, RowScales& rows, i32 (&shift)[2],
                                   Convert convert) {
#pragma unroll 1
  while (ptx::warp_any(convert() && shift[0] == 0)) {
    const i32 before[2] = {rows.exponent[0], rows.exponent[1]};
    choose_scales(source, slot, rows, true);
#pragma unroll
    for (int row = 0; row < 2; ++row) shift[row] = kRetried + rows.exponent[row] - before[row];
  }
}

// The block's first tile and the step to its next (persistent blocks; of a cluster all count the
// same), and its chunks of K.
template <class Config>
struct BlockShare {
  i32 first, step, chunk_begin, chunk_end;

  INGOT_D explicit BlockShare(const ProductArgs& args) {
    constexpr int kBlocks = Config::kCluster * Config::kSlices;
    first = static_cast<i32>(blockIdx.x) / kBlocks;
    step = static_cast<i32>(gridDim.x) / kBlocks;
    chunk_begin = 0;
    chunk_end = args.chunks;
    if constexpr (Config::kSlices > 1) {
      const i32 rank = static_cast<i32>(ptx::cluster_rank()), pairs = args.chunks / 2;
      chunk_begin = rank * pairs / Config::kSlices * 2;
      chunk_end = (rank + 1) * pairs / Config::kSlices * 2;
    }
  }
};

// Finishes a tile that a cluster shares: `buffer` is the ring of weights, `thread` the
// number among those that consume.
template <class Config, class Epilogue, int kValues>
INGOT_D void finish_shared_tile(float (&values)[kValues], RowScales& rows, ThreadTile tile,
                                u32 exponent_table, u32 buffer, i32 thread, const ProductArgs& args,
                                const typename Epilogue::Params& params, i32 sample_tile) {
  constexpr int kSlices = Config::kSlices;
  const i32 rank = static_cast<i32>(ptx::cluster_rank());
  float share[kValues / kSlices];
  exchange_slices<kSlices>(values, rows.exponent, share, buffer, thread);
  const i32 first = rank * (2 * kValues / kSlices);
  tile.m0 += first;
  tile.box_m += first;
  TileEpilogue<Epilogue, kValues / kSlices> epilogue(tile, args, params);
  finish_product<typename Config::RedoRow>(share, tile, rows.exponent[0], rows.exponent[1],
                                           exponent_table + 4 * first, args);
  finish_direct(share, tile, args, epilogue, sample_tile * kSlices + rank);
}

}  // namespace ingot::hopper
