// Split passes: fp32 matrices to the packed fp16 format that the product kernels read through TMA.
//
//   packed[row][slab][32 hi | 32 lo] fp16, slab = 32 of k: one 128-byte line a slab, so packed rows
//   cost the bytes of fp32 rows. k is zero-padded to whole slabs. exponent[row]: value = packed ·
//   2^exponent, chosen from the row's largest magnitude (scale.cuh).
//
// Inside a slab k is permuted into the order in which variant B's register fragments hold it:
// element 8c + 4j + 2h + e stands at 16j + 8h + 2c + e (c < 4; j, h, e < 2). The product's sum over
// k is the same for any order that both operands share. Infinities and NaN survive the split and
// surface in the product, which recomputes what they touch.
//
// Launches: split_rows for rows contiguous in k, kLanes threads a row; split_columns for the
// transposed layout (contiguous in the row index), as pack_columns.cuh says.
#pragma once

#include "product/pack_columns.cuh"

namespace ingot {

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

INGOT_D i32 slab_count(i32 k) {
  return (k + 31) / 32;
}

// Four consecutive elements from index 4·piece of a row, zero past its end.
template <bool kVectors>
INGOT_D float4 load_row_piece(const float* row, i32 piece, i32 k) {
  const i32 i = 4 * piece;
  if constexpr (kVectors) {
    return i < k ? __ldcs(reinterpret_cast<const float4*>(row) + piece)
                 : float4{0.f, 0.f, 0.f, 0.f};
  } else {
    return {i < k ? row[i] : 0.f, i + 1 < k ? row[i + 1] : 0.f, i + 2 < k ? row[i + 2] : 0.f,
            i + 3 < k ? row[i + 3] : 0.f};
  }
}

// Word i of lane c becomes word c of lane i, for the four lanes whose numbers differ in bits 1 and
// 2 only; c is the number that these make.
INGOT_D void transpose_words(u32 (&word)[4], i32 c) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    const bool upper = (c & bit) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const u32 sent = upper ? word[i] : word[i | bit];
      const u32 got = __shfl_xor_sync(~0u, sent, 2 * bit);
      (upper ? word[i] : word[i | bit]) = got;
    }
  }
}

// Stores what the eight lanes of a slab hold, a piece each, 16 bytes a lane. All lanes of the warp
// call it, `stored` or not.
INGOT_D void store_packed_pieces(u32* row, i32 piece, const float4& v, float scale, bool stored) {
  u32 word[4];  // hi of h = 0 and 1, lo of h = 0 and 1
  split_pair(v.x, v.y, scale, word[0], word[2]);
  split_pair(v.z, v.w, scale, word[1], word[3]);
  const i32 c = (piece & 7) >> 1, j = piece & 1;
  transpose_words(word, c);
  if (!stored) return;
  // The lane now holds words c = 0 … 3 of one of the four; lines are eight vectors.
  uint4* line = reinterpret_cast<uint4*>(row) + (piece >> 3) * 8;
  line[(c >> 1) * 4 + 2 * j + (c & 1)] = uint4{word[0], word[1], word[2], word[3]};
}

// A row of whole slabs, of which a lane holds vectors: piece p is its elements from 4·p.
struct SplitVectors {
  static constexpr int kLine = 32;  // elements in 128 bytes

  INGOT_D static void store(u32* row, i32 piece, const float4& v, float scale, bool stored) {
    store_packed_pieces(row, piece, v, scale, stored);
  }
};

// Maximum over the kLanes threads of a row; kLanes is a warp or the whole block.
template <int kLanes>
INGOT_D float row_maximum(float m) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, offset));
  if constexpr (kLanes > 32) {
    __shared__ float partial[kLanes / 32];
    if ((threadIdx.x & 31) == 0) partial[threadIdx.x >> 5] = m;
    __syncthreads();
    m = partial[0];
#pragma unroll
    for (int i = 1; i < kLanes / 32; ++i) m = fmaxf(m, partial[i]);
  }
  return m;
}

// kPieces > 0: the row fits in kLanes · kPieces vectors of registers and is read once.
// kPieces = 0: any length, read twice. Block: 256 threads or, if more, kLanes.
template <int kLanes, int kPieces, bool kVectors>
INGOT_D void split_rows(const SplitArgs& args) {
  const i32 rows_per_block = blockDim.x / kLanes;
  const i32 row = blockIdx.x * rows_per_block + threadIdx.x / kLanes;
  const i32 lane = threadIdx.x % kLanes;
  begin_packing(args);
  if (row >= args.rows) return;  // whole warps, and whole blocks where kLanes > 32
  const float* source = source_row(args, row);
  const i32 pieces = slab_count(args.k) * 8;
  u32* packed = static_cast<u32*>(args.packed) + static_cast<i64>(row) * slab_count(args.k) * 32;
  float amax = 0.f;
  if constexpr (kPieces > 0) {
    float4 v[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i)
      v[i] = load_row_piece<kVectors>(source, i * kLanes + lane, args.k);
#pragma unroll
    for (int i = 0; i < kPieces; ++i) amax = max_magnitude(amax, v[i]);
    amax = row_maximum<kLanes>(amax);
    const i32 exponent = scale_exponent(amax, kExactTarget);
    if (lane == 0) args.exponent[row] = exponent;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const i32 piece = i * kLanes + lane;
      store_packed_pieces(packed, piece, v[i], pow2(-exponent), piece < pieces);
    }
  } else {
    for (i32 piece = lane; piece < pieces; piece += kLanes) {
      amax = max_magnitude(amax, load_row_piece<kVectors>(source, piece, args.k));
    }
    amax = row_maximum<kLanes>(amax);
    const i32 exponent = scale_exponent(amax, kExactTarget);
    if (lane == 0) args.exponent[row] = exponent;
    for (i32 first = 0; first < pieces; first += kLanes) {
      const i32 piece = first + lane;
      store_packed_pieces(packed, piece, load_row_piece<kVectors>(source, piece, args.k),
                          pow2(-exponent), piece < pieces);
    }
  }
  end_packing(args);
}

template <int kWarps, int kRegisters, int kShared>
INGOT_D void split_columns(const SplitArgs& args) {
  pack_columns<columns::FragmentForm<1>, kWarps, kRegisters, kShared>(args);
}

#endif

}  // namespace ingot
