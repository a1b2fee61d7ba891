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

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot {

// Four dot products of length k: weight rows n0, n1 with sample rows m0, m1; order (n0,m0),
// (n0,m1), (n1,m0), (n1,m1), as a wgmma accumulator holds them.
INGOT_D void redo_dot_products(const hopper::OperandView& w, const hopper::OperandView& x, i64 n0,
                               i64 n1, i64 m0, i64 m1, i32 k, float (&result)[4]) {
  const float* w0 = w.data + n0 * w.row_stride;
  const float* w1 = w.data + n1 * w.row_stride;
  const float* x0 = x.data + m0 * x.row_stride;
  const float* x1 = x.data + m1 * x.row_stride;
  // Partial sums of 128 terms bound the growth of the rounding error as the split product's do.
  constexpr i32 kRun = 128;
  float total[4] = {0.f, 0.f, 0.f, 0.f};
  for (i32 begin = 0; begin < k; begin += kRun) {
    const i32 end = begin + kRun < k ? begin + kRun : k;
    float run[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 8
    for (i32 i = begin; i < end; ++i) {
      const float a0 = w0[i * w.k_stride], a1 = w1[i * w.k_stride];
      const float b0 = x0[i * x.k_stride], b1 = x1[i * x.k_stride];
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
template <int kValues>
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
    redo_dot_products(args.w, args.x, na, nb, ma, mb, args.k, fresh);
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
