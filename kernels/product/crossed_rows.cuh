// Packing passes of the "high" product (hopper/crossed.cuh): fp32 matrices to fp16 values, and to
// the FP8 (e4m3) values of which its cross terms are made.
//
//   packed[row] = a plane of lines of 128 bytes [64 hi8 | 64 lo8], then a plane of lines of 64 hi.
//   A line stands for 64 of k, to which k is zero-padded; elements are in order.
//   exponent[row]: value ≈ (hi + lo) · 2^exponent, where the row's largest hi lies in [2^13, 2^14).
//
// hi = fp16(v), hi8 = e4m3(v · 2^-6), lo8 = e4m3((v − hi) · 2^6): no larger than 256, where e4m3
// ends at 448, and the factors cancel, so that hi8 · lo8 counts in the same unit as hi · hi and all
// may be added up in one sum. lo8 keeps four bits of what fp16 leaves. e4m3 ends at 2^-9: of
// elements more than 2^13 below their row's largest it keeps less, and 2^18 below nothing.
//
// An infinity makes hi infinite and lo8 NaN, a NaN both: they surface in the product.
//
// Launches: cross_rows for rows contiguous in k, kLanes threads a row; cross_columns for the
// transposed layout, as pack_columns.cuh says. From compute capability 8.9 on.
#pragma once

#include "product/scaled_rows.cuh"

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)

namespace ingot {

// Two elements: hi in fp16, hi8 and lo8 in the low 16 bits.
INGOT_D void cross_pair(float first, float second, float scale, u32& hi, u32& hi8, u32& lo8) {
  constexpr float kDown = 0x1p-6f, kUp = 0x1p6f;
  const float a = first * scale, b = second * scale;
  hi = ptx::pack_half2(a, b);
  float hi_a, hi_b;
  ptx::unpack_half2(hi, hi_a, hi_b);
  hi8 = ptx::pack_e4m3_pair(a * kDown, b * kDown);
  lo8 = ptx::pack_e4m3_pair((a - hi_a) * kUp, (b - hi_b) * kUp);
}

// Four elements.
INGOT_D void cross_quad(const float4& v, float scale, u32& hi0, u32& hi1, u32& hi8, u32& lo8) {
  u32 high[2], low[2];
  cross_pair(v.x, v.y, scale, hi0, high[0], low[0]);
  cross_pair(v.z, v.w, scale, hi1, high[1], low[1]);
  hi8 = high[0] | high[1] << 16;
  lo8 = low[0] | low[1] << 16;
}

inline constexpr i32 kCrossedTarget = 13;

// A lane's share of a line is eight elements.
struct CrossedPairs {
  static constexpr i32 kTarget = kCrossedTarget;
  static constexpr int kPlanes = 2;

  INGOT_D static i32 piece(i32 pair, int second) { return 2 * pair + second; }
  INGOT_D static void store(u32* row, i32 lines, i32 pair, const float4& a, const float4& b,
                            float scale, bool stored) {
    if (!stored) return;
    uint4 hi;
    uint2 hi8, lo8;
    cross_quad(a, scale, hi.x, hi.y, hi8.x, lo8.x);
    cross_quad(b, scale, hi.z, hi.w, hi8.y, lo8.y);
    u32* cross = row + (pair >> 3) * 32 + (pair & 7) * 2;
    *reinterpret_cast<uint2*>(cross) = hi8;
    *reinterpret_cast<uint2*>(cross + 16) = lo8;
    *reinterpret_cast<uint4*>(row + (lines + (pair >> 3)) * 32 + (pair & 7) * 4) = hi;
  }
};

template <int kLanes, int kPairs, bool kVectors>
INGOT_D void cross_rows(const SplitArgs& args) {
  pack_pairs<CrossedPairs, kLanes, kPairs, kVectors>(args);
}

namespace columns {

// 32 of k, half of a line of either plane: two pieces of hi8, two of lo8, four of hi.
struct CrossedForm {
  static constexpr int kSlabs = 1;
  static constexpr i32 kTarget = kCrossedTarget;

  INGOT_D static i32 lines(i32 k) { return 2 * line_count(k); }
  INGOT_D static void pack(const float* v, float scale, int, u32 memory, i32 lane) {
    u32 hi[16], hi8[8], lo8[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float4 quad = {v[4 * i], v[4 * i + 1], v[4 * i + 2], v[4 * i + 3]};
      cross_quad(quad, scale, hi[2 * i], hi[2 * i + 1], hi8[i], lo8[i]);
    }
    const auto store = [&](int piece, const u32* word) {
      store_piece(memory, lane, piece, {word[0], word[1], word[2], word[3]});
    };
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store(i, hi8 + 4 * i);
      store(2 + i, lo8 + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) store(4 + i, hi + 4 * i);
  }
  INGOT_D static i32 place(i32 line, i32 piece, i32 lines) {
    const i32 of = line >> 1, half = line & 1;
    if (piece < 4) return of * 32 + (piece >> 1) * 16 + half * 8 + (piece & 1) * 4;
    return ((lines >> 1) + of) * 32 + half * 16 + (piece - 4) * 4;
  }
};

}  // namespace columns

template <int kWarps, int kRegisters, int kShared>
INGOT_D void cross_columns(const SplitArgs& args) {
  pack_columns<columns::CrossedForm, kWarps, kRegisters, kShared>(args);
}

}  // namespace ingot

#endif
