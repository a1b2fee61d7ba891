// Packing passes of the tf32 product: fp32 matrices to one fp16 value an element, under a power of
// two a row (scale.cuh). fp16 has TF32's eleven significant bits; the exponent of the row gives it
// the range.
//
//   packed[row][line][64] fp16, line = 64 of k: 128 bytes. k is zero-padded to whole lines.
//   exponent[row]: value ≈ packed · 2^exponent.
//
// Each half of a line is permuted as split.cuh permutes its slab of 32, so that the fragments of
// fused_scaled.cuh fit. Infinities and NaN survive and surface in the product.
//
// Launches: scale_rows for rows contiguous in k, kLanes threads a row; scale_columns for the
// transposed layout, as pack_columns.cuh says.
#pragma once

#include "product/split.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot {

INGOT_D i32 line_count(i32 k) {
  return (k + 63) / 64;
}

// A lane's share of a line is a pair of vectors: elements from 4 · (pair & 7) of either half.
struct ScaledPairs {
  static constexpr i32 kTarget = kExactTarget;
  static constexpr int kPlanes = 1;  // lines of either 64 of k

  INGOT_D static i32 piece(i32 pair, int second) {
    return (pair >> 3) * 16 + (pair & 7) + second * 8;
  }
  // Stores what the eight lanes of a line hold, a pair each, 16 bytes a lane. All lanes of the warp
  // call it, `stored` or not.
  INGOT_D static void store(u32* row, i32, i32 pair, const float4& a, const float4& b, float scale,
                            bool stored) {
    u32 word[4] = {
        ptx::pack_half2(a.x * scale, a.y * scale), ptx::pack_half2(a.z * scale, a.w * scale),
        ptx::pack_half2(b.x * scale, b.y * scale), ptx::pack_half2(b.z * scale, b.w * scale)};
    const i32 c = (pair & 7) >> 1, j = pair & 1;
    transpose_words(word, c);
    if (!stored) return;
    uint4* line = reinterpret_cast<uint4*>(row) + (pair >> 3) * 8;
    line[(c >> 1) * 4 + 2 * j + (c & 1)] = uint4{word[0], word[1], word[2], word[3]};
  }
};

// The same of a row whose lanes hold single vectors, eight of them half a line: piece p is elements
// from 4·p.
struct ScaledVectors {
  static constexpr int kLine = 64;  // elements in 128 bytes

  INGOT_D static void store(u32* row, i32 piece, const float4& v, float scale, bool stored) {
    u32 word[4] = {ptx::pack_half2(v.x * scale, v.y * scale),
                   ptx::pack_half2(v.z * scale, v.w * scale), 0, 0};
    const i32 c = (piece & 7) >> 1, j = piece & 1;
    transpose_words(word, c);
    if (!stored || c > 1) return;
    uint4* line = reinterpret_cast<uint4*>(row) + (piece >> 4) * 8;
    line[(piece >> 3 & 1) * 4 + 2 * j + c] = uint4{word[0], word[1], word[2], word[3]};
  }
};

// kPairs > 0: the row fits in kLanes · kPairs pairs of registers and is read once.
// kPairs = 0: any length, read twice. Block: 256 threads or, if more, kLanes.
template <class Pairs, int kLanes, int kPairs, bool kVectors>
INGOT_D void pack_pairs(const SplitArgs& args) {
  const i32 rows_per_block = blockDim.x / kLanes;
  const i32 row = blockIdx.x * rows_per_block + threadIdx.x / kLanes;
  const i32 lane = threadIdx.x % kLanes;
  begin_packing(args);
  if (row >= args.rows) return;  // whole warps, and whole blocks where kLanes > 32
  const float* source = args.source + row * args.row_stride;
  const i32 lines = line_count(args.k), pairs = lines * 8;
  u32* packed =
      static_cast<u32*>(args.packed) + static_cast<i64>(row) * lines * 32 * Pairs::kPlanes;
  const auto load = [&](i32 pair, int second) {
    return load_row_piece<kVectors>(source, Pairs::piece(pair, second), args.k);
  };
  float amax = 0.f;
  if constexpr (kPairs > 0) {
    float4 v[2 * kPairs];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) v[i] = load(i / 2 * kLanes + lane, i % 2);
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) amax = max_magnitude(amax, v[i]);
    amax = row_maximum<kLanes>(amax);
    const i32 exponent = scale_exponent(amax, Pairs::kTarget);
    if (lane == 0) args.exponent[row] = exponent;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const i32 pair = i * kLanes + lane;
      Pairs::store(packed, lines, pair, v[2 * i], v[2 * i + 1], pow2(-exponent), pair < pairs);
    }
  } else {
    for (i32 piece = lane; piece < 2 * pairs; piece += kLanes) {
      amax = max_magnitude(amax, load_row_piece<kVectors>(source, piece, args.k));
    }
    amax = row_maximum<kLanes>(amax);
    const i32 exponent = scale_exponent(amax, Pairs::kTarget);
    if (lane == 0) args.exponent[row] = exponent;
    for (i32 first = 0; first < pairs; first += kLanes) {
      const i32 pair = first + lane;
      Pairs::store(packed, lines, pair, load(pair, 0), load(pair, 1), pow2(-exponent),
                   pair < pairs);
    }
  }
  end_packing(args);
}

template <int kLanes, int kPairs, bool kVectors>
INGOT_D void scale_rows(const SplitArgs& args) {
  pack_pairs<ScaledPairs, kLanes, kPairs, kVectors>(args);
}

template <int kWarps, int kRegisters, int kShared>
INGOT_D void scale_columns(const SplitArgs& args) {
  pack_columns<columns::FragmentForm<2>, kWarps, kRegisters, kShared>(args);
}

}  // namespace ingot

#endif
