// Redo in IEEE fp32: outputs whose split product is not finite (an Inf or NaN among the inputs) are
// recomputed from the original operands before the epilogue sees them, by the warp that owns them.
//
// This is complete: a non-finite element of either operand makes hi infinite or NaN, and with
// lo = v − hi every product of its row is then Inf − Inf, Inf·0 or NaN; nothing later in the sum
// removes that. It needs no flags in memory, no second kernel and no host: the accumulator itself
// carries the flag to the only place that could use it.
#pragma once

#include "common/ptx.cuh"
#include "product/hopper/args.cuh"
#include "product/scale.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot {

// A sample's row as it lies in memory.
struct PlainRow {
  const float* data;
  i64 k_stride;

  INGOT_D PlainRow(const hopper::ProductArgs& args, i64 m)
      : data(args.x.data + m * args.x.row_stride), k_stride(args.x.k_stride) {}

  INGOT_D float operator[](i32 k) const { return data[k * k_stride]; }
};

// The same or, where it exists only packed (product/split.cuh, product/hopper/halves.cuh), from
// that: what is not finite survives in hi alone. An element below 2^-39 of the largest that shares
// its power of two is zero there.
struct SplitRow {
  const float* plain;
  i64 k_stride;
  const u16* packed;
  float scale;
  const float* factor;  // of 64 of k each; nullptr: scale is that of the whole row
  i64 factor_rows;

  INGOT_D SplitRow(const hopper::ProductArgs& args, i64 m)
      : plain(args.x.data), k_stride(args.x.k_stride), packed(nullptr), factor(nullptr) {
    if (plain != nullptr) {
      plain += m * args.x.row_stride;
      return;
    }
    packed = static_cast<const u16*>(args.x_packed) + m * ((args.k + 31) / 32) * 64;
    factor = args.x_factor;
    factor_rows = args.factor_rows;
    if (factor != nullptr) {
      factor += m;
    } else {
      scale = pow2(args.x_exponent[m]);
    }
  }

  INGOT_D float operator[](i32 k) const {
    if (plain != nullptr) return plain[k * k_stride];
    const i32 place = (k >> 2 & 1) * 16 + (k >> 1 & 1) * 8 + (k >> 3 & 3) * 2 + (k & 1);
    const u16* line = packed + static_cast<i64>(k >> 5) * 64 + place;
    float hi, lo;
    ptx::unpack_half2(static_cast<u32>(line[0]) | static_cast<u32>(line[32]) << 16, hi, lo);
    if (hi - hi != 0.f) return hi;
    const i64 part = k / hopper::kFactorFeatures;
    return (hi + lo) * (factor == nullptr ? scale : factor[part * factor_rows]);
  }
};

// Four dot products: weight rows n0, n1 with sample rows m0, m1; order (n0,m0), (n0,m1), (n1,m0),
// (n1,m1), as a wgmma accumulator holds them.
template <class Row>
INGOT_D void redo_dot_products(const hopper::ProductArgs& args, i64 n0, i64 n1, i64 m0, i64 m1,
                               float (&result)[4]) {
  const float* w0 = args.w.data + n0 * args.w.row_stride;
  const float* w1 = args.w.data + n1 * args.w.row_stride;
  const Row x0(args, m0), x1(args, m1);
  const i32 k = args.k;
  // Partial sums of 128 terms bound the growth of the rounding error as the split product's do.
  constexpr i32 kRun = 128;
  float total[4] = {0.f, 0.f, 0.f, 0.f};
  for (i32 begin = 0; begin < k; begin += kRun) {
    const i32 end = begin + kRun < k ? begin + kRun : k;
    float run[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (i32 i = begin; i < end; ++i) {
      const float a0 = w0[i * args.w.k_stride], a1 = w1[i * args.w.k_stride];
      const float b0 = x0[i], b1 = x1[i];
      run[0] = fmaf(a0, b0, run[0]);
      run[1] = fmaf(a0, b1, run[1]);
      run[2] = fmaf(a1, b0, run[2]);
      run[3] = fmaf(a1, b1, run[3]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) total[i] += run[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) result[i] = total[i];
}

// Recomputes the column groups of `marked` (bit j: columns 8j … 8j+7 of the tile) that any lane of
// the warp marked. The thread owns features n0 and n0 + 8 and, in group j, samples m0 + 8j and the
// one after it; indices past the matrices are clamped, since their results are never stored.
template <class Row = PlainRow, int kValues>
INGOT_D void redo_groups(float (&values)[kValues], const hopper::ProductArgs& args, u32 marked,
                         i64 n0, i64 m0) {
  const i64 last_n = args.n - 1, last_m = args.m - 1;
  const i64 na = n0 < last_n ? n0 : last_n, nb = n0 + 8 < last_n ? n0 + 8 : last_n;
#pragma unroll 1
  for (int group = 0; group < kValues / 4; ++group) {
    if (!ptx::warp_any((marked >> group) & 1)) continue;
    const i64 m = m0 + 8 * group;
    const i64 ma = m < last_m ? m : last_m, mb = m + 1 < last_m ? m + 1 : last_m;
    float fresh[4];
    redo_dot_products<Row>(args, na, nb, ma, mb, fresh);
    // A register array takes no run-time index.
#pragma unroll
    for (int j = 0; j < kValues / 4; ++j) {
      if (j == group) {
#pragma unroll
        for (int i = 0; i < 4; ++i) values[4 * j + i] = fresh[i];
      }
    }
  }
}

}  // namespace ingot

#endif
